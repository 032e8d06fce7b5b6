"""Traces as tables, as a Chrome trace (Perfetto), and as a drawing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..core.errors import BenchError
from .sites import Site
from .waits import Trace, Unit, Wait, Warp, roles

MAX_SITES = 6
"""Places that a table lists for a role, longest waits first."""
_NS_PER_US = 1000.0
_RUNS = "#bbbbbb"
FORMATS = ".svg", ".png", ".pdf"


def rows(traces: Sequence[Trace], most: int = MAX_SITES) -> list[dict[str, Any]]:
    """Return what each role of a kernel waits for: shares of its time, and means per warp.

    The first row of a role, without a place, is the time in which it does not wait. Of several traces each one, of a
    build that records some of the waits, gives shares of its own time; what is left of the whole is the time without.
    """
    found: list[dict[str, Any]] = []
    for role, indices in roles(traces).items():
        places: list[dict[str, Any]] = []
        lengths = []
        for trace in traces:
            warps = trace.of_role(indices)
            total = sum(warp.end - warp.begin for warp in warps)
            lengths.append(total / len(warps))
            places += (_row(role, site, total, each, len(warps), trace.unit) for site, each in _by_site(warps).items())
        running, length = 1.0 - sum(row["share"] for row in places), sum(lengths) / len(lengths)
        found.append(_running(role, running, length, traces[0].unit))
        found += sorted(places, key=lambda row: -row["share"])[:most]
    return found


def _by_site(warps: Iterable[Warp]) -> dict[Site, list[Wait]]:
    found: dict[Site, list[Wait]] = {}
    for warp in warps:
        for wait in warp.waits:
            found.setdefault(wait.site, []).append(wait)
    return found


def _row(role: str, site: Site, total: float, waits: Sequence[Wait], warps: int, unit: Unit) -> dict[str, Any]:
    nanoseconds = sum(wait.end - wait.begin for wait in waits)
    return {
        "role": role,
        "site": str(site),
        "function": site.function,
        "share": nanoseconds / total if total else 0.0,
        "unit": unit.name,
        "time_per_warp": nanoseconds / warps / unit.nanoseconds,
        "waits_per_warp": len(waits) / warps,
        "time_per_wait": nanoseconds / len(waits) / unit.nanoseconds,
    }


def _running(role: str, share: float, nanoseconds: float, unit: Unit) -> dict[str, Any]:
    share = round(share, 9) + 0.0 if nanoseconds else 0.0  # without what rounding leaves of a role that only waits
    return {
        "role": role,
        "site": "",
        "function": "",
        "share": share,
        "unit": unit.name,
        "time_per_warp": share * nanoseconds / unit.nanoseconds,
        "waits_per_warp": 0.0,
        "time_per_wait": None,
    }


def chrome_trace(traces: Sequence[Trace]) -> dict[str, Any]:
    """Return the traces in the Chrome trace format: a process for each block of a kernel, a thread for each warp."""
    return {"traceEvents": [event for trace in traces for event in _events(trace)], "displayTimeUnit": "ns"}


def _events(trace: Trace) -> Iterator[dict[str, Any]]:
    for warp in trace.warps:
        place = {"pid": f"{trace.name} block {warp.block} (SM {warp.sm})", "tid": warp.warp}
        yield {"ph": "M", "name": "thread_name", **place, "args": {"name": f"warp {warp.warp}"}}
        for begin, end in running(warp):
            yield _bar("runs", "run", begin, end, place, {})
        for wait in warp.waits:
            site = wait.site
            where = {"file": site.file, "line": site.line, "function": site.function}
            more = {**where, "cycles": wait.cycles}
            yield _bar(str(site), "wait", wait.begin, wait.end, place, more)


def _bar(name: str, kind: str, begin: float, end: float, place: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": begin / _NS_PER_US, "dur": (end - begin) / _NS_PER_US}
    return {"ph": "X", "name": name, "cat": kind, **times, **place, "args": more}


def running(warp: Warp) -> Iterator[tuple[float, float]]:
    """Yield the times in which a warp does not wait."""
    at = warp.begin
    for wait in warp.waits:
        if wait.begin > at:
            yield at, wait.begin
        at = max(at, wait.end)
    if warp.end > at:
        yield at, warp.end


def write_chrome_trace(path: Path, traces: Sequence[Trace]) -> None:
    """Write the Chrome trace, which ui.perfetto.dev and chrome://tracing read."""
    path.write_text(json.dumps(chrome_trace(traces)))


def draw(path: Path, trace: Trace, block: int, window: tuple[float, float] | None) -> None:
    """Draw the warps of one block with matplotlib: SVG, PNG or PDF, by the file's name.

    Raises
    ------
    BenchError
        If the block has left nothing, or matplotlib is missing.
    """
    warps = [warp for warp in trace.warps if warp.block == block]
    if not warps:
        have = sorted({warp.block for warp in trace.warps})
        raise BenchError(f"block {block} of {trace.kernel}: got no record, expected one of {have[:8]} ...")
    try:
        from matplotlib import colors, patches
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BenchError(f"a drawing needs matplotlib ({error}): pip install matplotlib") from None
    places = list(_by_site(warps))
    colours = {
        site: colors.hsv_to_rgb((index / len(places), 1.0, 0.6 if index % 2 else 1.0))
        for index, site in enumerate(places)
    }
    figure = Figure(figsize=(14, 0.32 * len(warps) + 1.6 + 0.18 * len(places)), layout="constrained")
    axes = figure.add_subplot()
    scale = trace.unit.nanoseconds
    for row, warp in enumerate(warps):
        _bars(axes, row, running(warp), scale, _RUNS)
        for site in places:
            _bars(axes, row, ((w.begin, w.end) for w in warp.waits if w.site == site), scale, colours[site])
    axes.set_yticks(range(len(warps)), [f"warp {warp.warp}" for warp in warps])
    axes.invert_yaxis()
    axes.set_xlabel(trace.unit.name)
    axes.set_title(f"{trace.name} {trace.label}, block {block} on SM {warps[0].sm}")
    if window:
        axes.set_xlim(*window)
    named = [("runs", _RUNS), *((str(site), colours[site]) for site in places)]
    handles = [patches.Patch(color=colour, label=text) for text, colour in named]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=8)
    figure.savefig(path)


def _bars(axes: Any, row: int, times: Iterable[tuple[float, float]], scale: float, colour: Any) -> None:
    bars = [(begin / scale, (end - begin) / scale) for begin, end in times]
    axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=colour)
