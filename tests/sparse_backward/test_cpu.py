"""The public sparse backward through the NumPy backend: the oracle's answer, rounded once, where it is wanted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import dtypes, reference
from tests.support.calls import assert_same
from tests.support.flat import flat
from tests.support.sparse_cases import CORNERS, SparseCase, SparseInputs, make

SMALL = SparseCase(h_q=4, topk=40, lengths=True, sink=True, dlse=True)


@pytest.fixture(autouse=True)
def _numpy_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")


def expected(inputs: SparseInputs, dkv_dtype: str | None = None, **options: Any) -> list[np.ndarray | None]:
    """The oracle's answer in the dtypes of the public call."""
    dq, dkv, d_sink = reference.sparse_mla_backward(
        *inputs.backward_arguments, **{**inputs.backward_options, **options}
    )
    names = (inputs.case.dtype, dkv_dtype or inputs.case.dtype)
    rounded = [
        dtypes.round_to(x, name).astype(dtypes.numpy_dtype(name)) for x, name in zip((dq, dkv), names, strict=True)
    ]
    return [*rounded, None if d_sink is None else d_sink.astype(np.float32)]


def check(case: SparseCase, dkv_dtype: str | None = None, **options: Any) -> None:
    inputs = make(case)
    options = {**inputs.backward_options, **options}
    got = flat(mla_cupy.sparse_mla_backward)(*inputs.backward_arguments, **options, dkv_dtype=dkv_dtype)
    for one, other in zip(got, expected(inputs, dkv_dtype, **options), strict=True):
        if other is None:
            assert one is None
            continue
        assert_same(one, other)
        assert np.isfinite(one.astype(np.float32)).all()  # the poison of unselected rows did not leak


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("d_qk", [576, 512])
@pytest.mark.parametrize("dkv_dtype", [None, "float32"])
def test_equals_rounded_oracle(dtype: str, d_qk: int, dkv_dtype: str | None) -> None:
    check(SparseCase(h_q=4, topk=40, dtype=dtype, d_qk=d_qk), dkv_dtype)


@pytest.mark.parametrize(
    "options",
    [{"lse_base": "2"}, {"scale": 0.01}, {"scale": np.float32(0.125)}, {"causal": True}, {"attn_sink": None}],
    ids=str,
)
def test_options_reach_the_oracle(options: dict[str, Any]) -> None:
    check(SMALL, **options)


@pytest.mark.parametrize("case", CORNERS, ids=lambda case: case.id)
def test_shapes(case: SparseCase) -> None:
    check(case)


def test_gradients_of_a_small_loss() -> None:
    """The forward's own results go in; a step against the gradients lowers sum(out * dout)."""
    inputs = make(SparseCase(h_q=2, topk=20, sink=True, invalid=0.0, dtype="float16", strides="dense"))
    inputs.attn_sink[:] = 0.5
    inputs.kv[np.isnan(inputs.kv)] = 0

    def loss(q: Any, kv: Any, sink: Any) -> float:
        out = mla_cupy.sparse_mla_forward(
            q, kv, inputs.indices, attn_sink=sink, out_dtype="float32", scale=inputs.scale
        )[0]
        return float((out * inputs.dout.astype(np.float32)).sum())

    out, lse, _ = mla_cupy.sparse_mla_forward(
        *inputs.arguments, attn_sink=inputs.attn_sink, out_dtype="float32", scale=inputs.scale
    )
    arguments = (inputs.q, inputs.kv, out, inputs.dout, lse, inputs.indices)
    gradients = mla_cupy.sparse_mla_backward(
        *arguments, attn_sink=inputs.attn_sink, dkv_dtype="float32", scale=inputs.scale
    )
    point = [inputs.q, inputs.kv, inputs.attn_sink]
    here = loss(*point)
    for i, gradient in enumerate(gradients):
        wide = gradient.astype(np.float64)
        step = 1e-2 / np.sqrt((wide**2).sum())
        moved = [x if j != i else (x - step * wide).astype(x.dtype) for j, x in enumerate(point)]
        gain = float(((moved[i].astype(np.float64) - point[i].astype(np.float64)) * wide).sum())
        assert loss(*moved) - here == pytest.approx(gain, rel=0.05)
        assert gain < 0


@pytest.mark.parametrize("dkv_dtype", ["bfloat16", "float32"])
def test_given_arrays_are_written_and_returned(dkv_dtype: str) -> None:
    inputs = make(SMALL)
    s_q, h_q, _ = inputs.q.shape
    whole_dq = np.full((s_q + 1, h_q, 584), 7, inputs.q.dtype)
    whole_dkv = np.full((2 * 300, 579), 7, dtypes.numpy_dtype(dkv_dtype))
    dq, dkv = whole_dq[:s_q, :, :576], whole_dkv[::2, 1:577]
    sinks = np.full(h_q + 2, 7, np.float32)
    given = {"dq": dq, "dkv": dkv, "d_sink": sinks[1:-1]}
    results = flat(mla_cupy.sparse_mla_backward)(*inputs.backward_arguments, **inputs.backward_options, **given)
    assert all(result is target for result, target in zip(results, given.values(), strict=True))
    assert sinks[[0, -1]].tolist() == [7, 7]
    for result, wanted in zip(results, expected(inputs, dkv_dtype), strict=True):
        assert_same(result, wanted)
    assert (whole_dq[s_q:] == 7).all()
    assert (whole_dq[..., 576:] == 7).all()
    assert (whole_dkv[1::2] == 7).all()
    assert (whole_dkv[:, [0, 577, 578]] == 7).all()


@pytest.mark.parametrize("name", ["dq", "dkv", "d_sink"])
def test_only_one_array_given(name: str) -> None:
    inputs = make(SMALL)
    wanted = expected(inputs)
    i = ("dq", "dkv", "d_sink").index(name)
    target = np.empty_like(wanted[i])
    results = flat(mla_cupy.sparse_mla_backward)(
        *inputs.backward_arguments, **inputs.backward_options, **{name: target}
    )
    assert results[i] is target
    for result, one in zip(results, wanted, strict=True):
        assert_same(result, one)


def test_a_float32_out_is_taken_as_it_is() -> None:
    inputs = make(SMALL)
    out = inputs.exact[0].astype(np.float32)
    arguments = (inputs.q, inputs.kv, out, *inputs.backward_arguments[3:])
    got = flat(mla_cupy.sparse_mla_backward)(*arguments, **inputs.backward_options)
    exact = reference.sparse_mla_backward(*arguments, **inputs.backward_options)
    assert_same(got[0], dtypes.round_to(exact[0], "bfloat16").astype(inputs.q.dtype))
    assert_same(got[2], exact[2].astype(np.float32))


def test_the_oracle_is_deterministic_anyway() -> None:
    inputs = make(SMALL)
    got = flat(mla_cupy.sparse_mla_backward)(*inputs.backward_arguments, **inputs.backward_options, deterministic=True)
    for one, other in zip(got, expected(inputs), strict=True):
        assert_same(one, other)


def test_inputs_are_left_alone() -> None:
    inputs = make(SMALL)
    everything = [*inputs.backward_arguments, *inputs.optional.values()]
    before = [x.tobytes() for x in everything]
    flat(mla_cupy.sparse_mla_backward)(*inputs.backward_arguments, **inputs.backward_options)
    assert [x.tobytes() for x in everything] == before
