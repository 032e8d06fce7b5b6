"""A timeline as an HTML page of its own, which a browser shows without anything else."""

from __future__ import annotations

import html
from collections.abc import Sequence

from .spans import COLOURS, Span, track_order

_MEANING = {
    "run": "a warp runs",
    "wait": "a warp waits",
    "async": "asynchronous work is in flight",
    "phase": "an mbarrier completes a phase",
}
_ROW, _LABEL, _WIDTH = 18, 170, 1400
_STYLE = """
body { font: 13px system-ui, sans-serif; margin: 1.5em; color: #222 }
h2 { font-size: 14px; margin: 1.2em 0 .3em }
.scroll { overflow-x: auto; border: 1px solid #ccc }
.key span { display: inline-block; width: 12px; height: 12px; margin: 0 .3em 0 1em; vertical-align: -1px }
text { font-size: 11px } line { stroke: #eee } rect:hover { stroke: #000 }
"""


def page(spans: Sequence[Span], title: str) -> str:
    """Return the page.

    Parameters
    ----------
    spans : sequence of Span
        What a timeline has collected.
    title : str
        Heading, such as the kernel's name.
    """
    blocks = dict.fromkeys(span.block for span in spans)
    end = max((span.end for span in spans), default=1)
    key = "".join(f'<span style="background:{COLOURS[kind]}"></span>{text}' for kind, text in _MEANING.items())
    parts = [
        f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title><style>{_STYLE}</style>",
        f"<h1>{html.escape(title)}</h1><p class=key>{key}</p>",
        f"<p>From left to right: {end} executed basic blocks, in the order of execution. These are not durations on"
        " hardware. Point at a bar to see what it is.</p>",
    ]
    for block in blocks:
        name = f"block {block}" if block else "asynchronous units"
        parts.append(f"<h2>{name}</h2><div class=scroll>{_drawing([s for s in spans if s.block == block], end)}</div>")
    return "\n".join(parts) + "\n"


def _drawing(spans: Sequence[Span], end: int) -> str:
    """Return the SVG of one block's tracks."""
    tracks = {track: row for row, track in enumerate(sorted({span.track for span in spans}, key=track_order))}
    scale = _WIDTH / end
    height = _ROW * len(tracks)
    parts = [f'<svg width="{_LABEL + _WIDTH}" height="{height}">']
    for track, row in tracks.items():
        middle = row * _ROW + _ROW * 0.7
        parts.append(f'<line x1="0" x2="{_LABEL + _WIDTH}" y1="{(row + 1) * _ROW}" y2="{(row + 1) * _ROW}"/>')
        parts.append(f'<text x="4" y="{middle:.1f}">{html.escape(track)}</text>')
    for span in spans:
        x, width = _LABEL + span.start * scale, max((span.end - span.start) * scale, 1.0)
        what = html.escape(f"{span.label}: {span.start} to {span.end}")
        parts.append(
            f'<rect x="{x:.1f}" y="{tracks[span.track] * _ROW + 2}" width="{width:.1f}" height="{_ROW - 4}"'
            f' fill="{COLOURS[span.kind]}"><title>{what}</title></rect>'
        )
    return "".join([*parts, "</svg>"])
