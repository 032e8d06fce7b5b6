"""The public decode call through the NumPy backend: the oracle's answer, rounded once, where the caller wants it."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import UnsupportedDeviceError, dtypes
from mla_cupy.ops import backend
from mla_cupy.runtime import device
from tests.support.calls import assert_same, oracle, plan_of
from tests.support.cases import DecodeCase, make
from tests.support.flat import mla_decode

SMALL = DecodeCase(h_q=4, s_q=2, seqlens="ragged-90", page_size=16)


@pytest.fixture(autouse=True)
def _numpy_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")


def check(case: DecodeCase, **options: Any) -> None:
    inputs = make(case)
    options = {**case.options, **options}
    out, lse = mla_decode(*inputs.arguments, **options)
    expected = oracle(inputs, **options)
    assert_same(out, expected[0])
    assert_same(lse, expected[1])
    assert np.isfinite(out.astype(np.float32)).all()  # the pool's poison did not leak


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("out_dtype", [None, "float32"])
def test_equals_rounded_oracle(dtype: str, causal: bool, out_dtype: str | None) -> None:
    case = DecodeCase(h_q=4, s_q=2, seqlens="ragged-90", page_size=16, dtype=dtype)
    check(case, causal=causal, out_dtype=out_dtype)


@pytest.mark.parametrize(
    "options",
    [
        {"lse_base": "2"},
        {"empty_lse": math.inf},
        {"empty_lse": -1e30, "lse_base": "2"},
        {"scale": 0.01},
        {"scale": 1},
        {"scale": np.float32(0.125)},
    ],
    ids=str,
)
def test_options_reach_the_oracle(options: dict[str, Any]) -> None:
    check(SMALL, **options)


@pytest.mark.parametrize(
    "case",
    [
        DecodeCase(h_q=3, head_axis=False, seqlens=70),
        DecodeCase(h_q=2, strides="odd", page_size=24),
        DecodeCase(h_q=2, strides="dense"),
        DecodeCase(h_q=2, missing_pages=2, page_size=8, seqlens=60),
        DecodeCase(b=0, h_q=2, seqlens=0),
        DecodeCase(b=1, h_q=2, seqlens=0, spare_pages=0),  # a pool without pages
        DecodeCase(h_q=1, page_size=1, seqlens=9),
        DecodeCase(h_q=2, cp_world=4, cp_rank=3, s_q=3, seqlens="ragged-90"),
        DecodeCase(h_q=3, d_qk=512, s_q=2, seqlens="ragged-90"),
    ],
    ids=lambda case: case.id,
)
def test_shapes(case: DecodeCase) -> None:
    check(case)


def test_base_two_is_the_same_number() -> None:
    inputs = make(SMALL)
    natural = mla_decode(*inputs.arguments)[1]
    binary = mla_decode(*inputs.arguments, lse_base="2")[1]
    seen = np.isfinite(natural)
    assert seen.any()
    np.testing.assert_allclose(binary[seen] * math.log(2), natural[seen], rtol=1e-6)


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
def test_given_arrays_are_written_and_returned(out_dtype: str) -> None:
    inputs = make(SMALL)
    b, s_q, h_q = inputs.q.shape[:3]
    whole_out = np.full((b, s_q + 1, h_q, 520), 7, dtypes.numpy_dtype(out_dtype))
    whole_lse = np.full((b, 2 * h_q, s_q), 7, np.float32)
    out, lse = whole_out[:, :s_q, :, :512], whole_lse[:, ::2]
    results = mla_decode(*inputs.arguments, out=out, lse=lse)
    assert results[0] is out
    assert results[1] is lse
    expected = oracle(inputs, out_dtype)
    assert_same(out, expected[0])
    assert_same(lse, expected[1])
    assert (whole_out[:, s_q:] == 7).all()
    assert (whole_out[..., 512:] == 7).all()
    assert (whole_lse[:, 1::2] == 7).all()


def test_only_one_array_given() -> None:
    inputs = make(SMALL)
    expected = oracle(inputs)
    lse = np.empty(expected[1].shape, np.float32)
    out, same = mla_decode(*inputs.arguments, lse=lse)
    assert same is lse
    assert_same(out, expected[0])
    assert_same(lse, expected[1])


def test_check_passes_good_values() -> None:
    case = DecodeCase(h_q=2, seqlens="ragged-90")
    inputs = make(case)
    assert_same(mla_decode(*inputs.arguments, check=True)[0], oracle(inputs)[0])


def test_plan_of_the_backend() -> None:
    inputs = make(SMALL)
    plan = plan_of(inputs)
    assert plan.workspace_bytes == 0
    assert plan.device == -1
    assert "numpy" in repr(plan)
    plan.update(inputs.seqlens)
    assert_same(mla_decode(*inputs.arguments, plan=plan)[0], oracle(inputs)[0])
    few = [x[:2] if i != 1 else x for i, x in enumerate(inputs.arguments)]
    plan.update(few[3])
    assert_same(mla_decode(*few, plan=plan)[0], oracle(inputs)[0][:2])


def test_a_plan_is_for_one_rank() -> None:
    case = DecodeCase(h_q=2, seqlens="ragged-90", cp_world=2, cp_rank=1)
    inputs = make(case)
    plan = plan_of(inputs, cp_world=2, cp_rank=1)
    plan.update(inputs.seqlens)
    expected = oracle(inputs, **case.options)
    assert_same(mla_decode(*inputs.arguments, plan=plan, **case.options)[0], expected[0])
    with pytest.raises(mla_cupy.PlanError, match=r"shard=Shard\(2, 1\).*shard=Shard\(1, 0\)"):
        mla_decode(*inputs.arguments, plan=plan)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"cp_world": 0}, "shard.world: got 0"),
        ({"cp_world": 2.0}, "shard.world: got 2.0"),
        ({"cp_world": 2, "cp_rank": 2}, "shard.rank: got 2, expected an integer from 0 to 1"),
        ({"cp_rank": -1}, "shard.rank: got -1"),
    ],
    ids=str,
)
def test_bad_ranks(options: dict[str, Any], match: str) -> None:
    with pytest.raises(mla_cupy.ArgumentError, match=match):
        mla_decode(*make(SMALL).arguments, **options)
    with pytest.raises(mla_cupy.ArgumentError, match=match):
        plan_of(make(SMALL), **options)


def test_check_counts_the_tokens_of_all_ranks() -> None:
    case = DecodeCase(h_q=2, seqlens=(200, 90), b=2, cp_world=4, cp_rank=1, page_size=16)
    inputs = make(case)
    got = mla_decode(*inputs.arguments, check=True, **case.options)
    assert_same(got[0], oracle(inputs, **case.options)[0])
    capacity = inputs.block_table.shape[1] * 16 * 4 + 1
    inputs.seqlens[0] = capacity + 1
    with pytest.raises(
        mla_cupy.ArgumentError, match=rf"max_pages \* page_size \* shard.world \+ shard.rank = {capacity}"
    ):
        mla_decode(*inputs.arguments, check=True, **case.options)


def test_a_plan_is_for_keys_of_one_width() -> None:
    inputs = make(DecodeCase(h_q=2, seqlens=70, d_qk=512))
    plan = plan_of(inputs)
    plan.update(inputs.seqlens)
    assert_same(mla_decode(*inputs.arguments, plan=plan)[0], oracle(inputs)[0])
    wide = make(DecodeCase(h_q=2, seqlens=70))
    with pytest.raises(mla_cupy.PlanError, match=r"d_qk=512.*d_qk=576"):
        mla_decode(*wide.arguments, plan=plan)
    with pytest.raises(mla_cupy.ArgumentError, match=r"d_qk: got 500, expected 576, 512, 320 or 288"):
        plan_of(inputs, d_qk=500)


def test_inputs_are_left_alone() -> None:
    inputs = make(SMALL)
    before = [x.tobytes() for x in inputs.arguments]
    mla_decode(*inputs.arguments)
    assert [x.tobytes() for x in inputs.arguments] == before


# ---- Which backend ---------------------------------------------------------------------------------------------


def test_cuda_backend_without_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "cuda")
    monkeypatch.setattr(device, "gpu_count", lambda: 0)
    monkeypatch.setattr(backend, "_seen_gpu", False)
    inputs = make(SMALL)
    with pytest.raises(UnsupportedDeviceError, match="MLA_CUPY_BACKEND"):
        mla_decode(*inputs.arguments)
    with pytest.raises(UnsupportedDeviceError, match="MLA_CUPY_BACKEND"):
        plan_of(inputs)
    with pytest.raises(UnsupportedDeviceError, match="MLA_CUPY_BACKEND"):
        mla_cupy.merge_states(np.zeros((1, 1, 1, 1, 8), np.float32), np.zeros((1, 1, 1, 1), np.float32))


def test_a_gpu_that_is_seen_later_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "auto")
    monkeypatch.setattr(backend, "_seen_gpu", False)
    for count, used in ((0, False), (1, True)):
        monkeypatch.setattr(device, "gpu_count", lambda count=count: count)
        assert backend.use_gpu() is used


def test_unknown_backend_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "tpu")
    with pytest.raises(mla_cupy.ArgumentError, match=r"MLA_CUPY_BACKEND.*'tpu'.*auto, cuda, numpy"):
        mla_decode(*make(SMALL).arguments)


def test_missing_gpu_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "auto")
    monkeypatch.setattr(device, "gpu_count", lambda: 0)
    monkeypatch.setattr(backend, "_seen_gpu", False)
    backend._say_no_gpu.cache_clear()
    try:
        with caplog.at_level(logging.INFO, "mla_cupy"):
            for _ in range(2):
                check(DecodeCase(b=1, h_q=1, seqlens=3))
        assert [record.message for record in caplog.records if "NumPy backend" in record.message] == [
            "no GPU is visible: NumPy arrays are computed by the NumPy backend, in float64"
        ]
    finally:
        backend._say_no_gpu.cache_clear()


def test_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    if device.gpu_count():
        pytest.skip("there is a GPU")
    with pytest.raises(UnsupportedDeviceError, match="device 0"):
        plan_of(make(SMALL), device=0)
