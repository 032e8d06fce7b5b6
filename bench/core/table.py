"""The table of a case on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mla_cupy.terminal import Table

from .report import SINGLE_CALL, TIMED

if TYPE_CHECKING:
    from rich.console import Console

    from .operation import Ratio

COLUMNS = (
    "implementation",
    "us",
    "spread",
    "TFLOP/s",
    "TB/s",
    "of GEMM",
    "of copy",
    "roofline",
    "vs best peer",
    "host us",
    "other arrays",
    "empty launch",
    "method",
)
SPARSE_COLUMNS = ("L2 TB/s", "workspace MB")
SINGLE_COLUMNS = ("single call us",)
ERROR_COLUMNS = ("rms error", "bias")


def show(console: Console, rows: Sequence[Mapping[str, Any]], ratios: Sequence[Ratio] = ()) -> None:
    """The table of one case, and ratios of its times."""
    sparse = rows[0]["l2_bytes"] is not None
    errors = any("out_rms" in (row["check"] or ()) for row in rows)
    single = any(SINGLE_CALL in row["figures_us"] for row in rows)
    known = (
        (sparse, SPARSE_COLUMNS, sparse_cells),
        (single, SINGLE_COLUMNS, single_cells),
        (errors, ERROR_COLUMNS, error_cells),
    )
    further = [(names, make) for wanted, names, make in known if wanted]
    columns = [*COLUMNS, *(name for names, _ in further for name in names)]
    table = Table(*columns, title=f"{rows[0]['op']} {rows[0]['case']} {rows[0]['dtype']}", left=1)
    for row in rows:
        table.add_row(*cells(row), *(cell for _, make in further for cell in make(row)))
    console.print(table)
    for row in rows:
        if row["reason"]:
            console.print(f"  {row['implementation']}: {row['status']}: {row['reason']}", markup=False)
        if row["includes"]:
            console.print(f"  {row['implementation']}: times {row['includes']}", markup=False)
        for name, us in ((name, us) for name, us in row["figures_us"].items() if name != SINGLE_CALL):
            host = row["host_us"].get(name)
            console.print(f"  {row['implementation']}: {name} {us:.2f} us" + (f", host {host:.1f} us" if host else ""))
    for text, value, aim in ratios:
        console.print(f"  ratio {value:.3f}" + (f" (aim: {aim:g} at most)" if aim else "") + f": {text}")


def cells(row: Mapping[str, Any]) -> list[str]:
    """A row as the texts of the table."""
    label = row["implementation"] + (f" ({row['kernel']})" if row["kernel"] else "")
    if row["status"] not in TIMED:
        return [label, row["status"], *[""] * (len(COLUMNS) - 2)]
    timing = row["timing"]
    return [
        label,
        f"{timing['us_median']:.2f}",
        f"{timing['spread']:.1%}",
        f"{row['tflops']:.1f}",
        f"{row['tbps']:.2f}",
        *(_percent(row[key]) for key in ("share_gemm", "share_copy", "share_roofline")),
        "-" if row["speed_vs_best_peer"] is None else f"{row['speed_vs_best_peer']:.3f}x",
        *(_microseconds(row["host_us"].get(key)) for key in ("repeated_call", "call", "empty_launch")),
        timing["method"],
    ]


def sparse_cells(row: Mapping[str, Any]) -> list[str]:
    """The further columns of a sparse case."""
    rate, workspace = row["l2_tbps"], row["workspace_bytes"]
    return ["" if rate is None else f"{rate:.2f}", "" if workspace is None else f"{workspace / 1e6:.1f}"]


def single_cells(row: Mapping[str, Any]) -> list[str]:
    """The further column of an operation whose single calls are timed, too."""
    us = row["figures_us"].get(SINGLE_CALL)
    return ["" if us is None else f"{us:.2f}"]


def error_cells(row: Mapping[str, Any]) -> list[str]:
    """The further columns of an operation whose check tells relative errors of the result."""
    check = row["check"] or {}
    rms, bias = (check.get(name) for name in ("out_rms", "out_bias"))
    return ["" if rms is None else f"{rms:.2e}", "" if bias is None else f"{bias:+.2e}"]


def _microseconds(us: float | None) -> str:
    return "-" if us is None else f"{us:.1f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
