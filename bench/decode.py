"""Runs one decode case: check every implementation, record, time them in turn, check again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from .cases import DecodeCase
from .check import Expected, Verdict, expect, judge
from .device import Device
from .inputs import InputSet, set_bytes
from .limits import Limits
from .peers import Implementation, Prepared
from .recorders import Call
from .report import ERROR, OK, UNSUPPORTED, WRONG, make_row, relate
from .timer import host_us, rotation, sample, set_count, summarise

ROUNDS = 4  # the implementations take turns, so that a drift of the clock meets them all
WARMUP = 2


@dataclass(frozen=True)
class Options:
    """How to run, and what every row repeats."""

    dtype: str
    replays: int
    check: bool
    limits: Limits
    env: Mapping[str, Any]
    repro: str


@dataclass
class Entry:
    """An implementation on its way through one case."""

    implementation: Implementation
    status: str = OK
    reason: str = ""
    prepared: Prepared | None = None
    replay: Call | None = None
    verdict: Verdict | None = None
    samples: list[float] = field(default_factory=list)
    host_us: dict[str, float] = field(default_factory=dict)
    figures_us: dict[str, float] = field(default_factory=dict)

    def fail(self, status: str, reason: str) -> None:
        """Takes the implementation out of the rest of the case."""
        self.status, self.reason, self.prepared, self.replay = status, reason, None, None


def run_case(
    case: DecodeCase, implementations: Sequence[Implementation], device: Device, options: Options
) -> list[dict[str, Any]]:
    """The rows of one case. What goes wrong with one implementation is in its row and stops no other."""
    count = set_count(set_bytes(case), device.l2_bytes)
    entries = [Entry(implementation) for implementation in implementations]
    with device.current():
        try:
            sets = [device.inputs(case, options.dtype, seed) for seed in range(count)]
            expected = expect(case, options.dtype, sets[0], device) if options.check else []
            device.synchronize()
        except Exception as error:  # most likely a case too large for the memory
            for entry in entries:
                entry.fail(ERROR, f"no inputs: {type(error).__name__}: {error}")
        else:
            _run(entries, case, sets, expected, device, options)
        rows = [_row(entry, case, count, options) for entry in entries]
    relate(rows)
    return rows


def _run(
    entries: Sequence[Entry],
    case: DecodeCase,
    sets: Sequence[InputSet],
    expected: Sequence[Expected],
    device: Device,
    options: Options,
) -> None:
    for entry in entries:
        _guarded(entry, partial(_prepare, entry, case, sets, expected, device, options))
    for _ in range(ROUNDS):
        for entry in entries:
            _guarded(entry, partial(_time, entry, len(sets), device, options))
    for entry in entries:
        _guarded(entry, partial(_finish, entry, len(sets), expected, device, options))


def _guarded(entry: Entry, step: Callable[[], None]) -> None:
    if entry.status != OK:
        return
    try:
        step()
    except Exception as error:  # anything that a kernel, a driver or a peer throws
        entry.fail(ERROR, f"{type(error).__name__}: {error}")


def _prepare(
    entry: Entry,
    case: DecodeCase,
    sets: Sequence[InputSet],
    expected: Sequence[Expected],
    device: Device,
    options: Options,
) -> None:
    """Calls everything once and checks the first set; only what is right is recorded."""
    if reason := entry.implementation.unsupported(case, options.dtype):
        entry.fail(UNSUPPORTED, reason)
        return
    prepared = entry.implementation.prepare(case, options.dtype, sets, device)
    with prepared.recorder.current():
        for call in prepared.calls:
            call()
        entry.prepared = prepared
        _check(entry, expected, device, options)
        if entry.status == OK:
            entry.replay = prepared.recorder.record([prepared.calls[index] for index in rotation(len(sets))])
            device.poison(prepared.outputs(0).out)  # the check after the timing is then of what a replay wrote


def _check(entry: Entry, expected: Sequence[Expected], device: Device, options: Options) -> None:
    device.synchronize()
    if not expected or entry.prepared is None:
        return
    entry.verdict = judge(expected, entry.prepared.outputs(0), options.dtype, device)
    if not entry.verdict.ok:
        entry.fail(WRONG, entry.verdict.reason)


def _time(entry: Entry, sets: int, device: Device, options: Options) -> None:
    assert entry.prepared is not None
    assert entry.replay is not None
    replays = -(-options.replays // ROUNDS)
    with entry.prepared.recorder.current():
        entry.samples += sample(device.clock(), entry.replay, len(rotation(sets)), replays, WARMUP)


def _finish(entry: Entry, sets: int, expected: Sequence[Expected], device: Device, options: Options) -> None:
    """Checks what the replays wrote, then times the further figures and the host."""
    assert entry.prepared is not None
    _check(entry, expected, device, options)
    if entry.status != OK:
        return
    with entry.prepared.recorder.current():
        entry.host_us["call"] = host_us(entry.prepared.calls, device.synchronize)
        for name, figure in entry.prepared.figures.items():
            try:
                entry.figures_us[name], entry.host_us[name] = _figure(entry.prepared, figure, sets, device, options)
            except Exception as error:  # the row's own figure stands
                entry.reason = f"{name}: {type(error).__name__}: {error}"


def _figure(
    prepared: Prepared, figure: Sequence[Call], sets: int, device: Device, options: Options
) -> tuple[float, float]:
    """Microseconds on the GPU and on the host."""
    order = rotation(sets)
    replay = prepared.recorder.record([figure[index] for index in order])
    samples = sample(device.clock(), replay, len(order), options.replays, WARMUP)
    return summarise(samples, len(order)).us_median, host_us(figure, device.synchronize)


def _row(entry: Entry, case: DecodeCase, sets: int, options: Options) -> dict[str, Any]:
    timed = entry.status == OK and entry.prepared is not None
    return make_row(
        case,
        options.dtype,
        entry.implementation.name,
        limits=options.limits,
        env=options.env,
        repro=options.repro,
        status=entry.status,
        reason=entry.reason,
        variant=entry.prepared.variant if entry.prepared else "",
        timing=summarise(entry.samples, len(rotation(sets))) if timed else None,
        method=entry.prepared.recorder.method if entry.prepared else "",
        sets=sets,
        verdict=entry.verdict,
        host_us=entry.host_us,
        figures_us=entry.figures_us,
    )
