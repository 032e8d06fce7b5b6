"""Charts of lanes over time, and maps of tensor memory, as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

WIDTH, MARGIN, LANE, GAP = 960, 12, 40, 24
NAMES = 96  # pixels for the names of the lanes
FILLS = {
    "mma": "#cfe2ff",
    "softmax": "#ffe3c2",
    "wait": "#eeeeee",
    "copy": "#d3f0d8",
    "add": "#e6d6f5",
    "free": "#f7f7f7",
}
HEAD = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="Helvetica, Arial, sans-serif" '
    'font-size="13" role="img">\n<title>{title}</title>\n'
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0 L8 4 L0 8 z" fill="#b02a37"/></marker></defs>\n'
    '<rect width="{width}" height="{height}" rx="6" fill="#ffffff"/>\n'
)


class Span(NamedTuple):
    """A bar of a lane."""

    start: float
    end: float
    label: str
    kind: str


class Arrow(NamedTuple):
    """Arrow from a time in a lane to a time in another one; lanes are counted from 0."""

    lane: int
    at: float
    to_lane: int
    to: float
    label: str = ""


class Chart(NamedTuple):
    """Lanes over time."""

    title: str
    lanes: Mapping[str, Sequence[Span]]
    arrows: Sequence[Arrow] = ()
    ticks: Sequence[tuple[float, str]] = ()
    note: str = ""


class Region(NamedTuple):
    """A rectangle of tensor memory: columns `start` to `end`, in the lanes `half` ("all", "lower" or "upper")."""

    start: int
    end: int
    half: str
    label: str
    kind: str


def text(x: float, y: float, label: str, anchor: str = "middle", style: str = "") -> str:
    """One line of text, centred at y."""
    return f'<text x="{x:.1f}" y="{y + 4.5:.1f}" text-anchor="{anchor}"{style}>{escape(label)}</text>\n'


def box(x: float, y: float, width: float, height: float, label: str, kind: str) -> str:
    """A filled rectangle with a centred label, on two lines where it holds a bar."""
    shape = (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="3" fill="{FILLS[kind]}" '
        'stroke="#6c757d" stroke-width="0.8"/>\n'
    )
    lines = label.split("|")
    size = min(13.0, 1.65 * width / max(1, *map(len, lines)))
    style = f' font-size="{size:.1f}"' if size < 13 else ""
    middle = y + height / 2 - 7.5 * (len(lines) - 1)
    return shape + "".join(text(x + width / 2, middle + 15 * i, line, style=style) for i, line in enumerate(lines))


def document(title: str, height: float, body: str) -> str:
    """The whole file."""
    return HEAD.format(width=WIDTH, height=round(height), title=escape(title)) + body + "</svg>\n"


def chart(drawing: Chart) -> str:
    """Lanes with bars, arrows between them, ticks below."""
    end = max(span.end for spans in drawing.lanes.values() for span in spans)
    scale = (WIDTH - NAMES - 2 * MARGIN) / end

    def x(time: float) -> float:
        return MARGIN + NAMES + time * scale

    def top(lane: int) -> float:
        return MARGIN + lane * (LANE + GAP)

    body = ""
    for lane, (name, spans) in enumerate(drawing.lanes.items()):
        body += text(MARGIN, top(lane) + LANE / 2, name, "start", ' font-weight="bold"')
        for span in spans:
            body += box(x(span.start), top(lane), (span.end - span.start) * scale, LANE, span.label, span.kind)
    for arrow in drawing.arrows:
        down = arrow.to_lane > arrow.lane
        y0, y1 = top(arrow.lane) + (LANE if down else 0), top(arrow.to_lane) + (0 if down else LANE)
        body += (
            f'<line x1="{x(arrow.at):.1f}" y1="{y0:.1f}" x2="{x(arrow.to):.1f}" y2="{y1:.1f}" stroke="#b02a37" '
            'stroke-width="1.4" marker-end="url(#tip)"/>\n'
        )
        body += text(x(arrow.at) + 5, (y0 + y1) / 2, arrow.label, "start", ' font-size="11" fill="#b02a37"')
    y = top(len(drawing.lanes))
    for time, label in drawing.ticks:
        ends = f'x1="{x(time):.1f}" y1="{y - GAP:.1f}" x2="{x(time):.1f}" y2="{y - GAP + 5:.1f}"'
        body += f'<line {ends} stroke="#6c757d"/>\n'
        body += text(x(time), y - 8, label, style=' font-size="11" fill="#495057"')
    y += 14 if drawing.ticks else -4
    if drawing.note:
        body += text(MARGIN, y, drawing.note, "start", ' font-size="12" fill="#495057"')
        y += 18
    return document(drawing.title, y + MARGIN - 6, body)


class Node(NamedTuple):
    """A box of a flow: where it begins, its width, and its label on one or two lines."""

    x: float
    y: float
    width: float
    label: str
    kind: str


class Flow(NamedTuple):
    """Boxes, and arrows from one (by its place in the list) to another."""

    title: str
    nodes: Sequence[Node]
    arrows: Sequence[tuple[int, int]]
    note: str = ""


NODE_HEIGHT = 50


def flow(drawing: Flow) -> str:
    """Boxes and what flows between them: down, or to the side where they stand side by side."""
    body = "".join(box(node.x, node.y, node.width, NODE_HEIGHT, node.label, node.kind) for node in drawing.nodes)
    for start, end in drawing.arrows:
        a, b = drawing.nodes[start], drawing.nodes[end]
        if a.y == b.y:
            x1, x2, y1, y2 = a.x + a.width, b.x, a.y + NODE_HEIGHT / 2, b.y + NODE_HEIGHT / 2
        else:
            x1, x2 = a.x + a.width / 2, b.x + b.width / 2
            y1, y2 = (a.y + NODE_HEIGHT, b.y) if a.y < b.y else (a.y, b.y + NODE_HEIGHT)
        body += (
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
            'stroke="#b02a37" stroke-width="1.3" marker-end="url(#tip)"/>\n'
        )
    bottom = max(node.y for node in drawing.nodes) + NODE_HEIGHT
    return document(drawing.title, bottom + 50, body + text(MARGIN, bottom + 28, drawing.note, "start"))


def tensor_memory(title: str, maps: Sequence[tuple[str, int, Sequence[Region]]]) -> str:
    """Maps of 512 columns, the lane halves one above the other."""
    scale, half = (WIDTH - NAMES - 2 * MARGIN) / 512, 34
    body, y = "", float(MARGIN)
    for name, used, regions in maps:
        body += text(MARGIN, y + 8, f"{name}: {used} columns", "start", ' font-weight="bold"')
        y += 24
        for label, row in (("lower lanes", 0), ("upper lanes", 1)):
            body += text(MARGIN, y + half * row + half / 2, label, "start")
        left = MARGIN + NAMES
        body += box(left, y, 512 * scale, 2 * half, "", "free")
        for region in regions:
            height = 2 * half if region.half == "all" else half
            at = y + (half if region.half == "upper" else 0)
            width = (region.end - region.start) * scale
            body += box(left + region.start * scale, at, width, height, region.label, region.kind)
        for column in range(0, 513, 64):
            body += text(left + column * scale, y + 2 * half + 12, str(column), style=' font-size="11" fill="#495057"')
        y += 2 * half + 40
    return document(title, y - 8, body)


class Bars(NamedTuple):
    """Ratios of several peers for each case, drawn as horizontal bars that start at 1."""

    title: str
    peers: Mapping[str, str]
    cases: Sequence[tuple[str, Sequence[float]]]
    note: str = ""


BAR, CASE_GAP, CASE_NAMES, RATIO_LABEL = 13, 9, 330, 44


def bars(drawing: Bars) -> str:
    """A bar per case and peer, a legend above and a note below."""
    largest = max(ratio for _, ratios in drawing.cases for ratio in ratios)
    left = MARGIN + CASE_NAMES
    scale = (WIDTH - left - MARGIN - RATIO_LABEL) / (largest - 1)
    body = text(MARGIN, MARGIN + 8, drawing.title, "start", ' font-size="15" font-weight="bold"')
    for place, (peer, kind) in enumerate(drawing.peers.items()):
        body += box(left + 150 * place, MARGIN + 26, BAR, BAR, "", kind)
        body += text(left + 150 * place + 20, MARGIN + 26 + BAR / 2, peer, "start")
    y = float(MARGIN + 52)
    for name, ratios in drawing.cases:
        body += text(left - 10, y + BAR * len(ratios) / 2, name, "end")
        for ratio, kind in zip(ratios, drawing.peers.values(), strict=True):
            width = (ratio - 1) * scale
            body += box(left, y, width, BAR, "", kind)
            body += text(left + width + 5, y + BAR / 2, f"{ratio:.2f}x", "start", ' font-size="11"')
            y += BAR
        y += CASE_GAP
    body += text(MARGIN, y + 8, drawing.note, "start", ' font-size="12" fill="#495057"')
    return document(drawing.title, y + 26, body)
