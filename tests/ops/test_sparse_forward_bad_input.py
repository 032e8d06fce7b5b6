"""Every mistake in a call of the sparse forward: argument, got and expected, before anything has happened."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mla_cupy
from mla_cupy import ArgumentError, DeviceError, DTypeError, MlaError, ShapeError, UnsupportedDeviceError
from mla_cupy.launchers import sparse_forward_sequence
from tests.ops.conftest import Recorder
from tests.support.calls import no_launch
from tests.support.gpu import upload
from tests.support.mistakes import Bad, Call, Foreign, gapped, option, raises, shifted, swap

BF16 = np.dtype(ml_dtypes.bfloat16)
VECTORS = ("topk_length", "attn_sink", "cu_seqlens_q", "cu_seqlens_kv")


def good_call() -> Call:
    """Two sequences of 2 and 1 queries, 12 and 8 rows; every array is contiguous."""
    rng = np.random.default_rng(0)
    return {
        "q": rng.standard_normal((3, 4, 576), np.float32).astype(BF16),
        "kv": rng.standard_normal((20, 576), np.float32).astype(BF16),
        "indices": np.array([[0, 5, 11, -1, -1], [3, 3, 3, 2, 1], [7, -1, 0, 6, 5]], np.int32),
        "topk_length": np.array([4, 5, 5], np.int32),
        "attn_sink": np.array([0.5, -math.inf, math.inf, 0], np.float32),
        "cu_seqlens_q": np.array([0, 2, 3], np.int32),
        "cu_seqlens_kv": np.array([0, 12, 20], np.int32),
        "out": np.full((3, 4, 512), 7, BF16),
        "lse": np.full((3, 4), 7, np.float32),
        "max_logits": np.full((3, 4), 7, np.float32),
    }


def put(name: str, at: int | tuple[int, int], value: int, **options: Any) -> Any:
    """A hostile value, and the wish to have it found."""

    def change(call: Call) -> None:
        call.update(check=True, **options)
        call[name][at] = value

    return change


def causal_index(call: Call) -> None:
    """Query 0 of two sees 11 of 12 rows."""
    call.update(check=True, causal=True)


BAD = [
    # rank
    Bad("q 4-D", swap("q", lambda x: x[None]), ShapeError, ("q.shape", "(1, 3, 4, 576)", "(s_q, h_q, 576 or 512)")),
    Bad("q 2-D", swap("q", lambda x: x[0]), ShapeError, ("q.shape", "(4, 576)")),
    Bad("kv 1-D", swap("kv", lambda x: x[0]), ShapeError, ("kv.shape", "(576,)", "(s_kv, 576 or 512)")),
    Bad("kv 4-D", swap("kv", lambda x: x[None, None]), ShapeError, ("kv.shape", "(1, 1, 20, 576)")),
    Bad("indices 1-D", swap("indices", lambda x: x[0]), ShapeError, ("indices.shape", "(5,)", "(s_q, topk)")),
    Bad("topk_length 2-D", swap("topk_length", lambda x: x[None]), ShapeError, ("topk_length.shape", "(1, 3)", "(3,)")),
    Bad("sink 2-D", swap("attn_sink", lambda x: x[None]), ShapeError, ("attn_sink.shape", "(1, 4)", "(4,)")),
    Bad("cu_q 2-D", swap("cu_seqlens_q", lambda x: x[None]), ShapeError, ("cu_seqlens_q.shape", "(1, 3)", "(b + 1,)")),
    Bad("cu_kv 0-D", swap("cu_seqlens_kv", lambda x: np.array(0, np.int32)), ShapeError, ("cu_seqlens_kv.shape", "()")),
    # shape
    Bad("q 192", swap("q", lambda x: x[..., :192].copy()), ShapeError, ("q.shape[-1]", "192", "576 or 512")),
    Bad("q 512", swap("q", lambda x: x[..., :512].copy()), ShapeError, ("kv.shape[-1]", "576", "512, like q")),
    Bad("kv 512", swap("kv", lambda x: x[..., :512].copy()), ShapeError, ("kv.shape[-1]", "512", "576, like q")),
    Bad("no heads", swap("q", lambda x: x[:, :0]), ShapeError, ("q.shape[1]", "0", "at least 1")),
    Bad("kv heads", swap("kv", lambda x: x.reshape(10, 2, 576)), ShapeError, ("kv.shape[1]", "2", "1 head")),
    Bad(
        "indices heads",
        swap("indices", lambda x: np.stack([x, x], axis=1)),
        ShapeError,
        ("indices.shape[1]", "2", "1 head"),
    ),
    Bad("indices s_q", swap("indices", lambda x: x[:2]), ShapeError, ("indices.shape[0]", "2", "s_q=3")),
    Bad("topk_length s_q", swap("topk_length", lambda x: x[:2]), ShapeError, ("topk_length.shape", "(2,)", "(3,)")),
    Bad("sink h_q", swap("attn_sink", lambda x: x[:1]), ShapeError, ("attn_sink.shape", "(1,)", "(4,)")),
    Bad("cu_q empty", swap("cu_seqlens_q", lambda x: x[:0]), ShapeError, ("cu_seqlens_q.shape", "(0,)", "(b + 1,)")),
    Bad("cu_kv b", swap("cu_seqlens_kv", lambda x: x[:2]), ShapeError, ("cu_seqlens_kv.shape[0]", "2", "b + 1 = 3")),
    Bad("cu_q alone", lambda c: c.pop("cu_seqlens_kv"), ArgumentError, ("cu_seqlens_kv", "None", "both, or none")),
    Bad("cu_kv alone", lambda c: c.pop("cu_seqlens_q"), ArgumentError, ("cu_seqlens_q", "None", "both, or none")),
    Bad(
        "too many slots",
        swap("indices", lambda x: np.broadcast_to(x[:, :1], (3, 2**31))),
        ShapeError,
        ("topk", str(2**31), str(2**31 - 64)),
    ),
    Bad(
        "too many rows",
        swap("kv", lambda x: np.broadcast_to(x[:1], (2**31, 576))),
        ShapeError,
        ("kv.shape[0]", str(2**31), str(2**31 - 1)),
    ),
    Bad("out shape", swap("out", lambda x: x[..., :511]), ShapeError, ("out.shape", "(3, 4, 511)", "(3, 4, 512)")),
    Bad("out 576", swap("out", lambda x: np.full((3, 4, 576), 7, BF16)), ShapeError, ("out.shape", "576", "512")),
    Bad("lse shape", swap("lse", lambda x: x.T), ShapeError, ("lse.shape", "(4, 3)", "(3, 4)")),
    Bad("max shape", swap("max_logits", lambda x: x[:2]), ShapeError, ("max_logits.shape", "(2, 4)", "(3, 4)")),
    # dtype
    Bad("q fp32", swap("q", lambda x: x.astype(np.float32)), DTypeError, ("q.dtype", "float32", "bfloat16 or float16")),
    Bad("q words", swap("q", lambda x: x.view(np.uint16)), DTypeError, ("q.dtype", "uint16", "ml_dtypes.bfloat16")),
    Bad("kv fp16", swap("kv", lambda x: x.astype(np.float16)), DTypeError, ("kv.dtype", "float16", "bfloat16, like q")),
    *(
        Bad(f"{name} int64", swap(name, lambda x: x.astype(np.int64)), DTypeError, (f"{name}.dtype", "int64", "int32"))
        for name in ("indices", "topk_length", "cu_seqlens_q", "cu_seqlens_kv")
    ),
    Bad("indices uint32", swap("indices", lambda x: x.view(np.uint32)), DTypeError, ("indices.dtype", "uint32")),
    Bad("sink fp64", swap("attn_sink", lambda x: x.astype(float)), DTypeError, ("attn_sink.dtype", "float64")),
    Bad("sink bf16", swap("attn_sink", lambda x: x.astype(BF16)), DTypeError, ("attn_sink.dtype", "bfloat16")),
    Bad("out fp16", swap("out", lambda x: x.astype(np.float16)), DTypeError, ("out.dtype", "float16", "bfloat16")),
    Bad("lse fp64", swap("lse", lambda x: x.astype(float)), DTypeError, ("lse.dtype", "float64", "float32")),
    Bad("max bf16", swap("max_logits", lambda x: x.astype(BF16)), DTypeError, ("max_logits.dtype", "bfloat16")),
    Bad("out_dtype", option("out_dtype", "float16"), DTypeError, ("out_dtype", "float16", "bfloat16, like q")),
    Bad("out_dtype, out", option("out_dtype", "float32"), DTypeError, ("out.dtype", "bfloat16", "float32")),
    # stride
    Bad("q stride", swap("q", gapped), ShapeError, ("q.strides[-1]", "2", "1 element", "contiguous")),
    Bad("kv stride", swap("kv", gapped), ShapeError, ("kv.strides[-1]", "2", "1 element")),
    Bad("kv reversed", swap("kv", lambda x: x[..., ::-1]), ShapeError, ("kv.strides[-1]", "-1", "1 element")),
    Bad("out stride", swap("out", gapped), ShapeError, ("out.strides", "2)", "contiguous last axis")),
    Bad("out unaligned", swap("out", shifted), ShapeError, ("out.strides", "16 bytes")),
    Bad("out reversed", swap("out", lambda x: x[::-1]), ShapeError, ("out.strides", "16 bytes")),
    # libraries
    *(
        Bad(f"{name} None", swap(name, lambda x: None), DTypeError, (name, "an array"))
        for name in ("q", "kv", "indices")
    ),
    *(
        Bad(f"{name} list", swap(name, lambda x: [1.0]), DTypeError, (name, "a list", "an array"))
        for name in good_call()
    ),
    *(
        Bad(f"{name} foreign", swap(name, lambda x: Foreign()), DeviceError, (name, "dlpack on the GPU", "like q"))
        for name in good_call()
        if name != "q"
    ),
    # numbers
    Bad("d_v", option("d_v", 256), ArgumentError, ("d_v", "256", "512")),
    Bad("scale 0", option("scale", 0), ArgumentError, ("scale", "0", "finite number above 0")),
    Bad("scale nan", option("scale", math.nan), ArgumentError, ("scale", "nan", "finite")),
    Bad("scale inf", option("scale", math.inf), ArgumentError, ("scale", "inf", "finite")),
    Bad("scale tiny", option("scale", 1e-300), ArgumentError, ("scale", "1e-300", "float32")),
    Bad("scale array", option("scale", np.ones(2)), ArgumentError, ("scale", "array", "a finite number")),
    Bad("lse_base", option("lse_base", "10"), ArgumentError, ("lse_base", "'10'", '"e" or "2"')),
    Bad("empty_lse", option("empty_lse", "x"), MlaError, ("empty_lse", "'x'", "number")),
    Bad("variant", option("variant", "fastest"), ArgumentError, ("variant", "'fastest'", "dense_decode_generic")),
    # values
    Bad("check -2", put("indices", (2, 4), -2), ArgumentError, ("indices[2, 4]", "-2", "0 to 7")),
    Bad("check limit", put("indices", (0, 1), 12), ArgumentError, ("indices[0, 1]", "12", "-1, or a row of 0 to 11")),
    Bad("check causal", causal_index, ArgumentError, ("indices[0, 2]", "11", "-1, or a row of 0 to 10")),
    Bad("check length", put("topk_length", 1, 6), ArgumentError, ("topk_length[1]", "6", "topk = 5")),
    Bad("check length -1", put("topk_length", 2, -1), ArgumentError, ("topk_length[2]", "-1", "0 to")),
    Bad("check starts", put("cu_seqlens_q", 1, 4), ArgumentError, ("cu_seqlens_q[1]", "4", "starts of 0 to 3")),
    Bad("check order", put("cu_seqlens_kv", 2, 11), ArgumentError, ("cu_seqlens_kv[2]", "11", "ascending")),
    Bad("check end", put("cu_seqlens_kv", 2, 21), ArgumentError, ("cu_seqlens_kv[2]", "21", "0 to 20")),
    Bad("check outside", put("cu_seqlens_q", 2, 2), ArgumentError, ("indices[2, 0]", "7", "-1: the query sees no row")),
]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.id.replace(" ", "_"))
def test_refuses(bad: Bad, place: str) -> None:
    if place == "cupy" and bad.id.startswith("too many"):
        pytest.skip("uploading makes the broadcast real")
    raises(bad, mla_cupy.sparse_mla_forward, good_call(), place)


def test_every_argument_has_a_mistake() -> None:
    """A new argument of the call must come with the tests of its checks."""
    import inspect

    named = {word.split("[")[0].split(".")[0] for bad in BAD for word in bad.words}
    arguments = set(inspect.signature(mla_cupy.sparse_mla_forward).parameters)
    assert arguments - named == {"causal", "check", "stream"}


def test_the_call_that_the_mistakes_are_made_in_is_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    for result in mla_cupy.sparse_mla_forward(**good_call(), check=True):
        assert (result.astype(np.float32) != 7).all()


def test_the_same_call_is_launched_when_good(recorder: Recorder) -> None:
    mla_cupy.sparse_mla_forward(**good_call(), check=True)
    assert recorder.entries[0] == "sparse_rows"
    assert len(recorder.entries) > 2


def test_slots_that_do_not_count_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    call = good_call()
    call["indices"][0, 4] = 2**31 - 1  # topk_length is 4
    mla_cupy.sparse_mla_forward(**call, check=True)
    flat = {name: x for name, x in call.items() if name not in VECTORS}
    with pytest.raises(ArgumentError, match=r"indices\[0, 4\]: got 2147483647, expected -1, or a row of 0 to 19"):
        mla_cupy.sparse_mla_forward(**flat, check=True)
    mla_cupy.sparse_mla_forward(**flat)


@pytest.mark.parametrize("name", ["out", "lse", "max_logits"])
def test_read_only_results_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    call = good_call()
    call[name].flags.writeable = False
    with pytest.raises(ArgumentError, match=rf"{name}: got a read-only array, expected a writable one"):
        mla_cupy.sparse_mla_forward(**call)
    assert all((call[result].astype(np.float32) == 7).all() for result in ("out", "lse", "max_logits"))


def test_stream_of_an_unknown_kind(recorder: Recorder) -> None:
    with pytest.raises(ArgumentError, match=r"stream: got 'mine', expected a raw handle"):
        mla_cupy.sparse_mla_forward(**good_call(), stream="mine")
    assert recorder.launches == []


@pytest.mark.parametrize("variant", [name for name in sparse_forward_sequence.KERNELS if "generic" not in name])
def test_forced_kernel_that_does_not_fit(recorder: Recorder, variant: str) -> None:
    call = good_call()
    call["q"] = shifted(call["q"])
    with pytest.raises(UnsupportedDeviceError, match=f"{variant} needs q and kv to start at"):
        mla_cupy.sparse_mla_forward(**call, variant=variant)
    assert recorder.launches == []


@pytest.mark.gpu
def test_numpy_and_cupy_do_not_mix(gpu: object) -> None:
    for name in good_call():
        call = good_call()
        call[name] = upload(call[name])
        with no_launch(), pytest.raises(DeviceError, match=r"got an array of (cupy on the GPU|numpy on the CPU)"):
            mla_cupy.sparse_mla_forward(**call)
