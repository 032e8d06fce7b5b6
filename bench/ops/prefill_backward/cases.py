"""The cases of un-absorbed prefill, backward."""

from __future__ import annotations

from collections.abc import Mapping

from ...core.cost import ELEMENT_BYTES, SINGLE_BYTES, Cost
from ...core.errors import BenchError
from ..prefill.cases import D_ROPE, MLA, PrefillCase, parse_as

FORM = "b<N>-sq<N>-skv<N>-hq<N>[-hkv<N>][-d<N>x<N>][-full]"


class PrefillBackwardCase(PrefillCase):
    """A case of `mla_prefill_backward`."""

    @property
    def op(self) -> str:
        return "mla_prefill_backward"

    @property
    def cost(self) -> Cost:
        """Five products per pair: scores, dq and dk are d_qk wide, dP and dv d_v.

        Read once: q, keys, values, out, dout, lse; written once: the gradients.
        """
        queries, keys = self.b * self.s_q * self.h_q, self.b * self.s_kv * self.heads_kv
        elements = (
            queries * (self.d_qk + self.d_v) + keys * (self.d_qk - D_ROPE + self.d_v) + self.b * self.s_kv * D_ROPE
        )
        return Cost(
            flops=2 * self.pairs * self.h_q * (3 * self.d_qk + 2 * self.d_v),
            nbytes=2 * ELEMENT_BYTES * elements + SINGLE_BYTES * queries,
        )


def _causal(
    b: int, s: int, h: int, peer_us: float | None = None, d_qk: int = MLA[0], d_v: int = MLA[1]
) -> PrefillBackwardCase:
    return PrefillBackwardCase(b, s, s, h, d_qk=d_qk, d_v=d_v, peer_us=peer_us)


CASES = (
    _causal(1, 8192, 128, peer_us=15448),
    _causal(4, 2048, 128, peer_us=4711),
    _causal(4, 4096, 16, peer_us=2345),
    PrefillBackwardCase(1, 4096, 4096, 128, causal=False),
    _causal(1, 16384, 16),
    _causal(1, 8192, 32, d_qk=128, d_v=128),
    PrefillBackwardCase(1, 2048, 7680, 16, causal=False),
)
SUITES: Mapping[str, tuple[PrefillBackwardCase, ...]] = {"targets": CASES, "quick": CASES[:3]}


def parse(name: str) -> PrefillBackwardCase:
    """The case of that name: a built-in one, or any other shape written in the same form."""
    case = parse_as(name, PrefillBackwardCase, CASES)
    if case.state or case.topk or case.fp8:
        why = "a merged result's backward is any other's, a mask's and that of e4m3 codes are none"
        raise BenchError(f"case {name!r}: expected {FORM}; {why}")
    return case
