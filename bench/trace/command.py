"""`bench trace`: options, tables and files."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_cupy import simulation
from mla_cupy.errors import KernelCompileError
from mla_cupy.ops.call import forget
from mla_cupy.runtime import driver, loader
from mla_cupy.runtime.device import gpu_count
from mla_cupy.runtime.launching import Driver
from mla_cupy.terminal import Table

from ..core.device import DTYPES, CudaDevice, Device
from ..core.errors import BenchError
from ..core.host import HostDevice
from ..core.implementation import OWN, Choices, Prepared
from ..core.operation import BenchOperation, Case
from ..core.recorders import EVENTS, Call
from ..operations import OPERATIONS
from . import report
from .choice import NOWHERE, Choice
from .driver import Access, CudaAccess, Limits, Rehearsal, SimulatedAccess, TracingDriver
from .waits import BASIC_BLOCK, MICROSECOND, MIN_CYCLES, Trace, trace_of

if TYPE_CHECKING:
    from rich.console import Console

DESCRIPTION = """Show when each warp of a call's kernels waits, and for what.

The kernels are compiled a second time, with a clock read before and after everything that waits: mbarriers, named
barriers, WGMMA groups, copies, clusters. No source is changed for it, and plain builds stay as they are. Both builds
are timed, so that the price of tracing is known. It is lower where fewer places are recorded: those that --only finds,
or --parts of them, each in a build and a run of its own, whose tables are put together. --parts auto halves what costs
more than 3 %, as long as that makes it cheaper.
"""
EPILOG = """examples:
  trace decode b128-sq1-hq128-skv4096
  trace decode b128-sq1-hq128-skv4096 --perfetto decode.json      open it in ui.perfetto.dev
  trace decode b128-sq1-hq128-skv4096 --draw decode.svg --window 20,40
  trace decode b2-sq1-hq128-skv256 --simulate 2 --draw decode.svg --kernel-name decode_sm90_seesaw
  trace decode b128-sq1-hq128-skv4096 --only run_load_role        only waits in a function, file or call of this name
  trace decode b128-sq1-hq128-skv4096 --parts 4                   a quarter of the waits in each of four runs
  trace decode b128-sq1-hq128-skv4096 --parts auto                enough runs that each is near the plain call
  trace decode b2-sq1-hq128-skv256 --simulate 2                   without a GPU: the order of things, not their times

exit status: 0 success, 1 a result is wrong, 2 cannot run
"""
WARM_UP, TIMED = 3, 11
AUTO = 0
"""Number that stands for `--parts auto`."""
AIM = 1.03
"""Share of the plain call's time that a part of `--parts auto` may take, if fewer places can bring it there."""
FRAME_MARGIN = 1.01
"""A part that is so near to a build that records no place is not made smaller: what is left is not its waits'."""
MAX_AUTO_PARTS = 16
MAX_PARTS = 64
"""Largest number of parts; a part is halved if its build is refused, also with fewer registers."""
REFUSED = "is refused"
"""Words of the error of a build whose code would be slow."""
SIMULATED_GHZ = 1.0
"""Rate of the simulator's clock, which counts what its timer counts."""


@dataclass(frozen=True)
class Traced:
    """Traces of one call, its times in microseconds with both builds, and what is wrong with its result, or "".

    Of several parts there are traces of each, and times. Parts whose builds are refused have none. `frame_us` is the
    time of a build that records no place, where parts are chosen by what they cost, if ptxas takes it.
    """

    traces: list[Trace]
    plain_us: float | None
    traced_us: dict[str, float]
    wrong: str
    refused: list[str] = field(default_factory=list)
    frame_us: float | None = None

    @property
    def kernels(self) -> dict[str, list[Trace]]:
        """The traces of each kernel and variant."""
        found: dict[str, list[Trace]] = {}
        for trace in self.traces:
            found.setdefault(f"{trace.kernel} {trace.label}", []).append(trace)
        return found


@dataclass(frozen=True)
class Tracer:
    """Maker of drivers that trace on one device; with the clock's rate where kernels do not tell it."""

    target: Driver
    access: Access
    limits: Limits
    ghz: float
    min_cycles: int

    def recording(self, choice: Choice) -> TracingDriver:
        """Return a driver whose builds record these waits."""
        return TracingDriver(self.target, self.access, self.limits, choice)


@dataclass(frozen=True)
class Subject:
    """Case of an operation that is traced on a device, by our own implementation."""

    operation: BenchOperation
    case: Case
    implementation: Any
    dtype: str
    device: Device

    @cached_property
    def _sets(self) -> list[Any]:
        return [self.operation.inputs(self.case, self.dtype, 0, self.device)]

    @cached_property
    def _expected(self) -> Any:
        return self.operation.expect(self.case, self.dtype, self._sets[0], self.device)

    @property
    def timed(self) -> bool:
        """False in the simulator, which takes this machine's time."""
        return not isinstance(self.device, HostDevice)

    def prepare(self) -> Prepared:
        """Return the call, for the driver that is current."""
        prepared: Prepared = self.implementation.prepare(self.case, self.dtype, self._sets, self.device)
        return prepared

    def judge(self, prepared: Prepared) -> str:
        """Say what is wrong with the results; "" if nothing is."""
        verdict = self.operation.judge(self._expected, prepared.outputs(0), self.dtype, self.device)
        return "" if verdict.ok else verdict.reason


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `trace`."""
    parser.add_argument("operation", choices=list(OPERATIONS), metavar="OPERATION", help=", ".join(OPERATIONS))
    parser.add_argument("case", metavar="CASE", help="a case by name; `list` prints the built-in ones")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0])
    parser.add_argument("--kernel", metavar="NAME", help="force a kernel, as the public call's option does")
    parser.add_argument("--simulate", type=_positive, metavar="SMS", help="run in the simulator on SMS SMs")
    defaults = Limits()
    parser.add_argument(
        "--blocks", type=_positive, default=defaults.blocks, help="blocks that are traced (%(default)s)"
    )
    parser.add_argument("--capacity", type=_positive, default=defaults.capacity, help="records of a warp (%(default)s)")
    parser.add_argument(
        "--min-cycles",
        type=int,
        default=None,
        help=f"shortest wait that is shown ({MIN_CYCLES}; 1 simulated)",
    )
    parser.add_argument(
        "--only",
        type=_pattern,
        default="",
        metavar="REGEX",
        help="record only places whose function, call, file or line this finds",
    )
    parser.add_argument(
        "--parts",
        type=_parts,
        default=1,
        metavar="N",
        help="runs that record a part of the places each (%(default)s); auto: until a run costs less than 3 %%",
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
    _check_files(args)
    auto = args.parts == AUTO
    parts = 1 if auto else args.parts
    choices = [Choice(args.only, part, parts) for part in range(parts)]
    with _device(args) as (device, tracer):
        subject = Subject(operation, case, implementation, args.dtype, device)
        if args.draw or args.only:
            _check_names(args, subject, tracer)
        found = _trace(subject, tracer, choices, auto)
    if not any(warp.places for trace in found.traces for warp in trace.warps) and args.only:
        raise BenchError(f"--only: got {args.only!r}, which finds no place at which this call waits; leave it out")
    _show(console, found)
    _write(args, console, found)
    return int(bool(found.wrong))


def _check_files(args: argparse.Namespace) -> None:
    """Refuse, before the work, files that cannot be written after it."""
    for name in ("json", "perfetto", "draw"):
        path = getattr(args, name)
        if path and not path.parent.is_dir():
            raise BenchError(f"--{name}: got {path}, expected a file in a directory that exists")
    if args.kernel_name and not args.draw:
        raise BenchError("--kernel-name: got no --draw, expected a drawing of that kernel; add --draw FILE.svg")
    if args.draw and args.draw.suffix not in report.FORMATS:
        raise BenchError(f"--draw: got {args.draw}, expected a name that ends in {', '.join(report.FORMATS)}")
    if args.draw and importlib.util.find_spec("matplotlib") is None:
        raise BenchError("--draw: got no matplotlib, expected it installed; pip install matplotlib")


def _check_names(args: argparse.Namespace, subject: Subject, tracer: Tracer) -> None:
    """Refuse, before the work, a kernel or a block that the call does not launch, and places that it does not have."""
    rehearsal = Rehearsal(tracer.target, tracer.access, tracer.limits)
    with _tracing(rehearsal):
        _call(subject.prepare())()
    if args.only and not rehearsal.finds(Choice(args.only)):
        raise BenchError(f"--only: got {args.only!r}, which finds no place at which this call waits; leave it out")
    if not args.draw:
        return
    name, blocks = args.kernel_name, rehearsal.blocks
    if name and name.partition(", part ")[0] not in blocks:
        raise BenchError(f"--kernel-name: got {name!r}, expected one of {', '.join(blocks)}")
    count = min(tracer.limits.blocks, blocks[name.partition(", part ")[0]] if name else max(blocks.values()))
    if not 0 <= args.block < count:
        raise BenchError(f"--block: got {args.block}, expected 0 to {count - 1}")


@contextmanager
def _device(args: argparse.Namespace) -> Iterator[tuple[Device, Tracer]]:
    limits, least = Limits(args.blocks, args.capacity), args.min_cycles
    if args.simulate is not None:
        with simulation.simulated(args.simulate) as target:
            access = SimulatedAccess(target)
            yield HostDevice(), Tracer(target, access, limits, SIMULATED_GHZ, 1 if least is None else least)
        return
    if gpu_count() == 0:
        raise BenchError("trace: got no CUDA GPU, expected one; add --simulate 2 to run in the simulator")
    device = CudaDevice(EVENTS)
    with device.current():
        shortest = MIN_CYCLES if least is None else least
        yield device, Tracer(driver.current(), CudaAccess(), limits, _max_clock_ghz(), shortest)


def _max_clock_ghz() -> float:
    import cupy

    return float(cupy.cuda.Device().attributes["ClockRate"]) / 1e6  # kHz


def _trace(subject: Subject, tracer: Tracer, choices: Sequence[Choice], auto: bool = False) -> Traced:
    found = Traced([], _time(subject.prepare(), subject.device) if subject.timed else None, {}, "")
    if auto and subject.timed:
        found = replace(found, frame_us=_frame_us(subject, tracer))
    waiting = list(choices)
    while waiting and not found.wrong:
        choice = waiting.pop(0)
        try:
            more = _add_part(found, choice, subject, tracer, auto)
            waiting[:0] = choice.halves if more is None else []
            found = more or found
        except KernelCompileError as error:
            if REFUSED not in str(error):
                raise
            if choice.parts < MAX_PARTS or not choice.lean:
                waiting[:0] = choice.easier()
            else:
                found.refused.append(f"part {choice.name}: {str(error).splitlines()[0]}")
    if not found.traces:
        raise BenchError(f"no part can be traced; {found.refused[0]}")
    return found


def _frame_us(subject: Subject, tracer: Tracer) -> float | None:
    """Return the time of builds that record when a warp begins and ends, and no wait; None where they are refused."""
    for choice in (Choice(NOWHERE), Choice(NOWHERE, lean=True)):
        try:
            with _tracing(tracer.recording(choice)):
                return _time(subject.prepare(), subject.device)
        except KernelCompileError as error:
            if REFUSED not in str(error):
                raise
    return None


def _costs_too_much(us: float, found: Traced, choice: Choice) -> bool:
    """True where a part is above the aim, and well above what it would cost without a place."""
    if found.plain_us is None or choice.parts >= MAX_AUTO_PARTS:
        return False
    return us > max(AIM * found.plain_us, FRAME_MARGIN * (found.frame_us or 0.0))


def _add_part(found: Traced, choice: Choice, subject: Subject, tracer: Tracer, auto: bool) -> Traced | None:
    """Return what was found and a part besides, or None where it costs too much; its records are not read then."""
    recorder = tracer.recording(choice)
    with _tracing(recorder):
        prepared = subject.prepare()
        times = {choice.name: _time(prepared, subject.device)} if subject.timed else {}
        if auto and times and _costs_too_much(times[choice.name], found, choice):
            return None
        _call(prepared)()
        subject.device.synchronize()
        wrong = subject.judge(prepared)
        unit = MICROSECOND if subject.timed else BASIC_BLOCK
        traces = [trace_of(each, tracer.ghz, unit, tracer.min_cycles) for each in recorder.recorded()]
    return replace(
        found,
        traces=found.traces + [replace(trace, part=choice.name) for trace in traces],
        traced_us=found.traced_us | times,
        wrong=wrong,
    )


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
    for kernel, traces in found.kernels.items():
        blocks, unit = len({warp.block for warp in traces[0].warps}), traces[0].unit.name
        heads = ("role", "waits for", "share", "per warp", "waits", "per wait")
        table = Table(*heads, title=f"{kernel}: {blocks} blocks, times in {unit}", left=2)
        for row in report.rows(traces):
            table.add_row(*_cells(row))
        console.print(table)
        if dropped := sum(trace.dropped for trace in traces):
            console.print(f"{dropped} records had no room: raise --capacity")
        if spills := max(trace.spills for trace in traces):
            console.print(f"the traced build spills {spills} bytes: times are a little off")
    if found.plain_us and found.frame_us:
        console.print(f"no place recorded: {found.frame_us:.1f} us ({found.frame_us / found.plain_us:.3f})")
    for part, us in found.traced_us.items():
        if found.plain_us:
            console.print(
                f"whole call: {found.plain_us:.1f} us, traced{f', part {part}' if part else ''} {us:.1f} us "
                f"({us / found.plain_us:.3f}), medians of {TIMED} single calls"
            )
    for reason in found.refused:
        console.print(f"not traced: {reason}")
    console.print(f"result: {found.wrong}" if found.wrong else "result: equal to the oracle's within the tolerance")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        "" if row["site"] else row["role"],
        row["site"] or "nothing: it runs",
        f"{round(row['share'], 3) + 0.0:.1%}",  # a little below 0 is shown as 0
        f"{row['time_per_warp']:.4g}",
        f"{row['waits_per_warp']:.4g}" if row["site"] else "",
        "" if row["time_per_wait"] is None else f"{row['time_per_wait']:.3g}",
    )


def _write(args: argparse.Namespace, console: Console, found: Traced) -> None:
    if args.json:
        tables = [
            {
                "kernel": traces[0].kernel,
                "label": traces[0].label,
                "clock_ghz": traces[0].ghz,
                "dropped": sum(t.dropped for t in traces),
                "spill_bytes": max(t.spills for t in traces),
                "rows": report.rows(traces, most=1 << 30),
            }
            for traces in found.kernels.values()
        ]
        times = {
            "plain_us": found.plain_us,
            "frame_us": found.frame_us,
            "traced_us": max(found.traced_us.values(), default=None),
            "parts_us": found.traced_us,
            "refused": found.refused,
            "wrong": found.wrong,
        }
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
        if name in (trace.kernel, trace.name):
            return trace
    raise BenchError(f"--kernel-name: got {name!r}, expected one of {', '.join(trace.name for trace in traces)}")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {number}, expected at least 1")
    return number


def _parts(text: str) -> int:
    return AUTO if text == "auto" else _positive(text)


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a regular expression ({error})") from None
    return text


def _window(text: str) -> tuple[float, float]:
    begin, end = (float(part) for part in text.split(","))
    if not begin < end:
        raise argparse.ArgumentTypeError(f"got {text}, expected FROM,TO with FROM below TO")
    return begin, end
