"""The assumed rates of a GPU, each with its source and confidence."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

MEASURED, ONE_SOURCE, GUESS = "two sources or measured by others", "one source", "inferred"


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
        return [{"name": one.name, "value": getattr(self, one.name), **one.metadata} for one in fields(self)]


#: By target. B300's figures (sm_103a) are not known.
MACHINES = {"sm_100a": Machine()}

NOT_COUNTED = (
    "latencies: the first gather of a block, a lone product (132 to 180 cycles), barriers, launches",
    "waits for a gather that a single buffer of keys does not hide (tiles of 64 keys have one, of 32 two)",
    "what runs before and after the main kernel: delta, lists of rows, zeroing, conversion of dKV",
    "L2 reads: they are taken to slow the additions by nothing",
    "misses: sums, kv and the rest are taken to be in the L2",
)
