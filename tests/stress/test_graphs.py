"""CUDA graphs: update and call captured once, replayed with other contents."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import KernelNotBuiltError
from mla_cupy.ops.call import forget
from mla_cupy.runtime import loader
from mla_cupy.runtime.device import DeviceInfo
from tests.support.calls import ALL_KERNELS, assert_same, need, on_host, plan_of
from tests.support.cases import DecodeCase, DecodeInputs, make
from tests.support.flat import mla_decode
from tests.support.gpu import uploaded
from tests.support.kernels import fitting, in_both_sizes
from tests.support.tolerance import check

pytestmark = pytest.mark.gpu


@pytest.fixture(params=in_both_sizes(ALL_KERNELS))
def kernel(request: pytest.FixtureRequest, gpu: DeviceInfo) -> str:
    need(request.param, gpu)
    return str(request.param)


def steps(kernel: str, h_q: int) -> list[DecodeInputs]:
    """Other lengths, queries, caches and tables of the same shapes."""
    batches = [(900, 64, 0, 300), (1, 2000, 65, 0), (0, 0, 0, 0), (2000, 2000, 2000, 2000), (63, 64, 1, 128)]
    made = [
        make(fitting(DecodeCase(b=4, s_q=2, h_q=h_q, seqlens=lengths, seed=seed, strides="dense"), kernel))
        for seed, lengths in enumerate(batches)
    ]
    return [fitted(inputs, pages=140, max_pages=34) for inputs in made]


def fitted(inputs: DecodeInputs, pages: int, max_pages: int) -> DecodeInputs:
    """The inputs in a pool and a table of a fixed size; new memory is poison."""
    q, kv_cache, table, seqlens = inputs.arguments
    pool = np.full((pages, *kv_cache.shape[1:]), np.nan, kv_cache.dtype)
    pool[: len(kv_cache)] = kv_cache
    wide = np.full((len(table), max_pages), 2**30, np.int32)
    wide[:, : table.shape[1]] = table
    return DecodeInputs(inputs.case, q, pool, wide, seqlens)


@pytest.mark.parametrize("h_q", [16, 128])
def test_replays_with_other_contents(kernel: str, h_q: int) -> None:
    import cupy

    todo = steps(kernel, h_q)
    h_q = todo[0].case.h_q
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        arguments = uploaded(todo[0])
        plan = plan_of(todo[0], kernel=kernel)
        out = cupy.empty((4, 2, h_q, 512), todo[0].q.dtype)
        lse = cupy.empty((4, h_q, 2), cupy.float32)
        stream.begin_capture()
        plan.update(arguments[3])
        mla_decode(*arguments, plan=plan, out=out, lse=lse)
        graph = stream.end_capture()
        for inputs in [*todo, todo[0]]:
            for target, source in zip(arguments, inputs.arguments, strict=True):
                target.set(source)
            out.fill(np.nan)
            lse.fill(np.nan)
            graph.launch(stream)
            got = on_host((out, lse))
            check(got, inputs.exact, inputs.rounded, inputs.case.dtype)
            fresh = on_host(mla_decode(*arguments, kernel=kernel))
            assert_same(got[0], fresh[0])
            assert_same(got[1], fresh[1])


def test_replays_do_not_need_the_host_arrays_of_the_capture(kernel: str) -> None:
    """Launch parameters are part of the graph: calls in between do not change what it does."""
    import cupy

    first, second = steps(kernel, 16)[:2]
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        arguments, others = uploaded(first), uploaded(second)
        plan, other_plan = plan_of(first, kernel=kernel), plan_of(first, kernel=kernel)
        out, lse = cupy.empty((4, 2, 16, 512), first.q.dtype), cupy.empty((4, 16, 2), cupy.float32)
        stream.begin_capture()
        plan.update(arguments[3])
        for _ in range(3):
            mla_decode(*arguments, plan=plan, out=out, lse=lse)
        graph = stream.end_capture()
        other_plan.update(others[3])
        for _ in range(5):
            mla_decode(*others, plan=other_plan)
            graph.launch(stream)
        check(on_host((out, lse)), first.exact, first.rounded, first.case.dtype)


def test_merge_in_a_graph(gpu: DeviceInfo) -> None:
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        outs, lses = cupy.ones((2, 3, 1, 4, 64), cupy.float32), cupy.zeros((2, 3, 4, 1), cupy.float32)
        out, lse = mla_cupy.merge_states(outs, lses)
        stream.begin_capture()
        mla_cupy.merge_states(outs, lses, out=out, lse=lse)
        graph = stream.end_capture()
        outs[1] = 3
        graph.launch(stream)
        assert (out.get() == 2).all()


def test_kernel_that_is_not_loaded_cannot_be_captured(gpu: DeviceInfo) -> None:
    import cupy

    inputs = make(DecodeCase(b=2, seqlens=100))
    stream = cupy.cuda.Stream(non_blocking=True)
    loader.forget()
    forget()
    with stream:
        arguments = uploaded(inputs)
        stream.begin_capture()
        try:
            with pytest.raises(KernelNotBuiltError, match="captured into a graph: make a plan, or call the function"):
                mla_decode(*arguments)
        finally:
            stream.end_capture()
        got: Any = mla_decode(*arguments)  # the remedy
        check(on_host(got), inputs.exact, inputs.rounded, inputs.case.dtype)
