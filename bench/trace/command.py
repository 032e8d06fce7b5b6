"""`bench trace`: options, tables and files."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_cupy import simulation
from mla_cupy.ops.call import forget
from mla_cupy.runtime import driver, loader

from ..core.device import DTYPES, CudaDevice, Device
from ..core.errors import BenchError
from ..core.host import HostDevice
from ..core.implementation import OWN, Choices, Prepared
from ..core.operation import BenchOperation, Case
from ..core.recorders import EVENTS, Call
from ..operations import OPERATIONS
from . import report
from .driver import CudaAccess, Limits, SimulatedAccess, TracingDriver
from .waits import BASIC_BLOCK, MICROSECOND, Trace, trace_of

if TYPE_CHECKING:
    from rich.console import Console

DESCRIPTION = """Show when each warp of a call's kernels waits, and for what.

The kernels are compiled once more, with a clock read before and after everything that waits: mbarriers, named
barriers, WGMMA groups, copies, clusters. No source is changed for it, and plain builds stay as they are. Waits of
fewer cycles than --min-cycles leave no record. Both builds are timed, so that the price of tracing is known.
"""
EPILOG = """examples:
  trace decode b128-sq1-hq128-skv4096
  trace decode b128-sq1-hq128-skv4096 --perfetto decode.json      open it in ui.perfetto.dev
  trace decode b128-sq1-hq128-skv4096 --draw decode.svg --kernel-name decode_sm90_seesaw --window 20,40
  trace decode b2-sq1-hq128-skv256 --simulate 2                   without a GPU: the order of things, not their times

exit status: 0 success, 1 a result is wrong, 2 cannot run
"""
WARM_UP, TIMED = 3, 11
SIMULATED_GHZ = 1.0
"""Rate of the simulator's clock, which counts what its timer counts."""


@dataclass(frozen=True)
class Traced:
    """Traces of one call, its times in microseconds with both builds, and what is wrong with its result, or ""."""

    traces: list[Trace]
    plain_us: float | None
    traced_us: float | None
    wrong: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `trace`."""
    parser.add_argument("operation", choices=list(OPERATIONS), metavar="OPERATION", help=", ".join(OPERATIONS))
    parser.add_argument("case", metavar="CASE", help="a case by name; `list` prints the built-in ones")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0])
    parser.add_argument("--kernel", metavar="NAME", help="force a kernel, as the public call's option does")
    parser.add_argument("--simulate", type=_positive, metavar="SMS", help="run in the simulator, on so many SMs")
    defaults = Limits()
    parser.add_argument(
        "--blocks", type=_positive, default=defaults.blocks, help="blocks that are traced (%(default)s)"
    )
    parser.add_argument("--capacity", type=_positive, default=defaults.capacity, help="records of a warp (%(default)s)")
    parser.add_argument(
        "--min-cycles",
        type=int,
        default=None,
        help=f"shortest wait that is recorded ({defaults.min_cycles}; 1 simulated)",
    )
    files = parser.add_argument_group("files")
    files.add_argument("--json", type=Path, metavar="FILE.json", help="the tables")
    files.add_argument("--perfetto", type=Path, metavar="FILE.json", help="all waits, for ui.perfetto.dev")
    files.add_argument("--draw", type=Path, metavar="FILE.svg", help="one block (needs matplotlib; .svg, .png or .pdf)")
    files.add_argument("--kernel-name", metavar="NAME", help="which kernel is drawn (default: the longest)")
    files.add_argument("--block", type=int, default=0, help="which block is drawn (default 0)")
    files.add_argument("--window", type=_window, metavar="FROM,TO", help="which microseconds are drawn (default: all)")


def run(args: argparse.Namespace, console: Console) -> int:
    """`trace`."""
    operation: BenchOperation = OPERATIONS[args.operation]
    (case,) = operation.select([args.case], "targets")
    implementation = operation.implementations(Choices(None, args.kernel))[OWN]()
    if reason := implementation.unsupported(case, args.dtype):
        raise BenchError(f"{case.name}: {reason}")
    with _device(args) as (device, tracer, ghz):
        found = _trace(operation, case, implementation, args.dtype, device, tracer, ghz)
    _show(console, found)
    _write(args, console, found)
    return int(bool(found.wrong))


@contextmanager
def _device(args: argparse.Namespace) -> Iterator[tuple[Device, TracingDriver, float]]:
    """The device, a driver that traces on it, and its clock's rate where kernels do not tell it."""
    least = args.min_cycles
    if args.simulate is not None:
        limits = Limits(args.blocks, args.capacity, 1 if least is None else least)
        with simulation.simulated(args.simulate) as target:
            yield HostDevice(), TracingDriver(target, SimulatedAccess(target), limits), SIMULATED_GHZ
        return
    device = CudaDevice(EVENTS)
    limits = Limits(args.blocks, args.capacity, Limits().min_cycles if least is None else least)
    with device.current():
        yield device, TracingDriver(driver.current(), CudaAccess(), limits), _max_clock_ghz()


def _max_clock_ghz() -> float:
    import cupy

    return float(cupy.cuda.Device().attributes["ClockRate"]) / 1e6  # kHz


def _trace(
    operation: BenchOperation,
    case: Case,
    implementation: Any,
    dtype: str,
    device: Device,
    tracer: TracingDriver,
    ghz: float,
) -> Traced:
    sets = [operation.inputs(case, dtype, 0, device)]
    expected = operation.expect(case, dtype, sets[0], device)
    timed = not isinstance(device, HostDevice)
    plain_us = _time(implementation.prepare(case, dtype, sets, device), device) if timed else None
    with _tracing(tracer):
        prepared = implementation.prepare(case, dtype, sets, device)
        traced_us = _time(prepared, device) if timed else None
        _call(prepared)()
        device.synchronize()
        verdict = operation.judge(expected, prepared.outputs(0), dtype, device)
        unit = MICROSECOND if timed else BASIC_BLOCK
        traces = [trace_of(recorded, ghz, unit) for recorded in tracer.recorded()]
    return Traced(traces, plain_us, traced_us, "" if verdict.ok else verdict.reason)


@contextmanager
def _tracing(tracer: TracingDriver) -> Iterator[None]:
    """Calls go to the tracer; what this thread's calls have remembered of another driver is forgotten."""
    with driver.use(tracer):
        forget()
        try:
            yield
        finally:
            forget()
            loader.drop_kernels_of(tracer)


def _call(prepared: Prepared) -> Call:
    """The call, without a plan where there is a choice: with all of its kernels."""
    return prepared.figures.get("no_plan", prepared.calls)[0]


def _time(prepared: Prepared, device: Device) -> float:
    clock, samples = device.clock(), []
    for index in range(WARM_UP + TIMED):
        clock.start()
        _call(prepared)()
        us = clock.stop_us()
        if index >= WARM_UP:
            samples.append(us)
    return statistics.median(samples)


def _show(console: Console, found: Traced) -> None:
    from rich.table import Table

    for trace in found.traces:
        blocks, unit = len({warp.block for warp in trace.warps}), trace.unit.name
        table = Table(title=f"{trace.kernel} {trace.label}: {blocks} blocks", title_justify="left")
        table.add_column("role", no_wrap=True)
        table.add_column("waits for", overflow="fold")
        for column in ("share of time", f"{unit} per warp", "waits per warp", f"{unit} per wait"):
            table.add_column(column, justify="right")
        for row in report.rows(trace):
            table.add_row(*_cells(row))
        console.print(table)
        if trace.dropped:
            console.print(f"{trace.dropped} records had no room: raise --capacity")
        if trace.spills:
            console.print(f"the traced build spills {trace.spills} bytes: times are a little off")
    if found.plain_us and found.traced_us:
        console.print(
            f"whole call: {found.plain_us:.1f} us, traced {found.traced_us:.1f} us "
            f"({found.traced_us / found.plain_us:.3f}), medians of {TIMED} single calls"
        )
    console.print(f"result: {found.wrong}" if found.wrong else "result: equal to the oracle's within the tolerance")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        "" if row["site"] else row["role"],
        row["site"] or "nothing: it runs",
        f"{row['share']:.1%}",
        f"{row['time_per_warp']:.4g}",
        f"{row['waits_per_warp']:.4g}" if row["site"] else "",
        "" if row["time_per_wait"] is None else f"{row['time_per_wait']:.3g}",
    )


def _write(args: argparse.Namespace, console: Console, found: Traced) -> None:
    if args.json:
        tables = [
            {"kernel": t.kernel, "label": t.label, "clock_ghz": t.ghz, "dropped": t.dropped, "spill_bytes": t.spills}
            | {"rows": report.rows(t, most=1 << 30)}
            for t in found.traces
        ]
        times = {"plain_us": found.plain_us, "traced_us": found.traced_us, "wrong": found.wrong}
        args.json.write_text(json.dumps({"case": args.case, "dtype": args.dtype, **times, "kernels": tables}, indent=1))
    if args.perfetto:
        report.write_chrome_trace(args.perfetto, found.traces)
    if args.draw:
        report.draw(args.draw, _drawn(args.kernel_name, found.traces), args.block, args.window)
    for path in filter(None, (args.json, args.perfetto, args.draw)):
        console.print(f"wrote {path}")


def _drawn(name: str | None, traces: list[Trace]) -> Trace:
    if name is None:
        return max(traces, key=lambda trace: max((warp.end for warp in trace.warps), default=0.0))
    for trace in traces:
        if trace.kernel == name:
            return trace
    raise BenchError(f"--kernel-name: got {name!r}, expected one of {', '.join(trace.kernel for trace in traces)}")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {number}, expected at least 1")
    return number


def _window(text: str) -> tuple[float, float]:
    begin, end = (float(part) for part in text.split(","))
    if not begin < end:
        raise argparse.ArgumentTypeError(f"got {text}, expected FROM,TO with FROM below TO")
    return begin, end
