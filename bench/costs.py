"""What a case must at least compute and move, and how long that takes at given limits."""

from __future__ import annotations

from dataclasses import dataclass

from .cases import D_QK, D_V, DecodeCase

ELEMENT_BYTES = 2  # bfloat16 and float16


@dataclass(frozen=True)
class Cost:
    """Floating-point operations and bytes of one call."""

    flops: int
    nbytes: int

    @property
    def intensity(self) -> float:
        """Operations per byte: what decides between the two limits."""
        return self.flops / self.nbytes

    def tflops(self, us: float) -> float:
        """Rate in TFLOP/s of a call that takes `us` microseconds."""
        return self.flops / us / 1e6

    def tbps(self, us: float) -> float:
        """Rate in TB/s of a call that takes `us` microseconds."""
        return self.nbytes / us / 1e6


def decode_cost(case: DecodeCase) -> Cost:
    """Cost of a dense decode in the absorbed form.

    Two products a key: 576 wide for the score, 512 for the value; a multiply and an add each. The causal corner
    of s_q > 1 is counted as if it were full, as the peers' own benchmarks do. Every key is read once, q is read
    and out is written once; partial results of splits are the kernel's own affair and not counted.
    """
    flops = 2 * case.b * case.s_q * case.h_q * case.s_kv * (D_QK + D_V)
    cache = case.b * case.s_kv * case.h_kv * D_QK * ELEMENT_BYTES
    queries_and_out = case.b * case.s_q * case.h_q * (D_QK + D_V) * ELEMENT_BYTES
    return Cost(flops, cache + queries_and_out)


def roofline_us(cost: Cost, tflops: float | None, tbps: float | None) -> float | None:
    """The least microseconds at the given limits; None where no limit is known."""
    times = [cost.flops / tflops / 1e6] if tflops else []
    times += [cost.nbytes / tbps / 1e6] if tbps else []
    return max(times, default=None)
