"""`bench model`: the model's options, tables and JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_cupy.errors import explain
from mla_cupy.terminal import Table

from ..core import environment
from ..core.cost import D_QK, D_V
from ..core.errors import BenchError
from ..ops.sparse_backward import SparseBackwardCase
from . import context_parallel, counts, forward_report, prediction, tables
from .machine import MACHINES, NOT_COUNTED, Machine

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA_VERSION = 1
_OF_ONE_KERNEL = ("kernel", "heads", "topk", "s_q", "s_kv", "d_qk")
"""Options that mean nothing to the other operations."""
LABEL = "predicted, not measured"
OPERATION = "sparse-backward"
DTYPE = "bfloat16"

DESCRIPTION = f"""Predict a kernel's time from its own sizes and a GPU's assumed rates: {LABEL}.

The sizes (tiles, shapes and counts of the products) are read from the cubin, which is compiled if need be; no GPU is
needed. The rates are assumptions about a B200, each printed with its source. The tables show what a tile of keys
computes and moves, and which of tensor cores, shared memory and additions in the L2 would be the bottleneck.

`forward` models dense decode and the sparse forward: it first shows what it says of kernels of others whose times are
published, with the same constants, and then what it predicts for ours. Of the options it takes --arch and --json.

`context-parallel` models prefill and its gradient over 2 to 64 H200s, from the times of one. It takes --json alone.
"""
EPILOG = """examples:
  model sparse-backward                                     every kernel for Blackwell, 64 and 128 heads
  model sparse-backward --kernel sparse_backward_sm100 --heads 64,128,16 --topk 1024
  model sparse-backward --s-kv 32768 --json model.json
  model forward                                             published times of others, then predictions of ours
  model context-parallel                                    prefill over 2 to 64 GPUs
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `model`."""
    modelled = (OPERATION, forward_report.OPERATION, context_parallel.OPERATION)
    parser.add_argument(
        "operation", choices=modelled, metavar="OPERATION", help="what is modelled: " + ", ".join(modelled)
    )
    parser.add_argument("--arch", default="sm_100a", metavar="TARGET", help="a GPU's target (default %(default)s)")
    parser.add_argument("--kernel", metavar="NAME", help="one kernel by name (default: all that the model knows)")
    parser.add_argument(
        "--heads", type=_sizes, default=(64, 128), metavar="N[,N...]", help="query heads (default 64,128)"
    )
    parser.add_argument("--topk", type=_size, default=2048, metavar="N", help="rows per query (default %(default)s)")
    parser.add_argument("--s-q", type=_size, default=4096, metavar="N", help="queries (default %(default)s)")
    parser.add_argument("--s-kv", type=_size, default=8192, metavar="N", help="rows of kv (default %(default)s)")
    parser.add_argument(
        "--d-qk", type=int, choices=(D_QK, D_V), default=D_QK, help="width of a key (default %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all of it as one JSON object")
    parser.set_defaults(parser=parser)


def _size(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {number}, expected at least 1")
    return number


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(_size(one) for one in text.split(","))


def run(args: argparse.Namespace, console: Console) -> int:
    """`model`."""
    if args.operation == forward_report.OPERATION:
        forward_report.add_checks(args.parser, args, _OF_ONE_KERNEL)
        return forward_report.run(args.arch, args.json, console)
    if args.operation == context_parallel.OPERATION:
        forward_report.add_checks(args.parser, args, ("arch", *_OF_ONE_KERNEL))
        return context_parallel.run(args.json, console)
    known = counts.names(args.arch)
    kernels = [counts.load(name, args.arch, args.d_qk) for name in ((args.kernel,) if args.kernel else known)]
    cases = [SparseBackwardCase(args.s_q, args.s_kv, heads, args.topk, args.d_qk) for heads in args.heads]
    machine = MACHINES[args.arch]
    found = {case: predictions(kernels, case, machine) for case in cases}
    if args.json:
        rows = [one for case in cases for one in found[case]]
        _write(args.json, document(args.arch, cases, kernels, machine, rows, getattr(args, "arguments", ())))
    console.print(f"{LABEL.upper()}: {OPERATION} on {args.arch}, {DTYPE}, d_qk {args.d_qk}, d_v {D_V}", markup=False)
    console.print(tables.assumptions(machine), "", tile_table(kernels, machine), "")
    for case, predicted in found.items():
        console.print(prediction_table(case, predicted), "")
    for line in remarks(cases[0], machine):
        console.print(line)
    return 0


def predictions(
    kernels: Sequence[counts.Kernel], case: SparseBackwardCase, machine: Machine
) -> list[prediction.Prediction]:
    """Each kernel at each rate of additions."""
    return [prediction.predict(kernel, case, machine, rate) for kernel in kernels for rate in machine.addition_rates]


# ---- JSON ----------------------------------------------------------------------------------------------------------


def document(
    arch: str,
    cases: Sequence[SparseBackwardCase],
    kernels: Sequence[counts.Kernel],
    machine: Machine,
    predicted: Sequence[prediction.Prediction],
    arguments: Sequence[str] = (),
) -> dict[str, Any]:
    """All of it as plain data."""
    return {
        "schema_version": SCHEMA_VERSION,
        "label": LABEL,
        "operation": OPERATION,
        "arch": arch,
        "dtype": DTYPE,
        "shapes": [case.shape() for case in cases],
        "assumptions": machine.record(),
        "not_counted": list(NOT_COUNTED),
        "kernels": [kernel_record(kernel, machine) for kernel in kernels],
        "predictions": [asdict(one) for one in predicted],
        "repro": environment.command_line(list(arguments)),
    }


def kernel_record(kernel: counts.Kernel, machine: Machine) -> dict[str, Any]:
    """A kernel's facts, and a full block's counts and cycles."""
    ws = bool(kernel.weight_stationary)
    cycles = prediction.tile_cycles(kernel, kernel.block_heads, machine)
    products = [
        {**asdict(one), "cycles_each": prediction.product_cycles(one, ws, machine)}
        for one in kernel.products
        if one.count
    ]
    return {
        **asdict(kernel),
        "products": products,
        "tile_counts": asdict(counts.tile_counts(kernel, kernel.block_heads, kernel.tile_keys)),
        "tile_cycles": {**asdict(cycles), "total": cycles.total, "bound": cycles.bound},
        "block_counts": asdict(counts.block_counts(kernel)),
        "block_cycles": prediction.block_cycles(kernel, machine),
    }


def _write(path: Path, data: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        writable = explain("--json", path, "a file that can be written", str(error.strerror))
        raise BenchError(writable) from error


# ---- Tables --------------------------------------------------------------------------------------------------------


def tile_table(kernels: Sequence[counts.Kernel], machine: Machine) -> Table:
    """Costs of a tile of keys and a block of heads, a column for each kernel."""
    heads = kernels[0].block_heads
    table = tables.titled(
        f"a block of {heads} heads: counted from the kernels' constants; cycles predicted",
        "a tile of keys",
        *(kernel.name for kernel in kernels),
    )
    for index, name in enumerate(counts.PRODUCTS):
        table.add_row(name, *(_product(kernel, index, machine) for kernel in kernels))
    for label, figure in _FIGURES:
        table.add_row(label, *(f"{figure(kernel, machine):,.0f}" for kernel in kernels))
    for rate in machine.addition_rates:
        cells = (f"{_addition_cycles(kernel, machine, rate):,.0f}" for kernel in kernels)
        table.add_row(f"additions at {rate:g} TB/s, clk", *cells)
    for label, figure in _BLOCK_FIGURES:
        table.add_row(label, *(f"{figure(kernel, machine):,.0f}" for kernel in kernels))
    return table


def _product(kernel: counts.Kernel, index: int, machine: Machine) -> str:
    one = kernel.products[index]
    if not one.count:
        return "-"
    each = prediction.product_cycles(one, bool(kernel.weight_stationary), machine)
    return f"{one.count} of {one.m} x {one.n}: {one.count * each:,.0f} clk"


def _counts(kernel: counts.Kernel) -> counts.Counts:
    return counts.tile_counts(kernel, kernel.block_heads, kernel.tile_keys)


def _cycles(kernel: counts.Kernel, machine: Machine) -> prediction.Cycles:
    return prediction.tile_cycles(kernel, kernel.block_heads, machine)


def _addition_cycles(kernel: counts.Kernel, machine: Machine, tbps: float) -> float:
    """Cycles of a tile's additions if every multiprocessor makes equally many."""
    return _counts(kernel).added * machine.multiprocessors * machine.clock_ghz / tbps / 1e3


Figure = Callable[[counts.Kernel, Machine], float]
_FIGURES: tuple[tuple[str, Figure], ...] = (
    ("keys", lambda kernel, machine: kernel.tile_keys),
    ("FLOP", lambda kernel, machine: _counts(kernel).flops),
    ("shared memory: operands, B", lambda kernel, machine: _counts(kernel).operands),
    ("shared memory: K, P, dS, B", lambda kernel, machine: _counts(kernel).loaded + _counts(kernel).written),
    ("read from tensor memory, B", lambda kernel, machine: _counts(kernel).tmem),
    ("gathered from the L2, B", lambda kernel, machine: _counts(kernel).loaded),
    ("added in the L2, B", lambda kernel, machine: _counts(kernel).added),
    ("FLOPs at the peak, clk", lambda kernel, machine: _cycles(kernel, machine).peak),
    ("products, tensor cores alone, clk", lambda kernel, machine: _cycles(kernel, machine).pipe),
    ("products, operands alone, clk", lambda kernel, machine: _cycles(kernel, machine).operands),
    ("products, slower of the two, clk", lambda kernel, machine: _cycles(kernel, machine).products),
    ("K, P, dS, clk", lambda kernel, machine: _cycles(kernel, machine).other),
    ("tensor memory's reads, clk", lambda kernel, machine: _cycles(kernel, machine).tmem),
    ("multiprocessor, clk", lambda kernel, machine: _cycles(kernel, machine).total),
)
_BLOCK_FIGURES: tuple[tuple[str, Figure], ...] = (
    ("once a block: Q, dO in, B", lambda kernel, machine: counts.block_counts(kernel).loaded),
    ("once a block: dQ out, B", lambda kernel, machine: counts.block_counts(kernel).stored),
    ("once a block: shared memory, clk", lambda kernel, machine: prediction.block_cycles(kernel, machine)),
    ("a block's threads", lambda kernel, machine: kernel.threads),
    ("a block's shared memory, B", lambda kernel, machine: kernel.smem_bytes),
    ("its columns of tensor memory in use", lambda kernel, machine: kernel.tmem_columns_used),
)


def prediction_table(case: SparseBackwardCase, predicted: Sequence[prediction.Prediction]) -> Table:
    """The roofline of one case."""
    title = f"{LABEL.upper()}: the main kernel alone, {case.name}, {case.cost.flops / 1e12:.3f} TFLOP"
    heads = ("kernel", "additions TB/s", "SM ms", "L2 ms", "at least ms", "TFLOP/s", "bound by")
    table = tables.titled(title, *heads, "added TB/s", "gathered TB/s")
    for one in predicted:
        table.add_row(
            one.kernel,
            f"{one.addition_tbps:g}",
            *(f"{us / 1e3:.2f}" for us in (one.sm_us, one.l2_us, one.us)),
            f"{one.tflops:.0f}",
            one.bound,
            *(f"{tbps:.2f}" for tbps in (one.added_tbps, one.gathered_tbps)),
        )
    return table


def remarks(case: SparseBackwardCase, machine: Machine) -> list[str]:
    """Remarks on what the figures leave out."""
    lines = [
        "Lower bounds of the time at each rate of additions. The law of the products was measured for N = 64 to "
        "256: N = 32 is extrapolated. Not counted:",
        *(f"  {one}" for one in NOT_COUNTED),
    ]
    sums = 4 * case.s_kv * case.d_qk
    if sums > machine.l2_bytes:
        megabytes = f"{sums / 1e6:.0f} MB of sums do not fit in the L2 ({machine.l2_bytes / 1e6:.0f} MB)"
        lines.append(f"WARNING: {megabytes}: the rates of additions do not hold (an H200's fall to a half and less)")
    return lines
