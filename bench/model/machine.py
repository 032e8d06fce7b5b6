"""The assumed rates of a GPU, each with its source and confidence."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

MEASURED, ONE_SOURCE, GUESS = "two sources or measured by others", "one source", "inferred"
FITTED = "fitted"
OWN = "measured in this project"


def _figure(value: Any, unit: str, source: str, confidence: str) -> Any:
    return field(default=value, metadata={"unit": unit, "source": source, "confidence": confidence})


@dataclass(frozen=True)
class Machine:
    """Rates of a B200. None was measured in this project."""

    multiprocessors: int = _figure(148, "SMs", "NVIDIA's B200", MEASURED)
    clock_ghz: float = _figure(
        1.83, "GHz", "cudnn-frontend PR 817: 1.79 to 1.83 under such kernels, at 1000 W", ONE_SOURCE
    )
    peak_flops_per_cycle: int = _figure(
        8192, "FLOP/clk/SM", "SemiAnalysis microbench-blackwell: M = 128, N = 256", MEASURED
    )
    columns_per_cycle: int = _figure(
        2, "columns of D/clk", "the same: a product of K = 16 takes N / 2 at M = 64 and at M = 128", MEASURED
    )
    smem_bytes_per_cycle: int = _figure(
        128, "B/clk/SM", "the same: products of small N take (M + N) / 4, 32 bytes per row of A and of B", MEASURED
    )
    ws_columns_per_cycle: int = _figure(
        4, "columns of D/clk", "KevinZeng08/microbench-blackwell, .ws with M = 32 and 64, default collector", ONE_SOURCE
    )
    ws_overhead_cycles: int = _figure(12, "clk a product", "the same: N / 4 + 12", ONE_SOURCE)
    ws_wide_columns_per_cycle: int = _figure(2, "columns of D/clk", "the same, .ws with M = 128", ONE_SOURCE)
    ws_wide_overhead_cycles: int = _figure(10, "clk a product", "the same: N / 2 + 10", ONE_SOURCE)
    tmem_bytes_per_cycle: int = _figure(512, "B/clk/SM", "128 bytes for each quarter of the lanes", GUESS)
    l2_bytes: int = _figure(126 << 20, "B", "NVIDIA's B200", MEASURED)
    seen_addition_tbps: float = _figure(
        4.3,
        "TB/s",
        "cudnn-frontend PR 318: 17.2 GB in 4.02 ms, so at least this; its results for a GB200: 4.4",
        ONE_SOURCE,
    )
    hoped_addition_tbps: float = _figure(
        6.0, "TB/s", "1.4 times what was seen; the limit is not known (an H200: 3.74, measured)", GUESS
    )

    @property
    def addition_rates(self) -> tuple[float, float]:
        """TB/s of float32 additions in the L2: a conservative and an optimistic figure."""
        return self.seen_addition_tbps, self.hoped_addition_tbps

    def record(self) -> list[dict[str, Any]]:
        """Plain data, in the order above."""
        return _record(self)


@dataclass(frozen=True)
class ForwardRates:
    """Further rates, for attention forwards. Two were fitted to published times, which then show nothing."""

    memory_tbps: float = _figure(7.2, "TB/s", "copies on a B200: 7.0 to 7.4, of 8 nominal", ONE_SOURCE)
    exponentials_per_cycle: int = _figure(16, "ex2/clk/SM", "the rate since compute capability 9.0", MEASURED)
    sustained_half_tflops: float = _figure(
        1575,
        "TFLOP/s",
        "the middle of cuDNN's forwards on a GB200, 1,406 to 1,743; cuBLAS on a B200: 1,359 to 1,414",
        ONE_SOURCE,
    )
    sustained_fp8_tflops: float = _figure(2495, "TFLOP/s", "the same in FP8, 2,400 to 2,590", ONE_SOURCE)
    gather_issue_cycles: float = _figure(
        25, "clk an instruction", "one thread issues a `tile::gather4` in 20 to 30", GUESS
    )
    handoff_cycles: float = _figure(
        700,
        "clk a tile",
        "from the end of a score to the start of its values' product, beside the exponentials: commit, barriers, loads "
        "of tensor memory, maxima, P to shared memory. Fitted to the FP8 decode cases",
        FITTED,
    )
    start_us: float = _figure(
        7.4,
        "us a kernel",
        "launch, ramp and end of a kernel. Fitted to one sequence: half of 15.7 us less a tile",
        FITTED,
    )

    def sustained_tflops(self, element_bytes: int) -> float:
        """The rate that the power budget leaves the largest products."""
        return self.sustained_half_tflops if element_bytes == 2 else self.sustained_fp8_tflops

    def record(self) -> list[dict[str, Any]]:
        """Plain data, in the order above."""
        return _record(self)


@dataclass(frozen=True)
class ContextRates:
    """Rates of H200s that share out a sequence's tokens."""

    forward_tflops: float = _figure(680.0, "TFLOP/s", "mla_prefill of 131,072 tokens, one H200", OWN)
    backward_tflops: float = _figure(585.0, "TFLOP/s", "its backward, the same run", OWN)
    product_tflops: float = _figure(560.0, "TFLOP/s", "products of 512 terms, which write 64 KB a token", GUESS)
    memory_tbps: float = _figure(4.2, "TB/s", "copies on an H200", OWN)
    call_us: float = _figure(350.0, "us a call", "its end, when few multiprocessors have work left", FITTED)
    forward_row_bytes: float = _figure(
        20.0, "B an element", "output of a call: read and written in float32, and waited for", FITTED
    )
    backward_row_bytes: float = _figure(
        60.0, "B an element", "dQ of a call: sums in float32, conversions, sums of dK and dV", FITTED
    )
    nvlink_gbs: float = _figure(372.0, "GB/s", "large copies from one H200 to another of its host, one direction", OWN)
    infiniband_gbs: float = _figure(45.0, "GB/s a GPU", "an adapter of 400 Gbit/s for each GPU, 90 % of it", GUESS)
    exchange_start_us: float = _figure(15.0, "us", "NCCL's all-to-all of a decode step on two H200s", OWN)

    def record(self) -> list[dict[str, Any]]:
        """Plain data, in the order above."""
        return _record(self)


def _record(rates: Any) -> list[dict[str, Any]]:
    return [{"name": one.name, "value": getattr(rates, one.name), **one.metadata} for one in fields(rates)]


#: Machines by target. B300's figures (sm_103a) are not known.
MACHINES = {"sm_100a": Machine()}
FORWARD_RATES = {"sm_100a": ForwardRates()}
CONTEXT_RATES = ContextRates()

NOT_COUNTED = (
    "latencies: the first gather of a block, a lone product (132 to 180 cycles), barriers, launches",
    "waits for a gather that a single buffer of keys does not hide (tiles of 64 keys have one, of 32 two)",
    "what runs before and after the main kernel: delta, lists of rows, zeroing, conversion of dKV",
    "L2 reads: they are taken to slow the additions by nothing",
    "misses: sums, kv and the rest are taken to be in the L2",
)
