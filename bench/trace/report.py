"""Traces as tables, as a Chrome trace (Perfetto), and as a drawing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..core.errors import BenchError
from .sites import Site
from .waits import Trace, Unit, Wait, Warp

MAX_SITES = 6
"""Places that a table lists of a role, those of the longest waits first."""
_NS_PER_US = 1000.0
_RUNS = "#4c78a8"


def rows(trace: Trace, most: int = MAX_SITES) -> list[dict[str, Any]]:
    """Return what each role waits for: shares of its time, and means per warp.

    The first row of a role, without a place, is the time in which it does not wait.
    """
    found: list[dict[str, Any]] = []
    for role, warps in trace.roles.items():
        total = sum(warp.end - warp.begin for warp in warps)
        waits = _by_site(warps)
        running = total - sum(warp.waiting for warp in warps)
        found.append(_row(role, None, total, running, 0, len(warps), trace.unit))
        longest = sorted(waits.items(), key=lambda item: -sum(w.end - w.begin for w in item[1]))
        for site, each in longest[:most]:
            waited = sum(wait.end - wait.begin for wait in each)
            found.append(_row(role, site, total, waited, len(each), len(warps), trace.unit))
    return found


def _by_site(warps: Iterable[Warp]) -> dict[Site, list[Wait]]:
    found: dict[Site, list[Wait]] = {}
    for warp in warps:
        for wait in warp.waits:
            found.setdefault(wait.site, []).append(wait)
    return found


def _row(
    role: str, site: Site | None, total: float, nanoseconds: float, count: int, warps: int, unit: Unit
) -> dict[str, Any]:
    return {
        "role": role,
        "site": str(site) if site else "",
        "function": site.function if site else "",
        "share": nanoseconds / total if total else 0.0,
        "unit": unit.name,
        "time_per_warp": nanoseconds / warps / unit.nanoseconds,
        "waits_per_warp": count / warps,
        "time_per_wait": nanoseconds / count / unit.nanoseconds if count else None,
    }


def chrome_trace(traces: Sequence[Trace]) -> dict[str, Any]:
    """Return the traces in the Chrome trace format: a process for each block of a kernel, a thread for each warp."""
    return {"traceEvents": [event for trace in traces for event in _events(trace)], "displayTimeUnit": "ns"}


def _events(trace: Trace) -> Iterator[dict[str, Any]]:
    for warp in trace.warps:
        place = {"pid": f"{trace.kernel} block {warp.block} (SM {warp.sm})", "tid": warp.warp}
        yield {"ph": "M", "name": "thread_name", **place, "args": {"name": f"warp {warp.warp}"}}
        for begin, end in running(warp):
            yield _bar("runs", "run", begin, end, place, {})
        for wait in warp.waits:
            site = wait.site
            where = {"file": site.file, "line": site.line, "function": site.function}
            more = {**where, "barrier": f"0x{wait.barrier:x}", "cycles": wait.cycles}
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
        from matplotlib import colormaps, patches
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BenchError(f"a drawing needs matplotlib ({error}): pip install matplotlib") from None
    places = list(_by_site(warps))
    colours = {site: colormaps["tab20"]((2 * index + 1) % 20) for index, site in enumerate(places)}
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
    axes.set_title(f"{trace.kernel} {trace.label}, block {block} on SM {warps[0].sm}")
    if window:
        axes.set_xlim(*window)
    named = [("runs", _RUNS), *((str(site), colours[site]) for site in places)]
    handles = [patches.Patch(color=colour, label=text) for text, colour in named]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=8)
    figure.savefig(path)


def _bars(axes: Any, row: int, times: Iterable[tuple[float, float]], scale: float, colour: Any) -> None:
    bars = [(begin / scale, (end - begin) / scale) for begin, end in times]
    axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=colour)
