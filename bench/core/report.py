"""Rows: one JSON object each, and the table on the terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from .cases import Case
from .costs import Cost, roofline_us
from .errors import BenchError
from .limits import Limits
from .peers import BASELINES, EXTERNAL, Verdict
from .timer import Timing

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA_VERSION = 2
OK, WRONG, UNSUPPORTED, ERROR = "ok", "wrong", "unsupported", "error"
NUMBER = (int, float)
OPTIONAL_NUMBER = (int, float, type(None))

# What version 1 did not have yet, as it must be read.
SINCE_VERSION_1: dict[str, Any] = {"l2_bytes": None, "l2_tbps": None, "workspace_bytes": None}

# Every row has every key, with a value of one of these types.
SCHEMA: dict[str, tuple[type, ...]] = {
    "schema_version": (int,),
    "op": (str,),
    "case": (str,),
    "shape": (dict,),
    "dtype": (str,),
    "implementation": (str,),
    "variant": (str,),
    "status": (str,),
    "reason": (str,),
    "timing": (dict, type(None)),  # method, cold_l2, sets, and what `Timing` holds
    "host_us": (dict,),  # host microseconds of an eager call, by figure
    "figures_us": (dict,),  # further GPU figures: the plan's update, the call without a plan
    "flops": (int,),
    "bytes": (int,),  # from and to memory, if nothing moves twice
    "l2_bytes": (int, type(None)),  # the scattered rows of a sparse operation, between L2 and multiprocessors
    "workspace_bytes": (int, type(None)),  # the most that a call allocates at a time, besides its results
    "tflops": OPTIONAL_NUMBER,
    "tbps": OPTIONAL_NUMBER,
    "l2_tbps": OPTIONAL_NUMBER,
    "share_gemm": OPTIONAL_NUMBER,
    "share_copy": OPTIONAL_NUMBER,
    "share_roofline": OPTIONAL_NUMBER,
    "speed_vs": (dict,),  # how many times as fast as each other implementation of this run
    "speed_vs_best_peer": OPTIONAL_NUMBER,
    "check": (dict, type(None)),
    "limits": (dict,),
    "env": (dict,),
    "repro": (str,),
}
TIMING_KEYS = ("method", "cold_l2", "sets", "us_median", "us_p20", "us_p80", "replays", "calls", "spread")


def make_row(
    case: Case,
    dtype: str,
    implementation: str,
    *,
    limits: Limits,
    env: Mapping[str, Any],
    repro: str,
    status: str = OK,
    reason: str = "",
    variant: str = "",
    timing: Timing | None = None,
    method: str = "",
    sets: int = 0,
    verdict: Verdict | None = None,
    host_us: Mapping[str, float] | None = None,
    figures_us: Mapping[str, float] | None = None,
    workspace_bytes: int | None = None,
) -> dict[str, Any]:
    """One row; the comparisons with other rows are filled in by `relate`."""
    cost = case.cost
    row: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "op": case.op,
        "case": case.name,
        "shape": case.shape(),
        "dtype": dtype,
        "implementation": implementation,
        "variant": variant,
        "status": status,
        "reason": reason,
        "timing": None,
        "host_us": dict(host_us or {}),
        "figures_us": dict(figures_us or {}),
        "flops": cost.flops,
        "bytes": cost.nbytes,
        "l2_bytes": cost.l2_bytes,
        "workspace_bytes": workspace_bytes,
        "speed_vs": {},
        "speed_vs_best_peer": None,
        "check": _without_nan(asdict(verdict)) if verdict else None,
        "limits": limits.record(),
        "env": dict(env),
        "repro": repro,
    }
    if timing:
        row["timing"] = {"method": method, "cold_l2": True, "sets": sets, "spread": timing.spread, **asdict(timing)}
    return row | _rates(cost, limits, timing)


def _without_nan(value: Any) -> Any:
    """The same data with None for what JSON cannot say."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _rates(cost: Cost, limits: Limits, timing: Timing | None) -> dict[str, float | None]:
    names = ("tflops", "tbps", "l2_tbps", "share_gemm", "share_copy", "share_roofline")
    if timing is None:
        return dict.fromkeys(names)
    us = timing.us_median
    tflops, tbps = cost.tflops(us), cost.tbps(us)
    least = roofline_us(cost, limits.gemm_tflops, limits.copy_tbps)
    shares = (
        tflops / limits.gemm_tflops if limits.gemm_tflops else None,
        tbps / limits.copy_tbps if limits.copy_tbps else None,
        least / us if least else None,
    )
    return dict(zip(names, (tflops, tbps, cost.l2_tbps(us), *shares), strict=True))


def microseconds(row: Mapping[str, Any]) -> float | None:
    """The median of a row that was timed."""
    return float(row["timing"]["us_median"]) if row["status"] == OK and row["timing"] else None


def relate(rows: Sequence[dict[str, Any]]) -> None:
    """Fills in, among the rows of one case, how each compares with the others.

    The best peer is the fastest of the other projects, or the fastest baseline where none of those ran.
    """
    times = {row["implementation"]: us for row in rows if (us := microseconds(row)) is not None}
    peers = [times[name] for name in EXTERNAL if name in times] or [times[name] for name in BASELINES if name in times]
    for row in rows:
        us = microseconds(row)
        if us is None:
            continue
        row["speed_vs"] = {name: other / us for name, other in times.items() if name != row["implementation"]}
        row["speed_vs_best_peer"] = min(peers) / us if peers else None


def validate(row: object) -> None:
    """Raises BenchError where a row is not what `SCHEMA` says."""
    if not isinstance(row, dict):
        raise BenchError(f"row: got {type(row).__name__}, expected an object")
    if row.get("schema_version") != SCHEMA_VERSION:
        raise BenchError(f"schema_version: got {row.get('schema_version')!r}, expected {SCHEMA_VERSION}")
    missing, unknown = SCHEMA.keys() - row.keys(), row.keys() - SCHEMA.keys()
    if missing or unknown:
        raise BenchError(f"row: missing {sorted(missing)}, unknown {sorted(unknown)}")
    for key, types in SCHEMA.items():
        if not isinstance(row[key], types) or isinstance(row[key], bool):
            raise BenchError(f"{key}: got {row[key]!r}, expected {' or '.join(t.__name__ for t in types)}")
    if row["status"] == OK and (row["timing"] is None or set(TIMING_KEYS) != row["timing"].keys()):
        raise BenchError(f"timing: got {row['timing']!r}, expected the keys {', '.join(TIMING_KEYS)}")


def write(stream: IO[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Appends rows, one JSON object a line, and hands them to the system at once."""
    for row in rows:
        validate(row)
        stream.write(json.dumps(row, allow_nan=False) + "\n")
    stream.flush()


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror}") from error
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if isinstance(row, dict) and row.get("schema_version") == 1:
                row = {**SINCE_VERSION_1, **row, "schema_version": SCHEMA_VERSION}
            validate(row)
        except (json.JSONDecodeError, BenchError) as error:
            raise BenchError(f"{path}, line {number}: {error}") from error
        rows.append(row)
    return rows


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
    "method",
)
SPARSE_COLUMNS = ("L2 TB/s", "workspace MB")


def show(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """The table of one case."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=f"{rows[0]['op']} {rows[0]['case']} {rows[0]['dtype']}", title_justify="left")
    sparse = rows[0]["l2_bytes"] is not None
    for index, column in enumerate(COLUMNS + SPARSE_COLUMNS if sparse else COLUMNS):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=index == 0)
    for row in rows:
        table.add_row(*cells(row), *(sparse_cells(row) if sparse else ()))
    console.print(table)
    for row in rows:
        if row["reason"]:
            console.print(f"  {row['implementation']}: {row['status']}: {escape(row['reason'])}")
        for name, us in row["figures_us"].items():
            host = row["host_us"].get(name)
            console.print(f"  {row['implementation']}: {name} {us:.2f} us" + (f", host {host:.1f} us" if host else ""))


def cells(row: Mapping[str, Any]) -> list[str]:
    """A row as the texts of the table."""
    label = row["implementation"] + (f" ({row['variant']})" if row["variant"] else "")
    if row["status"] != OK:
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
        f"{row['host_us']['call']:.1f}" if "call" in row["host_us"] else "-",
        timing["method"],
    ]


def sparse_cells(row: Mapping[str, Any]) -> list[str]:
    """What the table of a sparse case has besides."""
    rate, workspace = row["l2_tbps"], row["workspace_bytes"]
    return ["" if rate is None else f"{rate:.2f}", "" if workspace is None else f"{workspace / 1e6:.1f}"]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
