"""Results of dense decode in e4m3: memory of the caller, plans, and what is refused."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mla_cupy
from mla_cupy import ArgumentError, DTypeError, PlanError, ShapeError, dtypes
from mla_cupy.reference.fp8_results import quantise_results
from tests.support.calls import Array
from tests.support.flat import cascade_decode, flat, mla_decode, plan_decode
from tests.support.gpu import upload
from tests.support.sim_driver import simulated

CODES = "float8_e4m3fn"
KERNEL = "mla_attention_quantize_output"
SIZES: dict[str, Any] = {"max_b": 2, "s_q": 1, "h_q": 4, "max_pages": 2, "page_size": 8, "dtype": "bfloat16"}


@pytest.fixture
def _on_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")


def _call(**changes: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    arrays: dict[str, Array] = {
        "q": rng.standard_normal((2, 1, 4, 576)).astype(ml_dtypes.bfloat16),
        "kv_cache": rng.standard_normal((3, 8, 576)).astype(ml_dtypes.bfloat16),
        "block_table": np.array([[2, 0], [1, 1]], np.int32),
        "seqlens": np.array([11, 0], np.int32),
    }
    return {**arrays, **changes}


@pytest.mark.usefixtures("_on_numpy")
@pytest.mark.parametrize("dtype", [CODES, ml_dtypes.float8_e4m3fn, np.dtype(ml_dtypes.float8_e4m3fn)], ids=str)
def test_memory_of_the_caller(dtype: Any) -> None:
    out, whole = np.ones((2, 1, 4, 512), ml_dtypes.float8_e4m3fn), np.ones((4, 2, 1, 4), np.float32)
    scales = np.moveaxis(whole, 0, -1)
    results = mla_decode(**_call(), out_dtype=dtype, out=out, out_scales=scales)
    assert results[0] is out
    assert results[2] is scales
    codes, wanted = quantise_results(mla_decode(**_call())[0])
    np.testing.assert_array_equal(out.view(np.uint8), codes)
    np.testing.assert_array_equal(scales, wanted)


def test_only_codes_have_scales() -> None:
    with simulated(2) as target:
        assert len(mla_decode(**_call())) == 2
        assert len(mla_decode(**_call(), out_dtype="float32")) == 2
        assert KERNEL not in target.launched
        for _ in range(2):  # checked, then repeated
            out, _, scales = mla_decode(**_call(), out_dtype=CODES)
            assert target.launched[-1] == KERNEL
            assert not out[1].astype(np.float32).any()
            np.testing.assert_array_equal(scales[1], np.float32(1e-4) * np.float32(1 / 448))
        codes, _, scales = mla_decode(**_call(), out_dtype=CODES, scales="power_of_2")
        wanted, powers = quantise_results(mla_decode(**_call())[0], "power_of_2")
        np.testing.assert_array_equal(codes.view(np.uint8), wanted)
        np.testing.assert_array_equal(scales, powers)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [CODES, "uint8"])
def test_numpy_arrays_on_a_gpu(dtype: str, hopper: object) -> None:
    """CuPy has no e4m3: its bytes come back as the dtype that the caller wants."""
    exact, _ = mla_decode(**_call())
    given = np.zeros((2, 1, 4, 512), dtypes.numpy_dtype(dtype))
    for more in ({}, {"out": given}):
        out, _, scales = mla_decode(**_call(), **more, out_dtype=dtype)
        codes, wanted = quantise_results(exact)
        assert out.dtype.name == dtype
        np.testing.assert_array_equal(out.view(np.uint8), codes)
        np.testing.assert_array_equal(scales, wanted)
    assert out is given


@pytest.mark.gpu
def test_a_captured_call(hopper: object) -> None:
    """A replay reads the queries that are there by then."""
    import cupy

    sent = {name: upload(x) for name, x in _call().items()}
    out, scales = cupy.empty((2, 1, 4, 512), cupy.uint8), cupy.empty((2, 1, 4, 4), cupy.float32)
    plan = plan_decode(**SIZES, fp8_out=True)
    plan.update(sent["seqlens"])
    call = functools.partial(mla_decode, **sent, plan=plan, out=out, out_scales=scales, out_dtype="uint8")
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        call()
        stream.begin_capture()
        call()
        graph = stream.end_capture()
        sent["q"][...] = upload(_call()["q"][::-1].copy())
        graph.launch()
        stream.synchronize()
    codes, wanted = quantise_results(cupy.asnumpy(mla_decode(**sent)[0]))
    np.testing.assert_array_equal(cupy.asnumpy(out), codes)
    np.testing.assert_array_equal(cupy.asnumpy(scales), wanted)


def test_an_empty_batch() -> None:
    empty = {name: x[:0] for name, x in _call().items() if name != "kv_cache"}
    with simulated(2) as target:
        out, _, scales = mla_decode(**_call(**empty), out_dtype=CODES)
        assert (out.shape, scales.shape) == ((0, 1, 4, 512), (0, 1, 4, 4))
        assert target.launched == []


MISTAKES = (
    ({"out_dtype": "int32"}, DTypeError, "out_dtype: got int32, expected float32 or .*, or uint8 or float8_e4m3fn"),
    (
        {"out": np.ones((2, 1, 4, 512), np.uint8)},
        DTypeError,
        "out.dtype: got uint8, expected .*; pass out_dtype='uint8'",
    ),
    (
        {"out_dtype": CODES, "out": np.ones((2, 1, 4, 512), np.uint8)},
        DTypeError,
        "out.dtype: got uint8, expected float8_e4m3fn",
    ),
    ({"out_scales": np.ones((2, 1, 4, 4), np.float32)}, ArgumentError, "out_scales: got .*: out_dtype is not e4m3"),
    (
        {"out_dtype": CODES, "out_scales": np.ones((2, 1, 4, 2), np.float32)},
        ShapeError,
        r"out_scales.shape: got \(2, 1, 4, 2\), expected \(2, 1, 4, 4\)",
    ),
    (
        {"out_dtype": CODES, "w_uv": np.ones((4, 64, 512), ml_dtypes.bfloat16)},
        ShapeError,
        r"project.w_uv.shape\[1\]: got 64, expected a multiple of 128",
    ),
    ({"scales": "power_of_2"}, ArgumentError, "scales: got 'power_of_2', expected \"plain\" for results in 16 bits"),
    ({"out_dtype": CODES, "scales": "tensor"}, ArgumentError, "scales: got 'tensor', expected \"plain\" or"),
    ({"out_dtype": CODES, "cp_world": 2}, ArgumentError, "shard.world: got 2, expected 1 with results in e4m3"),
)


@pytest.mark.usefixtures("_on_numpy")
@pytest.mark.parametrize(("changes", "error", "match"), MISTAKES)
def test_mistakes(changes: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        mla_decode(**_call(**changes))


@pytest.mark.usefixtures("_on_numpy")
def test_operations_without_codes() -> None:
    with pytest.raises(DTypeError, match="out_dtype: got float8_e4m3fn, expected float32 or bfloat16"):
        cascade_decode(**_call(), groups=[], out_dtype=CODES)
    call = {"q": _call()["q"][0], "kv": _call()["kv_cache"][0], "indices": np.zeros((1, 3), np.int32), "scale": 0.1}
    with pytest.raises(DTypeError, match="out_dtype: got float8_e4m3fn, expected float32 or bfloat16"):
        flat(mla_cupy.sparse_mla_forward)(**call, out_dtype=CODES)


@pytest.mark.usefixtures("_on_numpy")
def test_a_plan_knows_of_codes() -> None:
    plan = plan_decode(**SIZES)
    plan.update(_call()["seqlens"])
    with pytest.raises(PlanError, match="plan: got fp8_out=False, expected fp8_out=True, as in the call"):
        mla_decode(**_call(), plan=plan, out_dtype=CODES)
    with pytest.raises(ShapeError, match="d_head: got 192, expected a multiple of 128"):
        plan_decode(**SIZES, fp8_out=True, d_head=192)
    with pytest.raises(ArgumentError, match="fp8_out: got 2"):
        plan_decode(**SIZES, fp8_out=2)


def test_the_workspace_holds_results_in_16_bits() -> None:
    with simulated(2):
        call, decode = _call(scale=1.0), mla_cupy.mla_decode
        plain, coded = (mla_cupy.workspace_bytes(decode, **call, out_dtype=x) for x in (None, CODES))
        assert coded - plain == 2 * 2 * 4 * 512
        plans = [plan_decode(**SIZES, fp8_out=x).workspace_bytes for x in (False, True)]
        assert plans[1] - plans[0] == 2 * 2 * 4 * 512
