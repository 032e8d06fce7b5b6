"""Runs one case of an operation: checks every implementation, records it, times all in turn, checks again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from .device import Device
from .errors import RefusedError
from .implementation import Implementation, Prepared
from .limits import Limits
from .operation import BenchOperation, Case, Verdict
from .recorders import Call
from .report import ERROR, INEXACT, OK, SINGLE_CALL, UNSUPPORTED, WRONG, make_row, relate
from .timer import host_us, rotation, sample, set_count, summarise

ROUNDS = 4  # the implementations take turns, so that clock drift affects all alike
WARMUP = 2
LOAD_US = 1e6  # before compute-bound cases: a cool GPU runs at a higher clock than it can hold
COMPUTE_BOUND = 150  # FLOP per byte; on an H200 copies and GEMMs meet at 160
MAX_LOAD_REPLAYS = 10_000
HOST_BATCH_US = 20_000  # GPU time of a batch of calls for measuring host time, within 4 to 20 calls


@dataclass(frozen=True)
class Options:
    """Options of a run, and what every row repeats."""

    dtype: str
    replays: int
    check: bool
    limits: Limits
    env: Mapping[str, Any]
    repro: str


@dataclass
class Entry:
    """The state of an implementation in one case."""

    implementation: Implementation
    status: str = OK
    reason: str = ""
    prepared: Prepared | None = None
    replay: Call | None = None
    verdict: Verdict | None = None
    samples: list[float] = field(default_factory=list)
    host_us: dict[str, float] = field(default_factory=dict)
    figures_us: dict[str, float] = field(default_factory=dict)
    workspace_bytes: int | None = None

    def fail(self, status: str, reason: str) -> None:
        """Takes the implementation out of the rest of the case."""
        self.status, self.reason, self.prepared, self.replay = status, reason, None, None


@dataclass(frozen=True)
class _Run:
    """State that all implementations of a case share."""

    operation: BenchOperation
    case: Case
    device: Device
    options: Options
    sets: Sequence[Any]
    expected: Sequence[Any]


def run_case(
    operation: BenchOperation, case: Case, implementations: Sequence[Implementation], device: Device, options: Options
) -> list[dict[str, Any]]:
    """The rows of one case. A failure of one implementation is reported in its row and stops no other."""
    count = set_count(case.cost.nbytes, device.l2_bytes)
    entries = [Entry(implementation) for implementation in implementations]
    with device.current():
        try:
            sets = [operation.inputs(case, options.dtype, seed, device) for seed in range(count)]
            expected = operation.expect(case, options.dtype, sets[0], device) if options.check else []
            device.synchronize()
        except Exception as error:  # most likely a case too large for the memory
            for entry in entries:
                entry.fail(ERROR, f"no inputs: {type(error).__name__}: {error}")
        else:
            _run(entries, _Run(operation, case, device, options, sets, expected))
        rows = [_row(entry, operation, case, count, options) for entry in entries]
    relate(rows)
    return rows


def _run(entries: Sequence[Entry], run: _Run) -> None:
    for entry in entries:
        _guarded(entry, partial(_prepare, entry, run))
    _warm_up(entries, run)
    for _ in range(ROUNDS):
        for entry in entries:
            _guarded(entry, partial(_time, entry, run))
    for entry in entries:
        _guarded(entry, partial(_finish, entry, run))


def _warm_up(entries: Sequence[Entry], run: _Run) -> None:
    """A second of load before a compute-bound case, by the first implementation that can be replayed."""
    cost = run.case.cost
    entry = next((entry for entry in entries if entry.status == OK), None)
    if entry is not None and cost.flops > COMPUTE_BOUND * cost.nbytes:
        _guarded(entry, partial(_load, entry, run))


def _load(entry: Entry, run: _Run) -> None:
    assert entry.prepared is not None
    assert entry.replay is not None
    clock, us = run.device.clock(), 0.0
    with entry.prepared.recorder.current():
        for _ in range(MAX_LOAD_REPLAYS):
            clock.start()
            entry.replay()
            us += clock.stop_us()
            if us >= LOAD_US:
                return


def _guarded(entry: Entry, step: Callable[[], None]) -> None:
    if entry.status != OK:
        return
    try:
        step()
    except RefusedError as error:
        entry.fail(UNSUPPORTED, str(error))
    except Exception as error:  # anything that a kernel, a driver or a peer throws
        entry.fail(ERROR, f"{type(error).__name__}: {error}")


def _prepare(entry: Entry, run: _Run) -> None:
    """Calls everything once and checks the first set; only correct results are recorded for timing."""
    if reason := entry.implementation.unsupported(run.case, run.options.dtype):
        entry.fail(UNSUPPORTED, reason)
        return
    prepared = entry.implementation.prepare(run.case, run.options.dtype, run.sets, run.device)
    with prepared.recorder.current():
        for call in prepared.calls:
            call()
        entry.prepared = prepared
        _check(entry, run)
        if entry.status == OK:
            entry.replay = prepared.recorder.record([prepared.calls[index] for index in rotation(len(run.sets))])
            for name in run.operation.results:  # so that the check after the timing sees what a replay wrote
                if (written := getattr(prepared.outputs(0), name)) is not None:
                    run.device.poison(written)


def _check(entry: Entry, run: _Run) -> None:
    run.device.synchronize()
    if not run.expected or entry.prepared is None:
        return
    outputs = entry.prepared.outputs(0)
    entry.verdict = run.operation.judge(run.expected, outputs, run.options.dtype, run.device)
    if entry.verdict.ok:
        return
    if excuse := entry.prepared.excuse(entry.verdict):
        entry.reason = f"{entry.verdict.reason}; timed all the same: {excuse}"
    else:
        entry.fail(WRONG, entry.verdict.reason)


def _time(entry: Entry, run: _Run) -> None:
    assert entry.prepared is not None
    assert entry.replay is not None
    replays = -(-run.options.replays // ROUNDS)
    with entry.prepared.recorder.current():
        calls = len(rotation(len(run.sets)))
        entry.samples += sample(run.device.clock(), entry.replay, calls, replays, WARMUP)


def _finish(entry: Entry, run: _Run) -> None:
    """Checks what the replays wrote, then measures host times, further figures and memory."""
    assert entry.prepared is not None
    _check(entry, run)
    if entry.status != OK:
        return
    with entry.prepared.recorder.current():
        us = summarise(entry.samples, 1).us_median
        entry.host_us["call"] = _host_us(entry.prepared.calls, us, run.device)
        entry.host_us["repeated_call"] = _host_us(entry.prepared.calls[:1], us, run.device)
        entry.host_us["empty_launch"] = host_us([run.device.launch_empty], run.device.synchronize)
        if run.operation.single_calls:
            entry.figures_us[SINGLE_CALL] = _single_us(entry.prepared.calls, run)
        for name, figure in entry.prepared.figures.items():
            try:
                entry.figures_us[name], entry.host_us[name] = _figure(entry.prepared, figure, run)
            except Exception as error:  # the row's own figure remains valid
                entry.reason = f"{name}: {type(error).__name__}: {error}"
        if entry.prepared.workspace_bytes is not None:
            try:
                entry.workspace_bytes = entry.prepared.workspace_bytes()
            except Exception as error:
                entry.reason = f"workspace: {type(error).__name__}: {error}"


def _single_us(calls: Sequence[Call], run: _Run) -> float:
    """Microseconds between two events around one call, its launches included, over cold inputs."""
    order, clock = rotation(len(run.sets)), run.device.clock()
    samples = [us for at in range(run.options.replays) for us in sample(clock, calls[order[at % len(order)]], 1, 1)]
    return summarise(samples, 1).us_median


def _figure(prepared: Prepared, figure: Sequence[Call], run: _Run) -> tuple[float, float]:
    """Microseconds on the GPU and on the host."""
    order = rotation(len(run.sets))
    replay = prepared.recorder.record([figure[index] for index in order])
    samples = sample(run.device.clock(), replay, len(order), run.options.replays, WARMUP)
    us = summarise(samples, len(order)).us_median
    return us, _host_us(figure, us, run.device)


def _host_us(calls: Sequence[Call], gpu_us: float, device: Device) -> float:
    per_batch = max(4, min(20, int(HOST_BATCH_US / gpu_us))) if gpu_us else 20
    return host_us(calls, device.synchronize, per_batch=per_batch)


def _row(entry: Entry, operation: BenchOperation, case: Case, sets: int, options: Options) -> dict[str, Any]:
    timed = entry.status == OK and entry.prepared is not None
    inexact = timed and entry.verdict is not None and not entry.verdict.ok
    return make_row(
        case,
        options.dtype,
        entry.implementation.name,
        benchmark=operation.name,
        limits=options.limits,
        env=options.env,
        repro=options.repro,
        status=INEXACT if inexact else entry.status,
        reason=entry.reason,
        kernel=entry.prepared.kernel if entry.prepared else "",
        includes=entry.prepared.includes if entry.prepared else "",
        timing=summarise(entry.samples, len(rotation(sets))) if timed else None,
        method=entry.prepared.recorder.method if entry.prepared else "",
        sets=sets,
        verdict=entry.verdict,
        host_us=entry.host_us,
        figures_us=entry.figures_us,
        workspace_bytes=entry.workspace_bytes,
    )
