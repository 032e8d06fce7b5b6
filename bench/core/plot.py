"""Figures of result files: for each benchmark a roofline, and bars of the speed relative to each peer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

from .errors import BenchError
from .implementation import BASELINES, EXTERNAL, OWN
from .report import microseconds
from .selection import Case, case_of, one_run_per_case

Row = Mapping[str, Any]
FORMATS = ("png", "svg", "pdf")
#: Marker and colour of an implementation, the same in every figure.
STYLES = {
    OWN: ("o", "tab:blue"),
    "deterministic": ("s", "tab:cyan"),
    "flashmla": ("^", "tab:orange"),
    "fa3": ("D", "tab:green"),
    "cudnn": ("v", "tab:red"),
    "cupy": ("P", "tab:gray"),
    "generic": ("X", "tab:brown"),
}
#: Styles of implementations without one above, in the order of a figure.
OTHER_STYLES = (("*", "tab:purple"), ("p", "tab:olive"), ("<", "tab:pink"), ("h", "black"), (">", "darkgoldenrod"))
FILLS = ("full", "none", "left", "right")  # of the markers of a figure's operations
CLUSTER_RATIO = 1.3  # neighbours with closer intensities share a column of labels
MAX_LABELS = 40  # of more cases only the extremes are labelled
EXTREMES_RATIO = 1.6  # the highest and the lowest point of every such range of intensities
LABEL_ROWS = 48  # labels between the ends of the y axis
MAX_ROOFS = 2  # with more of them they are drawn as a band
LABEL_SIZE = 7  # points
LABEL_OFFSET = 0.015  # distance of a label from its points, as a share of the x axis
CHARACTER = 0.0052  # width of a label's character, as a share of the x axis
MARGIN = 1.4  # factor between the data and the ends of the axes


Anchor = tuple[float, float, str]  # intensity, TFLOP/s, the case's name


@dataclass(frozen=True)
class Label:
    """The name of a case: the point that it belongs to, and where it is written, in data coordinates."""

    text: str
    x: float
    y: float
    text_x: float
    text_y: float


def draw(rows: Sequence[Row], directory: Path, suffix: str = "png") -> list[Path]:
    """Writes the figures of every benchmark into a directory; returns their paths.

    Each case is shown as one run timed it: see `one_run_per_case`. What computes nothing, such as a copy, has no
    roofline.
    """
    timed = one_run_per_case(row for row in rows if microseconds(row) is not None)
    if not timed:
        raise BenchError("plot: no row was timed")
    written = []
    for benchmark in dict.fromkeys(map(_figure_name, timed)):
        own = [row for row in timed if _figure_name(row) == benchmark]
        figures = {"roofline": roofline} if all(row["flops"] for row in own) else {}
        figures |= {"ratios": ratio_bars} if any(map(ratios, own)) else {}
        paths = {name: directory / f"{benchmark}-{name}.{suffix}" for name in figures}
        written += [_save(partial(paint, rows=own), paths[name]) for name, paint in figures.items()]
    return written


def draw_roofline(rows: Sequence[Row], path: Path) -> None:
    """Writes one roofline of all rows that were timed."""
    _save(partial(roofline, rows=[row for row in rows if microseconds(row) is not None]), path)


def _figure_name(row: Row) -> str:
    """The benchmark, or the public function where a row of an early version does not say."""
    return str(row["benchmark"] or row["op"])


def _save(paint: Callable[[Any], None], path: Path) -> Path:
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise BenchError(f"plot needs matplotlib ({error}); pip install matplotlib") from error
    figure = pyplot.figure(layout="constrained")
    try:
        paint(figure)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise BenchError(f"plot: cannot write {path}: {error}") from error
    finally:
        pyplot.close(figure)
    return path


def _title(rows: Sequence[Row]) -> str:
    """Operations, dtypes, GPUs and days."""
    parts = (
        dict.fromkeys(row["op"] for row in rows),
        dict.fromkeys(row["dtype"] for row in rows),
        dict.fromkeys(str(row["env"].get("gpu")) for row in rows),
        sorted({str(row["env"].get("date"))[:10] for row in rows}),
    )
    return ", ".join(" and ".join(part) for part in parts)


def _case_names(rows: Sequence[Row]) -> dict[Case, str]:
    """Names of the cases: the dtype is named only if there are several."""
    several = len({row["dtype"] for row in rows}) > 1
    return {case_of(row): f"{row['case']} {row['dtype']}" if several else row["case"] for row in rows}


# ---- Roofline ------------------------------------------------------------------------------------------------------


def roofline(figure: Any, rows: Sequence[Row]) -> None:
    """TFLOP/s over intensity, with the limits measured in the runs of these rows."""
    from matplotlib.ticker import LogLocator, NullFormatter

    figure.set_size_inches(13, 8)
    axes = figure.subplots()
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte of memory traffic", ylabel="TFLOP/s")
    axes.set_title(f"Roofline: {_title(rows)}")
    (left, right), (bottom, top) = _ranges(rows)
    axes.set(xlim=(left, right), ylim=(bottom, top))
    _draw_roofs(axes, _distinct_limits(rows), left, right)
    _draw_points(axes, rows)
    labels = place_labels(rows, (left, right), (bottom, top))
    for label in labels:
        arrow = {"arrowstyle": "-", "color": "0.6", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 4, "relpos": (0, 0.5)}
        xy, place = (label.x, label.y), (label.text_x, label.text_y)
        box = {"facecolor": "white", "alpha": 0.6, "linewidth": 0, "pad": 0.5}  # readable where points lie below
        axes.annotate(label.text, xy, place, fontsize=LABEL_SIZE, va="center", arrowprops=arrow, bbox=box, zorder=4)
    cases = len(_anchors(rows))
    if len(labels) < cases:
        axes.set_xlabel(f"{axes.get_xlabel()}\n{len(labels)} of {cases} cases are labelled")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
    axes.grid(visible=True, which="both", alpha=0.25)
    figure.legend(loc="outside lower center", ncols=4)


def _draw_points(axes: Any, rows: Sequence[Row]) -> None:
    """A marker and a colour per implementation; markers of several operations differ in how they are filled."""
    styles = _styles(row["implementation"] for row in rows)
    ops = tuple(dict.fromkeys(row["op"] for row in rows))
    for op, name in dict.fromkeys((row["op"], row["implementation"]) for row in rows):
        marker, colour = styles[name]
        points = [(_intensity(row), row["tflops"]) for row in rows if (row["op"], row["implementation"]) == (op, name)]
        text = f"{name}, {op}" if len(ops) > 1 else name
        look = {"color": colour, "fillstyle": FILLS[ops.index(op) % len(FILLS)], "markersize": 6, "alpha": 0.85}
        axes.plot(*zip(*points, strict=True), marker, label=text, zorder=3, **look)


def _styles(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Marker and colour by implementation; those without one of their own take turns."""
    others = cycle(OTHER_STYLES)
    return {name: STYLES[name] if name in STYLES else next(others) for name in dict.fromkeys(names)}


def _intensity(row: Row) -> float:
    return float(row["flops"] / row["bytes"])


def _distinct_limits(rows: Iterable[Row]) -> list[tuple[float | None, float | None]]:
    """Copy TB/s and GEMM TFLOP/s of each run, as far as they were measured."""
    limits = dict.fromkeys((row["limits"]["copy_tbps"], row["limits"]["gemm_tflops"]) for row in rows)
    return [limit for limit in limits if any(limit)]


def limit_line(copy: float | None, gemm: float | None, left: float, right: float) -> tuple[list[float], list[float]]:
    """The roof between two intensities: the smaller of the two limits everywhere, bent where they meet."""
    ridge = gemm / copy if copy and gemm else None
    xs = [left, *([ridge] if ridge and left < ridge < right else []), right]
    return xs, [min(([x * copy] if copy else []) + ([gemm] if gemm else [])) for x in xs]


def _draw_roofs(axes: Any, limits: Sequence[tuple[float | None, float | None]], left: float, right: float) -> None:
    """A line per run, or a band from the lowest to the highest of many."""
    lines = [limit_line(copy, gemm, left, right) for copy, gemm in limits]
    if len(limits) <= MAX_ROOFS:
        for style, limit, (xs, ys) in zip(("-", "--"), limits, lines, strict=False):
            axes.plot(xs, ys, linestyle=style, color="black", linewidth=1, label=_limit_label([limit]), zorder=1)
        return
    xs = sorted({x for line, _ in lines for x in line})
    heights = [[limit_line(copy, gemm, x, x)[1][0] for x in xs] for copy, gemm in limits]
    low, high = ([pick(at) for at in zip(*heights, strict=True)] for pick in (min, max))
    axes.fill_between(xs, low, high, color="0.75", linewidth=0, zorder=1)
    axes.plot(xs, high, color="black", linewidth=1, label=_limit_label(limits), zorder=1)


def _limit_label(limits: Sequence[tuple[float | None, float | None]]) -> str:
    copies, gemms = ([limit for limit in side if limit] for side in zip(*limits, strict=True))
    texts = ([f"copy {_span(copies, 2)} TB/s"] if copies else []) + (
        [f"GEMM {_span(gemms, 0)} TFLOP/s"] if gemms else []
    )
    return ("limits: " if len(limits) == 1 else f"limits of {len(limits)} runs: ") + ", ".join(texts)


def _span(values: Sequence[float], digits: int) -> str:
    low, high = (f"{pick(values):.{digits}f}" for pick in (min, max))
    return low if low == high else f"{low} to {high}"


def _ranges(rows: Sequence[Row]) -> tuple[tuple[float, float], tuple[float, float]]:
    """The ends of both axes: all points with their labels, and the ridge of every roof."""
    limits = _distinct_limits(rows)
    ridges = [gemm / copy for copy, gemm in limits if copy and gemm]
    xs = [*map(_intensity, rows), *ridges]
    ys = [*(row["tflops"] for row in rows), *(gemm for _, gemm in limits if gemm)]
    left = min(xs) / MARGIN
    room = 1 - LABEL_OFFSET - CHARACTER * max(len(name) for name in _case_names(rows).values())
    return (left, left * (max(xs) / left) ** (1 / room)), (min(ys) / MARGIN, max(ys) * MARGIN)


def place_labels(rows: Sequence[Row], x_range: tuple[float, float], y_range: tuple[float, float]) -> list[Label]:
    """Labels that do not overlap: one per case, or of many cases only of the extremes of every range of intensities."""
    names = _case_names(rows)
    anchors = sorted((_intensity(row), row["tflops"], names[key]) for key, row in _anchors(rows).items())
    clusters = _clusters(anchors) if len(anchors) <= MAX_LABELS else _extremes(anchors)
    placed: list[Label] = []
    for label in _in_columns(clusters, x_range, y_range):
        if not any(_overlap(label, other, x_range, y_range) for other in placed):
            placed.append(label)
    return placed


def _clusters(anchors: Sequence[Anchor]) -> list[list[Anchor]]:
    """Anchors in ascending order, parted where two neighbours are far from each other."""
    clusters: list[list[Anchor]] = []
    for anchor in anchors:
        if clusters and anchor[0] < clusters[-1][-1][0] * CLUSTER_RATIO:
            clusters[-1].append(anchor)
        else:
            clusters.append([anchor])
    return clusters


def _extremes(anchors: Sequence[Anchor]) -> list[list[Anchor]]:
    """The highest and the lowest anchor of every range of intensities, in ascending order of these."""
    ranges: list[list[Anchor]] = []
    for anchor in anchors:
        if ranges and anchor[0] < ranges[-1][0][0] * EXTREMES_RATIO:
            ranges[-1].append(anchor)
        else:
            ranges.append([anchor])
    ends = [(min(some, key=lambda anchor: anchor[1]), max(some, key=lambda anchor: anchor[1])) for some in ranges]
    return [list(dict.fromkeys(pair)) for pair in ends]


def _overlap(a: Label, b: Label, x_range: tuple[float, float], y_range: tuple[float, float]) -> bool:
    """True if two texts overlap, by the estimated size of a character."""
    left, right = sorted((a, b), key=lambda label: label.text_x)
    width: float = (x_range[1] / x_range[0]) ** (CHARACTER * len(left.text))
    gap: float = (y_range[1] / y_range[0]) ** (0.99 / LABEL_ROWS)
    return right.text_x < left.text_x * width and max(a.text_y, b.text_y) < min(a.text_y, b.text_y) * gap


def _in_columns(
    clusters: Sequence[Sequence[Anchor]], x_range: tuple[float, float], y_range: tuple[float, float]
) -> list[Label]:
    """The labels of each cluster in a column to its right, so that none overlap in a column of `LABEL_ROWS`."""
    gap = (y_range[1] / y_range[0]) ** (1 / LABEL_ROWS)
    offset = (x_range[1] / x_range[0]) ** LABEL_OFFSET
    labels = []
    for cluster in clusters:
        by_height = sorted(cluster, key=lambda anchor: anchor[1])
        heights = spread([y for _, y, _ in by_height], gap, y_range)
        text_x = max(x for x, _, _ in cluster) * offset
        labels += [Label(text, x, y, text_x, at) for (x, y, text), at in zip(by_height, heights, strict=True)]
    return labels


def _anchors(rows: Sequence[Row]) -> dict[Case, Row]:
    """The row that carries the label of each case: our own, or the first if there is none."""
    anchors: dict[Case, Row] = {}
    for row in rows:
        if row["implementation"] == OWN or case_of(row) not in anchors:
            anchors[case_of(row)] = row
    return anchors


def spread(heights: Sequence[float], gap: float, bounds: tuple[float, float]) -> list[float]:
    """Ascending heights moved apart to ratios of at least `gap`, as little as possible and within the bounds.

    Without their distances, the logarithms must not decrease: neighbours that would are pooled into their mean.
    """
    step = math.log(gap)
    pools: list[tuple[float, int]] = []  # mean, count
    for position, height in enumerate(heights):
        mean, count = math.log(height) - position * step, 1
        while pools and pools[-1][0] > mean:
            other, others = pools.pop()
            mean, count = (mean * count + other * others) / (count + others), count + others
        pools.append((mean, count))
    flat = [mean for mean, count in pools for _ in range(count)]
    low, high = (math.log(bound) for bound in bounds)
    high -= (len(heights) - 1) * step
    return [math.exp(max(low, min(high, mean)) + position * step) for position, mean in enumerate(flat)]


# ---- Ratios --------------------------------------------------------------------------------------------------------


def ratios(row: Row) -> dict[str, float]:
    """Speed of our own row relative to each peer and baseline of the same run; nothing for other rows."""
    if row["implementation"] != OWN:
        return {}
    return {name: row["speed_vs"][name] for name in (*EXTERNAL, *BASELINES) if name in row["speed_vs"]}


def ratio_bars(figure: Any, rows: Sequence[Row]) -> None:
    """Horizontal bars, grouped by case: a peer's time divided by ours, above 1 where we are faster."""
    names = _case_names(rows)
    groups = [(names[case_of(row)], found) for row in rows if (found := ratios(row))]
    peers = dict.fromkeys(name for _, found in groups for name in found)
    figure.set_size_inches(11, 1.5 + len(groups) * (0.12 + 0.2 * len(peers)))
    axes = figure.subplots()
    height = 0.8 / len(peers)
    styles = _styles(peers)
    for offset, peer in enumerate(peers):
        colour = styles[peer][1]
        at = [place + (offset + 0.5) * height - 0.4 for place, (_, found) in enumerate(groups) if peer in found]
        values = [found[peer] for _, found in groups if peer in found]
        axes.barh(at, values, height * 0.9, color=colour, label=f"vs. {peer}")
        for y, value in zip(at, values, strict=True):  # at the foot of the bar, away from the line at 1
            axes.text(0, y, f" {value:.2f}", color="white", va="center", fontsize=LABEL_SIZE + 1, fontweight="bold")
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(groups)), [name for name, _ in groups], fontsize=LABEL_SIZE + 1)
    axes.set_ylim(len(groups) - 0.5, -0.5)  # the first case at the top
    axes.set_xlim(0, 1.05 * max(ratio for _, found in groups for ratio in found.values()))
    axes.set_xlabel("time of the peer / time of mla_cupy, in one run: above 1 mla_cupy is faster")
    axes.set_title(f"Speed relative to peers: {_title(rows)}")
    axes.grid(visible=True, axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=len(peers))
