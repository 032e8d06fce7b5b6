"""The demo without a GPU: decode's kernels for Hopper, compiled and run in the simulator of PTX."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import mla_cupy
from mla_cupy import dtypes, parts, reference, simulation
from mla_cupy.compiling import compile_all, outcome_row
from mla_cupy.demo import lanes
from mla_cupy.errors import KernelCompileError
from mla_cupy.kernels.decode import DECODE
from mla_cupy.kernels.decode.problem import Batch, DecodeProblem
from mla_cupy.runtime import nvrtc
from mla_cupy.runtime.build import BuildRequest
from mla_cupy.runtime.loader import Outcome
from mla_cupy.shapes import D_QK, D_V
from mla_cupy.terminal import console, say, show, table

H_Q, PAGE_SIZE, SMS = 128, 64, 4
LENGTHS = (0, 1, 65, 300)
"""Tokens of each sequence: none, one, one more than a page, several pages."""
ARCH = "sm_90a"
SCALE = 192**-0.5
LANE_WIDTH = 92
"""Columns of the timeline, in a terminal that has them."""
ROLES = {"warps 0-3": "left: even tiles", "warps 4-7": "right: odd tiles", "warps 8-11": "load"}
"""Roles of the warpgroups of `ATTENTION`, as its source has them under "Budget"."""
ATTENTION = "mla_decode_sm90_seesaw"

Array = npt.NDArray[Any]


class Inputs(NamedTuple):
    """Arguments of `mla_decode`."""

    q: Array
    kv_cache: Array
    block_table: Array
    seqlens: Array


@dataclass(frozen=True)
class Comparison:
    """Largest error of one result, and its tolerance."""

    result: str
    error: float
    tolerance: float

    @property
    def right(self) -> bool:
        """True if it is within the tolerance; NaN is not."""
        return self.error <= self.tolerance


class PerLaunch:
    """A timeline for each launch of a simulated GPU, by its number; used where the simulator expects a timeline."""

    def __init__(self, gpu: simulation.SimDriver) -> None:
        self._gpu = gpu
        self.timelines: dict[int, Any] = {}

    def __getattr__(self, name: str) -> Any:
        """Return the current launch's timeline's attribute."""
        number = len(self._gpu.launched)
        if number not in self.timelines:
            self.timelines[number] = parts.simulator().Timeline()
        return getattr(self.timelines[number], name)


@dataclass(frozen=True)
class Simulated:
    """Results and launches of one simulated call."""

    out: Array
    lse: Array
    launched: Sequence[str]
    reports: Sequence[Any]
    timelines: dict[int, Any]
    seconds: float

    def timeline(self, entry: str) -> Any:
        """Return the timeline of a kernel."""
        return self.timelines[self.launched.index(entry)]


def run(options: argparse.Namespace) -> int:
    """Compile the kernels of one small decode, run it in the simulator, and compare it with the oracle.

    Returns
    -------
    int
        0, or 1 if a result is wrong or a kernel does not compile. Without NVRTC the oracle computes alone.
    """
    inputs = make_inputs(options.dtype, options.seed)
    if not options.json:
        _describe(options.dtype)
    try:
        nvrtc.find_nvrtc()
    except KernelCompileError as error:
        return _without_compiler(inputs, error, as_json=options.json)
    outcomes = compile_all(requests_of(options.dtype), options.jobs, quiet=options.json)
    if errors := [outcome.error for outcome in outcomes if outcome.error]:
        print("mla-cupy: " + "\n".join(errors), file=sys.stderr)
        return 1
    found = simulate(inputs)
    comparisons = compare(found.out, found.lse, inputs, options.dtype)
    rows = kernel_rows(outcomes, found)
    if options.json:
        print(json.dumps(_as_json(options, rows, comparisons, found), indent=1))
    else:
        _show(rows, comparisons, found)
    _write(options, found)
    return 0 if all(comparison.right for comparison in comparisons) else 1


def make_inputs(dtype: str, seed: int) -> Inputs:
    """Return random queries and keys; the pages are shuffled."""
    rng = np.random.default_rng(seed)
    kind = dtypes.numpy_dtype(dtype)
    lengths = np.asarray(LENGTHS, np.int32)
    max_pages = -(-max(LENGTHS) // PAGE_SIZE)
    pages = rng.permutation(len(LENGTHS) * max_pages).astype(np.int32)
    q = rng.standard_normal((len(LENGTHS), 1, H_Q, D_QK), np.float32).astype(kind)
    kv_cache = rng.standard_normal((pages.size, PAGE_SIZE, 1, D_QK), np.float32).astype(kind)
    return Inputs(q, kv_cache, pages.reshape(len(LENGTHS), max_pages), lengths)


def requests_of(dtype: str) -> list[BuildRequest]:
    """Return the builds that the call launches, and no others."""
    tokens = PAGE_SIZE * -(-max(LENGTHS) // PAGE_SIZE)
    problem = DecodeProblem(1, H_Q, dtype, batch=Batch(len(LENGTHS), tokens))
    config = DECODE.configure(problem, simulation.fake_gpu(SMS))
    return [spec.request(variant, ARCH) for spec, variant in DECODE.builds(config)]


def simulate(inputs: Inputs) -> Simulated:
    """Call `mla_decode` on a simulated GPU; a race, a fault or an undefined value raises the simulator's error."""
    start = time.perf_counter()
    with simulation.simulated(SMS) as gpu:
        recorder = gpu.timeline = PerLaunch(gpu)
        out, lse = mla_cupy.mla_decode(*inputs, scale=SCALE)
    seconds = time.perf_counter() - start
    return Simulated(out, lse, tuple(gpu.launched), tuple(gpu.reports), recorder.timelines, seconds)


def compare(out: Array, lse: Array, inputs: Inputs, dtype: str) -> list[Comparison]:
    """Compare with the float64 oracle, by the rule of tests and benchmarks.

    A kernel may err twice as much as the oracle that makes the kernel's own roundings, and one unit in the last place
    of the largest value.
    """
    rule = parts.part("bench", "core.tolerance")
    exact_out, exact_lse = reference.mla_decode(*inputs, scale=SCALE)
    rounded_out, rounded_lse = reference.mla_decode(*inputs, scale=SCALE, rounding=dtype)
    lse_size = max(1.0, float(np.abs(exact_lse[np.isfinite(exact_lse)]).max(initial=0)))
    floors = rule.epsilon(dtype) * float(np.abs(exact_out).max()), rule.LSE_RELATIVE * lse_size
    return [
        Comparison("out", rule.distance(out, exact_out), 2 * rule.distance(rounded_out, exact_out) + floors[0]),
        Comparison("lse", rule.distance(lse, exact_lse), 2 * rule.distance(rounded_lse, exact_lse) + floors[1]),
    ]


def kernel_rows(outcomes: Sequence[Outcome], found: Simulated) -> list[dict[str, Any]]:
    """Return the result of each launch, in order: its build, its size, and the simulator's counts."""
    builds = {outcome.request.entry: outcome_row(outcome) for outcome in outcomes}
    rows = []
    for number, entry in enumerate(found.launched):
        runs = [span for span in found.timelines[number].spans if span.kind == "run"]
        threads = 32 * len({span.track for span in runs})
        report = found.reports[number]
        counted = {"instructions": report.total, "wgmma_flops": sum(report.flops.values())}
        rows.append({**builds[entry], "blocks": len({span.block for span in runs}), "threads": threads, **counted})
    return rows


def _describe(dtype: str) -> None:
    say(
        "No GPU: the kernels that `mla_decode` launches on Hopper run in ptxsim, a simulator of PTX.\n"
        f"Decode of {len(LENGTHS)} sequences of {', '.join(map(str, LENGTHS))} tokens, {H_Q} query heads, d_qk {D_QK}, "
        f"d_v {D_V}, pages of {PAGE_SIZE}, {dtype}, on {SMS} simulated multiprocessors.\n"
    )


def _without_compiler(inputs: Inputs, error: KernelCompileError, *, as_json: bool) -> int:
    """Fall back to the oracle when no compiler is available."""
    out, lse = mla_cupy.mla_decode(*inputs, scale=SCALE)
    if as_json:
        print(json.dumps({"place": "numpy", "reason": str(error)}, indent=1))
        return 0
    print(f"No kernel can be compiled here, so none ran: {error}")
    print(f"The NumPy oracle has computed out {out.shape} and lse {lse.shape}.")
    return 0


def _show(rows: Sequence[dict[str, Any]], comparisons: Sequence[Comparison], found: Simulated) -> None:
    keys = ("kernel", "blocks", "threads", "registers", "smem", "spills", "seconds", "state", "instructions")
    heads = ("kernel", "blocks", "threads", "registers", "smem bytes", "spills", "compile s", "state", "instructions")
    shown = ([f"{row[key]:,}" if isinstance(row[key], int) else row[key] for key in keys] for row in rows)
    errors = ((c.result, f"{c.error:.2e}", f"{c.tolerance:.2e}", "right" if c.right else "WRONG") for c in comparisons)
    show(
        table(f"kernels for {ARCH}, and the warp-instructions simulated in {found.seconds:.1f} s", heads, shown),
        table("compared with the float64 oracle", ("result", "largest error", "tolerance", ""), errors),
    )
    say("\nNo race, no access out of bounds, no undefined value: the simulator stops at the first.")
    if ATTENTION in found.launched:
        _show_lanes(found.timeline(ATTENTION).spans)
    say("Simulated: what is computed and in which order, not how fast. All other kernels: mla-cupy compile")


def _show_lanes(spans: Sequence[Any]) -> None:
    block = lanes.busiest_block(spans)
    begin, end = lanes.extent(spans, block)
    name = ATTENTION.removeprefix("mla_")
    say(f"\nTimeline of block {block} of {name}: {end - begin:,} basic blocks from left to right.")
    print("# at work   - partly   blank: waits, or nothing in flight")
    labels = {lane: f"{lane}, {role}" for lane, role in ROLES.items()}
    width = max(map(len, labels.values()))
    columns = min(LANE_WIDTH, console().width - width - len("   ||"))
    for lane, text in lanes.lanes(spans, block, columns).items():
        print(f"  {labels.get(lane, lane):{width}} |{text}|")
    print()


def _as_json(
    options: argparse.Namespace, rows: Sequence[dict[str, Any]], comparisons: Sequence[Comparison], found: Simulated
) -> dict[str, Any]:
    return {
        "place": "simulator",
        "batch": {"seqlens": list(LENGTHS), "h_q": H_Q, "page_size": PAGE_SIZE, "dtype": options.dtype},
        "kernels": list(rows),
        "results": [{**asdict(c), "right": c.right} for c in comparisons],
        "simulator_seconds": round(found.seconds, 3),
    }


def _write(options: argparse.Namespace, found: Simulated) -> None:
    """Write the pictures that are asked for."""
    timeline = found.timeline(ATTENTION)
    said = sys.stderr if options.json else sys.stdout
    if options.html:
        timeline.save_page(options.html, ATTENTION)
        print(f"Timeline of all blocks: {options.html}", file=said)
    if options.png:
        timeline.draw(options.png, lanes.busiest_block(timeline.spans))
        print(f"Timeline of one block: {options.png}", file=said)
