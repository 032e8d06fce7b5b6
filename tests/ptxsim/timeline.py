"""A timeline of a launch: who ran, who waited for what, which asynchronous work was in flight.

Time is counted in executed basic blocks: it shows order and overlap, not durations on hardware.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Span:
    """One bar: a track, a label, a kind (``run``, ``wait``, ``async`` or ``phase``) and its start and end."""

    block: tuple[int, int, int]
    track: str
    label: str
    kind: str
    start: int
    end: int


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
        self._waiting: dict[int, tuple[str, int]] = {}
        self._last: dict[int, Span] = {}

    def turn(self, warp: object, start: int, end: int) -> None:
        """A warp ran."""
        last = self._last.get(id(warp))
        if last is not None and last.end == start:
            last.end = end
            return
        span = Span(warp.cta.ctaid, f"warp {warp.index}", "runs", "run", start, end)
        self._last[id(warp)] = span
        self.spans.append(span)

    def park(self, warp: object, park: object, step: int) -> None:
        """A warp starts to wait."""
        self._waiting[id(warp)] = (park.what, step)

    def wake(self, warp: object, step: int) -> None:
        """A warp's wait is over."""
        what, start = self._waiting.pop(id(warp), ("waits", step))
        if step > start:
            self.spans.append(Span(warp.cta.ctaid, f"warp {warp.index}", what, "wait", start, step))

    def asynchronous(self, op: object, step: int) -> None:
        """A piece of asynchronous work finished."""
        self.spans.append(Span((0, 0, 0), op.name, op.name, "async", op.start, max(step, op.start + 1)))

    def phase(self, barrier: object, step: int) -> None:
        """An mbarrier completed a phase."""
        label = f"phase {barrier.phase} complete"
        self.spans.append(Span(barrier.cta.ctaid, f"mbarrier {barrier.offset}", label, "phase", step, step + 1))

    def chrome_trace(self) -> dict:
        """Return the timeline in the Chrome trace format (one process a block, one thread a track)."""
        events = []
        blocks = {block: i for i, block in enumerate(dict.fromkeys(s.block for s in self.spans))}
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

    def draw(self, path: str | Path, block: tuple[int, int, int] = (0, 0, 0)) -> None:
        """Draw the tracks of a block (and the asynchronous units) as a PNG; needs matplotlib."""
        import matplotlib as mpl
        from matplotlib.figure import Figure

        spans = [s for s in self.spans if s.block == block or s.kind == "async"]
        names = sorted({s.track for s in spans}, key=_track_order)
        rows = {name: i for i, name in enumerate(names)}
        colours = {"run": "#4c78a8", "wait": "#e0e0e0", "async": "#f58518", "phase": "#54a24b"}
        figure = Figure(figsize=(12, 0.35 * len(names) + 1), layout="constrained")
        axes = figure.add_subplot()
        for kind, colour in colours.items():
            for span in (s for s in spans if s.kind == kind):
                axes.broken_barh(
                    [(span.start, span.end - span.start)], (rows[span.track] - 0.4, 0.8), facecolors=colour
                )
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set_xlabel("executed basic blocks")
        handles = [mpl.patches.Patch(color=c, label=k) for k, c in colours.items()]
        axes.legend(handles=handles, loc="upper right", ncols=4)
        figure.savefig(path, dpi=120)


def _track_order(name: str) -> tuple[int, int, str]:
    """Sort warps by number, then barriers, then asynchronous units."""
    number = int(name.split()[-1]) if name.split()[-1].isdigit() else 0
    return (0 if name.startswith("warp") else 1 if name.startswith("mbarrier") else 2, number, name)
