"""The record of dense decode from FP8 records."""

from __future__ import annotations

from functools import partial

from ...core.implementation import OWN, Choices, Known
from ...core.operation import BenchOperation
from ...peers.fa3 import FlashAttention3
from ...peers.flashmla import FlashMla, FlashMlaFp8
from ..decode.check import expect
from ..decode.own import IN_PARTS, PACKED, SINK, VARYING, Decode
from ..decode.own import NAMED as NAMED_ROWS
from . import cases, check, inputs
from .own import (
    CODED_TERMS,
    E4M3,
    EXACT,
    GENERIC,
    NAMED,
    TERMS,
    CodedQueries,
    Fp8Decode,
    Fp8InParts,
    Fp8Packed,
    Fp8WithSink,
    TwoTerms,
)

EXAMPLES = """examples:
  run dense-decode-fp8 --peers-dir peers               all cases, FlashMLA, FlashAttention-3, our own over rows
  run dense-decode-fp8 --case b128-sq1-hq16-skv8192-fp8-math-mean1 --peers flashmla_fp8 --peers-dir peers
  run dense-decode-fp8 --quick --peers rows
  run dense-decode-fp8 --case b128-sq1-hq16-skv8192-fp8   records with one scale for all
  run dense-decode-fp8 --case b128-sq1-hq128-skv8192-fp8-math --peers exact,rows   products in FP8 beside conversion
  run dense-decode-fp8 --suite forms --peers q_rope,attn_sink,packed,varying
  run dense-decode-fp8 --case b64-sq1-hq24-skv4096     any other shape, named in the same form
"""

PEERS = "flashmla", "flashmla_fp8", "fa3"


def implementations(choices: Choices) -> Known:
    """Everything that computes it: ours from the records, the others from rows of the same numbers."""
    return {
        OWN: lambda: Fp8Decode(choices.kernel),
        "rows": lambda: Decode(None, "rows"),
        **{name: partial(Decode, name, name) for name in NAMED_ROWS},
        E4M3: CodedQueries,
        TERMS: TwoTerms,
        CODED_TERMS: lambda: CodedQueries(CODED_TERMS),
        EXACT: lambda: Fp8Decode(None, EXACT),
        SINK: lambda: Fp8WithSink(None, SINK),
        IN_PARTS: lambda: Fp8InParts(None, IN_PARTS),
        PACKED: lambda: Fp8Packed(PACKED, varying=False),
        VARYING: lambda: Fp8Packed(VARYING, varying=True),
        "generic": lambda: Fp8Decode(GENERIC, "generic"),
        **{name: partial(Fp8Decode, name, name) for name in NAMED},
        "flashmla": lambda: FlashMla(choices.directory("flashmla")),
        "flashmla_fp8": lambda: FlashMlaFp8(choices.directory("flashmla_fp8")),
        "fa3": lambda: FlashAttention3(choices.directory("fa3")),
    }


DENSE_DECODE_FP8 = BenchOperation(
    name="dense-decode-fp8",
    title="dense paged decode from FP8 records; the peers read 16-bit rows of the same numbers",
    examples=EXAMPLES,
    peers="rows (our own over 16-bit rows), flashmla, flashmla_fp8 (of records with one scale), fa3 (the three import "
    "torch and need --peers-dir), "
    "exact (our own with conversion, of cases with products in FP8), e4m3_queries (our own with queries in e4m3, of "
    "the same cases), fp8x2 and fp8x2_e4m3_queries (the same with two terms), attn_sink, q_rope, packed, varying, "
    "generic, "
    f"{', '.join((*NAMED, *NAMED_ROWS))}; or none. "
    f"Default: rows, and {','.join(PEERS)} where --peers-dir is given",
    suites=cases.SUITES,
    case_form=cases.FORM,
    parse=cases.parse,
    inputs=inputs.make_inputs,
    expect=expect,
    judge=check.judge,
    results=("out",),
    implementations=implementations,
    default_peers=lambda choices: ["rows", *(PEERS if choices.peers_dir else ())],
    peers_dir=True,
)
