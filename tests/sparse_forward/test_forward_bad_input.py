"""Every mistake in a call of the sparse forward: argument, got and expected, before anything has happened."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import ArgumentError, DTypeError, MlaError, ShapeError, UnsupportedDeviceError
from mla_cupy.ops.sparse_forward import OPERATION
from tests.support.flat import flat
from tests.support.kernels import FORWARD_KERNELS, on_hopper
from tests.support.mistakes import Bad, Call, option, raises, shifted, swap
from tests.support.operations import mistakes
from tests.support.recorder import Recorder
from tests.support.sparse_mistakes import BF16, BOTH, WORKSPACE, arguments_without, shared_inputs

VECTORS = ("topk_length", "attn_sink", "cu_seqlens_q", "cu_seqlens_kv")


def good_call() -> Call:
    return {
        **shared_inputs(),
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
    *BOTH,
    # shape
    Bad("out shape", swap("out", lambda x: x[..., :511]), ShapeError, ("out.shape", "(3, 4, 511)", "(3, 4, 512)")),
    Bad("out 576", swap("out", lambda x: np.full((3, 4, 576), 7, BF16)), ShapeError, ("out.shape", "576", "512")),
    Bad("lse shape", swap("lse", lambda x: x.T), ShapeError, ("lse.shape", "(4, 3)", "(3, 4)")),
    # dtype
    Bad("out_dtype", option("out_dtype", "float16"), DTypeError, ("out_dtype", "float16", "bfloat16, like q")),
    Bad("out_dtype, out", option("out_dtype", "float32"), DTypeError, ("out.dtype", "bfloat16", "float32")),
    # stride
    # memory
    WORKSPACE,
    # numbers
    Bad("empty_lse", option("empty_lse", "x"), MlaError, ("empty_lse", "'x'", "number")),
    Bad("kv_scale", option("kv_scale", 2.0), ArgumentError, ("kv_scale", "2.0", "1 for 16-bit rows")),
    Bad("math", option("math", "fp8"), ArgumentError, ("math", "'fp8'", '"exact" for 16-bit rows', "cache_append")),
    Bad("kv_format", option("kv_format", "v32"), ArgumentError, ("kv_format", "'v32'", "None for 16-bit rows")),
    Bad("batch_invariant", option("batch_invariant", 2), ArgumentError, ("batch_invariant", "2", "True or False")),
    Bad("split_tokens", option("split_tokens", 100), ArgumentError, ("split_tokens", "100", "a multiple of 64")),
    Bad("kernel", option("kernel", "fastest"), ArgumentError, ("kernel", "'fastest'", "attention_generic")),
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
    raises(bad, flat(mla_cupy.sparse_mla_forward), good_call(), place)


def test_every_argument_has_a_mistake() -> None:
    """A new argument of the call must come with the tests of its checks."""
    assert arguments_without([*BAD, *mistakes(OPERATION)], flat(mla_cupy.sparse_mla_forward)) == {
        "causal",
        "relative",
        "stream",
    }


def test_the_call_that_the_mistakes_are_made_in_is_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    for result in flat(mla_cupy.sparse_mla_forward)(**good_call(), check=True):
        assert (result.astype(np.float32) != 7).all()


def test_the_same_call_is_launched_when_good(recorder: Recorder) -> None:
    flat(mla_cupy.sparse_mla_forward)(**good_call(), check=True)
    assert recorder.entries[0] == "attention_row_lists"
    assert len(recorder.entries) > 2


def test_slots_that_do_not_count_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    call = good_call()
    call["indices"][0, 4] = 2**31 - 1  # topk_length is 4
    flat(mla_cupy.sparse_mla_forward)(**call, check=True)
    plain = {name: x for name, x in call.items() if name not in VECTORS}
    with pytest.raises(ArgumentError, match=r"indices\[0, 4\]: got 2147483647, expected -1, or a row of 0 to 19"):
        flat(mla_cupy.sparse_mla_forward)(**plain, check=True)
    flat(mla_cupy.sparse_mla_forward)(**plain)


@pytest.mark.parametrize("kernel", on_hopper(FORWARD_KERNELS))
def test_forced_kernel_that_does_not_fit(recorder: Recorder, kernel: str) -> None:
    call = good_call()
    call["q"] = shifted(call["q"])
    with pytest.raises(UnsupportedDeviceError, match=f"{kernel} needs q and kv to start at"):
        flat(mla_cupy.sparse_mla_forward)(**call, kernel=kernel)
    assert recorder.launches == []
