"""The cases of the sparse backward."""

from __future__ import annotations

from collections.abc import Mapping

from ...core.cost import D_V, ELEMENT_BYTES, SINGLE_BYTES, Cost
from ..sparse import cases


class SparseBackwardCase(cases.SparseCase):
    """A case of `sparse_mla_backward`."""

    @property
    def op(self) -> str:
        return "sparse_mla_backward"

    @property
    def cost(self) -> Cost:
        """Five products per top-k entry, one row gathered, one float32 row added.

        Scores, dq and the first part of dkv are d_qk wide; dP and the second part of dkv are d_v wide. Read once: q,
        out, dout, lse, kv and the indices; written once: dq and dkv.
        """
        rows = self.s_q * self.h_q
        elements = 2 * rows * (self.d_qk + D_V) + 2 * self.s_kv * self.d_qk
        return Cost(
            flops=2 * self.pairs * self.h_q * (3 * self.d_qk + 2 * D_V),
            nbytes=ELEMENT_BYTES * elements + SINGLE_BYTES * (rows + self.pairs),
            l2_bytes=self.pairs * self.d_qk * (ELEMENT_BYTES + SINGLE_BYTES),
        )


CASES: tuple[SparseBackwardCase, ...] = (
    # s_q, s_kv, h_q; the peer is cudnn-frontend
    SparseBackwardCase(4096, 8192, 64, peer_us=6690, target_us=5900),
    SparseBackwardCase(4096, 8192, 128, peer_us=13900, target_us=11600),
    SparseBackwardCase(4096, 32768, 128, peer_us=17700, target_us=12500),
    SparseBackwardCase(4096, 32768, 64, peer_us=12000, target_us=7500),
    SparseBackwardCase(4096, 8192, 16, peer_us=6490, target_us=5600),
)
# Quick: compute-bound, and with more rows than fit easily in the L2.
SUITES: Mapping[str, tuple[SparseBackwardCase, ...]] = {"targets": CASES, "quick": CASES[1:3]}


def parse(name: str) -> SparseBackwardCase:
    """The case of that name: one of `CASES`, or any other shape written in the same form."""
    return cases.parse(name, SparseBackwardCase, CASES)
