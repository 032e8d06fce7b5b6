"""The benchmark of dense decode from FP8 records, on the NumPy device."""

from __future__ import annotations

import numpy as np
import pytest

from bench.core.errors import BenchError
from bench.operations import DENSE_DECODE_FP8
from bench.ops.dense_decode_fp8.cases import CASES, Fp8DecodeCase
from mla_cupy import reference
from mla_cupy.reference.fp8_queries import dequantised

SMALL = "b2-sq2-hq3-skv20-page16"


def test_names_round_trip():
    assert DENSE_DECODE_FP8.select([], "targets") == CASES
    for case in CASES:
        assert DENSE_DECODE_FP8.parse(case.name) is case
    assert DENSE_DECODE_FP8.parse(SMALL) == Fp8DecodeCase(2, 2, 3, 20, page_size=16)
    assert DENSE_DECODE_FP8.parse(SMALL + "-fp8") == Fp8DecodeCase(2, 2, 3, 20, page_size=16, one_scale=True)
    both = Fp8DecodeCase(2, 2, 3, 20, page_size=16, one_scale=True, fp8_math=True)
    assert DENSE_DECODE_FP8.parse(SMALL + "-fp8-math") == both
    assert both.name == SMALL + "-fp8-math"


@pytest.mark.parametrize("name", ["", "b1-sq1-hq2-skv20-hkv2", "b1-sq1-hq2-skv20-dqk512"])
def test_a_bad_name_is_refused(name):
    with pytest.raises(BenchError, match="case"):
        DENSE_DECODE_FP8.parse(name)


def test_bytes_are_those_of_records():
    case = CASES[0]
    assert case.cost.nbytes == 128 * 8192 * 656 + 2 * 128 * 16 * 1088
    assert case.cost.flops == 2 * 128 * 8192 * 16 * 1088
    assert DENSE_DECODE_FP8.parse(case.name + "-fp8").cost.nbytes == 128 * 8192 * 576 + 2 * 128 * 16 * 1088


@pytest.mark.parametrize("name", [SMALL, SMALL + "-fp8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_are_the_numbers_of_the_records(device, numpy_backend, dtype, name):
    case = DENSE_DECODE_FP8.parse(name)
    inputs = DENSE_DECODE_FP8.inputs(case, dtype, 1, device)
    slots = np.arange(case.num_pages * case.page_size)
    exact = reference.cache_gather(inputs.records, slots, record=case.record.name)[0].reshape(inputs.kv_cache.shape)
    assert inputs.kv_cache.dtype == inputs.q.dtype
    np.testing.assert_array_equal(inputs.kv_cache[..., :512].astype(np.float32), exact[..., :512])
    np.testing.assert_allclose(inputs.kv_cache[..., 512:].astype(np.float32), exact[..., 512:], rtol=1e-3)
    assert np.abs(exact).max() > 2


@pytest.mark.parametrize("name", [SMALL, SMALL + "-fp8"])
def test_ours_and_ours_over_rows(rows_of, name):
    rows = rows_of(DENSE_DECODE_FP8, name, ["rows"])
    assert [(row["status"], row["reason"]) for row in rows.values()] == [("ok", "")] * 2
    assert list(rows) == ["mla_cupy", "rows"]


def test_products_in_fp8_beside_conversion(rows_of, device, numpy_backend):
    """Queries are numbers of e4m3, which rounding leaves as they are: all compute the same."""
    name = "b1-sq1-hq2-skv9-page16-fp8-math"
    rows = rows_of(DENSE_DECODE_FP8, name, ["exact", "rows"])
    assert [(row["status"], row["reason"]) for row in rows.values()] == [("ok", "")] * 3
    assert {row["shape"]["math"] for row in rows.values()} == {"fp8"}
    q = DENSE_DECODE_FP8.inputs(DENSE_DECODE_FP8.parse(name), "bfloat16", 1, device).q
    np.testing.assert_array_equal(dequantised(q), q.astype(np.float64))
    assert len(np.unique(q.astype(np.float32))) > 50
