"""The cases of the sparse forward."""

from __future__ import annotations

from collections.abc import Mapping

from ...core.cost import D_V, ELEMENT_BYTES, SINGLE_BYTES, Cost
from ..sparse import cases


class SparseForwardCase(cases.SparseCase):
    """A case of `sparse_mla_forward`."""

    @property
    def op(self) -> str:
        return "sparse_mla_forward"

    @property
    def cost(self) -> Cost:
        """Every top-k entry counts, as in the peers' own benchmarks, and gathers one row of kv."""
        rows = self.s_q * self.h_q
        return Cost(
            flops=2 * self.pairs * self.h_q * (self.d_qk + D_V),
            nbytes=ELEMENT_BYTES * (self.s_kv * self.d_qk + rows * (self.d_qk + D_V)) + SINGLE_BYTES * self.pairs,
            l2_bytes=self.pairs * self.d_qk * ELEMENT_BYTES,
        )


CASES: tuple[SparseForwardCase, ...] = (
    # s_q, s_kv, h_q; the peer is FlashMLA, which takes 64 or 128 heads
    SparseForwardCase(4096, 8192, 128, peer_us=3990, target_us=3700),
    SparseForwardCase(4096, 32768, 128, peer_us=4160, target_us=3800),
    SparseForwardCase(4096, 32768, 64, peer_us=2120, target_us=1950),
    SparseForwardCase(4096, 32768, 16),
)
# Quick: compute-bound, and with more rows than fit easily in the L2.
SUITES: Mapping[str, tuple[SparseForwardCase, ...]] = {"targets": CASES, "quick": CASES[:2]}


def parse(name: str) -> SparseForwardCase:
    """The case of that name: one of `CASES`, or any other shape written in the same form."""
    return cases.parse(name, SparseForwardCase, CASES)
