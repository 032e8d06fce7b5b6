"""Cases of prefill over e4m3 codes, on the NumPy device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bench.core.errors import BenchError
from bench.ops.prefill.cases import CODED, PrefillCase, parse
from bench.ops.prefill.check import expect, judge
from bench.ops.prefill.inputs import PrefillOutputs, make_inputs
from bench.ops.prefill.own import NAMED, Prefill
from bench.ops.prefill_backward.cases import parse as parse_backward

CASE = PrefillCase(2, 3, 5, 2, fp8=True)


def test_names():
    assert [parse(case.name) for case in CODED] == list(CODED)
    assert parse("b2-sq3-skv5-hq2-fp8") == CASE
    with pytest.raises(BenchError, match="e4m3 codes are none"):
        parse_backward(CASE.name)


def test_codes_have_half_the_bytes():
    half = replace(CASE, fp8=False).cost
    results = 2 * CASE.b * CASE.s_q * CASE.h_q * CASE.d_v
    lse = 4 * CASE.b * CASE.s_q * CASE.h_q
    assert CASE.cost.flops == half.flops
    assert 2 * (CASE.cost.nbytes - results - lse) == half.nbytes - results - lse


def test_the_check(device):
    """Passes what the call returns, and not what is half as large again."""
    inputs = make_inputs(CASE, "bfloat16", 1, device)
    assert inputs.q.dtype == inputs.kv.dtype == inputs.k_rope.dtype == np.uint8
    own = Prefill()
    assert own.unsupported(CASE, "bfloat16") is None
    assert Prefill(NAMED[0], NAMED[0]).unsupported(CASE, "bfloat16") == "e4m3 codes"
    prepared = own.prepare(CASE, "bfloat16", [inputs], device)
    prepared.calls[0]()
    expected = expect(CASE, "bfloat16", inputs, device)
    result = prepared.outputs(0)
    assert judge(expected, result, "bfloat16", device).ok
    wrong = PrefillOutputs((result.out.astype(np.float32) * 1.5).astype(result.out.dtype), result.lse)
    assert not judge(expected, wrong, "bfloat16", device).ok
