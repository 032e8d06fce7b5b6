"""The public call on a GPU: where results go, options, plans, host arrays."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import dtypes, reference
from mla_cupy.runtime.device import DeviceInfo
from tests.support.calls import ALL_KERNELS, assert_same, need, on_host, plan_of
from tests.support.cases import DecodeCase, make
from tests.support.flat import mla_decode
from tests.support.gpu import run_and_check, upload, uploaded
from tests.support.kernels import fitting, in_both_sizes
from tests.support.tolerance import check

pytestmark = pytest.mark.gpu

CASE = DecodeCase(b=5, s_q=2, h_q=32, seqlens="ragged-700", page_size=32)
SPLIT = DecodeCase(b=2, h_q=128, seqlens=(6000, 100))


@pytest.fixture(params=in_both_sizes(ALL_KERNELS))
def kernel(request: pytest.FixtureRequest, gpu: DeviceInfo) -> str:
    need(request.param, gpu)
    return str(request.param)


@pytest.mark.parametrize("case", [CASE, SPLIT], ids=["whole", "split"])
def test_out_dtype_float32(kernel: str, case: DecodeCase) -> None:
    inputs = make(fitting(case, kernel))
    arguments = uploaded(inputs)
    out, lse = on_host(mla_decode(*arguments, kernel=kernel, out_dtype="float32"))
    assert out.dtype == np.float32
    check((out, lse), inputs.exact, inputs.rounded, case.dtype)
    short, same_lse = on_host(mla_decode(*arguments, kernel=kernel))
    assert_same(dtypes.round_to(out, case.dtype).astype(short.dtype), short)  # one rounding apart, nothing else
    assert_same(same_lse, lse)


@pytest.mark.parametrize("case", [CASE, SPLIT], ids=["whole", "split"])
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
def test_results_in_given_views(kernel: str, case: DecodeCase, out_dtype: str) -> None:
    import cupy

    inputs = make(fitting(case, kernel))
    arguments = uploaded(inputs)
    expected = on_host(mla_decode(*arguments, kernel=kernel, out_dtype=out_dtype))
    b, s_q, h_q = inputs.q.shape[:3]
    whole_out = cupy.full((b, s_q + 1, h_q, 528), 7, dtypes.numpy_dtype(out_dtype))
    whole_lse = cupy.full((b, h_q, 3 * s_q), 7, cupy.float32)
    out, lse = whole_out[:, 1:, :, 8:520], whole_lse[..., 1::3]
    results = mla_decode(*arguments, kernel=kernel, out=out, lse=lse)
    assert results[0] is out
    assert results[1] is lse
    host_out, host_lse = on_host((whole_out, whole_lse))
    assert_same(host_out[:, 1:, :, 8:520], expected[0])
    assert_same(host_lse[..., 1::3], expected[1])
    host_out[:, 1:, :, 8:520], host_lse[..., 1::3] = 7, 7
    assert (host_out.astype(np.float32) == 7).all()  # nothing was written outside them
    assert (host_lse == 7).all()


@pytest.mark.parametrize("case", [CASE, SPLIT, DecodeCase(s_q=4, seqlens=(2, 0, 300))], ids=["whole", "split", "empty"])
def test_bases_and_empty_rows(kernel: str, case: DecodeCase) -> None:
    inputs = make(fitting(case, kernel))
    for options in ({"lse_base": "2"}, {"empty_lse": math.inf}, {"lse_base": "2", "empty_lse": -1e4}):
        got = on_host(mla_decode(*uploaded(inputs), kernel=kernel, **options))
        exact = reference.mla_decode(*inputs.arguments, **options)
        rounded = reference.mla_decode(*inputs.arguments, rounding=case.dtype, **options)
        check(got, exact, rounded, case.dtype)


@pytest.mark.parametrize("scale", [1e-6, 0.01, 0.3])
def test_scale(kernel: str, scale: float) -> None:
    inputs = make(fitting(CASE, kernel))
    got = on_host(mla_cupy.mla_decode(*uploaded(inputs), kernel=kernel, scale=scale))
    exact = reference.mla_decode(*inputs.arguments, scale=scale)
    rounded = reference.mla_decode(*inputs.arguments, scale=scale, rounding=CASE.dtype)
    check(got, exact, rounded, CASE.dtype)


def test_unusual_views_fall_back_to_the_generic_kernel(gpu: DeviceInfo) -> None:
    """Reversed and repeated arrays: any strides are correct."""
    import cupy

    inputs = make(DecodeCase(b=4, h_q=16, seqlens=200, s_q=2))
    q, kv_cache, table, seqlens = uploaded(inputs)
    exact = inputs.exact
    last = len(inputs.kv_cache) - 1
    mirrored = np.where((table.get() >= 0) & (table.get() <= last), last - table.get(), table.get()).astype(np.int32)
    repeated = np.broadcast_to(inputs.q[:1], inputs.q.shape)
    repeated_exact = reference.mla_decode(repeated, *inputs.arguments[1:])
    repeated_rounded = reference.mla_decode(repeated, *inputs.arguments[1:], rounding="bfloat16")
    check(
        on_host(mla_decode(q, kv_cache[::-1], upload(mirrored), seqlens)),
        exact,
        inputs.rounded,
        "bfloat16",
    )
    turned = on_host(mla_decode(q[:, :, ::-1], kv_cache, table, seqlens))
    check((turned[0][:, :, ::-1], turned[1][:, ::-1]), exact, inputs.rounded, "bfloat16")
    got = on_host(mla_decode(cupy.broadcast_to(q[:1], q.shape), kv_cache, table, seqlens))
    check(got, repeated_exact, repeated_rounded, "bfloat16")


def test_strided_table_and_lengths(kernel: str) -> None:
    import cupy

    inputs = make(fitting(CASE, kernel))
    q, kv_cache, table, seqlens = uploaded(inputs)
    wide = cupy.full((table.shape[0], 3 * table.shape[1]), 2**30, cupy.int32)
    wide[:, ::3] = table
    long = cupy.full(4 * len(seqlens), -9, cupy.int32)
    long[::4] = seqlens
    got = on_host(mla_decode(q, kv_cache, wide[:, ::3], long[::4], kernel=kernel))
    check(got, inputs.exact, inputs.rounded, CASE.dtype)


# ---- Plans -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [CASE, SPLIT], ids=["whole", "split"])
def test_plan_gives_the_same_bits(kernel: str, case: DecodeCase) -> None:
    inputs = make(fitting(case, kernel))
    arguments = uploaded(inputs)
    expected = on_host(mla_decode(*arguments, kernel=kernel))
    plan = plan_of(inputs, kernel=kernel, max_b=case.b + 10)
    assert plan.kernel == kernel
    plan.update(arguments[3])
    for _ in range(3):
        got = on_host(mla_decode(*arguments, plan=plan))
        assert_same(got[0], expected[0])
        assert_same(got[1], expected[1])


def test_smaller_batches_with_a_plan(kernel: str) -> None:
    inputs = make(fitting(CASE, kernel))
    q, kv_cache, table, seqlens = uploaded(inputs)
    plan = plan_of(inputs, kernel=kernel)
    for b in (5, 1, 3, 2, 4, 5):
        plan.update(seqlens[:b])
        got = on_host(mla_decode(q[:b], kv_cache, table[:b], seqlens[:b], plan=plan))
        exact, rounded = ((out[:b], lse[:b]) for out, lse in (inputs.exact, inputs.rounded))
        check(got, exact, rounded, CASE.dtype)


def test_workspace_of_the_caller_is_all_that_is_written(kernel: str) -> None:
    import cupy

    inputs = make(fitting(SPLIT, kernel))
    arguments = uploaded(inputs)
    nbytes = plan_of(inputs, kernel=kernel).workspace_bytes
    whole = cupy.full(nbytes + 1024, 0xA5, cupy.uint8)
    begin = 256 + -whole.data.ptr % 256
    plan = plan_of(inputs, kernel=kernel, workspace=whole[begin : begin + nbytes])
    assert plan.workspace_bytes == nbytes
    plan.update(arguments[3])
    got = on_host(mla_decode(*arguments, plan=plan))
    check(got, inputs.exact, inputs.rounded, SPLIT.dtype)
    host = whole.get()
    assert (host[:begin] == 0xA5).all()
    assert (host[begin + nbytes :] == 0xA5).all()
    assert nbytes == 0 or (host[begin : begin + nbytes] != 0xA5).any()


def test_planned_call_allocates_nothing(kernel: str) -> None:
    import cupy

    inputs = make(fitting(SPLIT, kernel))
    arguments = uploaded(inputs)
    plan = plan_of(inputs, kernel=kernel)
    plan.update(arguments[3])
    out, lse = mla_decode(*arguments, plan=plan)

    def refuse(nbytes: int) -> Any:
        raise AssertionError(f"{nbytes} bytes were asked for")

    with cupy.cuda.using_allocator(refuse):
        plan.update(arguments[3])
        mla_decode(*arguments, plan=plan, out=out, lse=lse)
    cupy.cuda.get_current_stream().synchronize()


def test_plan_refuses_unaligned_arrays_after_good_ones(hopper: DeviceInfo) -> None:
    import cupy

    inputs = make(dataclasses.replace(CASE, strides="dense"))
    q, kv_cache, table, seqlens = uploaded(inputs)
    plan = plan_of(inputs)
    plan.update(seqlens)
    mla_decode(q, kv_cache, table, seqlens, plan=plan)
    shifted = cupy.zeros(q.size + 1, q.dtype)[1:].reshape(q.shape)
    with pytest.raises(mla_cupy.PlanError, match="multiples of 16 bytes"):
        mla_decode(shifted, kv_cache, table, seqlens, plan=plan)


# ---- NumPy arrays ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strides", ["padded", "dense"])
def test_numpy_arrays_give_what_cupy_arrays_give(gpu: DeviceInfo, strides: Any) -> None:
    inputs = make(dataclasses.replace(CASE, strides=strides))
    expected = on_host(mla_decode(*uploaded(inputs)))
    out, lse = mla_decode(*inputs.arguments)
    assert type(out) is type(lse) is np.ndarray
    assert_same(out, expected[0])
    assert_same(lse, expected[1])
    given = np.full(out.shape, 7, np.float32), np.full((*lse.shape[:2], 6), 7, np.float32)[..., ::3]
    results = mla_decode(*inputs.arguments, out=given[0], lse=given[1])
    assert results[0] is given[0]
    assert results[1] is given[1]
    assert_same(dtypes.round_to(given[0], "bfloat16").astype(out.dtype), out)
    assert_same(given[1], lse)
    plan = plan_of(inputs)
    plan.update(inputs.seqlens)
    assert_same(mla_decode(*inputs.arguments, plan=plan)[0], expected[0])


def test_numpy_arrays_on_a_stream(gpu: DeviceInfo) -> None:
    import cupy

    inputs = make(CASE)
    expected = on_host(mla_decode(*uploaded(inputs)))
    stream = cupy.cuda.Stream(non_blocking=True)
    for _ in range(20):
        out, lse = mla_decode(*inputs.arguments, stream=stream)
        assert_same(out, expected[0])
        assert_same(lse, expected[1])


def test_numpy_backend_can_be_forced(gpu: DeviceInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    inputs = make(CASE)
    out, _ = mla_decode(*inputs.arguments)
    assert_same(out, dtypes.round_to(inputs.exact[0], "bfloat16").astype(out.dtype))


def test_numpy_merge(gpu: DeviceInfo) -> None:
    rng = np.random.default_rng(0)
    outs, lses = rng.standard_normal((3, 2, 1, 4, 64), np.float32), rng.standard_normal((3, 2, 4, 1), np.float32)
    out, lse = mla_cupy.merge_states(outs, lses)
    exact = reference.merge_states(outs, lses)
    np.testing.assert_allclose(out, exact[0], rtol=0, atol=4e-6)
    np.testing.assert_allclose(lse, exact[1], rtol=1e-6)


def test_check_reads_the_device(gpu: DeviceInfo) -> None:
    inputs = make(CASE)
    q, kv_cache, table, seqlens = uploaded(inputs)
    mla_decode(q, kv_cache, table, seqlens, check=True)
    seqlens[3] = -4
    with pytest.raises(mla_cupy.ArgumentError, match=r"seqlens\[3\]: got -4"):
        mla_decode(q, kv_cache, table, seqlens, check=True)
    seqlens[3] = 40
    table[3, 1] = len(kv_cache)
    with pytest.raises(mla_cupy.ArgumentError, match=rf"block_table\[3, 1\]: got {len(kv_cache)}"):
        mla_decode(q, kv_cache, table, seqlens, check=True)


def test_large_batches(kernel: str) -> None:
    """More requests than the schedule kernel takes at once."""
    run_and_check(DecodeCase(b=2500, h_q=2, seqlens=(1, 0, 3, 65, 17), page_size=16), kernel=kernel)
