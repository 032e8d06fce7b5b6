"""`mla_cupy.compat.flash_mla_fp8` against the oracle, with arrays of several libraries."""

from __future__ import annotations

import doctest
from typing import Any

import numpy as np
import pytest

from mla_cupy import ArgumentError, DTypeError, PlanError, ShapeError
from mla_cupy.compat import flash_mla_fp8
from mla_cupy.compat.flash_mla import flash_mla_with_kvcache
from mla_cupy.compat.flash_mla_fp8 import flash_mla_with_kvcache_fp8, get_mla_metadata_dense_fp8
from mla_cupy.compat.flash_mla_schedule import FlashMLASchedMeta
from tests.support import cases
from tests.support.tolerance import check

pytestmark = pytest.mark.usefixtures("_numpy_backend")


def inputs_of(queries: str = "float8_e4m3fn", **changes: Any) -> cases.DecodeInputs:
    """Three sequences, the second of them empty; the cache is contiguous, as all libraries want it."""
    sizes: dict[str, Any] = {"b": 3, "s_q": 2, "h_q": 4, "page_size": 16, "seqlens": (70, 0, 9), "strides": "dense"}
    sizes |= {"record": "fp8", "math": "fp8", "kv_scale": 0.25, "queries": queries}
    made = cases.make(cases.DecodeCase(**{**sizes, **changes}))
    return cases.DecodeInputs(made.case, made.q, np.ascontiguousarray(made.kv_cache), *made.arguments[2:])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("queries", ["float8_e4m3fn", "uint8", ""])
def test_dense_decode_in_fp8(library: Any, queries: str, causal: bool) -> None:
    """Two layers of one step; scales as vLLM gives them, and as numbers."""
    make, back = library
    inputs = inputs_of(queries, causal=causal, q_scale=0.5 if queries else 1.0)
    arguments = [make(x) for x in inputs.arguments]
    schedule, nothing = get_mla_metadata_dense_fp8(arguments[3], 8, 1)
    assert nothing is None
    numbers = {"descale_q": inputs.case.q_scale, "descale_k": inputs.case.kv_scale}
    for scales in (numbers, {name: make(np.array([value], np.float32)) for name, value in numbers.items()}):
        out, lse = map(back, flash_mla_with_kvcache_fp8(*arguments, 512, schedule, causal=causal, **scales))
        unseen = np.isneginf(inputs.exact[1])
        assert unseen.any()
        assert (lse[unseen] == np.inf).all()
        assert out.dtype.name == "bfloat16"
        check((out, np.where(unseen, -np.inf, lse)), inputs.exact, inputs.rounded, "bfloat16")
    assert schedule.have_initialized


@pytest.mark.parametrize("queries", ["float8_e4m3fn", "uint8", ""])
def test_scales_on_a_gpu_are_not_copied_to_the_host(queries: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read by the kernel; but for 16-bit queries, which have none. NumPy's pass for a GPU's here."""
    inputs = inputs_of(queries, q_scale=0.5 if queries else 1.0)
    copied: list[str] = []
    number = flash_mla_fp8._number
    monkeypatch.setattr(flash_mla_fp8, "_number", lambda name, value: copied.append(name) or number(name, value))
    monkeypatch.setattr(flash_mla_fp8, "_library_on_gpu", lambda name, value: None if value is None else np)
    scales = {"descale_q": np.array([inputs.case.q_scale], np.float32), "descale_k": np.full((1, 1), 0.25, np.float32)}
    out, lse = flash_mla_with_kvcache_fp8(*inputs.arguments, 512, FlashMLASchedMeta(), causal=True, **scales)
    check((out, np.where(np.isneginf(inputs.exact[1]), -np.inf, lse)), inputs.exact, inputs.rounded, "bfloat16")
    assert copied == ([] if queries else ["descale_q"])


def test_scales_are_1_by_default() -> None:
    inputs = inputs_of(kv_scale=1.0)
    out, _ = flash_mla_with_kvcache_fp8(*inputs.arguments, 512, FlashMLASchedMeta(), None, None, True)
    check((out, inputs.exact[1].astype(np.float32)), inputs.exact, inputs.rounded, "bfloat16")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"k_cache": np.zeros((9, 5, 1, 656), "u1")}, ShapeError, r"k_cache.shape\[-1\]: got 656, expected 576"),
        ({"k_cache": np.zeros((9, 5, 1, 576), "f2")}, DTypeError, "k_cache.dtype: got float16"),
        ({"descale_q": 0.0}, ArgumentError, "descale_q: got 0.0, expected a finite number above 0"),
        ({"descale_k": "1"}, ArgumentError, "descale_k: got '1'"),
        ({"descale_k": np.ones(2, "f4")}, ShapeError, r"descale_k.shape: got \(2,\), expected one element"),
        ({"descale_q": np.ones(1, "f2")}, DTypeError, "descale_q.dtype: got float16, expected float32"),
        ({"head_dim_v": 128}, ArgumentError, "head_dim_v: got 128, expected 512"),
        ({"tile_scheduler_metadata": np.zeros(3)}, PlanError, "tile_scheduler_metadata: got ndarray"),
        ({"block_table": None}, (ArgumentError, DTypeError), "block_table: got None"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_mistakes(change: dict[str, Any], error: type[Exception], message: str) -> None:
    names = ("q", "k_cache", "block_table", "cache_seqlens")
    given: dict[str, Any] = dict(zip(names, inputs_of().arguments, strict=True))
    given.update(head_dim_v=512, tile_scheduler_metadata=FlashMLASchedMeta())
    schedule = given["tile_scheduler_metadata"]
    with pytest.raises(error, match=message):
        flash_mla_with_kvcache_fp8(**{**given, **change})
    assert not schedule.have_initialized
    flash_mla_with_kvcache_fp8(**given)


def test_the_other_function_names_this_one() -> None:
    inputs = inputs_of()
    with pytest.raises(DTypeError, match=r"q.dtype: got float8_e4m3fn, .*call flash_mla_with_kvcache_fp8"):
        flash_mla_with_kvcache(*inputs.arguments, 512, FlashMLASchedMeta(), is_fp8_kvcache=True)


def test_docstrings() -> None:
    assert doctest.testmod(flash_mla_fp8).failed == 0
