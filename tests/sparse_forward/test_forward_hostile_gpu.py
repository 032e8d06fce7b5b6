"""NaN and infinity stay where they are selected; kv may be of any size. Other hostile values: tests/operations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import reference
from mla_cupy.runtime.device import DeviceInfo
from tests.support.calls import assert_same
from tests.support.flat import flat
from tests.support.gpu import upload
from tests.support.kernels import in_both_sizes
from tests.support.sparse_cases import SparseCase, make
from tests.support.sparse_gpu import ALL_KERNELS, check_forward, forward, need, on_host

pytestmark = pytest.mark.gpu

S_KV = 500
CASE = SparseCase(s_q=40, s_kv=S_KV, h_q=16, topk=200, sink=True)


@pytest.fixture(params=in_both_sizes(ALL_KERNELS))
def kernel(request: pytest.FixtureRequest, gpu: DeviceInfo) -> str:
    need(request.param, gpu, CASE)
    return str(request.param)


@pytest.fixture
def case(kernel: str) -> SparseCase:
    return CASE


# ---- NaN and infinity ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("column", [3, 570])  # of the values; of the keys alone
def test_nan_reaches_the_queries_that_select_it_and_no_others(
    kernel: str, case: SparseCase, value: float, column: int
) -> None:
    inputs = make(replace(case, sink=False))
    inputs.q[..., column] = np.abs(inputs.q[..., column]) + np.asarray(0.5, inputs.q.dtype)  # infinite scores
    clean = forward(inputs, kernel=kernel)
    row = inputs.rows[5][7]
    inputs.kv[row, column] = value
    hit = np.array([row in rows for rows in inputs.rows])
    assert 0 < hit.sum() < len(hit)
    out, lse, max_logits = forward(inputs, kernel=kernel)
    for got, before in zip((out, lse, max_logits), clean, strict=True):
        assert_same(got[~hit], before[~hit])
    assert not np.isfinite(lse[hit]).any()
    assert not np.isfinite(max_logits[hit]).any()
    assert np.isnan(out[hit][..., :512].astype(np.float32)).all()


def test_nan_in_a_query_stays_in_its_row(kernel: str, case: SparseCase) -> None:
    inputs = make(replace(case, sink=False))
    clean = forward(inputs, kernel=kernel)
    inputs.q[5, 9, 100] = np.nan
    results = forward(inputs, kernel=kernel)
    hit = np.zeros((case.s_q, case.h_q), bool)
    hit[5, 9] = True
    for got, before in zip(results, clean, strict=True):
        assert_same(got[~hit], before[~hit])
        assert np.isnan(got[hit].astype(np.float32)).all()


def test_nan_in_one_piece_of_a_split_query_survives_the_merge(kernel: str) -> None:
    inputs = make(SparseCase(s_q=2, s_kv=12_000, h_q=16, topk=9000, invalid=0.0, seed=3))
    assert len(inputs.rows[1]) > 8000
    only = np.setdiff1d(inputs.rows[1], inputs.rows[0])[0]
    clean = forward(inputs, kernel=kernel)
    inputs.kv[only, 3] = np.nan
    out, lse, max_logits = forward(inputs, kernel=kernel)
    assert np.isnan(out[1].astype(np.float32)).all()
    assert np.isnan(lse[1]).all()
    assert np.isnan(max_logits[1]).all()
    assert np.isfinite(out[0].astype(np.float32)).all()
    np.testing.assert_allclose(lse[0], clean[1][0], rtol=1e-5)


# ---- A large kv ------------------------------------------------------------------------------------------------

LARGE_ROWS = 4_000_000  # of 576 float16: 4.6 GB; 2^31 elements end in row 3,728,270, 2^32 bytes there too
FAR = (LARGE_ROWS - 1, 3_728_269, 3_728_270, 3_728_271, 0, 1, 1_864_135, LARGE_ROWS - 2, 2_000_000, 3_999_000)


@pytest.fixture(scope="module")
def large_kv(gpu: DeviceInfo) -> Iterator[Any]:
    """Not initialised: whatever is read beyond the rows that a test writes is garbage."""
    import cupy

    free, _ = cupy.cuda.runtime.memGetInfo()
    if free < 8 << 30:
        pytest.skip(f"needs 8 GiB of free GPU memory, there are {free >> 30}")
    yield cupy.empty((LARGE_ROWS, 576), np.float16)
    cupy.get_default_memory_pool().free_all_blocks()


@pytest.mark.parametrize("h_q", [16, 64, 128])
@pytest.mark.parametrize("ragged", [False, True])
def test_kv_of_more_than_2_31_elements(gpu: DeviceInfo, large_kv: Any, h_q: int, ragged: bool, kernel: str) -> None:
    import cupy

    small = make(SparseCase(s_q=6, s_kv=len(FAR), h_q=h_q, topk=70, dtype="float16", strides="dense", invalid=0.3))
    need(kernel, gpu, small.case)
    kv = np.random.default_rng(2).standard_normal((len(FAR), 576), np.float32).astype(np.float16)
    for row, content in zip(FAR, kv, strict=True):
        large_kv[row] = cupy.asarray(content)
    indices = small.indices
    valid = (indices >= 0) & (indices < len(FAR))
    far = np.where(valid, np.asarray(FAR, np.int32)[np.where(valid, indices, 0)], np.where(indices < 0, indices, -9))
    starts: dict[str, Any] = {}
    if ragged:  # the same rows, counted from the start of the second sequence
        start = 1_000_000
        far = np.where(far >= start, far - start, -1)
        indices = np.where(valid & (np.asarray(FAR)[np.where(valid, indices, 0)] >= start), indices, -1)
        ends = {"cu_seqlens_q": [0, 0, 6], "cu_seqlens_kv": [0, start, LARGE_ROWS]}
        starts = {name: cupy.asarray(x, cupy.int32) for name, x in ends.items()}
    exact = reference.sparse_mla_forward(small.q, kv, indices, scale=small.scale)
    rounded = reference.sparse_mla_forward(small.q, kv, indices, scale=small.scale, rounding="float16")
    results = flat(mla_cupy.sparse_mla_forward)(
        upload(small.q), large_kv, upload(far.astype(np.int32)), scale=small.scale, kernel=kernel, **starts
    )
    check_forward(on_host(results), exact, rounded, "float16")
