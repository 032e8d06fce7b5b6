"""The public sparse forward through the NumPy backend: the oracle's answer, rounded once, where the caller wants it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import dtypes, reference
from tests.support.calls import assert_same
from tests.support.flat import flat
from tests.support.sparse_cases import CORNERS, SparseCase, SparseInputs, make

SMALL = SparseCase(h_q=4, topk=40, lengths=True, sink=True)


@pytest.fixture(autouse=True)
def _numpy_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")


def expected(inputs: SparseInputs, out_dtype: str | None = None, **options: Any) -> list[np.ndarray]:
    """The oracle's answer in the dtypes of the public call."""
    out, *logs = reference.sparse_mla_forward(*inputs.arguments, **{**inputs.options, **options})
    name = out_dtype or inputs.case.dtype
    return [dtypes.round_to(out, name).astype(dtypes.numpy_dtype(name)), *(x.astype(np.float32) for x in logs)]


def check(case: SparseCase, **options: Any) -> None:
    inputs = make(case)
    got = flat(mla_cupy.sparse_mla_forward)(*inputs.arguments, **{**inputs.options, **options})
    for one, other in zip(got, expected(inputs, **options), strict=True):
        assert_same(one, other)
    assert np.isfinite(got[0].astype(np.float32)).all()  # the poison of unselected rows did not leak


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("d_qk", [576, 512])
@pytest.mark.parametrize("out_dtype", [None, "float32"])
def test_equals_rounded_oracle(dtype: str, d_qk: int, out_dtype: str | None) -> None:
    check(SparseCase(h_q=4, topk=40, dtype=dtype, d_qk=d_qk), out_dtype=out_dtype)


@pytest.mark.parametrize(
    "options",
    [
        {"lse_base": "2"},
        {"empty_lse": math.inf},
        {"empty_lse": -1e30, "lse_base": "2"},
        {"scale": 0.01},
        {"scale": 1},
        {"scale": np.float32(0.125)},
        {"causal": True},
        {"attn_sink": None},
    ],
    ids=str,
)
def test_options_reach_the_oracle(options: dict[str, Any]) -> None:
    check(SMALL, **options)


@pytest.mark.parametrize("case", CORNERS, ids=lambda case: case.id)
def test_shapes(case: SparseCase) -> None:
    check(case)


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
def test_given_arrays_are_written_and_returned(out_dtype: str) -> None:
    inputs = make(SMALL)
    s_q, h_q, _ = inputs.q.shape
    whole = np.full((s_q + 1, h_q, 520), 7, dtypes.numpy_dtype(out_dtype))
    logs = np.full((2, s_q, 2 * h_q), 7, np.float32)
    given = {"out": whole[:s_q, :, :512], "lse": logs[0, :, ::2], "max_logits": logs[1, :, 1::2]}
    results = flat(mla_cupy.sparse_mla_forward)(*inputs.arguments, **inputs.options, **given)
    for result, target, wanted in zip(results, given.values(), expected(inputs, out_dtype), strict=True):
        assert result is target
        assert_same(target, wanted)
    assert (whole[s_q:] == 7).all()
    assert (whole[..., 512:] == 7).all()
    assert (logs[0, :, 1::2] == 7).all()
    assert (logs[1, :, ::2] == 7).all()


@pytest.mark.parametrize("name", ["out", "lse", "max_logits"])
def test_only_one_array_given(name: str) -> None:
    inputs = make(SMALL)
    wanted = dict(zip(("out", "lse", "max_logits"), expected(inputs), strict=True))
    target = np.empty_like(wanted[name])
    results = flat(mla_cupy.sparse_mla_forward)(*inputs.arguments, **inputs.options, **{name: target})
    assert results[list(wanted).index(name)] is target
    for result, one in zip(results, wanted.values(), strict=True):
        assert_same(result, one)


def test_check_passes_good_values() -> None:
    inputs = make(SparseCase(h_q=2, invalid=0.0))
    indices = np.where((inputs.indices < 0) | (inputs.indices >= 300), -1, inputs.indices)
    checked = flat(mla_cupy.sparse_mla_forward)(inputs.q, inputs.kv, indices, check=True, scale=inputs.scale)
    assert_same(checked[0], expected(inputs)[0])


def test_inputs_are_left_alone() -> None:
    inputs = make(SMALL)
    everything = [*inputs.arguments, *inputs.optional.values()]
    before = [x.tobytes() for x in everything]
    flat(mla_cupy.sparse_mla_forward)(*inputs.arguments, **inputs.options)
    assert [x.tobytes() for x in everything] == before


def test_parts_merge_to_the_whole() -> None:
    """The float32 `out` and the `lse` of two halves of the slots go into `merge_states`."""
    inputs = make(SparseCase(h_q=4, topk=60))
    halves = [
        mla_cupy.sparse_mla_forward(
            inputs.q, inputs.kv, inputs.indices[:, part], out_dtype="float32", scale=inputs.scale
        )
        for part in (slice(0, 25), slice(25, 60))
    ]
    outs = np.stack([half[0] for half in halves])[:, None]
    lses = np.stack([half[1].T for half in halves])[:, None]
    out, lse = mla_cupy.merge_states(outs, lses)
    np.testing.assert_allclose(out[0], inputs.exact[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(lse[0].T, inputs.exact[1], rtol=1e-5)
