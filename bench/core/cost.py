"""What a case must at least compute and move, and how long that takes at given limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .cases import DecodeCase
    from .sparse_cases import SparseCase

D_QK = 576
D_V = 512
ELEMENT_BYTES = 2  # bfloat16 and float16
SINGLE_BYTES = 4  # float32 and int32


@dataclass(frozen=True)
class Cost:
    """Floating-point operations and bytes of one call.

    `nbytes` is what must move from and to memory if nothing moves twice. `l2_bytes` is what a sparse operation moves
    between the L2 and the multiprocessors for its scattered rows; None for the others.
    """

    flops: int
    nbytes: int
    l2_bytes: int | None = None

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

    def l2_tbps(self, us: float) -> float | None:
        """Rate in TB/s of the scattered rows."""
        return None if self.l2_bytes is None else self.l2_bytes / us / 1e6


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


def sparse_forward_cost(case: SparseCase) -> Cost:
    """Cost of a sparse forward: every slot counts, as in the peers' own benchmarks, and gathers one row of kv."""
    pairs = case.s_q * case.topk
    rows = case.s_q * case.h_q
    return Cost(
        flops=2 * pairs * case.h_q * (case.d_qk + D_V),
        nbytes=ELEMENT_BYTES * (case.s_kv * case.d_qk + rows * (case.d_qk + D_V)) + SINGLE_BYTES * pairs,
        l2_bytes=pairs * case.d_qk * ELEMENT_BYTES,
    )


def sparse_backward_cost(case: SparseCase) -> Cost:
    """Cost of a sparse backward: five products a slot, one row gathered, one float32 row added.

    Scores, dq and the first part of dkv are d_qk wide; dP and the second part of dkv are d_v wide. Read once: q, out,
    dout, lse, kv and the indices; written once: dq and dkv.
    """
    pairs = case.s_q * case.topk
    rows = case.s_q * case.h_q
    elements = 2 * rows * (case.d_qk + D_V) + 2 * case.s_kv * case.d_qk
    return Cost(
        flops=2 * pairs * case.h_q * (3 * case.d_qk + 2 * D_V),
        nbytes=ELEMENT_BYTES * elements + SINGLE_BYTES * (rows + pairs),
        l2_bytes=pairs * case.d_qk * (ELEMENT_BYTES + SINGLE_BYTES),
    )


def roofline_us(cost: Cost, tflops: float | None, tbps: float | None) -> float | None:
    """The least microseconds at the given limits; None where no limit is known."""
    times = [cost.flops / tflops / 1e6] if tflops else []
    times += [cost.nbytes / tbps / 1e6] if tbps else []
    return max(times, default=None)
