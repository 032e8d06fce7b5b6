"""The contents of GPU memory are not trusted: any length, any page id, NaN and infinity, pools of any size."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from mla_cupy import reference
from mla_cupy.runtime.device import DeviceInfo
from tests.support.calls import ALL_KERNELS, Array, assert_same, need, on_host, plan_of
from tests.support.cases import DecodeCase, DecodeInputs, make
from tests.support.flat import mla_decode
from tests.support.gpu import upload, uploaded
from tests.support.kernels import fitting, in_both_sizes
from tests.support.tolerance import check

pytestmark = pytest.mark.gpu

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
PAGES, PAGE = 12, 32


@pytest.fixture(params=in_both_sizes(ALL_KERNELS))
def kernel(request: pytest.FixtureRequest, gpu: DeviceInfo) -> str:
    need(request.param, gpu)
    return str(request.param)


def run(inputs: DecodeInputs, kernel: str | None, **options: Any) -> tuple[Array, Array]:
    return on_host(mla_decode(*uploaded(inputs), kernel=kernel, causal=inputs.case.causal, **options))


def run_and_check(inputs: DecodeInputs, kernel: str | None) -> None:
    check(run(inputs, kernel), inputs.exact, inputs.rounded, inputs.case.dtype)


def full_pages(b: int = 4, h_q: int = 16, s_q: int = 2) -> DecodeInputs:
    """Every page of the pool is full of numbers, so that any page id and any length have an answer."""
    inputs = make(DecodeCase(b=b, h_q=h_q, s_q=s_q, seqlens=PAGES * PAGE, page_size=PAGE, spare_pages=0))
    table = np.ascontiguousarray(inputs.block_table[:, :PAGES])
    return dataclasses.replace(inputs, block_table=table, seqlens=inputs.seqlens.copy())


@pytest.mark.parametrize("page", [INT_MIN, INT_MAX, -1, "num_pages", "num_pages + 1", 1 << 30])
def test_page_ids_out_of_range_are_missing(kernel: str, page: int | str) -> None:
    inputs = full_pages()
    num_pages = len(inputs.kv_cache)
    value = {"num_pages": num_pages, "num_pages + 1": num_pages + 1}.get(str(page), page)
    inputs.block_table[0, :] = value  # nothing is left
    inputs.block_table[1, 3:7] = value
    inputs.block_table[2, -1] = value
    run_and_check(inputs, kernel)


@pytest.mark.parametrize("length", [INT_MIN, -65, -1, PAGES * PAGE + 1, 10**6, INT_MAX - 63, INT_MAX])
def test_lengths_out_of_range_are_clamped(kernel: str, length: int) -> None:
    inputs = full_pages()
    inputs.seqlens[[0, 2]] = length
    run_and_check(inputs, kernel)
    inputs = full_pages()
    inputs.seqlens[:] = length
    run_and_check(inputs, kernel)


def test_everything_is_garbage(kernel: str) -> None:
    """No answer is wrong here but a fault; the oracle agrees all the same."""
    inputs = full_pages(b=40)
    rng = np.random.default_rng(5)
    hostile = rng.random(inputs.block_table.shape) < 0.5
    inputs.block_table[hostile] = rng.integers(INT_MIN, INT_MAX, int(hostile.sum()), np.int32)
    inputs.seqlens[:] = rng.choice([INT_MIN, -1, 0, 1, 100, INT_MAX], 40)
    run_and_check(inputs, kernel)


def test_block_table_without_pages(kernel: str) -> None:
    inputs = full_pages()
    run_and_check(dataclasses.replace(inputs, block_table=inputs.block_table[:, :0].copy()), kernel)


def test_pool_without_pages(gpu: DeviceInfo) -> None:
    inputs = full_pages()
    inputs = dataclasses.replace(inputs, kv_cache=inputs.kv_cache[:0].copy())
    out, lse = run(inputs, None)
    assert (out == 0).all()
    assert np.isneginf(lse).all()


def test_plan_for_other_lengths_is_slow_not_wrong(kernel: str) -> None:
    """The schedule decides who does what, never what is read: see `test_schedule.py`."""
    import cupy

    inputs = make(fitting(DecodeCase(b=6, h_q=128, seqlens=(3000, 64, 0, 700, 1, 1500)), kernel))
    arguments = uploaded(inputs)
    plan = plan_of(inputs, kernel=kernel)
    for planned in ([0] * 6, [5000, 0, 0, 0, 0, 0], [INT_MAX] * 6, [64, 64, 3000, 64, 64, 64], [INT_MIN] * 6):
        plan.update(cupy.asarray(planned, cupy.int32))
        got = on_host(mla_decode(*arguments, plan=plan))
        check(got, inputs.exact, inputs.rounded, inputs.case.dtype)


# ---- NaN and infinity ------------------------------------------------------------------------------------------

Spoil = Callable[[DecodeInputs, int, float], None]


def spoil_token(inputs: DecodeInputs, token: int, value: float) -> None:
    """Put `value` into a token of request 1, in a column of the values and one of the keys alone."""
    page = inputs.block_table[1, token // inputs.case.page_size]
    inputs.kv_cache[page, token % inputs.case.page_size, 0, [3, 570]] = value


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("page_size", [16, 24, 64])
@pytest.mark.parametrize("length", [64, 130, 700])
def test_nan_reaches_the_queries_that_see_it_and_no_others(
    kernel: str, value: float, page_size: int, length: int
) -> None:
    s_q, back = 4, 2  # token length - 2 is seen by the last two queries
    inputs = make(fitting(DecodeCase(b=3, s_q=s_q, h_q=16, page_size=page_size, seqlens=length), kernel))
    inputs.q[..., [3, 570]] = np.abs(inputs.q[..., [3, 570]]) + np.asarray(0.5, inputs.q.dtype)  # infinite scores
    clean_out, clean_lse = run(inputs, kernel)
    assert np.isfinite(clean_out.astype(np.float32)).all()
    spoil_token(inputs, length - back, value)
    out, lse = run(inputs, kernel)
    seen = np.zeros(out.shape[:3], bool)
    seen[1, s_q - back :] = True
    assert_same(out[~seen], clean_out[~seen])
    assert_same(lse[~seen.swapaxes(1, 2)], clean_lse[~seen.swapaxes(1, 2)])
    assert np.isnan(out[seen].astype(np.float32)).all()
    assert not np.isfinite(lse[seen.swapaxes(1, 2)]).any()


def test_nan_in_a_query_stays_in_its_row(kernel: str) -> None:
    inputs = make(DecodeCase(b=3, s_q=2, h_q=16, seqlens=300))
    clean_out, clean_lse = run(inputs, kernel)
    inputs.q[1, 1, 5, 100] = np.nan
    out, lse = run(inputs, kernel)
    seen = np.zeros(out.shape[:3], bool)
    seen[1, 1, 5] = True
    assert_same(out[~seen], clean_out[~seen])
    assert_same(lse[~seen.swapaxes(1, 2)], clean_lse[~seen.swapaxes(1, 2)])
    assert np.isnan(out[seen].astype(np.float32)).all()
    assert np.isnan(lse[seen.swapaxes(1, 2)]).all()


def test_values_of_a_split_request_that_are_nan_survive_the_merge(kernel: str) -> None:
    """One request over the whole GPU: the NaN is in one piece, the other pieces are clean."""
    inputs = make(fitting(DecodeCase(b=2, h_q=128, seqlens=(50, 9000)), kernel))
    spoil_token(inputs, 4321, np.nan)
    out, lse = run(inputs, kernel)
    assert np.isnan(out[1].astype(np.float32)).all()
    assert np.isnan(lse[1]).all()
    assert np.isfinite(out[0].astype(np.float32)).all()


# ---- A large pool ----------------------------------------------------------------------------------------------

LARGE_PAGES = 120_000  # of 64 tokens: 8.8 GB, more than 2^32 elements; 2^32 bytes end in page 58,254


@pytest.fixture(scope="module")
def large_pool(gpu: DeviceInfo) -> Iterator[Any]:
    """Not initialised: anything read beyond the pages that a test writes is garbage."""
    import cupy
    import ml_dtypes

    free, _ = cupy.cuda.runtime.memGetInfo()
    if free < 12 << 30:
        pytest.skip(f"needs 12 GiB of free GPU memory, there are {free >> 30}")
    yield cupy.empty((LARGE_PAGES, 64, 1, 576), np.dtype(ml_dtypes.bfloat16))
    cupy.get_default_memory_pool().free_all_blocks()


def test_pool_of_more_than_4_gib(kernel: str, large_pool: Any) -> None:
    import cupy

    far = [LARGE_PAGES - 1, 58_254, 0, 29_127, LARGE_PAGES - 2, 58_255, 116_508, 116_509]  # around 2^31, 2^32 elements
    inputs = make(fitting(DecodeCase(b=2, s_q=2, h_q=64, seqlens=256, strides="dense", spare_pages=0), kernel))
    small = inputs.kv_cache
    assert len(small) == len(far)
    for page, content in zip(far, small, strict=True):
        large_pool[page] = cupy.asarray(content)
    table = inputs.block_table.copy()
    table[:, :4] = np.asarray(far, np.int32)[table[:, :4]]
    got = mla_decode(upload(inputs.q), large_pool, upload(table), upload(inputs.seqlens), kernel=kernel)
    exact = reference.mla_decode(*inputs.arguments)
    check(on_host(got), exact, inputs.rounded, "bfloat16")
