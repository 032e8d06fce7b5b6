"""Arrays of a library that mla_cupy has never heard of, and arrays on another GPU than the current one."""

from __future__ import annotations

from typing import Any

import pytest

import mla_cupy
from mla_cupy import DeviceError
from mla_cupy.runtime import device
from mla_cupy.runtime.device import DeviceInfo
from tests.support.calls import assert_same, on_host, plan_of
from tests.support.cases import DecodeCase, make
from tests.support.flat import default_scale, mla_decode
from tests.support.gpu import uploaded
from tests.support.tolerance import check

pytestmark = pytest.mark.gpu

CASE = DecodeCase(b=4, s_q=2, h_q=32, seqlens="ragged-700")


class Foreign:
    """DLPack and nothing else."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory

    def __dlpack_device__(self) -> Any:
        return self._memory.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        return self._memory.__dlpack__(**options)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_foreign_arrays_are_not_copied_and_give_cupy_arrays(gpu: DeviceInfo, dtype: str) -> None:
    import cupy

    inputs = make(DecodeCase(b=4, s_q=2, h_q=32, seqlens="ragged-700", dtype=dtype))
    arguments = uploaded(inputs)
    foreign = [Foreign(x) for x in arguments]
    scale = default_scale(arguments[0])
    out, lse = mla_decode(*foreign, scale=scale)
    assert isinstance(out, cupy.ndarray)
    assert isinstance(lse, cupy.ndarray)
    check(on_host((out, lse)), inputs.exact, inputs.rounded, dtype)
    given = Foreign(cupy.full(out.shape, 7, out.dtype)), Foreign(cupy.full(lse.shape, 7, lse.dtype))
    results = mla_decode(*foreign, scale=scale, out=given[0], lse=given[1])
    assert results[0] is given[0]
    assert results[1] is given[1]
    assert_same(given[0]._memory.get(), out.get())
    assert_same(given[1]._memory.get(), lse.get())
    plan = plan_of(inputs)
    plan.update(foreign[3])
    for _ in range(2):
        assert_same(mla_decode(*foreign, scale=scale, plan=plan)[0].get(), out.get())


def test_foreign_arrays_live_until_the_work_is_done(gpu: DeviceInfo) -> None:
    """Dropped by the caller while the stream has not come to the call; the next call finds what has ended."""
    import cupy

    pool = cupy.get_default_memory_pool()
    arguments = uploaded(make(CASE))
    mla_decode(*map(Foreign, arguments))  # builds
    busy = cupy.ones((8192, 8192), cupy.float32)
    product = busy @ busy
    cupy.cuda.Device().synchronize()
    mla_decode(*map(Foreign, arguments))  # also releases other tests' leftovers
    before = pool.used_bytes()
    for _ in range(20):
        cupy.matmul(busy, busy, out=product)
    memory = arguments[0].copy()
    nbytes = pool.used_bytes() - before
    mla_decode(Foreign(memory), *map(Foreign, arguments[1:]))
    del memory
    done = cupy.cuda.Event()
    done.record()
    assert not done.done
    assert nbytes >= arguments[0].nbytes
    assert pool.used_bytes() == before + nbytes
    done.synchronize()
    mla_decode(*map(Foreign, arguments))
    assert pool.used_bytes() == before


def test_foreign_and_cupy_arrays_do_not_mix(gpu: DeviceInfo) -> None:
    q, kv_cache, table, seqlens = uploaded(make(CASE))
    with pytest.raises(DeviceError, match="seqlens: got an array of dlpack on the GPU, expected an array of cupy"):
        mla_decode(q, kv_cache, table, Foreign(seqlens))


# ---- Several GPUs ----------------------------------------------------------------------------------------------


@pytest.fixture
def second_gpu(gpu: DeviceInfo) -> DeviceInfo:
    if device.gpu_count() < 2:
        pytest.skip("needs two GPUs")
    return device.describe(1)


def test_arrays_on_another_gpu_than_the_current_one(second_gpu: DeviceInfo) -> None:
    import cupy

    inputs = make(CASE)
    here = on_host(mla_decode(*uploaded(inputs)))
    with cupy.cuda.Device(1):
        there = uploaded(inputs)
        cupy.cuda.get_current_stream().synchronize()
    assert cupy.cuda.runtime.getDevice() == 0
    plan = plan_of(inputs, device=1)
    plan.update(there[3])
    outs = cupy.cuda.Device(1)
    for options in ({}, {"plan": plan}, {"plan": plan}):
        out, lse = mla_decode(*there, **options)
        assert cupy.cuda.runtime.getDevice() == 0
        assert out.device == lse.device == outs
        with outs:
            got = on_host((out, lse))
        assert_same(got[0], here[0])
        assert_same(got[1], here[1])
    with outs:
        states = cupy.stack([out, out]), cupy.stack([lse, lse])
        cupy.cuda.get_current_stream().synchronize()
    merged, _ = mla_cupy.merge_states(*states)
    assert merged.device == outs
    with outs:
        assert_same(merged.get(), here[0])


def test_gpus_do_not_mix(second_gpu: DeviceInfo) -> None:
    import cupy

    inputs = make(CASE)
    here = uploaded(inputs)
    plan = plan_of(inputs)
    with cupy.cuda.Device(1):
        there = uploaded(inputs)
    with pytest.raises(DeviceError, match="kv_cache's device: got 1, expected 0, like q"):
        mla_decode(here[0], there[1], here[2], here[3])
    with pytest.raises(DeviceError, match="seqlens' device: got 1, expected 0, the plan's"):
        plan.update(there[3])
    plan.update(here[3])
    with pytest.raises(mla_cupy.PlanError, match=r"plan\.device: got 0, expected 1"):
        mla_decode(*there, plan=plan)


def test_numpy_lengths_for_a_plan_on_another_gpu(second_gpu: DeviceInfo) -> None:
    import cupy

    inputs = make(CASE)
    plan = plan_of(inputs, device=1)
    plan.update(inputs.seqlens)
    with cupy.cuda.Device(1):
        got = on_host(mla_decode(*uploaded(inputs), plan=plan))
    check(got, inputs.exact, inputs.rounded, CASE.dtype)
