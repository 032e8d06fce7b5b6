"""The public sparse backward on a GPU: where results go, repeats, streams, hostile values, host arrays, large kv."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import dtypes, reference
from mla_cupy.runtime.device import DeviceInfo
from tests.support.calls import assert_same
from tests.support.flat import flat
from tests.support.gpu import upload
from tests.support.gradients import (
    ALL_KERNELS,
    backward,
    check_gradients,
    error_of_exact_additions,
    need,
    on_host,
    uploaded,
)
from tests.support.kernels import in_both_sizes
from tests.support.sparse_cases import SparseCase, make

pytestmark = pytest.mark.gpu

S_KV = 500
CASE = SparseCase(s_q=60, s_kv=S_KV, h_q=72, topk=200, lengths=True, sink=True)


@pytest.fixture(params=in_both_sizes(ALL_KERNELS))
def kernel(request: pytest.FixtureRequest, gpu: DeviceInfo) -> str:
    need(request.param, gpu, CASE)
    return str(request.param)


@pytest.fixture(params=[False, True], ids=["plain", "deterministic"])
def deterministic(request: pytest.FixtureRequest, gpu: DeviceInfo, kernel: str) -> bool:
    need(kernel, gpu, CASE, request.param)
    return bool(request.param)


@pytest.mark.parametrize("dkv_dtype", ["bfloat16", "float32"])
def test_results_in_given_views(kernel: str, dkv_dtype: str, deterministic: bool) -> None:
    import cupy

    inputs = make(CASE)
    whole_dq = cupy.full((CASE.s_q + 1, CASE.h_q, 592), 7, inputs.q.dtype)
    whole_dkv = cupy.full((2 * S_KV, 579), 7, dtypes.numpy_dtype(dkv_dtype))
    dq, dkv = whole_dq[1:, :, 8:584], whole_dkv[::2, 1:577]
    arguments, named = uploaded(inputs)
    sinks = cupy.full(CASE.h_q + 2, 7, cupy.float32)
    given = {"dq": dq, "dkv": dkv, "d_sink": sinks[1:-1]}
    results = flat(mla_cupy.sparse_mla_backward)(
        *arguments, **named, **given, kernel=kernel, deterministic=deterministic
    )
    assert all(result is target for result, target in zip(results, given.values(), strict=True))
    assert sinks[[0, -1]].get().tolist() == [7, 7]
    check_gradients(on_host(results), inputs, dkv_dtype, deterministic)
    dq.fill(7)
    dkv.fill(7)
    for whole in on_host((whole_dq, whole_dkv)):
        assert (whole.astype(np.float32) == 7).all()  # nothing was written outside them


@pytest.mark.parametrize("options", [{"lse_base": "2"}, {"scale": 0.01}, {"scale": 0.2, "lse_base": "2"}], ids=str)
def test_bases_and_scales(kernel: str, options: dict[str, Any]) -> None:
    inputs = make(CASE)
    options = {**inputs.options, **options}
    out, lse, _ = reference.sparse_mla_forward(*inputs.arguments, **options)
    given = (inputs.q, inputs.kv, out.astype(inputs.q.dtype), inputs.dout, lse.astype(np.float32), inputs.indices)
    exact, rounded = (
        reference.sparse_mla_backward(*given, **options, rounding=rounding) for rounding in (None, CASE.dtype)
    )
    named = options | {name: upload(x) for name, x in inputs.optional.items()}
    got = on_host(flat(mla_cupy.sparse_mla_backward)(*map(upload, given), **named, kernel=kernel))
    for x, wanted, budget in zip(got, exact, rounded, strict=True):
        error = np.abs(x.astype(np.float64) - wanted)
        peak = np.abs(wanted).max()
        assert error.max() <= 2 * np.abs(budget - wanted).max() + 1e-4 * peak
        assert peak > 0


def test_a_float32_out(kernel: str) -> None:
    inputs = make(CASE)
    arguments, named = uploaded(inputs)
    short = on_host(flat(mla_cupy.sparse_mla_backward)(*arguments, **named, kernel=kernel))
    arguments[2] = upload(inputs.out.astype(np.float32))
    wide = on_host(flat(mla_cupy.sparse_mla_backward)(*arguments, **named, kernel=kernel))
    check_gradients(wide, inputs)
    np.testing.assert_allclose(wide[2], short[2], rtol=1e-4, atol=1e-4 * np.abs(short[2]).max())


# ---- Repeats ---------------------------------------------------------------------------------------------------


def test_deterministic_repeats_are_bit_identical(gpu: DeviceInfo, kernel: str) -> None:
    import cupy

    need(kernel, gpu, CASE, deterministic=True)
    arguments, named = uploaded(make(CASE))
    options = {**named, "kernel": kernel, "deterministic": True, "dkv_dtype": "float32"}
    first = flat(mla_cupy.sparse_mla_backward)(*arguments, **options)
    different = cupy.zeros(3, cupy.int64)
    other = cupy.cuda.Stream(non_blocking=True)
    for repeat in range(300):
        with other:  # other work during the calls, in its own arena, so that blocks run in another order
            load = cupy.ones(1 << (10 + repeat % 12), cupy.float32)
            load *= 2
        again = flat(mla_cupy.sparse_mla_backward)(*arguments, **options)
        for i, (x, y) in enumerate(zip(again, first, strict=True)):
            width = cupy.uint16 if x.dtype.itemsize == 2 else cupy.uint32
            different[i] += (x.view(width) != y.view(width)).sum()
    assert different.get().tolist() == [0, 0, 0]


def test_plain_repeats_differ_in_the_last_bits_of_dkv_only(kernel: str) -> None:
    arguments, named = uploaded(make(CASE))
    options = {**named, "kernel": kernel, "dkv_dtype": "float32"}
    first = on_host(flat(mla_cupy.sparse_mla_backward)(*arguments, **options))
    peak = np.abs(first[1]).max(axis=1, keepdims=True)
    for _ in range(20):
        again = on_host(flat(mla_cupy.sparse_mla_backward)(*arguments, **options))
        assert_same(again[0], first[0])
        assert_same(again[2], first[2])
        assert (np.abs(again[1] - first[1]) <= 1e-5 * peak).all()


def test_exact_additions_are_near_plain_ones(gpu: DeviceInfo, kernel: str) -> None:
    """Also where many queries add to few rows, which leaves each of them few bits."""
    need(kernel, gpu, CASE, deterministic=True)
    inputs = make(replace(CASE, s_q=800, s_kv=40, topk=64, lengths=False))
    plain, exact = (
        backward(inputs, kernel=kernel, dkv_dtype="float32", deterministic=deterministic)[1]
        for deterministic in (False, True)
    )
    peak = np.abs(plain).max(axis=1, keepdims=True)
    assert (np.abs(plain - exact) <= error_of_exact_additions(inputs) * peak).all()


# ---- Hostile values --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["dout", "q", "kv"])
def test_nan_stays_with_the_queries_that_see_it(kernel: str, where: str, deterministic: bool) -> None:
    inputs = make(replace(CASE, s_kv=5000, sink=False, lengths=False))
    options = {"kernel": kernel, "deterministic": deterministic, "dkv_dtype": "float32"}
    clean = backward(inputs, **options)
    row = inputs.rows[5][7]
    {"dout": inputs.dout[5, 9], "q": inputs.q[5, 9], "kv": inputs.kv[row]}[where][3] = np.nan
    hit = np.array([row in rows for rows in inputs.rows]) if where == "kv" else np.arange(CASE.s_q) == 5
    spoiled = np.zeros(5000, bool)
    spoiled[np.concatenate([rows for rows, is_hit in zip(inputs.rows, hit, strict=True) if is_hit])] = True
    assert 0 < hit.sum() < len(hit)
    assert 0 < spoiled.sum() < len(spoiled)
    dq, dkv, _ = backward(inputs, **options)
    assert_same(dq[~hit], clean[0][~hit])
    assert np.isnan(dq[5, 9].astype(np.float32)).all()
    assert np.isfinite(dkv[~spoiled]).all()
    np.testing.assert_allclose(dkv[~spoiled], clean[1][~spoiled], rtol=0, atol=1e-4 * np.abs(clean[1]).max())
    # The lse is still finite: a NaN in a row spoils the weights of this row only.
    assert np.isnan(dkv[row] if where == "kv" else dkv[spoiled]).all()


# ---- Host arrays, large kv -------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [CASE, replace(CASE, strides="odd", head_axis=True)], ids=["padded", "odd"])
def test_host_arrays_go_to_the_gpu_and_back(gpu: DeviceInfo, case: SparseCase) -> None:
    inputs = make(case)
    results = flat(mla_cupy.sparse_mla_backward)(*inputs.backward_arguments, **inputs.options, deterministic=True)
    assert all(isinstance(x, np.ndarray) for x in results)
    check_gradients(results, inputs, deterministic=True)
    given = [np.full(x.shape, 7, x.dtype) for x in results[:2]]
    again = flat(mla_cupy.sparse_mla_backward)(
        *inputs.backward_arguments, **inputs.options, deterministic=True, dq=given[0], dkv=given[1]
    )
    for result, target, wanted in zip(again, (*given, again[2]), results, strict=True):
        assert result is target
        assert_same(target, wanted)


LARGE_ROWS = 4_000_000  # of 576 float16: 4.6 GB, and 9.2 GB of sums; 2^31 elements end in row 3,728,270
FAR = (LARGE_ROWS - 1, 3_728_269, 3_728_270, 3_728_271, 0, 1, 1_864_135, LARGE_ROWS - 2, 2_000_000, 3_999_000)


@pytest.fixture(scope="module")
def large_kv(gpu: DeviceInfo) -> Iterator[Any]:
    """Not initialised: whatever is read beyond the rows that a test writes is garbage."""
    import cupy

    free, _ = cupy.cuda.runtime.memGetInfo()
    if free < 30 << 30:
        pytest.skip(f"needs 30 GiB of free GPU memory, there are {free >> 30}")
    yield cupy.empty((LARGE_ROWS, 576), np.float16)
    cupy.get_default_memory_pool().free_all_blocks()


def test_kv_of_more_than_2_31_elements(large_kv: Any, kernel: str, deterministic: bool) -> None:
    import cupy

    small = make(SparseCase(s_q=6, s_kv=len(FAR), h_q=72, topk=70, dtype="float16", strides="dense", invalid=0.3))
    kv = np.random.default_rng(2).standard_normal((len(FAR), 576), np.float32).astype(np.float16)
    small = replace(small, kv=kv)
    large_kv[cupy.asarray(FAR)] = cupy.asarray(kv)
    valid = (small.indices >= 0) & (small.indices < len(FAR))
    far = np.where(valid, np.asarray(FAR, np.int32)[np.where(valid, small.indices, 0)], -9).astype(np.int32)
    arguments, _ = uploaded(small)
    arguments[1], arguments[5] = large_kv, cupy.asarray(far)
    dq, dkv, _ = mla_cupy.sparse_mla_backward(*arguments, kernel=kernel, deterministic=deterministic, scale=576**-0.5)
    check_gradients([*on_host((dq, dkv[cupy.asarray(FAR)])), None], small, deterministic=deterministic)
    dkv[cupy.asarray(FAR)] = 0
    assert int(cupy.count_nonzero(dkv.view(cupy.uint16))) == 0  # no other row was touched
