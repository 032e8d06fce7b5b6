"""Every mistake in a call of the sparse backward: argument, got and expected, before anything has happened."""

from __future__ import annotations

import inspect
import math

import ml_dtypes
import numpy as np
import pytest

import mla_cupy
from mla_cupy import ArgumentError, DeviceError, DTypeError, ShapeError, UnsupportedDeviceError
from mla_cupy.launchers.sparse_backward_config import KERNELS
from tests.ops.conftest import Recorder
from tests.support.calls import no_launch
from tests.support.gpu import upload
from tests.support.mistakes import Bad, Call, Foreign, gapped, option, raises, shifted, swap

BF16 = np.dtype(ml_dtypes.bfloat16)


def good_call() -> Call:
    """Two sequences of 2 and 1 queries, 12 and 8 rows; every array is contiguous."""
    rng = np.random.default_rng(0)
    return {
        "q": rng.standard_normal((3, 4, 576), np.float32).astype(BF16),
        "kv": rng.standard_normal((20, 576), np.float32).astype(BF16),
        "out": rng.standard_normal((3, 4, 512), np.float32).astype(BF16),
        "dout": rng.standard_normal((3, 4, 512), np.float32).astype(BF16),
        "lse": rng.standard_normal((3, 4), np.float32),
        "indices": np.array([[0, 5, 11, -1, -1], [3, 3, 3, 2, 1], [7, -1, 0, 6, 5]], np.int32),
        "topk_length": np.array([4, 5, 5], np.int32),
        "attn_sink": np.array([0.5, -math.inf, math.inf, 0], np.float32),
        "cu_seqlens_q": np.array([0, 2, 3], np.int32),
        "cu_seqlens_kv": np.array([0, 12, 20], np.int32),
        "dq": np.full((3, 4, 576), 7, BF16),
        "dkv": np.full((20, 576), 7, BF16),
    }


def hostile_index(call: Call) -> None:
    call.update(check=True)
    call["indices"][0, 1] = 12


def many_additions(call: Call) -> None:
    """65536 * 65536 slots, each of which adds once. Nothing of that size is allocated."""
    wide = {
        name: np.broadcast_to(call[name][:1], (65536, *call[name].shape[1:])) for name in ("q", "out", "dout", "lse")
    }
    call.update(wide, deterministic=True, indices=np.broadcast_to(call["indices"][:1, :1], (65536, 65536)))
    for name in ("topk_length", "cu_seqlens_q", "cu_seqlens_kv", "dq", "attn_sink"):
        call[name] = None


BAD = [
    # shape: what forward and backward share is tested with the forward
    Bad("q 4-D", swap("q", lambda x: x[None]), ShapeError, ("q.shape", "(1, 3, 4, 576)", "(s_q, h_q, 576 or 512)")),
    Bad("kv 512", swap("kv", lambda x: x[..., :512].copy()), ShapeError, ("kv.shape[-1]", "512", "576, like q")),
    Bad("indices s_q", swap("indices", lambda x: x[:2]), ShapeError, ("indices.shape[0]", "2", "s_q=3")),
    Bad("topk_length s_q", swap("topk_length", lambda x: x[:2]), ShapeError, ("topk_length.shape", "(2,)", "(3,)")),
    Bad("sink h_q", swap("attn_sink", lambda x: x[:1]), ShapeError, ("attn_sink.shape", "(1,)", "(4,)")),
    Bad("cu_kv b", swap("cu_seqlens_kv", lambda x: x[:2]), ShapeError, ("cu_seqlens_kv.shape[0]", "2", "b + 1 = 3")),
    Bad("cu_q alone", lambda c: c.pop("cu_seqlens_kv"), ArgumentError, ("cu_seqlens_kv", "None", "both, or none")),
    Bad("cu_kv alone", lambda c: c.pop("cu_seqlens_q"), ArgumentError, ("cu_seqlens_q", "None", "both, or none")),
    Bad("out 576", swap("out", lambda x: np.zeros((3, 4, 576), BF16)), ShapeError, ("out.shape", "576", "512")),
    Bad("out 2-D", swap("out", lambda x: x[0]), ShapeError, ("out.shape", "(4, 512)", "(3, 4, 512)")),
    Bad("dout h_q", swap("dout", lambda x: x[:, :3]), ShapeError, ("dout.shape", "(3, 3, 512)", "(3, 4, 512)")),
    Bad("lse shape", swap("lse", lambda x: x.T), ShapeError, ("lse.shape", "(4, 3)", "(3, 4)")),
    Bad("dq shape", swap("dq", lambda x: x[..., :512]), ShapeError, ("dq.shape", "(3, 4, 512)", "(3, 4, 576)")),
    Bad("dkv shape", swap("dkv", lambda x: x[:19]), ShapeError, ("dkv.shape", "(19, 576)", "(20, 576)")),
    Bad("dkv 3-D", swap("dkv", lambda x: x[:, None]), ShapeError, ("dkv.shape", "(20, 1, 576)", "(20, 576)")),
    # dtype
    Bad("q fp32", swap("q", lambda x: x.astype(np.float32)), DTypeError, ("q.dtype", "float32", "bfloat16 or float16")),
    Bad("kv fp16", swap("kv", lambda x: x.astype(np.float16)), DTypeError, ("kv.dtype", "float16", "bfloat16, like q")),
    Bad("indices int64", swap("indices", lambda x: x.astype(np.int64)), DTypeError, ("indices.dtype", "int64")),
    Bad("sink fp64", swap("attn_sink", lambda x: x.astype(float)), DTypeError, ("attn_sink.dtype", "float64")),
    Bad("out fp16", swap("out", lambda x: x.astype(np.float16)), DTypeError, ("out.dtype", "float16", "or float32")),
    Bad("dout fp32", swap("dout", lambda x: x.astype(np.float32)), DTypeError, ("dout.dtype", "float32", "like q")),
    Bad("lse fp64", swap("lse", lambda x: x.astype(float)), DTypeError, ("lse.dtype", "float64", "float32")),
    Bad("dq fp32", swap("dq", lambda x: x.astype(np.float32)), DTypeError, ("dq.dtype", "float32", "bfloat16")),
    Bad("dkv fp16", swap("dkv", lambda x: x.astype(np.float16)), DTypeError, ("dkv.dtype", "float16", "bfloat16")),
    Bad("dkv_dtype", option("dkv_dtype", "float16"), DTypeError, ("dkv_dtype", "float16", "bfloat16, like kv")),
    Bad("dkv_dtype, dkv", option("dkv_dtype", "float32"), DTypeError, ("dkv.dtype", "bfloat16", "float32")),
    # stride
    *(
        Bad(f"{name} stride", swap(name, gapped), ShapeError, (f"{name}.strides[-1]", "2", "1 element", "contiguous"))
        for name in ("q", "kv", "out", "dout", "dkv")
    ),
    Bad("dout reversed", swap("dout", lambda x: x[..., ::-1]), ShapeError, ("dout.strides[-1]", "-1", "1 element")),
    Bad("dq stride", swap("dq", gapped), ShapeError, ("dq.strides", "2)", "contiguous last axis")),
    Bad("dq unaligned", swap("dq", shifted), ShapeError, ("dq.strides", "16 bytes")),
    Bad(
        "dkv overlaps",
        swap("dkv", lambda x: np.lib.stride_tricks.as_strided(np.full(20 * 576, 7, BF16), (20, 576), (1000, 2))),
        ShapeError,
        ("dkv.strides[0]", "500", "at least 576"),
    ),
    # libraries
    *(
        Bad(f"{name} None", swap(name, lambda x: None), DTypeError, (name, "an array"))
        for name in ("q", "kv", "out", "dout", "lse", "indices")
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
    Bad("lse_base", option("lse_base", "10"), ArgumentError, ("lse_base", "'10'", '"e" or "2"')),
    Bad("variant", option("variant", "fastest"), ArgumentError, ("variant", "'fastest'", "sparse_backward_generic")),
    # values
    Bad("check limit", hostile_index, ArgumentError, ("indices[0, 1]", "12", "-1, or a row of 0 to 11")),
]
#: Found when a kernel is chosen, so not by the NumPy backend.
MANY = Bad("many", many_additions, ArgumentError, ("deterministic", "s_q * topk * 1 = 4294967296", "split the queries"))


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.id.replace(" ", "_"))
def test_refuses(bad: Bad, place: str) -> None:
    if place == "cupy" and bad.id == "dkv overlaps":
        pytest.skip("uploading makes the rows real")
    raises(bad, mla_cupy.sparse_mla_backward, good_call(), place)


@pytest.mark.usefixtures("recorder")
def test_more_slots_than_can_be_counted() -> None:
    raises(MANY, mla_cupy.sparse_mla_backward, good_call(), "recorder")


def test_every_argument_has_a_mistake() -> None:
    """A new argument of the call must come with the tests of its checks."""
    named = {word.split("[")[0].split(".")[0] for bad in [*BAD, MANY] for word in bad.words}
    arguments = set(inspect.signature(mla_cupy.sparse_mla_backward).parameters)
    assert arguments - named == {"causal", "check", "stream"}


def test_the_call_that_the_mistakes_are_made_in_is_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    for result in mla_cupy.sparse_mla_backward(**good_call(), check=True):
        assert (result.astype(np.float32) == 7).mean() < 0.01


def test_the_same_call_is_launched_when_good(recorder: Recorder) -> None:
    mla_cupy.sparse_mla_backward(**good_call(), check=True)
    assert recorder.entries[0] == "sparse_rows"
    assert recorder.entries[-1] == "sparse_sink"


@pytest.mark.parametrize("name", ["dq", "dkv"])
def test_read_only_results_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    call = good_call()
    call[name].flags.writeable = False
    with pytest.raises(ArgumentError, match=rf"{name}: got a read-only array, expected a writable one"):
        mla_cupy.sparse_mla_backward(**call)
    assert all((call[result].astype(np.float32) == 7).all() for result in ("dq", "dkv"))


def test_stream_of_an_unknown_kind(recorder: Recorder) -> None:
    with pytest.raises(ArgumentError, match=r"stream: got 'mine', expected a raw handle"):
        mla_cupy.sparse_mla_backward(**good_call(), stream="mine")
    assert recorder.launches == []


@pytest.mark.parametrize("name", ["q", "kv", "dout"])
@pytest.mark.parametrize("variant", [name for name in KERNELS if "generic" not in name])
def test_forced_kernel_that_does_not_fit(recorder: Recorder, variant: str, name: str) -> None:
    call = good_call()
    call[name] = shifted(call[name])
    with pytest.raises(UnsupportedDeviceError, match=f"{variant} (needs|is for) "):
        mla_cupy.sparse_mla_backward(**call, variant=variant)
    assert recorder.launches == []


@pytest.mark.gpu
def test_numpy_and_cupy_do_not_mix(gpu: object) -> None:
    for name in good_call():
        call = good_call()
        call[name] = upload(call[name])
        with no_launch(), pytest.raises(DeviceError, match=r"got an array of (cupy on the GPU|numpy on the CPU)"):
            mla_cupy.sparse_mla_backward(**call)
