"""Every mistake of a caller: the right exception, with argument, got and expected, before anything has happened."""

from __future__ import annotations

import math
import sys
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mla_cupy import ArgumentError, DeviceError, DTypeError, MlaError, PlanError, ShapeError, UnsupportedDeviceError
from tests.support.calls import no_launch
from tests.support.flat import mla_decode, plan_decode
from tests.support.gpu import upload
from tests.support.mistakes import (
    Bad,
    Call,
    HostForeign,
    option,
    raises,
    shifted,
    swap,
)
from tests.support.recorder import Recorder

BF16 = np.dtype(ml_dtypes.bfloat16)


def good_decode() -> Call:
    """Two sequences of 20 and 33 tokens; every array is contiguous."""
    rng = np.random.default_rng(0)
    return {
        "q": rng.standard_normal((2, 3, 4, 576), np.float32).astype(BF16),
        "kv_cache": rng.standard_normal((8, 16, 576), np.float32).astype(BF16),
        "block_table": np.arange(8, dtype=np.int32).reshape(2, 4),
        "seqlens": np.array([20, 33], np.int32),
        "out": np.full((2, 3, 4, 512), 7, BF16),
        "lse": np.full((2, 4, 3), 7, np.float32),
    }


DECODE = [
    # rank
    Bad(
        "q 3-D",
        swap("q", lambda x: x[0]),
        ShapeError,
        ("q.shape", "(3, 4, 576)", "(b, s_q, h_q, 576 or 512 or 320 or 288)"),
    ),
    Bad("kv 2-D", swap("kv_cache", lambda x: x[0]), ShapeError, ("kv_cache.shape", "(16, 576)", "page_size")),
    Bad("kv 5-D", swap("kv_cache", lambda x: x[None, None]), ShapeError, ("kv_cache.shape", "(1, 1, 8, 16, 576)")),
    Bad("table 1-D", swap("block_table", lambda x: x[0]), ShapeError, ("block_table.shape", "(4,)", "(b, max_pages)")),
    Bad("seqlens 2-D", swap("seqlens", lambda x: x[None]), ShapeError, ("seqlens.shape", "(1, 2)", "(b,)")),
    Bad("seqlens 0-D", swap("seqlens", lambda x: np.array(20, np.int32)), ShapeError, ("seqlens.shape", "()", "(b,)")),
    # shape
    Bad("q 512", swap("q", lambda x: x[..., :512].copy()), ShapeError, ("kv_cache.shape[-1]", "576", "d_qk=512")),
    Bad("kv 512", swap("kv_cache", lambda x: x[..., :512].copy()), ShapeError, ("kv_cache.shape[-1]", "512", "576")),
    Bad("q 192", swap("q", lambda x: x[..., :192].copy()), ShapeError, ("q.shape[-1]", "192", "576", "absorb")),
    Bad(
        "two KV heads",
        swap("kv_cache", lambda x: np.repeat(x[:, :, None], 2, axis=2)),
        ShapeError,
        ("kv_cache.shape", "(8, 16, 2, 576)", "(num_pages, page_size, 1, width)", "(num_pages, 1, page_size, width)"),
    ),
    Bad(
        "too many tokens",
        swap("block_table", lambda x: np.broadcast_to(x[:, :1], (2, 2**27))),
        ShapeError,
        ("max_pages * page_size", str(2**31), "2^31"),
    ),
    Bad("out shape", swap("out", lambda x: x[..., :511]), ShapeError, ("out.shape", "511)", "(2, 3, 4, 512)")),
    Bad("lse shape", swap("lse", lambda x: x.transpose(0, 2, 1)), ShapeError, ("lse.shape", "(2, 3, 4)", "(2, 4, 3)")),
    # dtype
    Bad("q fp32", swap("q", lambda x: x.astype(np.float32)), DTypeError, ("q.dtype", "float32", "bfloat16")),
    Bad("q words", swap("q", lambda x: x.view(np.uint16)), DTypeError, ("q.dtype", "uint16", "ml_dtypes.bfloat16")),
    Bad(
        "kv fp16",
        swap("kv_cache", lambda x: x.astype(np.float16)),
        DTypeError,
        ("kv_cache.dtype", "float16", "bfloat16, like q"),
    ),
    Bad("seqlens uint32", swap("seqlens", lambda x: x.astype(np.uint32)), DTypeError, ("seqlens.dtype", "uint32")),
    Bad("lse bf16", swap("lse", lambda x: x.astype(BF16)), DTypeError, ("lse.dtype", "bfloat16", "float32")),
    Bad("out_dtype", option("out_dtype", "float16"), DTypeError, ("out_dtype", "float16", "bfloat16, like q")),
    Bad("out_dtype 64", option("out_dtype", "float64"), DTypeError, ("out_dtype", "float64", "float32")),
    Bad("out_dtype, out", option("out_dtype", "float32"), DTypeError, ("out.dtype", "bfloat16", "float32")),
    # stride
    Bad(
        "out odd rows",
        swap("out", lambda x: np.full((2, 3, 4, 513), 7, BF16)[..., :512]),
        ShapeError,
        ("out.strides", "513", "16 bytes"),
    ),
    # libraries
    Bad("q number", swap("q", lambda x: 3), DTypeError, ("q", "an int", "an array")),
    Bad("out str", swap("out", lambda x: "out"), DTypeError, ("out", "a str", "an array")),
    Bad("kv foreign host", swap("kv_cache", lambda x: HostForeign()), DTypeError, ("kv_cache", "a HostForeign")),
    # numbers
    Bad("scale 0", option("scale", 0), ArgumentError, ("scale", "0", "finite number above 0")),
    Bad("scale -1", option("scale", -1.0), ArgumentError, ("scale", "-1.0", "above 0")),
    Bad("scale nan", option("scale", math.nan), ArgumentError, ("scale", "nan", "finite")),
    Bad("scale inf", option("scale", math.inf), ArgumentError, ("scale", "inf", "finite")),
    Bad("scale str", option("scale", "0.1"), ArgumentError, ("scale", "'0.1'", "a finite number")),
    Bad("scale tiny", option("scale", 1e-300), ArgumentError, ("scale", "1e-300", "float32")),
    Bad("scale huge", option("scale", 1e300), ArgumentError, ("scale", "1e+300", "float32")),
    Bad("scale huger", option("scale", 10**400), ArgumentError, ("scale", "float32")),
    Bad("scale array", option("scale", np.ones(2)), ArgumentError, ("scale", "array", "a finite number")),
    Bad("lse_base", option("lse_base", "10"), ArgumentError, ("lse_base", "'10'", '"e" or "2"')),
    Bad("lse_base 2", option("lse_base", 2), ArgumentError, ("lse_base", "2", '"e" or "2"')),
    Bad("empty_lse", option("empty_lse", "x"), MlaError, ("empty_lse", "'x'", "number")),
    Bad("empty_lse huge", option("empty_lse", 1e300), MlaError, ("empty_lse", "1e+300", "float32")),
    Bad("kernel", option("kernel", "fastest"), ArgumentError, ("kernel", "'fastest'", "attention_generic")),
    Bad("plan", option("plan", "a plan"), MlaError, ("plan", "'a plan'", "plan_decode")),
    Bad("stream", option("stream", "a stream"), ArgumentError, ("stream", "'a stream'", "a raw handle or a stream")),
    # values
    Bad(
        "check low", lambda c: (c.update(check=True), c["seqlens"].fill(-5)), ArgumentError, ("seqlens[0]", "-5", "64")
    ),
    Bad(
        "check high",
        lambda c: (c.update(check=True), c["seqlens"].__setitem__(1, 65)),
        ArgumentError,
        ("seqlens[1]", "65", "max_pages * page_size = 64"),
    ),
    Bad(
        "check page high",
        lambda c: (c.update(check=True), c["block_table"].__setitem__((1, 2), 8)),
        ArgumentError,
        ("block_table[1, 2]", "8", "0 to 7"),
    ),
    Bad(
        "check page low",
        lambda c: (c.update(check=True), c["block_table"].__setitem__((0, 1), -1)),
        ArgumentError,
        ("block_table[0, 1]", "-1", "0 to 7"),
    ),
]


@pytest.mark.parametrize("bad", DECODE, ids=lambda bad: bad.id.replace(" ", "_"))
def test_decode_refuses(bad: Bad, place: str) -> None:
    if place == "cupy" and bad.id == "too many tokens":
        pytest.skip("uploading makes the broadcast real")
    raises(bad, mla_decode, good_decode(), place)


@pytest.mark.parametrize("text", ["a", "abc"])
def test_strings_are_refused_for_their_dtype(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strings of three characters have 12 bytes, which nothing is aligned to: that is not what is wrong."""
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    table = np.full(good_decode()["block_table"].shape, text)
    with pytest.raises(DTypeError, match=r"^block_table\.dtype: got .*, expected int32"):
        mla_decode(**{**good_decode(), "block_table": table})


def test_a_size_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of two cache formats have 576 elements."""
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    with pytest.raises(ShapeError, match=r"^kv_cache\.shape: got \(2, 3\)") as caught:
        mla_decode(**{**good_decode(), "kv_cache": np.ones((2, 3), BF16)})
    assert str(caught.value).count("576") == 1


def test_the_call_that_the_mistakes_are_made_in_is_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    out, lse = mla_decode(**good_decode())
    assert (out.astype(np.float32) != 7).all()
    assert (lse != 7).all()


def test_the_same_call_is_launched_when_good(recorder: Recorder) -> None:
    mla_decode(**good_decode())
    assert recorder.entries == ["decode_sm90_small_cluster8"]


# ---- Plans -----------------------------------------------------------------------------------------------------

GOOD_PLAN: Call = {
    "max_b": 2, "s_q": 3, "h_q": 4, "max_pages": 4, "page_size": 16, "dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"s_q": 2}, ("plan", "s_q=2", "s_q=3")),
        ({"h_q": 8}, ("plan", "h_q=8", "h_q=4")),
        ({"dtype": "float16"}, ("plan", "float16", "bfloat16")),
        ({"max_pages": 3}, ("plan", "max_pages=3", "max_pages=4")),
        ({"max_pages": 5}, ("plan", "max_pages=5", "max_pages=4")),
        ({"page_size": 32}, ("plan", "page_size=32", "page_size=16")),
    ],
    ids=str,
)
def test_plan_of_another_shape(
    place: str, sizes: Call, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_decode(**{**GOOD_PLAN, **sizes})
    if place == "numpy":
        plan.update(good_decode()["seqlens"])
    else:
        plan._scheduled_b = 2  # as an update does, which would launch
    raises(Bad("", option("plan", plan), PlanError, words), mla_decode, good_decode(), place)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("q", shifted, ("address 0x", "2 bytes past a multiple of 16", "copy q")),
        ("kv_cache", shifted, ("address 0x", "2 bytes past", "copy kv_cache, or leave the plan out")),
        (
            "q",
            lambda x: np.pad(x, [(0, 0)] * 3 + [(0, 1)])[..., :576],
            ("strides[0] = 6924 elements of 2", "multiples of 16 bytes"),
        ),
        ("kv_cache", lambda x: x[::-1], ("strides[0] = -", "elements of 2 bytes")),
        ("kv_cache", lambda x: x[:0], ("kv_cache.shape[0]", "got 0", "at least 1 page")),
    ],
    ids=["q-address", "cache-address", "q-stride", "cache-stride", "no-pages"],
)
def test_plans_take_aligned_arrays(recorder: Recorder, name: str, change: Any, words: tuple[str, ...]) -> None:
    """The error names the array and what of it is wrong; a call without a plan takes it."""
    plan, call = plan_decode(**GOOD_PLAN), good_decode()
    plan._scheduled_b = 2
    mla_decode(**{**call, name: change(call[name])})
    raises(Bad("", swap(name, change), PlanError, words), partial(mla_decode, plan=plan), call, "recorder")


def test_plan_without_update(place: str) -> None:
    plan = plan_decode(**GOOD_PLAN)
    bad = Bad("", option("plan", plan), PlanError, ("plan", "no update yet", "b=2", "plan.update"))
    raises(bad, mla_decode, good_decode(), place)


def test_plan_updated_for_another_batch(place: str) -> None:
    plan = plan_decode(**GOOD_PLAN)
    plan._scheduled_b = 1
    bad = Bad("", option("plan", plan), PlanError, ("plan", "update for b=1", "b=2", "plan.update"))
    raises(bad, mla_decode, good_decode(), place)


UPDATE = [
    (np.zeros(3, np.int32), PlanError, ("seqlens.shape[0]", "3", "max_b=2", "larger plan")),
    (np.zeros((1, 2), np.int32), ShapeError, ("seqlens.shape", "(1, 2)", "(b,)")),
    (np.zeros(2, np.int16), DTypeError, ("seqlens.dtype", "int16", "int32 or int64")),
    ([1, 2], DTypeError, ("seqlens", "a list", "an array")),
]


@pytest.mark.parametrize(("seqlens", "error", "words"), UPDATE, ids=lambda x: getattr(x, "__name__", None))
def test_update_refuses(place: str, seqlens: Any, error: type[Exception], words: tuple[str, ...]) -> None:
    plan = plan_decode(**GOOD_PLAN)
    if place == "cupy" and isinstance(seqlens, np.ndarray):
        seqlens = upload(seqlens)
    with pytest.raises(error) as caught:
        plan.update(seqlens)
    for word in words:
        assert word in str(caught.value)
    assert plan._scheduled_b is None


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        *(({name: 0}, ArgumentError, (name, "0", "an integer from 1")) for name in GOOD_PLAN if name != "dtype"),
        *(({name: 1.5}, ArgumentError, (name, "1.5", "an integer")) for name in GOOD_PLAN if name != "dtype"),
        ({"max_pages": 2**27}, ArgumentError, ("max_pages * page_size", "2^31")),
        ({"dtype": "float32"}, DTypeError, ("dtype", "float32", "bfloat16")),
        ({"dtype": np.float64}, DTypeError, ("dtype", "float64", "bfloat16")),
        ({"dtype": None}, DTypeError, ("dtype", "None", "bfloat16")),
        ({"kernel": "fastest"}, ArgumentError, ("kernel", "'fastest'", "attention_generic")),
    ],
    ids=str,
)
def test_plan_refuses(place: str, changes: Call, error: type[Exception], words: tuple[str, ...]) -> None:
    with pytest.raises(error) as caught:
        plan_decode(**{**GOOD_PLAN, **changes})
    assert isinstance(caught.value, MlaError)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("dtype", ["bfloat16", BF16, ml_dtypes.bfloat16, np.float16, np.dtype(np.float16)], ids=str)
def test_plan_takes_a_dtype_in_any_form(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    plan = plan_decode(**{**GOOD_PLAN, "dtype": dtype})
    assert plan._problem.dtype == ("bfloat16" if "bfloat16" in str(dtype) else "float16")


def test_workspace_of_the_caller(recorder: Recorder) -> None:
    nbytes = plan_decode(**GOOD_PLAN).workspace_bytes
    whole = np.zeros(nbytes + 512, np.uint8)
    aligned = whole[-whole.ctypes.data % 256 :][:nbytes]
    plan = plan_decode(**GOOD_PLAN, workspace=aligned)
    assert plan.address == aligned.ctypes.data
    for workspace, word in (
        (aligned[:-1], f"at least {nbytes}"),
        (whole[(-whole.ctypes.data) % 256 + 128 :][:nbytes], "multiple of 256"),
        (aligned.view(np.int8), "uint8"),
        (np.zeros((2, nbytes), np.uint8), "contiguous vector"),
        (np.zeros(2 * nbytes, np.uint8)[::2], "contiguous vector"),
    ):
        with pytest.raises(PlanError, match="workspace") as caught:
            plan_decode(**GOOD_PLAN, workspace=workspace)
        assert word in str(caught.value)


@pytest.mark.gpu
def test_host_memory_is_no_workspace(gpu: object) -> None:
    with pytest.raises(PlanError, match=r"workspace.*numpy.*GPU"):
        plan_decode(**GOOD_PLAN, workspace=np.zeros(1 << 24, np.uint8))


def test_forced_kernel_that_does_not_fit(recorder: Recorder) -> None:
    call = good_decode()
    call["q"] = shifted(call["q"])
    with pytest.raises(UnsupportedDeviceError, match="decode_sm90_seesaw needs q and kv_cache to start at"):
        mla_decode(**call, kernel="decode_sm90_seesaw")
    assert recorder.launches == []


# ---- Mixed libraries -------------------------------------------------------------------------------------------


def test_torch_on_the_cpu_and_numpy_do_not_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    call = good_decode()
    call["seqlens"] = torch.from_numpy(call["seqlens"])
    with pytest.raises(DeviceError, match="seqlens: got an array of torch on the CPU, expected an array of numpy"):
        mla_decode(**call)


@pytest.mark.gpu
def test_numpy_and_cupy_do_not_mix(gpu: object) -> None:
    call = good_decode()
    call["kv_cache"] = upload(call["kv_cache"])
    with no_launch(), pytest.raises(DeviceError, match=r"kv_cache: got an array of cupy on the GPU, expected.*numpy"):
        mla_decode(**call)


def test_a_library_is_not_imported_to_refuse_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    loaded = {name for name in ("torch", "jax") if name in sys.modules}
    bad = Bad("q list", swap("q", lambda x: [[1.0]]), DTypeError, ("q", "a list", "NumPy, CuPy, PyTorch, JAX"))
    raises(bad, mla_decode, good_decode(), "numpy")
    assert {name for name in ("torch", "jax") if name in sys.modules} == loaded
