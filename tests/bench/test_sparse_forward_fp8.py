"""The benchmark of the sparse forward from FP8 records, on the NumPy device."""

from __future__ import annotations

import numpy as np
import pytest

from bench.core.errors import BenchError
from bench.operations import SPARSE_FORWARD_FP8
from bench.ops.sparse_forward_fp8.cases import CASES, Fp8ForwardCase
from mla_cupy import reference

SMALL = "sq3-skv128-hq2-topk20"


def test_names_round_trip():
    assert SPARSE_FORWARD_FP8.select([], "targets") == CASES
    for case in CASES:
        assert SPARSE_FORWARD_FP8.parse(case.name) is case
    assert SPARSE_FORWARD_FP8.parse(SMALL) == Fp8ForwardCase(3, 128, 2, 20)


@pytest.mark.parametrize("name", ["", "sq3-skv100-hq2-topk20", "sq3-skv128-hq2-topk20-dqk512-fp8-math"])
def test_a_bad_name_is_refused(name):
    with pytest.raises(BenchError, match="case"):
        SPARSE_FORWARD_FP8.parse(name)


def test_bytes_are_those_of_records():
    case = CASES[0]
    assert case.cost.l2_bytes == 4096 * 2048 * 656
    assert case.cost.nbytes == 8192 * 656 + 2 * 4096 * 128 * 1088 + 4 * 4096 * 2048
    assert [case.cost.l2_bytes for case in CASES[-3:]] == [4096 * 2048 * 584, *[4096 * 2048 * 576] * 2]


@pytest.mark.parametrize("name", [SMALL, SMALL + "-dqk512"])
def test_rows_are_the_numbers_of_the_records(device, numpy_backend, name):
    case = SPARSE_FORWARD_FP8.parse(name)
    inputs = SPARSE_FORWARD_FP8.inputs(case, "bfloat16", 1, device)
    exact = reference.cache_gather(inputs.records, np.arange(case.s_kv))[0]
    np.testing.assert_array_equal(inputs.kv.astype(np.float32), exact)
    assert np.abs(exact).max() > 2


def test_products_in_fp8(rows_of):
    """Queries are numbers of e4m3, so rows of 16 bits give the same results."""
    rows = rows_of(SPARSE_FORWARD_FP8, SMALL + "-fp8-math", ["rows"])
    assert [(row["status"], row["reason"]) for row in rows.values()] == [("ok", "")] * 2
    assert SPARSE_FORWARD_FP8.parse(SMALL + "-fp8-math") == Fp8ForwardCase(3, 128, 2, 20, fp8_math=True)


@pytest.mark.parametrize("name", [SMALL, SMALL + "-dqk512"])
def test_ours_and_ours_over_rows(rows_of, name):
    rows = rows_of(SPARSE_FORWARD_FP8, name, ["rows", "gathered"])
    assert [(row["status"], row["reason"]) for row in rows.values()] == [("ok", "")] * 3
    assert list(rows) == ["mla_cupy", "rows", "gathered"]
