"""A timeline of a launch: who ran, who waited for what, which asynchronous work was in flight.

Time is counted in executed basic blocks: it shows order and overlap, not durations on hardware.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import SimError
from .page import page
from .spans import COLOURS, Span, track_order


class Timeline:
    """Collects spans while a launch runs; pass it as ``launch(..., timeline=Timeline())``.

    Examples
    --------
    >>> timeline = Timeline()
    >>> timeline.spans
    []
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._last: dict[tuple, Span] = {}

    def turn(self, warp: Any, start: int, end: int) -> None:
        """A warp ran."""
        key = (warp.home.ctaid, warp.index)
        last = self._last.get(key)
        if last is not None and last.end == start:
            last.end = end
            return
        span = Span(warp.home.ctaid, f"warp {warp.index}", "runs", "run", start, end)
        self._last[key] = span
        self.spans.append(span)

    def wait(self, warp: Any, park: Any, step: int) -> None:
        """A warp's wait is over."""
        if step > park.since:
            self.spans.append(Span(warp.home.ctaid, f"warp {warp.index}", park.what, "wait", park.since, step))

    def asynchronous(self, op: Any, step: int) -> None:
        """A piece of asynchronous work finished."""
        self.spans.append(Span((), op.name, op.name, "async", op.start, max(step, op.start + 1)))

    def phase(self, barrier: Any, step: int) -> None:
        """An mbarrier completed a phase."""
        label = f"phase {barrier.phase} complete"
        self.spans.append(Span(barrier.cta.ctaid, f"mbarrier {barrier.offset}", label, "phase", step, step + 1))

    def chrome_trace(self) -> dict:
        """Return the timeline in the Chrome trace format (one process a block, one thread a track)."""
        blocks = {block: i for i, block in enumerate(dict.fromkeys(s.block for s in self.spans))}
        names = {block: f"block {block}" if block else "asynchronous units" for block in blocks}
        events = [
            {"ph": "M", "pid": i, "name": "process_name", "args": {"name": names[block]}} for block, i in blocks.items()
        ]
        tracks: dict[tuple, int] = {}
        for span in self.spans:
            key = (span.block, span.track)
            if key not in tracks:
                tracks[key] = len(tracks)
                common = {"ph": "M", "pid": blocks[span.block], "tid": tracks[key]}
                events.append({**common, "name": "thread_name", "args": {"name": span.track}})
            events.append(
                {
                    "name": span.label,
                    "cat": span.kind,
                    "ph": "X",
                    "ts": span.start,
                    "dur": span.end - span.start,
                    "pid": blocks[span.block],
                    "tid": tracks[key],
                }
            )
        return {"traceEvents": events, "displayTimeUnit": "ns"}

    def save(self, path: str | Path) -> None:
        """Write the Chrome trace as JSON."""
        Path(path).write_text(json.dumps(self.chrome_trace()))

    def save_page(self, path: str | Path, title: str = "timeline") -> None:
        """Write an HTML page that shows all tracks, to be read in a browser."""
        Path(path).write_text(page(self.spans, title))

    def draw(self, path: str | Path, block: tuple[int, int, int] = (0, 0, 0)) -> None:
        """Draw the tracks of a block (and the asynchronous units) as a PNG; needs matplotlib."""
        patches, figure_of = drawing()
        spans = [s for s in self.spans if s.block == block or s.kind == "async"]
        names = sorted({s.track for s in spans}, key=track_order)
        rows = {name: i for i, name in enumerate(names)}
        figure = figure_of(figsize=(12, 0.35 * len(names) + 1.3), layout="constrained")
        axes = figure.add_subplot()
        bars: dict[tuple[str, str], list[tuple[int, int]]] = {}
        for span in spans:
            bars.setdefault((span.track, span.kind), []).append((span.start, span.end - span.start))
        for (track, kind), pieces in bars.items():
            axes.broken_barh(pieces, (rows[track] - 0.4, 0.8), facecolors=COLOURS[kind])
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set_xlabel("executed basic blocks")
        handles = [patches.Patch(color=c, label=k) for k, c in COLOURS.items()]
        figure.legend(handles=handles, loc="outside upper right", ncols=4)
        figure.savefig(path, dpi=120)


def drawing() -> tuple[Any, type]:
    """Return what draws a timeline: matplotlib's patches and its figure.

    Raises
    ------
    SimError
        Matplotlib is not installed.
    """
    try:
        from matplotlib import patches
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SimError(
            f"a PNG needs matplotlib, of ptxsim's extra `plot`; an HTML page needs nothing ({error})"
        ) from None
    return patches, Figure
