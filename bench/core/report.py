"""Rows: one JSON object each."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from .cost import Cost, roofline_us
from .errors import BenchError
from .implementation import BASELINES, EXTERNAL
from .limits import Limits
from .operation import Case, Verdict
from .timer import Timing

SCHEMA_VERSION = 5
OK, WRONG, UNSUPPORTED, ERROR = "ok", "wrong", "unsupported", "error"
INEXACT = "inexact"  # misses the tolerance, for a reason that is known of this peer, and is timed all the same
TIMED = OK, INEXACT
OPTIONAL_NUMBER = (int, float, type(None))

# Keys that version 1 lacked, with the values that its rows get when they are read.
SINCE_VERSION_1: dict[str, Any] = {"l2_bytes": None, "l2_tbps": None, "workspace_bytes": None}

# Every row has every key, with a value of one of these types.
SCHEMA: dict[str, tuple[type, ...]] = {
    "schema_version": (int,),
    "benchmark": (str,),  # its name after `run`; since version 5
    "op": (str,),  # the public function
    "case": (str,),
    "shape": (dict,),
    "dtype": (str,),
    "implementation": (str,),
    "kernel": (str,),  # up to version 2: "variant"
    "includes": (str,),  # what the time includes; since version 4
    "status": (str,),
    "reason": (str,),
    "timing": (dict, type(None)),  # method, cold_l2, sets, and what `Timing` holds
    "host_us": (dict,),  # host microseconds: call (other arrays each time), repeated_call, empty_launch, the figures
    "figures_us": (dict,),  # further GPU figures: the plan's update, the call without a plan
    "flops": (int,),
    "bytes": (int,),  # from and to memory, if nothing moves twice
    "l2_bytes": (int, type(None)),  # the scattered rows of a sparse operation, between L2 and SMs
    "workspace_bytes": (int, type(None)),  # peak allocation of a call, besides its results
    "tflops": OPTIONAL_NUMBER,
    "tbps": OPTIONAL_NUMBER,
    "l2_tbps": OPTIONAL_NUMBER,
    "share_gemm": OPTIONAL_NUMBER,
    "share_copy": OPTIONAL_NUMBER,
    "share_roofline": OPTIONAL_NUMBER,
    "speed_vs": (dict,),  # speed relative to each other implementation of this run
    "speed_vs_best_peer": OPTIONAL_NUMBER,
    "check": (dict, type(None)),
    "limits": (dict,),
    "env": (dict,),
    "repro": (str,),
}
SINGLE_CALL = "single_call"
"""The figure of one call between two events, where an operation has it: a column of its own."""
TIMING_KEYS = ("method", "cold_l2", "sets", "us_median", "us_p20", "us_p80", "replays", "calls", "spread")


def make_row(
    case: Case,
    dtype: str,
    implementation: str,
    *,
    benchmark: str,
    limits: Limits,
    env: Mapping[str, Any],
    repro: str,
    status: str = OK,
    reason: str = "",
    kernel: str = "",
    includes: str = "",
    timing: Timing | None = None,
    method: str = "",
    sets: int = 0,
    verdict: Verdict | None = None,
    host_us: Mapping[str, float] | None = None,
    figures_us: Mapping[str, float] | None = None,
    workspace_bytes: int | None = None,
) -> dict[str, Any]:
    """One row; `relate` fills in the comparisons with other rows."""
    cost = case.cost
    row: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "benchmark": benchmark,
        "op": case.op,
        "case": case.name,
        "shape": case.shape(),
        "dtype": dtype,
        "implementation": implementation,
        "kernel": kernel,
        "includes": includes,
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
    """Data with None for values that JSON lacks."""
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
    """The median of a timed row, else None."""
    return float(row["timing"]["us_median"]) if row["status"] in TIMED and row["timing"] else None


def relate(rows: Sequence[dict[str, Any]]) -> None:
    """Fills in how each row of a case compares with the others.

    The best peer is the fastest of the other projects, or the fastest baseline if no other project ran.
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
    """Raises BenchError if a row does not match `SCHEMA`."""
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
    if row["status"] in TIMED and (row["timing"] is None or set(TIMING_KEYS) != row["timing"].keys()):
        raise BenchError(f"timing: got {row['timing']!r}, expected the keys {', '.join(TIMING_KEYS)}")


def write(stream: IO[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Appends rows, one JSON object per line, and flushes them."""
    for row in rows:
        validate(row)
        stream.write(json.dumps(row, allow_nan=False) + "\n")
    stream.flush()


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except IsADirectoryError as error:
        raise BenchError(f"{path} is a directory, expected a file of results: {path}/*.jsonl") from error
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror}") from error
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = _upgraded(json.loads(line))
            validate(row)
        except (json.JSONDecodeError, BenchError) as error:
            raise BenchError(f"{path}, line {number}: {error}") from error
        rows.append(row)
    return rows


def _upgraded(row: Any) -> Any:
    """Convert a row of an earlier version to the current version."""
    version = row.get("schema_version") if isinstance(row, dict) else None
    if version not in (1, 2, 3, 4) or (version < 3 and "variant" not in row):
        return row
    changed = {"schema_version": SCHEMA_VERSION, "benchmark": _benchmark(row.get("repro"))}
    if version < 4:
        changed |= {"kernel": row.get("variant", row.get("kernel")), "includes": ""}
    return {**SINCE_VERSION_1, **{key: value for key, value in row.items() if key != "variant"}, **changed}


def _benchmark(repro: object) -> str:
    """The name after `run` in a row's command line."""
    found = re.search(r" bench run ([\w-]+)", str(repro))
    return found[1] if found else ""
