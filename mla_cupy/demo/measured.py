"""The demo on a GPU: its main kernels compiled, a case of each operation checked and timed, next to the roofline."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from mla_cupy.compiling import compile_all
from mla_cupy.errors import MlaError
from mla_cupy.kernels import KERNELS
from mla_cupy.parts import part
from mla_cupy.runtime.build import BuildRequest
from mla_cupy.terminal import progress, say, show, table

CASES = (
    ("decode", "b64-sq1-hq128-skv8192-mix1"),
    ("sparse-forward", "sq4096-skv8192-hq128-topk2048"),
    ("sparse-backward", "sq4096-skv8192-hq128-topk2048"),
)
"""An operation of `mla-cupy bench`, and a case of it; the decode is of sequences of up to 8192 tokens."""
REPLAYS = 24
Row = Mapping[str, Any]


def run(options: argparse.Namespace) -> int:
    """Compile, check and time; a wrong result is not timed.

    Returns
    -------
    int
        0, or 1 if a result is wrong, a case fails or a kernel does not compile.

    Raises
    ------
    MlaError
        If there is no CuPy, or a picture cannot be written.
    """
    try:
        return _run(options)
    except _bench("core.errors").BenchError as error:
        raise MlaError(str(error)) from error


def _run(options: argparse.Namespace) -> int:
    device = _bench("core.device").CudaDevice()
    outcomes = compile_all(core_requests(device.arch), options.jobs, quiet=options.json)
    if errors := [outcome.error for outcome in outcomes if outcome.error]:
        print("mla-cupy: " + "\n".join(errors), file=sys.stderr)
        return 1
    limits, rows = measure(device, options)
    if options.json:
        print(json.dumps({"place": "gpu", "rows": rows}, indent=1))
    else:
        _show(device, limits, rows)
    if options.png and any(row["timing"] for row in rows):
        _bench("core.plot").draw_roofline(rows, options.png)
        print(f"Roofline: {options.png}", file=sys.stderr if options.json else sys.stdout)
    return 0 if all(row["status"] == "ok" for row in rows) else 1


def core_requests(arch: str) -> list[BuildRequest]:
    """Return the builds of the most frequent calls; builds for one kind of GPU, which take longest, come first."""
    core = [(spec, variant) for spec in KERNELS.values() for variant in spec.core_on(arch)]
    core.sort(key=lambda build: not build[0].archs)
    return [spec.request(variant, arch) for spec, variant in core]


def measure(device: Any, options: argparse.Namespace) -> tuple[Any, list[dict[str, Any]]]:
    """Measure the limits of the machine, then check and time each case; a failure is reported in its row."""
    with device.current():
        limits = _bench("core.limits").measure(device)
    runner = _bench("core.runner")
    env = _bench("core.environment").describe(device.name, device.arch, "demo")
    how = runner.Options(options.dtype, REPLAYS, True, limits, env, "mla-cupy demo")
    operations = _bench("operations").OPERATIONS
    implementation = _bench("core.implementation")
    rows: list[dict[str, Any]] = []
    with progress("checking and timing", len(CASES), quiet=options.json) as advance:
        for name, case in CASES:
            advance(f"{name} {case}", False)
            operation = operations[name]
            own = implementation.make([], operation.implementations(implementation.Choices()))
            rows += runner.run_case(operation, operation.parse(case), own, device, how)
            device.release()
            advance(f"{name} {case}", True)
    return limits, rows


def _show(device: Any, limits: Any, rows: Sequence[Row]) -> None:
    heads = ("operation", "case", "us", "TFLOP/s", "TB/s", "of roofline", "error", "tolerance", "")
    print(f"{device.name} ({device.arch})")
    show(table("checked against the float64 oracle, then timed", heads, map(_cells, rows)))
    rates = f"copy {_rate(limits.copy_tbps, 'TB/s')}, GEMM {_rate(limits.gemm_tflops, 'TFLOP/s')}"
    say(f"\nThe roofline uses the limits measured just now: {rates}.")
    say("More cases, and other libraries for comparison: mla-cupy bench run decode --help")


def _cells(row: Row) -> list[str]:
    """Return a row of the table; the error is the one that comes nearest to its tolerance."""
    error, tolerance = _worst(row["check"])
    checked = [f"{error:.2e}", f"{tolerance:.2e}", row["status"] + (f": {row['reason']}" if row["reason"] else "")]
    if not row["timing"]:
        return [row["op"], row["case"], "", "", "", "", *checked]
    share = row["share_roofline"]
    rates = f"{row['tflops']:.0f}", f"{row['tbps']:.2f}", "unknown" if share is None else f"{share:.0%}"
    return [row["op"], row["case"], f"{row['timing']['us_median']:.1f}", *rates, *checked]


def _worst(check: Mapping[str, Any] | None) -> tuple[float, float]:
    """Return an error and its tolerance; NaN if nothing was checked."""
    nan = float("nan")
    if check is None:
        return nan, nan
    if "errors" in check:
        pairs = [(check["errors"][name], tolerance) for name, tolerance in check["tolerances"].items()]
    else:
        pairs = [(check["out_max"], check["out_tolerance"])]
    known = [(nan if error is None else error, tolerance) for error, tolerance in pairs]  # a row has no NaN but None
    return max(known, key=lambda pair: math.inf if math.isnan(pair[0]) else pair[0] / pair[1] if pair[1] else 0.0)


def _rate(value: float | None, unit: str) -> str:
    return "unknown" if value is None else f"{value:.4g} {unit}"


def _bench(name: str) -> Any:
    """Return a module of the benchmarks."""
    return part("bench", name)
