"""Dense decode from FP8 records: the cases of dense decode, over a cache of "v32" or "fp8" records.

Peers read 16-bit rows of the numbers that the records hold, which any 16-bit format holds exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

import mla_cupy
from mla_cupy.cache_formats import FP8, V32, CacheFormat
from mla_cupy.shapes import D_ROPE

from ..core.cost import D_QK, D_V, ELEMENT_BYTES, Cost
from ..core.device import Device
from ..core.implementation import OWN, Choices, Known, Prepared, own_kernels
from ..core.operation import BenchOperation
from .decode import (
    IN_PARTS,
    NAMED,
    PACKED,
    SINK,
    VARYING,
    Decode,
    DecodeInputs,
    DecodeOutputs,
    DecodeVerdict,
    Expected,
    InParts,
    Packed,
    WithSink,
    expect,
    judge,
    shuffled_table,
)
from .decode_cases import PATTERN, DecodeCase, fields_of

# ---- Cases -----------------------------------------------------------------------------------------------------------

FORM = "b<N>-sq<N>-hq<N>-skv<N>[-page<N>][-mix<N>][-fp8[-math]][-mean1][-q16]"


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
        suffix = "-fp8" * self.one_scale + "-math" * self.fp8_math
        return super().name + suffix + "-mean1" * self.mean1 + "-q16" * self.wide_queries

    @property
    def cost(self) -> Cost:
        """Cost of FP8 tokens: peers that read rows move 1.76 times the bytes, or twice for "fp8"."""
        lengths = self.lengths()
        tokens = int((np.minimum(lengths, self.window + self.s_q - 1) if self.window else lengths).sum())
        queries_and_out = self.b * self.s_q * self.h_q * (D_QK + D_V) * ELEMENT_BYTES
        return Cost(super().cost.flops, tokens * self.record.token_bytes + queries_and_out)

    def shape(self) -> dict[str, Any]:
        special = {**({"math": self.math} if self.fp8_math else {}), **({"mean": 1} if self.mean1 else {})}
        special |= {"query_bits": 16} if self.wide_queries else {}
        return {**super().shape(), "record": self.record.name, **special}


CASES = (
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
# The cost of decode's optional inputs over FP8 tokens, by `--peers`; and windows, next to plain calls with equally
# many keys.
FORMS = (
    *(
        Fp8DecodeCase(128, s_q, h_q, s_kv, one_scale=one_scale)
        for one_scale in (False, True)
        for h_q, s_q, s_kv in ((128, 1, 4096), (128, 2, 4096), (64, 1, 4096), (16, 1, 8192), (16, 2, 8192))
    ),
    *(Fp8DecodeCase(128, 1, h_q, 4 * kept, window=kept) for h_q, kept in ((128, 4096), (16, 8192))),
)


def case_of(*groups: Any) -> Fp8DecodeCase:
    """The last four groups are suffixes, the others dense decode's."""
    *sizes, one_scale, fp8_math, mean1, wide_queries = groups
    case = Fp8DecodeCase(
        **fields_of(*sizes),
        one_scale=bool(one_scale),
        fp8_math=bool(fp8_math),
        mean1=bool(mean1),
        wide_queries=bool(wide_queries),
    )
    if case.d_qk != D_QK:
        raise ValueError(f"records have keys of {D_QK}; expected {FORM}")
    return case


# ---- Inputs and outputs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fp8DecodeInputs(DecodeInputs):
    """One set of inputs; `kv_cache` has the rows."""

    records: Any  # (num_pages, page_size, 656), or 576 of "fp8", uint8


def make_inputs(case: Fp8DecodeCase, dtype: str, seed: int, device: Device) -> Fp8DecodeInputs:
    """Random queries and latents, quantised with scales that are powers of two, "fp8" with 1; in shuffled pages."""
    table, seqlens = shuffled_table(case, seed), case.lengths()
    tokens = case.num_pages * case.page_size
    records = device.empty((case.num_pages, case.page_size, case.record.token_bytes), "uint8")
    slots = device.upload(np.arange(tokens, dtype=np.int32))
    latent = device.normal((tokens, D_V), dtype, 3 * seed + 2, *((0.5, 1.0) if case.mean1 else ()))
    rope = device.normal((tokens, D_ROPE), dtype, 3 * seed + 3)
    with device.current():
        mla_cupy.cache_append(latent, rope, records, slots)
        rows = mla_cupy.cache_gather(records, slots, out_dtype=dtype)
    return Fp8DecodeInputs(
        q=_queries(case, dtype, 3 * seed + 1, device),
        kv_cache=rows.reshape(case.num_pages, case.page_size, 1, D_QK),
        block_table=device.upload(table),
        seqlens=device.upload(seqlens),
        host_table=table,
        host_seqlens=seqlens,
        records=records,
    )


def _queries(case: Fp8DecodeCase, dtype: str, seed: int, device: Device) -> Any:
    """Random queries; over "fp8" numbers of e4m3, rounded as the tokens of a cache are, unless they are `wide`."""
    shape = (case.b, case.s_q, case.h_q, D_QK)
    queries = device.normal(shape, dtype, seed)
    if not case.one_scale or case.wide_queries:
        return queries
    return e4m3_numbers(queries.reshape(-1, D_QK), dtype, device).reshape(shape)


def e4m3_numbers(rows: Any, dtype: str, device: Device) -> Any:
    """Rows of 576 numbers, rounded as the tokens of a cache of the record "fp8" are."""
    records = device.empty((len(rows), 1, D_QK), "uint8")
    slots = device.upload(np.arange(len(rows), dtype=np.int32))
    with device.current():
        mla_cupy.cache_append(rows[:, :D_V], rows[:, D_V:], records, slots)
        return mla_cupy.cache_gather(records, slots, out_dtype=dtype)


# ---- What is timed ---------------------------------------------------------------------------------------------------

E4M3 = "e4m3_queries"  # our own with queries that are in e4m3 already
#: Our own with weights, and queries in 16 bits, in two terms; and with queries that are in e4m3 already.
TERMS, CODED_TERMS = "fp8x2", "fp8x2_e4m3_queries"
EXACT = "exact"  # our own with conversion, where the case has products in FP8
FORMAT = "kv_format" if hasattr(mla_cupy, "checking") else "record"  # in older trees
GENERIC = "decode_generic_records"  # without tensor cores
NAMED_RECORDS = ("decode_mma_records",)  # of GPUs without WGMMA


class Fp8Decode(Decode):
    """The call of a serving loop."""

    def plan_options(self, case: DecodeCase) -> dict[str, Any]:
        assert isinstance(case, Fp8DecodeCase)
        return {**super().plan_options(case), FORMAT: case.record.name, **self._math(case)}

    def call_options(self, case: DecodeCase, device: Device) -> dict[str, Any]:
        return {**super().call_options(case, device), **self._math(case)}

    def _math(self, case: DecodeCase) -> dict[str, Any]:
        """Arithmetic of a call: the case's, or the default for peers that convert FP8 to 16 bits."""
        if self.name in (TERMS, CODED_TERMS):
            return {"fp8": mla_cupy.Fp8("fp8x2")}
        return {"fp8": mla_cupy.Fp8(case.math)} if self.name in (OWN, E4M3) and case.math != "exact" else {}

    def prepare(self, case: DecodeCase, dtype: str, sets: Sequence[DecodeInputs], device: Device) -> Prepared:
        def over_records(inputs: DecodeInputs) -> DecodeInputs:
            assert isinstance(inputs, Fp8DecodeInputs)
            return replace(inputs, kv_cache=inputs.records)

        return super().prepare(case, dtype, [over_records(inputs) for inputs in sets], device)


class Fp8WithSink(Fp8Decode, WithSink):
    """Call with a sink without effect."""


class Fp8InParts(Fp8Decode, InParts):
    """Call with queries in two arrays."""


class Fp8Packed(Fp8Decode, Packed):
    """Call with queries packed one sequence after another, of one length or of lengths that vary."""


class TwoTerms(Fp8Decode):
    """Call with weights and queries in two terms."""

    def __init__(self, name: str = TERMS) -> None:
        super().__init__(None, name)

    def unsupported(self, case: DecodeCase, dtype: str) -> str | None:
        from mla_cupy.kernels.decode.sm90_fp8 import LEAST_ROWS_OF_TERMS  # older trees have none

        assert isinstance(case, Fp8DecodeCase)
        if not case.fp8_math:
            return "products in FP8 only: cases -fp8-math"
        rows = case.s_q * case.h_q
        return None if rows >= LEAST_ROWS_OF_TERMS else f"{LEAST_ROWS_OF_TERMS} and more query rows only"


class CodedQueries(Fp8Decode):
    """Call with queries in e4m3, as FlashMLA in FP8 gets them; `name` says with how many terms of weights."""

    def __init__(self, name: str = E4M3) -> None:
        super().__init__(None, name)

    def unsupported(self, case: DecodeCase, dtype: str) -> str | None:
        assert isinstance(case, Fp8DecodeCase)
        if not case.fp8_math:
            return "products in FP8 only: cases -fp8-math"
        if case.wide_queries:
            return "queries that e4m3 holds only: not of cases -q16"
        if self.name == CODED_TERMS and (reason := TwoTerms().unsupported(case, dtype)):
            return reason
        return None if dtype == "bfloat16" else "results are bfloat16"

    def plan_options(self, case: DecodeCase) -> dict[str, Any]:
        return {**super().plan_options(case), "dtype": "float8_e4m3fn"}

    def prepare(self, case: DecodeCase, dtype: str, sets: Sequence[DecodeInputs], device: Device) -> Prepared:
        def coded(inputs: DecodeInputs) -> DecodeInputs:
            numbers = device.to_host(inputs.q).astype(ml_dtypes.float8_e4m3fn)  # which they are
            return replace(inputs, q=device.upload(numbers.view(np.uint8)))

        return super().prepare(case, dtype, [coded(inputs) for inputs in sets], device)


# ---- Check -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fp8Verdict(DecodeVerdict):
    """Verdict with relative errors of the sampled rows of `out`.

    `out_rms` is the root of the mean square of the differences, `out_bias` how much larger the result is: -0.15 where
    15 % of it are missing. Both are relative to the expected values.
    """

    not_finite: int  # values of the whole result
    out_rms: float
    out_bias: float


def judge_with_errors(expected: Sequence[Expected], outputs: DecodeOutputs, dtype: str, device: Device) -> Fp8Verdict:
    """Compares the outputs with the expected values."""
    verdict = judge(expected, outputs, dtype, device)
    want = np.concatenate([e.out.ravel() for e in expected])
    parts = [device.to_host(outputs.out[e.batch])[:, e.heads].astype(np.float64) for e in expected]
    error = np.concatenate([part.ravel() for part in parts]) - want
    size = float(want @ want) or 1.0
    relative = float(np.sqrt(error @ error / size)), float(error @ want / size)
    return Fp8Verdict(
        **vars(verdict), not_finite=device.count_not_finite(outputs.out), out_rms=relative[0], out_bias=relative[1]
    )


# ---- The operation ---------------------------------------------------------------------------------------------------

PEERS = ("flashmla", "flashmla_fp8", "fa3")


def implementations(choices: Choices) -> Known:
    """Everything that computes it: ours from the records, the others from rows of the same numbers."""
    from ..peers.fa3 import FlashAttention3
    from ..peers.flashmla import FlashMla, FlashMlaFp8

    return {
        "rows": lambda: Decode(None, "rows"),
        **{name: partial(Decode, name, name) for name in NAMED},
        E4M3: CodedQueries,
        TERMS: TwoTerms,
        CODED_TERMS: lambda: CodedQueries(CODED_TERMS),
        EXACT: lambda: Fp8Decode(None, EXACT),
        SINK: lambda: Fp8WithSink(None, SINK),
        IN_PARTS: lambda: Fp8InParts(None, IN_PARTS),
        PACKED: lambda: Fp8Packed(PACKED, varying=False),
        VARYING: lambda: Fp8Packed(VARYING, varying=True),
        **own_kernels(Fp8Decode, choices, GENERIC, NAMED_RECORDS),
        "flashmla": choices.from_dir(FlashMla, "flashmla"),
        "flashmla_fp8": choices.from_dir(FlashMlaFp8, "flashmla_fp8"),
        "fa3": choices.from_dir(FlashAttention3, "fa3"),
    }


DENSE_DECODE_FP8 = BenchOperation(
    name="dense-decode-fp8",
    title="dense paged decode from FP8 records; the peers read 16-bit rows of the same numbers",
    examples="""examples:
  run dense-decode-fp8 --peers-dir peers               all cases, FlashMLA, FlashAttention-3, our own over rows
  run dense-decode-fp8 --case b128-sq1-hq16-skv8192-fp8-math-mean1 --peers flashmla_fp8 --peers-dir peers
  run dense-decode-fp8 --quick --peers rows
  run dense-decode-fp8 --case b128-sq1-hq16-skv8192-fp8   records with one scale for all
  run dense-decode-fp8 --case b128-sq1-hq128-skv8192-fp8-math --peers exact,rows   products in FP8 beside conversion
  run dense-decode-fp8 --suite forms --peers q_rope,attn_sink,packed,varying
  run dense-decode-fp8 --case b64-sq1-hq24-skv4096     any other shape, named in the same form
""",
    peers="rows (our own over 16-bit rows), flashmla, flashmla_fp8 (of records with one scale), fa3 (the three import "
    "torch and need --peers-dir), "
    "exact (our own with conversion, of cases with products in FP8), e4m3_queries (our own with queries in e4m3, of "
    "the same cases), fp8x2 and fp8x2_e4m3_queries (the same with two terms), attn_sink, q_rope, packed, varying, "
    "generic, "
    f"{', '.join((*NAMED_RECORDS, *NAMED))}; or none. "
    f"Default: rows, and {','.join(PEERS)} where --peers-dir is given",
    suites={"targets": CASES, "quick": CASES[:2], "forms": FORMS},
    case_form=FORM,
    pattern=PATTERN + r"(?:(-fp8)(-math)?)?(-mean1)?(-q16)?",
    case_of=case_of,
    inputs=make_inputs,
    expect=expect,
    judge=judge_with_errors,
    implementations=implementations,
    default_peers=("rows",),
    peers_from_dir=PEERS,
)
