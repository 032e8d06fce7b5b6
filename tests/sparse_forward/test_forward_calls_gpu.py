"""The public sparse forward on a GPU: where results go, options, streams, repeats, host arrays."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import ArgumentError, dtypes, reference
from mla_cupy.runtime.device import DeviceInfo
from tests.support.calls import assert_same, no_launch
from tests.support.flat import flat
from tests.support.gpu import upload
from tests.support.kernels import in_both_sizes
from tests.support.sparse_cases import SparseCase, make
from tests.support.sparse_gpu import ALL_KERNELS, check_forward, forward, need, on_host, run_and_check, uploaded

pytestmark = pytest.mark.gpu

WHOLE = SparseCase(s_q=300, s_kv=900, h_q=16, topk=130, lengths=True, sink=True)
SPLIT = SparseCase(s_q=3, s_kv=9000, h_q=16, topk=5000, sink=True)
BOTH = pytest.mark.parametrize("case", [WHOLE, SPLIT], ids=["whole", "split"], indirect=True)


@pytest.fixture(params=in_both_sizes(ALL_KERNELS))
def kernel(request: pytest.FixtureRequest, gpu: DeviceInfo) -> str:
    need(request.param, gpu, WHOLE)
    return str(request.param)


@pytest.fixture
def case(request: pytest.FixtureRequest, kernel: str) -> SparseCase:
    return request.param


def call(case: SparseCase, **options: Any) -> tuple[Any, Any, Any]:
    """The results on the GPU."""
    arguments, named = uploaded(make(case))
    return flat(mla_cupy.sparse_mla_forward)(*arguments, **{**named, **options})


@BOTH
def test_out_dtype_float32(kernel: str, case: SparseCase) -> None:
    inputs = make(case)
    out, lse, max_logits = forward(inputs, kernel=kernel, out_dtype="float32")
    assert out.dtype == np.float32
    rounded = reference.sparse_mla_forward(
        *inputs.arguments, **inputs.options, rounding=case.dtype, out_dtype="float32"
    )
    check_forward((out, lse, max_logits), inputs.exact, rounded, "float32")
    short, *same = forward(inputs, kernel=kernel)
    assert_same(dtypes.round_to(out, case.dtype).astype(short.dtype), short)  # one rounding apart, nothing else
    assert_same(same[0], lse)
    assert_same(same[1], max_logits)


@BOTH
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
def test_results_in_given_views(kernel: str, case: SparseCase, out_dtype: str) -> None:
    import cupy

    expected = on_host(call(case, kernel=kernel, out_dtype=out_dtype))
    whole = cupy.full((case.s_q + 1, case.h_q, 528), 7, dtypes.numpy_dtype(out_dtype))
    logs = cupy.full((2, case.s_q, 3 * case.h_q), 7, cupy.float32)
    given = {"out": whole[1:, :, 8:520], "lse": logs[0, :, 1::3], "max_logits": logs[1, :, 2::3]}
    results = call(case, kernel=kernel, **given)
    for result, target in zip(results, given.values(), strict=True):
        assert result is target
    host, host_logs = on_host((whole, logs))
    for got, wanted in zip((host[1:, :, 8:520], host_logs[0, :, 1::3], host_logs[1, :, 2::3]), expected, strict=True):
        assert_same(got, wanted)
        got[...] = 7
    assert (host.astype(np.float32) == 7).all()  # nothing was written outside them
    assert (host_logs == 7).all()


@pytest.mark.parametrize("name", ["out", "lse", "max_logits"])
def test_only_one_array_given(gpu: DeviceInfo, name: str) -> None:
    import cupy

    expected = dict(zip(("out", "lse", "max_logits"), call(WHOLE), strict=True))
    target = cupy.empty_like(expected[name])
    results = call(WHOLE, **{name: target})
    assert results[list(expected).index(name)] is target
    for result, wanted in zip(on_host(results), on_host(tuple(expected.values())), strict=True):
        assert_same(result, wanted)


@BOTH
@pytest.mark.parametrize(
    "options", [{"lse_base": "2"}, {"empty_lse": math.inf}, {"lse_base": "2", "empty_lse": -1e4}], ids=str
)
def test_bases_and_empty_rows(kernel: str, case: SparseCase, options: dict[str, Any]) -> None:
    inputs = make(case)
    exact, rounded = (
        reference.sparse_mla_forward(*inputs.arguments, **inputs.options, **options, rounding=rounding)
        for rounding in (None, case.dtype)
    )
    check_forward(forward(inputs, kernel=kernel, **options), exact, rounded, case.dtype)


@pytest.mark.parametrize("scale", [1e-6, 0.01, 0.3])
def test_scale(kernel: str, scale: float) -> None:
    inputs = make(WHOLE)
    exact, rounded = (
        reference.sparse_mla_forward(*inputs.arguments, **{**inputs.options, "scale": scale}, rounding=rounding)
        for rounding in (None, WHOLE.dtype)
    )
    check_forward(forward(inputs, kernel=kernel, scale=scale), exact, rounded, WHOLE.dtype)


def test_head_axes_change_nothing(kernel: str) -> None:
    case = WHOLE
    flat = forward(make(case), kernel=kernel)
    for got, wanted in zip(forward(make(replace(case, head_axis=True)), kernel=kernel), flat, strict=True):
        assert_same(got, wanted)


@BOTH
def test_repeats_are_bit_identical(kernel: str, case: SparseCase) -> None:
    arguments, named = uploaded(make(case))
    first = on_host(flat(mla_cupy.sparse_mla_forward)(*arguments, **named, kernel=kernel))
    for _ in range(20):
        again = on_host(flat(mla_cupy.sparse_mla_forward)(*arguments, **named, kernel=kernel))
        for got, wanted in zip(again, first, strict=True):
            assert_same(got, wanted)


def test_parts_merge_to_the_whole(gpu: DeviceInfo) -> None:
    """The float32 `out` and the `lse` of two halves of the slots go into `merge_states`."""
    import cupy

    inputs = make(replace(WHOLE, sink=False, lengths=False, s_q=20))
    q, kv, indices = (upload(x) for x in inputs.arguments)
    halves = [
        mla_cupy.sparse_mla_forward(q, kv, indices[:, part], out_dtype="float32", scale=576**-0.5)
        for part in (slice(0, 50), slice(50, 130))
    ]
    outs = cupy.stack([half[0] for half in halves])[:, None]
    lses = cupy.stack([half[1].T for half in halves])[:, None]
    out, lse = on_host(mla_cupy.merge_states(outs, lses, out_dtype="float32"))
    check_forward((out[0], lse[0].T, inputs.exact[2]), inputs.exact, inputs.rounded, "bfloat16")


# ---- Streams ---------------------------------------------------------------------------------------------------


def test_the_inputs_may_still_be_in_the_making(gpu: DeviceInfo) -> None:
    """The lists are made on the stream too: nothing is read before the stream's earlier work is done."""
    import cupy

    inputs = make(WHOLE)
    (q, kv, indices), named = uploaded(inputs)
    wanted = on_host(flat(mla_cupy.sparse_mla_forward)(q, kv, indices, **named))
    late = cupy.full_like(indices, -1)
    busy = cupy.ones((4096, 4096), cupy.float32)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        for _ in range(5):
            busy = busy @ busy * 1e-4
        late[...] = indices
        results = flat(mla_cupy.sparse_mla_forward)(q, kv, late, **named)
        stream.synchronize()
    for one, other in zip(on_host(results), wanted, strict=True):
        assert_same(one, other)


# ---- Values and host arrays ------------------------------------------------------------------------------------


def test_check_looks_at_the_values(gpu: DeviceInfo) -> None:
    inputs = make(SparseCase(invalid=0.0))
    indices = np.where((inputs.indices < 0) | (inputs.indices >= 300), -1, inputs.indices).astype(np.int32)
    good = replace(inputs, indices=indices.copy())
    run_and_check(good, check=True)
    indices[3, 5] = 300
    with (
        no_launch(),
        pytest.raises(ArgumentError, match=r"indices\[3, 5\]: got 300, expected -1, or a row of 0 to 299"),
    ):
        forward(replace(inputs, indices=indices), check=True)


@pytest.mark.parametrize("case", [WHOLE, replace(WHOLE, strides="odd", head_axis=True)], ids=["padded", "odd"])
def test_host_arrays_go_to_the_gpu_and_back(gpu: DeviceInfo, case: SparseCase) -> None:
    inputs = make(case)
    results = flat(mla_cupy.sparse_mla_forward)(*inputs.arguments, **inputs.options)
    assert all(isinstance(x, np.ndarray) for x in results)
    check_forward(results, inputs.exact, inputs.rounded, case.dtype)
    given = [np.full(x.shape, 7, x.dtype) for x in results]
    names = dict(zip(("out", "lse", "max_logits"), given, strict=True))
    again = flat(mla_cupy.sparse_mla_forward)(*inputs.arguments, **inputs.options, **names)
    for result, target, wanted in zip(again, given, results, strict=True):
        assert result is target
        assert_same(target, wanted)
