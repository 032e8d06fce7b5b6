"""Summary of a run, as data and as text to paste into an issue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from mla_cupy.runtime import report
from mla_cupy.selftest.place import Place
from mla_cupy.selftest.probe import Probe, stage
from mla_cupy.selftest.trial import BAD, DIED, FAILED, HUNG, PASSED, SKIPPED, UNFIT, Result

COMPARISON = (
    "instructions exactly (small integers: no hardware rounds them)",
    "calls with the float64 oracle, within the error that is stated",
)
_WORDS = {PASSED: "pass", FAILED: "FAIL", DIED: "DIED", HUNG: "HUNG", SKIPPED: "skip", UNFIT: "n/a"}


def succeeded(results: Sequence[Result]) -> bool:
    """True if nothing went wrong."""
    return not any(result.status in BAD for result in results)


def facts(place: Place, keep_going: bool = False) -> dict[str, Any]:
    """Facts about the machine for readers of the report."""
    known = report.report()
    versions = known["versions"]
    cupy = [text for name, text in versions.items() if name.startswith("cupy") and text != "not installed"]
    return {
        "mla_cupy": versions["mla_cupy"],
        "arch": place.arch,
        "ran_on": place.gpu or "simulator",
        "reason": place.reason,
        "mode": place.mode if place.simulated else "",
        "simulated": place.simulated,
        "gpus": [f"{gpu['name']} ({gpu['target']})" for gpu in known["gpus"]],
        "driver": place.driver,
        "nvrtc": known["nvrtc"].get("version") or known["nvrtc"]["error"],
        "cupy": cupy[0] if cupy else "not installed",
        "numpy": versions["numpy"],
        "python": versions["python"],
        "platform": versions["platform"],
        "comparison": list(COMPARISON),
        "keep_going": keep_going,
    }


def as_json(known: dict[str, Any], probes: Sequence[Probe], results: Sequence[Result]) -> dict[str, Any]:
    """Everything."""
    about = {probe.name: probe.about for probe in probes}
    return {
        **known,
        "success": succeeded(results),
        "counts": dict(Counter(result.status for result in results)),
        "results": [{**asdict(result), "about": about[result.name]} for result in results],
    }


def stages(results: Sequence[Result]) -> list[tuple[str, str, str, str, str, str]]:
    """A row for each stage: its name, and how many passed, failed, were skipped, do not apply; the seconds."""
    rows = []
    for name in dict.fromkeys(stage(result.name) for result in results):
        mine = [result for result in results if stage(result.name) == name]
        count = Counter(result.status for result in mine)
        numbers = (count[PASSED], sum(count[bad] for bad in BAD), count[SKIPPED], count[UNFIT])
        passed, failed, skipped, unfit = map(str, numbers)
        rows.append((name, passed, failed, skipped, unfit, f"{sum(result.seconds for result in mine):.1f}"))
    return rows


def text(known: dict[str, Any], probes: Sequence[Probe], results: Sequence[Result]) -> str:
    """The report: plain, complete, narrow enough for an issue."""
    return "\n".join([*_head(known, results), "", *_lines(probes, results)])


def _head(known: dict[str, Any], results: Sequence[Result]) -> Iterator[str]:
    yield f"mla-cupy selftest for {known['arch']}"
    if known["simulated"]:
        yield f"  ran on      the simulator (ptxsim, mode {known['mode']}), not a GPU: {known['reason']}"
    else:
        yield f"  ran on      {known['ran_on']}"
    yield f"  package     mla_cupy {known['mla_cupy']}, NVRTC {known['nvrtc']}, CuPy {known['cupy']}"
    yield f"  machine     driver {known['driver']}, GPUs: {', '.join(known['gpus']) or 'none'}"
    yield f"  host        Python {known['python']}, NumPy {known['numpy']}, {known['platform']}"
    for i, line in enumerate(known["comparison"]):
        yield f"  {'' if i else 'compared':11} {line}"
    if known["keep_going"]:
        yield "  note        --keep-going: also what needs a probe that failed was run"
    for line in known.get("admission", ()):
        yield f"  admission   {line}"
    counts = Counter(_WORDS[result.status] for result in results)
    seconds = sum(result.seconds for result in results)
    outcome = "all well" if succeeded(results) else "NOT WELL"
    yield f"  result      {outcome}: {', '.join(f'{n} {word}' for word, n in counts.items())}, in {seconds:.1f} s"


def _lines(probes: Sequence[Probe], results: Sequence[Result]) -> Iterator[str]:
    about = {probe.name: probe.about for probe in probes}
    for result in results:
        yield f"{_WORDS[result.status]:4} {result.seconds:7.2f} s  {result.name}"
        if result.status == PASSED and not result.compared.endswith("exactly"):
            yield f"{'':16}{result.compared}"
        if result.status in BAD:
            yield f"{'':16}{about[result.name]}"
        if result.message:
            yield from (f"{'':16}{line}" for line in result.message.splitlines())
