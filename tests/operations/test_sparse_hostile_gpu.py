"""Hostile contents of the GPU's memory for both sparse operations: any index, length, start or sink.

Streams and a pool whose memory is handed out again are of the same kind: nothing of one call may reach another.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mla_cupy.runtime.device import DeviceInfo
from tests.operations.sparse_runs import RUNS, SparseRun
from tests.support.gradients import on_host
from tests.support.sparse_cases import INT_MAX, INT_MIN, SparseCase, SparseInputs, make

pytestmark = pytest.mark.gpu

S_KV = 500


@pytest.fixture(params=RUNS)
def run(request: pytest.FixtureRequest, gpu: DeviceInfo) -> SparseRun:
    found: SparseRun = request.param
    found.need(gpu)
    return found


def all_finite(case: SparseCase) -> SparseInputs:
    """Every row holds numbers, so that any index has an answer."""
    inputs = make(case)
    kv = np.random.default_rng(1).standard_normal((case.s_kv, case.d_qk), np.float32).astype(inputs.kv.dtype)
    return replace(inputs, kv=kv, indices=inputs.indices.copy())


@pytest.mark.parametrize("index", [INT_MIN, INT_MAX, -1, -2, S_KV, S_KV + 1, 1 << 30, -(1 << 30)])
def test_indices_out_of_range_are_no_rows(run: SparseRun, index: int) -> None:
    inputs = all_finite(run.case)
    inputs.indices[0, :] = index  # nothing is left
    inputs.indices[2, 3:70] = index
    inputs.indices[3, -1] = index
    inputs.indices[4, :-1] = index  # one valid entry is left, unless `index` is invalid
    run.check(inputs)


@pytest.mark.parametrize("length", [INT_MIN, -1, 0, 1, 199, 200, 201, INT_MAX])
def test_lengths_are_clamped(run: SparseRun, length: int) -> None:
    run.check(replace(all_finite(run.case), topk_length=np.full(run.case.s_q, length, np.int32)))


@pytest.mark.parametrize("causal", [False, True])
def test_everything_is_garbage(run: SparseRun, causal: bool) -> None:
    """No answer is wrong here but a fault; the oracle agrees all the same."""
    rng = np.random.default_rng(5)

    def garbage(*shape: int) -> Any:
        wild = rng.integers(INT_MIN, INT_MAX, shape, np.int32)
        return np.where(rng.random(shape) < 0.5, wild, rng.integers(-5, S_KV + 5, shape, np.int32))

    for _ in range(8 if run.operation == "sparse_mla_forward" else 3):
        inputs = replace(
            all_finite(replace(run.case, causal=causal)),
            indices=garbage(run.case.s_q, run.case.topk),
            topk_length=garbage(run.case.s_q),
            cu_seqlens_q=garbage(9),
            cu_seqlens_kv=garbage(9),
        )
        run.check(inputs)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("starts_q", "starts_kv"),
    [
        ([3, 20, 30], [0, 100, 300]),  # queries before and after all sequences
        ([0, 40], [-5, 300]),
        ([0, 40], [400, INT_MAX]),
        ([INT_MIN, INT_MAX], [INT_MIN, INT_MAX]),
        ([0, 40], [300, 200]),  # a negative length
        ([0, 20, 0, 40], [0, 100, 200, 400]),  # two sequences claim the same queries
        ([0], [0]),
    ],
)
def test_hostile_starts(run: SparseRun, starts_q: list[int], starts_kv: list[int], causal: bool) -> None:
    starts = {"cu_seqlens_q": starts_q, "cu_seqlens_kv": starts_kv}
    inputs = all_finite(replace(run.case, causal=causal))
    run.check(replace(inputs, **{name: np.asarray(x, np.int32) for name, x in starts.items()}))


@pytest.mark.parametrize("sink", [-np.inf, np.inf, 1e30, -1e30, 0.0])
def test_sinks(run: SparseRun, sink: float) -> None:
    run.check(replace(all_finite(run.case), attn_sink=np.full(run.case.h_q, sink, np.float32)))


# ---- Streams ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["current", "argument"])
def test_streams_and_a_pool_churner(run: SparseRun, how: str) -> None:
    """Temporaries come from the stream's arena: whoever gets their memory next runs after them."""
    import cupy

    calls = [run.prepared(make(case)) for case in run.neighbours]
    expected = [on_host(call()) for call in calls]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in calls]
    results: list[list[Any]] = [[] for _ in calls]
    for _ in range(40):
        for i, (stream, call) in enumerate(zip(streams, calls, strict=True)):
            if how == "argument":
                results[i].append(call(stream=stream))
            with stream:
                if how == "current":
                    results[i].append(call())
                for nbytes in (1 << 12, 1 << 18, 1 << 22):
                    cupy.cuda.alloc(nbytes).memset_async(0x7F, nbytes)
    cupy.cuda.Device().synchronize()
    for wanted, got in zip(expected, results, strict=True):
        for result in map(on_host, got):
            run.assert_same(result, wanted)


def test_repeated_calls_with_a_workspace(run: SparseRun) -> None:
    """Equal results with the caller's dirty memory; nothing is allocated."""
    import cupy

    import mla_cupy

    call = run.prepared(make(run.case))
    results = call()
    expected = on_host(results)
    names = ("out", "lse", "max_logits") if run.operation == "sparse_mla_forward" else ("dq", "dkv", "d_sink")
    given = dict(zip(names, results, strict=True))
    nbytes = mla_cupy.workspace_bytes(call, **given)
    workspace = cupy.full(nbytes, 0xFF, cupy.uint8)
    call(**given, workspace=workspace)

    def refuse(size: int) -> Any:
        raise AssertionError(f"{size} bytes were asked for")

    for x in results:
        x.fill(7)
    workspace.fill(0x3C)
    with cupy.cuda.using_allocator(refuse):
        call(**given, workspace=workspace)
    run.assert_same(on_host(results), expected)
