"""Every mistake in a call of the sparse backward: argument, got and expected, before anything has happened."""

from __future__ import annotations

import numpy as np
import pytest

import mla_cupy
from mla_cupy import ArgumentError, DTypeError, ShapeError, UnsupportedDeviceError
from mla_cupy.ops.sparse_backward import OPERATION
from tests.support.flat import flat
from tests.support.kernels import BACKWARD_KERNELS
from tests.support.mistakes import Bad, Call, option, raises, shifted, swap
from tests.support.operations import mistakes
from tests.support.recorder import Recorder
from tests.support.sparse_mistakes import BF16, BOTH, WORKSPACE, arguments_without, shared_inputs


def good_call() -> Call:
    rng = np.random.default_rng(1)
    return {
        **shared_inputs(),
        "out": rng.standard_normal((3, 4, 512), np.float32).astype(BF16),
        "dout": rng.standard_normal((3, 4, 512), np.float32).astype(BF16),
        "lse": rng.standard_normal((3, 4), np.float32),
        "dq": np.full((3, 4, 576), 7, BF16),
        "dkv": np.full((20, 576), 7, BF16),
        "d_sink": np.full(4, 7, np.float32),
    }


def hostile_index(call: Call) -> None:
    call.update(check=True)
    call["indices"][0, 1] = 12


def many_additions(call: Call) -> None:
    """65536 * 65536 slots that add once each. Nothing of that size is allocated."""
    wide = {
        name: np.broadcast_to(call[name][:1], (65536, *call[name].shape[1:])) for name in ("q", "out", "dout", "lse")
    }
    call.update(wide, deterministic=True, indices=np.broadcast_to(call["indices"][:1, :1], (65536, 65536)))
    for name in ("topk_length", "cu_seqlens_q", "cu_seqlens_kv", "dq", "attn_sink", "d_sink"):
        call[name] = None


BAD = [
    *BOTH,
    # shape
    Bad("lse shape", swap("lse", lambda x: x.T), ShapeError, ("lse.shape[0]", "4", "s_q=3, as in q")),
    Bad("out 576", swap("out", lambda x: np.zeros((3, 4, 576), BF16)), ShapeError, ("out.shape", "576", "512")),
    Bad("out 2-D", swap("out", lambda x: x[0]), ShapeError, ("out.shape", "(4, 512)", "(s_q, h_q, 512)")),
    Bad("dq shape", swap("dq", lambda x: x[..., :512]), ShapeError, ("dq.shape", "(3, 4, 512)", "(3, 4, 576)")),
    Bad("dkv shape", swap("dkv", lambda x: x[:19]), ShapeError, ("dkv.shape", "(19, 576)", "(20, 576)")),
    Bad("dkv 3-D", swap("dkv", lambda x: x[:, None]), ShapeError, ("dkv.shape", "(20, 1, 576)", "(20, 576)")),
    # dtype
    Bad("dout fp32", swap("dout", lambda x: x.astype(np.float32)), DTypeError, ("dout.dtype", "float32", "like q")),
    Bad("dkv_dtype", option("dkv_dtype", "float16"), DTypeError, ("dkv_dtype", "float16", "bfloat16, like q")),
    Bad("dkv_dtype, dkv", option("dkv_dtype", "float32"), DTypeError, ("dkv.dtype", "bfloat16", "float32")),
    # stride
    Bad(
        "dkv overlaps",
        swap(
            "dkv",
            lambda x: np.lib.stride_tricks.as_strided(np.full(20 * 576, 7, BF16), (20, 576), (1000, 2)),
        ),
        ShapeError,
        ("dkv.strides", "(500, 1)", "do not overlap each other"),
    ),
    # memory
    WORKSPACE,
    # numbers
    Bad("kernel", option("kernel", "fastest"), ArgumentError, ("kernel", "'fastest'", "sparse_backward_generic")),
    # values
    Bad("check limit", hostile_index, ArgumentError, ("indices[0, 1]", "12", "-1, or a row of 0 to 11")),
]
#: Found when a kernel is chosen, so not by the NumPy backend.
MANY = Bad("many", many_additions, ArgumentError, ("deterministic", "s_q * topk * 1 = 4294967296", "split the queries"))


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.id.replace(" ", "_"))
def test_refuses(bad: Bad, place: str) -> None:
    if place == "cupy" and (bad.id == "dkv overlaps" or bad.id.startswith("too many")):
        pytest.skip("uploading makes the rows real")
    raises(bad, flat(mla_cupy.sparse_mla_backward), good_call(), place)


@pytest.mark.usefixtures("recorder")
def test_more_slots_than_can_be_counted() -> None:
    raises(MANY, flat(mla_cupy.sparse_mla_backward), good_call(), "recorder")


def test_every_argument_has_a_mistake() -> None:
    """A new argument of the call must come with the tests of its checks."""
    assert arguments_without([*BAD, MANY, *mistakes(OPERATION)], flat(mla_cupy.sparse_mla_backward)) == {
        "causal",
        "relative",
        "stream",
    }


def test_the_call_that_the_mistakes_are_made_in_is_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    for result in flat(mla_cupy.sparse_mla_backward)(**good_call(), check=True):
        assert (result.astype(np.float32) == 7).mean() < 0.01


def test_the_same_call_is_launched_when_good(recorder: Recorder) -> None:
    flat(mla_cupy.sparse_mla_backward)(**good_call(), check=True)
    assert recorder.entries[0] == "attention_row_lists"
    assert recorder.entries[-1] == "sparse_backward_sink"


@pytest.mark.parametrize("name", ["q", "kv", "dout"])
@pytest.mark.parametrize("kernel", [name for name in BACKWARD_KERNELS if "generic" not in name])
def test_forced_kernel_that_does_not_fit(recorder: Recorder, kernel: str, name: str) -> None:
    call = good_call()
    call[name] = shifted(call[name])
    with pytest.raises(UnsupportedDeviceError, match=f"{kernel} (needs|is for) "):
        flat(mla_cupy.sparse_mla_backward)(**call, kernel=kernel)
    assert recorder.launches == []
