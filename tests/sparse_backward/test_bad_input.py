"""Every mistake in a call of the sparse backward: argument, got and expected, before anything has happened."""

from __future__ import annotations

import numpy as np
import pytest

import mla_cupy
from mla_cupy import ArgumentError, DeviceError, DTypeError, ShapeError, UnsupportedDeviceError
from mla_cupy.launchers.sparse_backward_config import KERNELS
from tests.ops.conftest import Recorder
from tests.support.calls import no_launch
from tests.support.gpu import upload
from tests.support.mistakes import Bad, Call, gapped, option, raises, refuses_what_it_cannot_write, shifted, swap
from tests.support.sparse_mistakes import BF16, BOTH, arguments_without, of_libraries, shared_inputs


def good_call() -> Call:
    rng = np.random.default_rng(1)
    return {
        **shared_inputs(),
        "out": rng.standard_normal((3, 4, 512), np.float32).astype(BF16),
        "dout": rng.standard_normal((3, 4, 512), np.float32).astype(BF16),
        "lse": rng.standard_normal((3, 4), np.float32),
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
    *BOTH,
    *of_libraries(good_call(), ("q", "kv", "out", "dout", "lse", "indices")),
    # shape
    Bad("out 576", swap("out", lambda x: np.zeros((3, 4, 576), BF16)), ShapeError, ("out.shape", "576", "512")),
    Bad("out 2-D", swap("out", lambda x: x[0]), ShapeError, ("out.shape", "(4, 512)", "(3, 4, 512)")),
    Bad("dout h_q", swap("dout", lambda x: x[:, :3]), ShapeError, ("dout.shape", "(3, 3, 512)", "(3, 4, 512)")),
    Bad("dq shape", swap("dq", lambda x: x[..., :512]), ShapeError, ("dq.shape", "(3, 4, 512)", "(3, 4, 576)")),
    Bad("dkv shape", swap("dkv", lambda x: x[:19]), ShapeError, ("dkv.shape", "(19, 576)", "(20, 576)")),
    Bad("dkv 3-D", swap("dkv", lambda x: x[:, None]), ShapeError, ("dkv.shape", "(20, 1, 576)", "(20, 576)")),
    # dtype
    Bad("out fp16", swap("out", lambda x: x.astype(np.float16)), DTypeError, ("out.dtype", "float16", "or float32")),
    Bad("dout fp32", swap("dout", lambda x: x.astype(np.float32)), DTypeError, ("dout.dtype", "float32", "like q")),
    Bad("dq fp32", swap("dq", lambda x: x.astype(np.float32)), DTypeError, ("dq.dtype", "float32", "bfloat16")),
    Bad("dkv fp16", swap("dkv", lambda x: x.astype(np.float16)), DTypeError, ("dkv.dtype", "float16", "bfloat16")),
    Bad("dkv_dtype", option("dkv_dtype", "float16"), DTypeError, ("dkv_dtype", "float16", "bfloat16, like kv")),
    Bad("dkv_dtype, dkv", option("dkv_dtype", "float32"), DTypeError, ("dkv.dtype", "bfloat16", "float32")),
    # stride
    *(
        Bad(f"{name} stride", swap(name, gapped), ShapeError, (f"{name}.strides[-1]", "2", "1 element", "contiguous"))
        for name in ("out", "dout", "dkv")
    ),
    Bad("dout reversed", swap("dout", lambda x: x[..., ::-1]), ShapeError, ("dout.strides[-1]", "-1", "1 element")),
    Bad("dq stride", swap("dq", gapped), ShapeError, ("dq.strides", "2)", "contiguous last axis")),
    Bad("dq unaligned", swap("dq", shifted), ShapeError, ("dq.strides", "16 bytes")),
    Bad(
        "dkv overlaps",
        swap(
            "dkv",
            lambda x: np.lib.stride_tricks.as_strided(np.full(20 * 576, 7, BF16), (20, 576), (1000, 2)),
        ),
        ShapeError,
        ("dkv.strides[0]", "500", "at least 576"),
    ),
    # numbers
    Bad("variant", option("variant", "fastest"), ArgumentError, ("variant", "'fastest'", "sparse_backward_generic")),
    # values
    Bad("check limit", hostile_index, ArgumentError, ("indices[0, 1]", "12", "-1, or a row of 0 to 11")),
]
#: Found when a kernel is chosen, so not by the NumPy backend.
MANY = Bad("many", many_additions, ArgumentError, ("deterministic", "s_q * topk * 1 = 4294967296", "split the queries"))


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.id.replace(" ", "_"))
def test_refuses(bad: Bad, place: str) -> None:
    if place == "cupy" and (bad.id == "dkv overlaps" or bad.id.startswith("too many")):
        pytest.skip("uploading makes the rows real")
    raises(bad, mla_cupy.sparse_mla_backward, good_call(), place)


@pytest.mark.usefixtures("recorder")
def test_more_slots_than_can_be_counted() -> None:
    raises(MANY, mla_cupy.sparse_mla_backward, good_call(), "recorder")


def test_every_argument_has_a_mistake() -> None:
    """A new argument of the call must come with the tests of its checks."""
    assert arguments_without([*BAD, MANY], mla_cupy.sparse_mla_backward) == {
        "causal",
        "check",
        "stream",
    }


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


def test_results_that_cannot_be_written_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refuses_what_it_cannot_write(mla_cupy.sparse_mla_backward, good_call(), ("dq", "dkv"), monkeypatch)


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
