"""`bench compare-trees`: options, table and JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_cupy.terminal import Table

from ..core import environment
from ..core.device import DTYPES
from ..core.errors import BenchError
from ..core.operation import BenchOperation, Case
from ..core.timer import percentile
from ..operations import OPERATIONS
from .parent import Comparison, Options, compare_all, describe
from .process import SERVE, Process

if TYPE_CHECKING:
    from rich.console import Console

DESCRIPTION = """Time two source trees in turn on one GPU.

Each tree runs in a process of its own, on the same inputs; the two are asked for samples alternately. Our own public
calls are timed as `run` does, without peers: replays of a CUDA graph, or events where a tree cannot be captured.
"""
EPILOG = """example:
  git worktree add ../old COMMIT
  compare-trees ../old . --fail-if-slower 2 --json trees.jsonl
  compare-trees ../old . --operations sparse-backward --quick

exit status: 0 success, 1 a row failed (see --fail-if-slower) or could not be timed, 2 cannot run
"""


COLUMNS = (
    "operation",
    "case",
    "implementation",
    "old us",
    "new us",
    "ratio",
    "rounds",
    "spread",
    "host us",
    "bits",
    "method",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `compare-trees`."""
    parser.add_argument("old", type=Path, metavar="OLD_DIR", help="root of a checkout")
    parser.add_argument("new", type=Path, metavar="NEW_DIR", help="root of another")
    parser.add_argument(
        "--operations",
        type=_operations,
        default=list(OPERATIONS),
        metavar="NAMES",
        help="comma-separated (default: all)",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--case", action="append", default=[], metavar="NAME", help="a case of the one operation, repeatable"
    )
    which.add_argument(
        "--quick", action="store_const", const="quick", default="targets", dest="suite", help="main cases"
    )
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="default %(default)s")
    parser.add_argument(
        "--rounds", type=_count, default=8, metavar="N", help="turns of each tree (default %(default)s)"
    )
    parser.add_argument("--replays", type=_count, default=8, metavar="N", help="replays per turn (default %(default)s)")
    parser.add_argument(
        "--fail-if-slower",
        type=float,
        metavar="PERCENT",
        help="exit 1 if the median of a row is larger in NEW_DIR by more than this and more than the row's own spread",
    )
    parser.add_argument("--json", type=Path, metavar="FILE.jsonl", help="append one JSON object per row")


def _operations(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in OPERATIONS]:
        raise argparse.ArgumentTypeError(f"got {unknown[0]!r}, expected some of {', '.join(OPERATIONS)}")
    return names


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {number}, expected at least 1")
    return number


def run(args: argparse.Namespace, console: Console, serve: str = SERVE) -> int:
    """`compare-trees`; `serve` is what the two processes run."""
    work = _work(args)
    table = Table(*COLUMNS)
    with ExitStack() as stack:
        stream = stack.enter_context(environment.open_to_append(args.json)) if args.json else None
        processes = [stack.enter_context(Process(tree, serve)) for tree in (args.old, args.new)]
        trees = _trees(processes)
        for process, (name, tree) in zip(processes, trees.items(), strict=True):
            console.print(f"{name}: {process.tree}, {tree}", markup=False)
        about = {"trees": trees, "env": environment.machine()}

        def report(row: Comparison) -> None:
            table.add_row(*cells(row))
            console.print("  ".join(filter(None, cells(row))), markup=False)
            if stream:
                stream.write(json.dumps({**row.record(), **about}, allow_nan=False) + "\n")
                stream.flush()

        old, new = processes
        rows = compare_all(work, old, new, Options(args.dtype, args.rounds, args.replays), report)
    console.print(table)
    failed = [_failed(row, args.fail_if_slower, console) for row in rows]
    return int(any(failed))


def _failed(row: Comparison, percent: float | None, console: Console) -> bool:
    """True if a row fails the command; prints it."""
    if row.reason:
        console.print(f"{row.op} {row.case} {row.implementation}: {row.reason}", markup=False)
    failed = row.ratio is None or (percent is not None and row.fails(percent))
    if failed:
        console.print(f"FAIL {row.op} {row.case} {row.implementation}", markup=False)
    return failed


def _work(args: argparse.Namespace) -> list[tuple[BenchOperation, Case]]:
    if args.case and len(args.operations) != 1:
        raise BenchError("--case: needs --operations with one name")
    operations = [OPERATIONS[name] for name in args.operations]
    return [(operation, case) for operation in operations for case in operation.select(args.case, args.suite)]


def _trees(processes: Sequence[Process]) -> dict[str, dict[str, Any]]:
    """Commit and GPU of each tree; no directories, so that the rows can be kept."""
    return {
        name: {"git": environment.git_commit(process.tree), "gpu": found["gpu"], "arch": found["arch"]}
        for name, process, found in zip(("old", "new"), processes, describe(processes), strict=True)
    }


def cells(row: Comparison) -> list[str]:
    """A comparison as the texts of the table."""
    if row.old is None or row.new is None or row.ratio is None or row.spread is None:
        return [row.op, row.case, row.implementation, "error", *[""] * 7]
    low, high = (percentile(sorted(row.round_ratios), share) for share in (0.2, 0.8))
    return [
        row.op,
        row.case,
        row.implementation,
        f"{row.old.us_median:.2f}",
        f"{row.new.us_median:.2f}",
        f"{row.ratio:.4f}",
        f"{low:.4f} to {high:.4f}",
        f"{row.spread:.1%}",
        f"{row.old.host_us:.1f} / {row.new.host_us:.1f}",
        {True: "equal", False: "differ", None: ""}[row.same_results],
        row.method,
    ]
