"""The command line: run, list, compare, plot, model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from . import model_report
from .errors import BenchError
from .operations import DECODE, OPERATIONS, SPARSE_BACKWARD, Operation
from .peers import Choices, Implementation, make
from .recorders import METHODS
from .sparse_cases import FORM, INDICES, with_indices

DESCRIPTION = """Benchmarks of mla_cupy against its peers and the limits of the machine.

Every implementation's result is checked before it is timed; the figure is the median over replays of a group of
calls that rotate over more inputs than the L2 cache holds; shares are of limits measured in the same run.
"""
PROG = "mla-cupy bench" if __name__.startswith("mla_cupy.") else "python -m bench"
EXAMPLES = {
    "decode": """examples:
  run decode --quick                                   the four main cases, with the built-in baselines
  run decode --peers-dir peers --json h200.jsonl       all cases, FlashMLA and FlashAttention-3 beside us
  run decode --case b128-sq1-hq128-skv4096 --peers generic
  run decode --case b3-sq2-hq16-skv1000-page16         any other shape, named in the same way
""",
    "sparse-forward": """examples:
  run sparse-forward --peers-dir peers                 all cases with FlashMLA beside us
  run sparse-forward --quick --indices clustered       indices as an indexer would choose them
  run sparse-forward --case sq512-skv4096-hq16-topk512 any other shape, named in the same way
""",
    "sparse-backward": """examples:
  run sparse-backward --peers cudnn --deterministic    all cases, cudnn-frontend and our own reproducible way beside us
  run sparse-backward --case sq512-skv4096-hq16-topk512-clustered
""",
}
EXIT_STATUS = "\nexit status: 0 all right, 1 a wrong result or an error in a case, 2 cannot run\n"
PEERS = {
    "decode": "flashmla, fa3 (they import torch and need --peers-dir), cupy, generic; or none. "
    "Default: generic,cupy, and flashmla,fa3 where --peers-dir is given",
    "sparse-forward": "flashmla (imports torch and needs --peers-dir), tilelang, generic; or none. "
    "Default: flashmla where --peers-dir is given",
    "sparse-backward": "cudnn (imports torch and cudnn-frontend), tilelang, generic. Default: none",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
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
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=prog, description=DESCRIPTION, formatter_class=raw)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="check and time one operation on the GPU")
    operations = run.add_subparsers(title="operations", required=True, metavar="OPERATION")
    for operation in OPERATIONS.values():
        title = operation.title[0].upper() + operation.title[1:] + "."
        epilog = EXAMPLES[operation.name] + EXIT_STATUS
        one = operations.add_parser(
            operation.name, help=operation.title, description=title, epilog=epilog, formatter_class=raw
        )
        _add_run_arguments(one, operation)
        one.set_defaults(handler=run_operation, operation=operation)

    show = commands.add_parser("list", help="print the cases, their cost, and what was seen on one H200")
    show.set_defaults(handler=list_cases)

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

    plot = commands.add_parser("plot", help="draw a result file as a roofline (needs matplotlib)")
    plot.add_argument("file", type=Path, metavar="FILE.jsonl")
    plot.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("roofline.png"),
        metavar="FILE",
        help="default %(default)s; .svg and .pdf too",
    )
    plot.set_defaults(handler=plot_file)

    model = commands.add_parser(
        "model",
        help="predict a Blackwell kernel's time from its own sizes and assumed rates; needs no GPU",
        description=model_report.DESCRIPTION,
        epilog=model_report.EPILOG,
        formatter_class=raw,
    )
    model_report.add_arguments(model)
    model.set_defaults(handler=lambda args: model_report.run(args, _console()))
    return parser


def _add_run_arguments(parser: argparse.ArgumentParser, operation: Operation) -> None:
    sparse = operation is not DECODE
    cases = parser.add_argument_group("which cases")
    which = cases.add_mutually_exclusive_group()
    which.add_argument(
        "--case",
        action="append",
        default=[],
        metavar="NAME",
        help="a case by name; may be given again" + (f"; any {FORM}" if sparse else ""),
    )
    which.add_argument(
        "--suite", choices=sorted(operation.suites), default="targets", help="a set of cases (default %(default)s)"
    )
    count = len(operation.suites["quick"])
    which.add_argument(
        "--quick", action="store_const", const="quick", dest="suite", help=f"the suite of {count} main cases"
    )
    if sparse:
        cases.add_argument(
            "--indices",
            choices=INDICES,
            default=None,
            help="how the rows of each query are chosen, in every case: all visible ones alike, or sinks, recent "
            "tokens and blocks that neighbouring queries share (default: as the case's name says, random)",
        )
    what = parser.add_argument_group("what runs")
    what.add_argument("--peers", type=_names, metavar="NAMES", help=f"comma-separated: {PEERS[operation.name]}")
    if operation is not SPARSE_BACKWARD:
        what.add_argument("--peers-dir", type=Path, metavar="DIR", help="holds the shared objects of the peers' wheels")
    else:
        what.add_argument(
            "--deterministic", action="store_true", help="also mla_cupy with deterministic=True, as a row of its own"
        )
    what.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    what.add_argument(
        "--variant", metavar="NAME", help="force a kernel of mla_cupy, as variant= of its public calls does"
    )
    how = parser.add_argument_group("how")
    how.add_argument(
        "--method",
        choices=METHODS,
        default=operation.method,
        help="graph: replays of a CUDA graph. events: the same calls made one by one between two CUDA events; for "
        "peers that cannot be captured (default %(default)s, the same for everyone in a run)",
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
    how.add_argument("--json", type=Path, metavar="FILE.jsonl", help="append one JSON object a row")
    how.add_argument("--tag", default="", help="a text to keep in every row")


def _names(text: str) -> list[str]:
    return [] if text == "none" else [name.strip() for name in text.split(",") if name.strip()]


def _percent(text: str) -> float:
    return float(text.removesuffix("%"))


def _replays(text: str) -> int:
    number = int(text)
    if number < 20:
        raise argparse.ArgumentTypeError(f"got {number}, expected at least 20")
    return number


def _console() -> Any:
    from rich.console import Console

    # A file or a pipe has no width of its own: do not cut the tables down to 80 columns there.
    return Console() if sys.stdout.isatty() else Console(width=160)


def run_operation(args: argparse.Namespace) -> int:
    """`run decode` and the others."""
    from . import environment, limits, report
    from .device import CudaDevice
    from .runner import Options, run_case

    operation: Operation = args.operation
    cases = operation.select(args.case, args.suite)
    if getattr(args, "indices", None):
        cases = operation.select([with_indices(case.name, args.indices) for case in cases], args.suite)
    implementations = _implementations(args, operation)
    device = CudaDevice(args.method)
    console = _console()
    env = environment.describe(device.name, device.arch, args.tag)
    versions = f"CUDA {env['cuda_runtime']}, NVRTC {env['nvrtc']}, CuPy {env['cupy']}, git {env['git']}"
    console.print(f"{device.name} ({device.arch}), {versions}")
    with device.current():
        measured = limits.NOT_MEASURED if args.no_limits else limits.measure(device)
    console.print(f"limit: copy {_rate(measured.copy_tbps, 'TB/s')} ({measured.copy_note})")
    console.print(f"limit: GEMM {_rate(measured.gemm_tflops, 'TFLOP/s')} ({measured.gemm_note})")

    options = Options(
        args.dtype, args.replays, not args.no_check, measured, env, environment.command_line(args.arguments)
    )
    failed = False
    with ExitStack() as stack:
        stream = stack.enter_context(_open_to_append(args.json)) if args.json else None
        for case in cases:
            rows = run_case(operation, case, implementations, device, options)
            report.show(console, rows)
            if stream:
                report.write(stream, rows)
            failed |= any(row["status"] in (report.WRONG, report.ERROR) for row in rows)
            try:
                device.release()
            except Exception as error:  # an error of a kernel stays with the process
                raise BenchError(f"the GPU cannot be used any more after {case.name}: {error}") from error
    return int(failed)


def _implementations(args: argparse.Namespace, operation: Operation) -> list[Implementation]:
    choices = Choices(getattr(args, "peers_dir", None), args.variant)
    names = operation.default_peers(choices) if args.peers is None else args.peers
    if getattr(args, "deterministic", False):
        names = ["deterministic", *names]
    return make(names, operation.implementations(choices))


def _open_to_append(path: Path) -> Any:
    try:
        return path.open("a", encoding="utf-8")
    except OSError as error:
        raise BenchError(f"--json: cannot write {path}: {error.strerror}") from error


def _rate(value: float | None, unit: str) -> str:
    return "unknown" if value is None else f"{value:.4g} {unit}"


def list_cases(args: argparse.Namespace) -> int:
    """`list`."""
    from rich.table import Table

    for operation in OPERATIONS.values():
        table = Table(title=operation.name, title_justify="left")
        table.add_column("case", no_wrap=True)
        seen = operation.suites["targets"][0].seen
        for column in ("GFLOP", "MB", "FLOP/B", *(f"{name} us" for name in seen), "suites"):
            table.add_column(column, justify="right")
        for case in operation.suites["targets"]:
            cost = case.cost
            suites = ", ".join(name for name, cases in operation.suites.items() if case in cases)
            figures = (f"{cost.flops / 1e9:.2f}", f"{cost.nbytes / 1e6:.1f}", f"{cost.intensity:.0f}")
            table.add_row(case.name, *figures, *("-" if us is None else f"{us:g}" for us in case.seen.values()), suites)
        _console().print(table)
    print("Microseconds: seen on one H200 with bfloat16, and aimed at there; claims are ratios of one run.")
    return 0


def compare_files(args: argparse.Namespace) -> int:
    """`compare`."""
    from .compare import compare, show
    from .report import read

    changes = compare(read(args.before), read(args.after), args.relative_to)
    show(_console(), changes, args.fail_if_slower)
    return int(args.fail_if_slower is not None and any(change.fails(args.fail_if_slower) for change in changes))


def plot_file(args: argparse.Namespace) -> int:
    """`plot`."""
    from .plot import roofline
    from .report import read

    roofline(read(args.file), args.output)
    print(f"wrote {args.output}")
    return 0
