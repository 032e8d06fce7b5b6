"""The cases of dense decode from FP8 records: those of dense decode, over a cache of "v32" or "fp8" records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mla_cupy.cache_formats import FP8, V32, CacheFormat

from ...core.cost import D_QK, D_V, ELEMENT_BYTES, Cost
from ...core.errors import BenchError
from ..decode import cases as rows
from ..decode.cases import DecodeCase

FORM = "b<N>-sq<N>-hq<N>-skv<N>[-page<N>][-mix<N>][-fp8[-math]][-mean1][-q16]"

_SUFFIX, _MATH_SUFFIX = f"-{FP8.name}", f"-{FP8.name}-math"
_MEAN_SUFFIX, _QUERY_SUFFIX = "-mean1", "-q16"


@dataclass(frozen=True)
class Fp8DecodeCase(DecodeCase):
    """Case over records; the peers read 16-bit rows of the same numbers. `one_scale`: "fp8", 576 bytes a token.

    With `fp8_math`, too, our own call has both products in FP8. The queries of `one_scale` are numbers of e4m3, so that
    all compute the same, but for `wide_queries`, which 16 bits hold: errors of these are beside the result without any
    rounding. `mean1`: the latents have mean 1 and deviation 0.5, which shows what sums lose of terms of one sign.
    """

    one_scale: bool = False
    fp8_math: bool = False
    mean1: bool = False
    wide_queries: bool = False

    @property
    def math(self) -> str:
        """Arithmetic of our own call, and of the oracle."""
        return "fp8" if self.fp8_math else "exact"

    @property
    def expected_math(self) -> str:
        """Arithmetic of the result that errors are beside."""
        return "exact" if self.wide_queries else self.math

    @property
    def record(self) -> CacheFormat:
        """Record that a token is kept in."""
        return FP8 if self.one_scale else V32

    @property
    def name(self) -> str:
        suffix = _MATH_SUFFIX if self.fp8_math else _SUFFIX * self.one_scale
        return super().name + suffix + _MEAN_SUFFIX * self.mean1 + _QUERY_SUFFIX * self.wide_queries

    @property
    def cost(self) -> Cost:
        """Cost of records: peers that read rows move 1.76 times the bytes, twice those of "fp8"."""
        lengths = self.lengths()
        tokens = int((np.minimum(lengths, self.window + self.s_q - 1) if self.window else lengths).sum())
        queries_and_out = self.b * self.s_q * self.h_q * (D_QK + D_V) * ELEMENT_BYTES
        return Cost(super().cost.flops, tokens * self.record.token_bytes + queries_and_out)

    def shape(self) -> dict[str, Any]:
        special = {**({"math": self.math} if self.fp8_math else {}), **({"mean": 1} if self.mean1 else {})}
        special |= {"query_bits": 16} if self.wide_queries else {}
        return {**super().shape(), "record": self.record.name, **special}


CASES: tuple[Fp8DecodeCase, ...] = (
    *(Fp8DecodeCase(128, 1, h_q, 8192) for h_q in (16, 8, 32)),
    Fp8DecodeCase(128, 2, 16, 8192),
    *(Fp8DecodeCase(128, 1, h_q, 8192) for h_q in (64, 128)),
    Fp8DecodeCase(128, 1, 128, 4096),
    Fp8DecodeCase(32, 1, 16, 8192),
    Fp8DecodeCase(16, 1, 128, 8192),
    *(Fp8DecodeCase(1, 1, 16, s_kv) for s_kv in (8192, 131072)),
    *(Fp8DecodeCase(128, 1, h_q, 8192, one_scale=True) for h_q in (16, 8, 32, 64, 128)),
    *(Fp8DecodeCase(128, 1, h_q, 8192, one_scale=True, fp8_math=True) for h_q in (16, 8, 32, 64, 128)),
    Fp8DecodeCase(128, 1, 128, 4096, one_scale=True, fp8_math=True),
    Fp8DecodeCase(64, 1, 128, 16384, one_scale=True, fp8_math=True),
    *(Fp8DecodeCase(b, 1, 128, 8192, one_scale=True, fp8_math=True) for b in (16, 4, 1)),
    *(
        Fp8DecodeCase(b, 1, h_q, 8192, one_scale=True, fp8_math=True, mean1=True)
        for b, h_q in ((128, 16), (128, 128), (16, 128))
    ),
)
# What the forms of decode cost over records, by `--peers`; and windows, beside plain calls that read as many keys.
FORMS = (
    *(
        Fp8DecodeCase(128, s_q, h_q, s_kv, one_scale=one_scale)
        for one_scale in (False, True)
        for h_q, s_q, s_kv in ((128, 1, 4096), (128, 2, 4096), (64, 1, 4096), (16, 1, 8192), (16, 2, 8192))
    ),
    *(Fp8DecodeCase(128, 1, h_q, 4 * kept, window=kept) for h_q, kept in ((128, 4096), (16, 8192))),
)
SUITES: Mapping[str, tuple[Fp8DecodeCase, ...]] = {"targets": CASES, "quick": CASES[:2], "forms": FORMS}


def parse(name: str) -> Fp8DecodeCase:
    """The case of that name: one of `CASES`, or any other shape written in the same form."""
    numbers = name.removesuffix(_QUERY_SUFFIX)
    shape = numbers.removesuffix(_MEAN_SUFFIX)
    rest = shape.removesuffix(_MATH_SUFFIX)
    fp8_math = rest != shape
    rest = rest.removesuffix(_SUFFIX)
    kind = {
        "one_scale": rest != shape,
        "fp8_math": fp8_math,
        "mean1": shape != numbers,
        "wide_queries": numbers != name,
    }
    case = Fp8DecodeCase(**vars(rows.parse(rest)), **kind)
    if case.d_qk != D_QK:
        raise BenchError(f"case {name!r}: records have keys of {D_QK}; expected {FORM}")
    return next((known for known in CASES if known == case), case)
