"""The command line: run, list, compare, compare-trees, compare-code, plot, trace, which, transformers, model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mla_cupy.terminal import Help, Table, console, progress, say

from . import claims, transformers_models, which
from .context_parallel import command as context_parallel
from .context_parallel import prefill as context_parallel_prefill
from .core.device import DTYPES
from .core.errors import BenchError
from .core.implementation import DETERMINISTIC, Choices, Implementation, make
from .core.operation import BenchOperation
from .core.plot import FORMATS
from .core.recorders import METHODS
from .model import report as model_report
from .operations import OPERATIONS
from .trace import command as trace_command
from .trees import code as trees_code
from .trees import command as trees_command

DESCRIPTION = """Benchmarks of mla_cupy against its peers and the limits of the machine.

Every implementation's result is checked before it is timed; the figure is the median over replays of a group of
calls that rotate over more inputs than the L2 cache holds; shares are of limits measured in the same run.
"""
PROG = "mla-cupy bench" if __name__.startswith("mla_cupy.") else "python -m bench"
EXIT_STATUS = "\nexit status: 0 success, 1 a wrong result or an error in a case, 2 cannot run\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status."""
    parser = build_parser()
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(arguments, argparse.Namespace(arguments=arguments))
    try:
        return int(args.handler(args))
    except BenchError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2


def build_parser(prog: str = PROG) -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(prog=prog, description=DESCRIPTION, formatter_class=Help)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_run(commands)
    show = commands.add_parser("list", help="print the cases, their cost, and times on one H200")
    show.add_argument("operations", nargs="*", type=_known, metavar="OPERATION", help="operations; default: all")
    show.set_defaults(handler=list_cases)
    _add_compare(commands)
    _add_module(commands, "compare-trees", "time two source trees in turn on the GPU", trees_command)
    _add_module(commands, "compare-code", "compare the machine code of two folders of builds; needs no GPU", trees_code)
    _add_plot(commands)
    _add_module(commands, "trace", "show what each warp of a call's kernels waits for", trace_command)
    _add_module(commands, "which", "tell which kernels a case runs on a GPU, and why; needs no GPU", which)
    text = "time transformers' own attention and these kernels in its place"
    _add_module(commands, "transformers", text, transformers_models)
    text = "predict a Blackwell kernel's time from its own sizes and assumed rates; needs no GPU"
    _add_module(commands, "model", text, model_report)
    return parser


def _known(name: str) -> str:
    """An operation's name as it is."""
    if name not in OPERATIONS:
        raise argparse.ArgumentTypeError(f"got {name!r}, expected one of {', '.join(OPERATIONS)}")
    return name


def _add_run(commands: Any) -> None:
    run = commands.add_parser("run", help="check and time one operation on the GPU")
    operations = run.add_subparsers(title="operations", required=True, metavar="OPERATION")
    for operation in OPERATIONS.values():
        title = operation.title[0].upper() + operation.title[1:] + "."
        epilog = operation.examples + EXIT_STATUS
        one = operations.add_parser(
            operation.name, help=operation.title, description=title, epilog=epilog, formatter_class=Help
        )
        _add_run_arguments(one, operation)
        one.set_defaults(handler=run_operation, operation=operation)
    for module in (context_parallel, context_parallel_prefill, claims):
        _add_module(operations, module.NAME, module.TITLE, module, EXIT_STATUS)


def _add_module(commands: Any, name: str, text: str, module: Any, status: str = "") -> None:
    """A command whose texts, arguments and handler a module has."""
    options = {"description": module.DESCRIPTION, "epilog": module.EPILOG + status}
    parser = commands.add_parser(name, help=text, formatter_class=Help, **options)
    module.add_arguments(parser)
    parser.set_defaults(handler=lambda args: module.run(args, console()))


def _add_compare(commands: Any) -> None:
    compare = commands.add_parser("compare", help="compare two result files")
    compare.add_argument("before", type=Path, metavar="A.jsonl")
    compare.add_argument("after", type=Path, metavar="B.jsonl")
    compare.add_argument(
        "--fail-if-slower",
        type=_percent,
        metavar="PERCENT",
        help="exit 1 if a row of mla_cupy is slower by more, or gone",
    )
    compare.add_argument(
        "--relative-to",
        metavar="PEER",
        help="compare times over this implementation's: for runs on different machines or days",
    )
    compare.set_defaults(handler=compare_files)


def _add_plot(commands: Any) -> None:
    plot = commands.add_parser("plot", help="draw result files: a roofline and bars for each operation (matplotlib)")
    plot.add_argument("files", type=Path, nargs="+", metavar="FILE.jsonl")
    plot.add_argument(
        "-o", "--output", type=Path, default=Path(), metavar="DIR", help="directory (default: the current one)"
    )
    plot.add_argument("--format", choices=FORMATS, default="png", help="default %(default)s")
    plot.set_defaults(handler=plot_files)


def _add_run_arguments(parser: argparse.ArgumentParser, operation: BenchOperation) -> None:
    _add_which_cases(parser, operation)
    _add_what_runs(parser, operation)
    _add_how(parser, operation)


def _add_which_cases(parser: argparse.ArgumentParser, operation: BenchOperation) -> None:
    cases = parser.add_argument_group("which cases")
    which = cases.add_mutually_exclusive_group()
    which.add_argument(
        "--case",
        action="append",
        default=[],
        metavar="NAME",
        help=f"a case by name, repeatable; any {operation.case_form}",
    )
    suites = sorted(operation.suites)
    text = f"a set of cases: {', '.join(suites)} (default %(default)s)"
    which.add_argument("--suite", choices=suites, default="targets", metavar="NAME", help=text)
    count = len(operation.suites["quick"])
    which.add_argument(
        "--quick", action="store_const", const="quick", dest="suite", help=f"the suite of {count} main cases"
    )
    for name, option in operation.case_options.items():
        cases.add_argument(f"--{name}", choices=option.choices, help=option.help)


def _add_what_runs(parser: argparse.ArgumentParser, operation: BenchOperation) -> None:
    what = parser.add_argument_group("what runs")
    what.add_argument("--peers", type=_names, metavar="NAMES", help=f"comma-separated: {operation.peers}")
    if operation.peers_from_dir:
        what.add_argument("--peers-dir", type=Path, metavar="DIR", help="holds the shared objects of the peers' wheels")
    if operation.deterministic:
        what.add_argument(
            "--deterministic", action="store_true", help="also mla_cupy with deterministic=True, as a row of its own"
        )
    what.add_argument("--dtype", choices=DTYPES, default=DTYPES[0])
    what.add_argument(
        "--kernel", metavar="NAME", help="force a kernel of mla_cupy, as the same option of its public calls does"
    )


def _add_how(parser: argparse.ArgumentParser, operation: BenchOperation) -> None:
    how = parser.add_argument_group("how")
    how.add_argument(
        "--method",
        choices=METHODS,
        default=operation.method,
        help="graph: replays of a CUDA graph. events: the same calls made one by one between two CUDA events; for "
        "peers that cannot be captured (default %(default)s; the same for all implementations of a run)",
    )
    how.add_argument(
        "--replays",
        type=_replays,
        default=32,
        metavar="N",
        help="timed replays, at least 20 (default %(default)s)",
    )
    how.add_argument("--no-check", action="store_true", help="do not check results (for profiling only)")
    how.add_argument(
        "--no-limits", action="store_true", help="do not measure the machine's limits (shares are then unknown)"
    )
    how.add_argument("--json", type=Path, metavar="FILE.jsonl", help="append one JSON object per row")
    how.add_argument("--tag", default="", help="a text to store in every row")


def _names(text: str) -> list[str]:
    return [] if text == "none" else [name.strip() for name in text.split(",") if name.strip()]


def _percent(text: str) -> float:
    return float(text.removesuffix("%"))


def _replays(text: str) -> int:
    number = int(text)
    if number < 20:
        raise argparse.ArgumentTypeError(f"got {number}, expected at least 20")
    return number


def run_operation(args: argparse.Namespace) -> int:
    """`run decode` and the others."""
    from .core import environment, limits, report, table
    from .core.device import CudaDevice
    from .core.runner import Options, run_case

    operation: BenchOperation = args.operation
    cases = operation.select(args.case, args.suite)
    for name, option in operation.case_options.items():
        if value := getattr(args, name):
            cases = operation.select([option.rename(case.name, value) for case in cases], args.suite)
    implementations = _implementations(args, operation)
    device, shown = CudaDevice(args.method), console()
    env = environment.describe(device.name, device.arch, args.tag)
    versions = f"CUDA {env['cuda_runtime']}, NVRTC {env['nvrtc']}, CuPy {env['cupy']}, git {env['git']}"
    shown.print(f"{device.name} ({device.arch}), {versions}")
    with device.current():
        measured = limits.NOT_MEASURED if args.no_limits else limits.measure(device)
    shown.print(f"limit: copy {_rate(measured.copy_tbps, 'TB/s')} ({measured.copy_note})")
    shown.print(f"limit: GEMM {_rate(measured.gemm_tflops, 'TFLOP/s')} ({measured.gemm_note})")

    options = Options(
        args.dtype, args.replays, not args.no_check, measured, env, environment.command_line(args.arguments)
    )
    failed = False
    with ExitStack() as stack:
        stream = stack.enter_context(environment.open_to_append(args.json)) if args.json else None
        advance = stack.enter_context(progress(operation.name, len(cases)))
        for case in cases:
            advance(case.name, False)
            rows = run_case(operation, case, implementations, device, options)
            table.show(shown, rows, operation.ratios(rows))
            if stream:
                report.write(stream, rows)
            failed |= any(row["status"] in (report.WRONG, report.ERROR) for row in rows)
            advance(case.name, True)
            try:
                device.release()
            except Exception as error:  # an error of a kernel is sticky in the process
                raise BenchError(f"the GPU is unusable after {case.name}: {error}") from error
    return int(failed)


def _implementations(args: argparse.Namespace, operation: BenchOperation) -> list[Implementation]:
    choices = Choices(getattr(args, "peers_dir", None), args.kernel)
    names = operation.peers_of(choices) if args.peers is None else args.peers
    if getattr(args, "deterministic", False):
        names = [DETERMINISTIC, *names]
    return make(names, operation.implementations(choices))


def _rate(value: float | None, unit: str) -> str:
    return "unknown" if value is None else f"{value:.4g} {unit}"


def list_cases(args: argparse.Namespace) -> int:
    """`list`."""
    for operation in [OPERATIONS[name] for name in args.operations or OPERATIONS]:
        cases = operation.suites["targets"]
        seen = [name for name in cases[0].seen if any(case.seen[name] is not None for case in cases)]
        heads = ("case", "GFLOP", "MB", "FLOP/B", *(f"{name} us" for name in seen), "suites")
        table = Table(*heads, title=operation.name, left=1)
        for case in cases:
            cost = case.cost
            suites = ", ".join(name for name, cases in operation.suites.items() if case in cases)
            figures = (f"{cost.flops / 1e9:.2f}", f"{cost.nbytes / 1e6:.1f}", f"{cost.intensity:.0f}")
            table.add_row(
                case.name,
                *figures,
                *("-" if case.seen[name] is None else f"{case.seen[name]:g}" for name in seen),
                suites,
            )
        console().print(table, "")
    say("Microseconds: measured on one H200 with bfloat16, and our target there; claims are ratios of one run.")
    return 0


def compare_files(args: argparse.Namespace) -> int:
    """`compare`."""
    from .core.compare import compare, show
    from .core.report import read

    changes = compare(read(args.before), read(args.after), args.relative_to)
    show(console(), changes, args.fail_if_slower)
    return int(args.fail_if_slower is not None and any(change.fails(args.fail_if_slower) for change in changes))


def plot_files(args: argparse.Namespace) -> int:
    """`plot`."""
    from .core.plot import draw
    from .core.report import read

    rows = [row for file in args.files for row in read(file)]
    for path in draw(rows, args.output, args.format):
        print(f"wrote {path}")
    return 0
