"""`bench model forward`: published times beside what the model says of them, then predictions of ours."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_cupy.errors import explain
from mla_cupy.terminal import Table

from ..core.errors import BenchError
from . import plans, published, tables
from .forward import Forecast, Plan, Work, at_clock, forecast, tile
from .machine import FORWARD_RATES, MACHINES, ForwardRates, Machine

if TYPE_CHECKING:
    from rich.console import Console

OPERATION = "forward"
SCHEMA_VERSION = 1
LABEL = "predicted, not measured"
TOLERANCE = 0.2
"""Part of a published time by which the model may miss it."""
AIM_CLOCK_GHZ = 1.85
BYTE_TIMES, AIM_TFLOPS = 1.25, 1200
NOT_COUNTED = (
    "the L2: reads of gathered rows, and keys that two blocks fetch one after the other",
    "q, results, lists of rows and the schedule",
    "first tiles of a work item, rescaling of results, and the combine beyond its start",
    "the conversion of records, beyond the stores of what it makes",
    "clocks: others' times were measured at clocks that nobody states",
)


def run(arch: str, json_file: Path | None, console: Console) -> int:
    """Print the tables, and write them where that is asked for."""
    if arch not in MACHINES:
        raise BenchError(explain("--arch", arch, " or ".join(MACHINES), "the rates of other GPUs are not known"))
    machine, rates = MACHINES[arch], FORWARD_RATES[arch]
    if json_file:
        try:
            json_file.write_text(json.dumps(document(arch, machine, rates), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise BenchError(explain("--json", json_file, "a file that can be written", str(error.strerror))) from error
    console.print(f"{LABEL.upper()}: attention forwards on {arch}", markup=False)
    console.print(tables.assumptions(machine, rates), "", tile_table(machine, rates), "")
    console.print(published_table(machine, rates), "", ours_table(machine, rates), "")
    for line in remarks():
        console.print(line)
    return 0


def remarks() -> Iterator[str]:
    """Remarks on what the figures leave out."""
    yield "Our kernels have been compiled and simulated; no GPU has run them. Not counted:"
    yield from (f"  {one}" for one in NOT_COUNTED)


def add_checks(parser: argparse.ArgumentParser, args: argparse.Namespace, names: tuple[str, ...]) -> None:
    """Refuse options that mean nothing here."""
    for name in names:
        if getattr(args, name) != parser.get_default(name):
            parser.error(f"--{name.replace('_', '-')}: `model {args.operation}` has cases of its own")


# ---- Rows ----------------------------------------------------------------------------------------------------------


def published_rows(machine: Machine, rates: ForwardRates) -> Iterator[tuple[str, ...]]:
    """Rows of the table "published against model"."""
    for case in published.CASES:
        found = forecast(case.plan, case.work, machine, rates)
        ratio = found.us / case.us
        role = "fitted" if case.fitted else "check"
        outcome = role if abs(ratio - 1) <= TOLERANCE else f"{role}: beyond 20 %"
        yield (
            case.work.name,
            case.source,
            f"{case.us:,.1f}",
            f"{found.us:,.1f}",
            f"{ratio:.2f}",
            found.bound,
            outcome,
        )


def best(plan: Plan, work: Work, machine: Machine, rates: ForwardRates) -> Forecast:
    """The forecast if keys arrived in shared memory without taking a cycle from the products' operands."""
    return forecast(replace(plan, filled=0), work, machine, rates)


def our_rows(machine: Machine, rates: ForwardRates) -> Iterator[tuple[str, ...]]:
    """Rows of the table of predictions."""
    for plan, work in plans.OURS:
        found = forecast(plan, work, machine, rates)
        yield (
            work.name,
            plan.name,
            f"{found.us:,.0f}",
            f"{found.tflops:,.0f}",
            f"{found.us / found.memory_us:.2f}" if found.memory_us else "-",
            found.bound,
            f"{best(plan, work, machine, rates).us:,.0f}",
            aim(plan, work, machine, rates),
        )


def aim(plan: Plan, work: Work, machine: Machine, rates: ForwardRates) -> str:
    """Describe whether the prediction at the aim's clock reaches what is aimed at with 128 heads; "" without an aim.

    Aims are of products in 16 bits.
    """
    if work.rows != 2 * plans.ROWS or plan.element_bytes == 1:
        return ""
    found = forecast(plan, work, at_clock(machine, AIM_CLOCK_GHZ), rates)
    if work.nbytes:
        ratio = found.us / found.memory_us
        return f"{'reached' if ratio <= BYTE_TIMES else 'missed'}: {ratio:.2f} of {BYTE_TIMES}"
    return f"{'reached' if found.tflops >= AIM_TFLOPS else 'missed'}: {found.tflops:,.0f} of {AIM_TFLOPS:,} TFLOP/s"


def tile_rows(machine: Machine, rates: ForwardRates) -> Iterator[tuple[str, ...]]:
    """Cycles of a tile on each SM, by plan."""
    every = dict.fromkeys((*(case.plan for case in published.CASES), *(plan for plan, _ in plans.OURS)))
    for plan in every:
        cost = tile(plan, machine, rates)
        parts = (cost.products, cost.smem, cost.chain, cost.gather, cost.total)
        rate = plan.flops / plan.blocks / cost.total
        yield (plan.name, str(plan.rows), str(plan.keys), *(f"{one:,.0f}" for one in parts), f"{rate:,.0f}")


# ---- Tables --------------------------------------------------------------------------------------------------------

PUBLISHED_HEADS = ("work", "source", "published us", "model us", "ratio", "bound by", "is a")
OUR_HEADS = ("work", "plan", "us", "TFLOP/s", "byte times", "bound by", "us if keys arrived for nothing", "aim")
TILE_HEADS = ("plan", "rows", "keys", "products", "shared memory", "order", "gather", "longest, clk", "FLOP/clk/SM")


def published_table(machine: Machine, rates: ForwardRates) -> Table:
    """Published against model."""
    return _filled("published against model", PUBLISHED_HEADS, published_rows(machine, rates), left=2)


def ours_table(machine: Machine, rates: ForwardRates) -> Table:
    """Predictions."""
    title = f"{LABEL.upper()}: ours"
    return _filled(title, OUR_HEADS, our_rows(machine, rates), left=2)


def tile_table(machine: Machine, rates: ForwardRates) -> Table:
    """Costs of a tile."""
    return _filled("a tile of keys, cycles on each SM", TILE_HEADS, tile_rows(machine, rates), left=1)


def _filled(title: str, heads: tuple[str, ...], rows: Iterator[tuple[str, ...]], left: int) -> Table:
    table = tables.titled(title, *heads, left=left)
    for row in rows:
        table.add_row(*row)
    return table


def document(arch: str, machine: Machine, rates: ForwardRates) -> dict[str, Any]:
    """All of it as plain data."""
    return {
        "schema_version": SCHEMA_VERSION,
        "label": LABEL,
        "operation": OPERATION,
        "arch": arch,
        "assumptions": [*machine.record(), *rates.record()],
        "not_counted": list(NOT_COUNTED),
        "published": [
            {
                "source": case.source,
                "us": case.us,
                "fitted": case.fitted,
                **_record(case.plan, case.work, machine, rates),
            }
            for case in published.CASES
        ],
        "predictions": [_record(plan, work, machine, rates) for plan, work in plans.OURS],
    }


def _record(plan: Plan, work: Work, machine: Machine, rates: ForwardRates) -> dict[str, Any]:
    return {
        "plan": asdict(plan),
        "work": asdict(work),
        "tile_cycles": asdict(tile(plan, machine, rates)),
        "model": asdict(forecast(plan, work, machine, rates)),
    }
