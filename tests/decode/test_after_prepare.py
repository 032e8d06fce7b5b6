"""`plan_decode(after_prepare=True)` in the simulator, one launch after another: where roles wait, and results."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mla_cupy
import ptxsim
from tests.support.calls import Array
from tests.support.sim_driver import instead_of_waiting, simulated

SIZES: dict[str, Any] = {"max_b": 2, "s_q": 2, "h_q": 4, "max_pages": 3, "page_size": 64, "dtype": "bfloat16"}
OLD, NEW, NONE = (190, 70), (1, 2), (0, 0)
"""Lengths with tiles that hold no new token, with new tokens only, without any."""
MARK = 7


def call(kernel: str, early: bool, seqlens: tuple[int, int], instruction: str = "", **plan: Any) -> list[Array]:
    """The results of one call; its kernels may execute another instruction wherever they wait.

    If that ends threads, roles that have started wait forever for those that have not.
    """
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 2, 4, 576)).astype(ml_dtypes.bfloat16)
    cache = rng.standard_normal((7, 64, 576)).astype(ml_dtypes.bfloat16)
    table, lengths = np.array([[5, 0, 3], [2, 6, 1]], np.int32), np.array(seqlens, np.int32)
    w_uv = rng.standard_normal((4, 128, 512)).astype(ml_dtypes.bfloat16)
    width = plan.get("d_head") or 512
    results = [np.full((2, 2, 4, width), MARK, ml_dtypes.bfloat16), np.full((2, 4, 2), MARK, np.float32)]
    options: dict[str, Any] = {"project": mla_cupy.Project(w_uv)} if width == 128 else {}
    if plan.get("q_rope"):
        q, options["q_rope"] = q[..., :512], q[..., 512:]
    with simulated(3):
        made = mla_cupy.plan_decode(**SIZES, **plan, kernel=kernel, after_prepare=early)
        made.update(lengths)
        arrays = (q, cache, table, lengths)
        given = {"scale": 0.1, "causal": True, "plan": made, "out": results[0], "lse": results[1], **options}
        if instruction:
            started = instruction == "exit;" and early and any(seqlens)
            with instead_of_waiting(instruction), pytest.raises(ptxsim.DeadlockError) if started else nullcontext():
                mla_cupy.mla_decode(*arrays, **given)
        else:
            mla_cupy.mla_decode(*arrays, **given)
    return results


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seqlens", [OLD, NEW, NONE], ids=["old", "new", "none"])
@pytest.mark.parametrize(
    ("kernel", "plan"),
    [
        ("decode_sm90_small", {}),
        ("decode_sm90_small", {"d_head": 128}),
        ("decode_sm90_small", {"q_rope": True}),
        ("decode_sm90_small_cluster8", {}),
        ("decode_sm90_seesaw", {}),
        ("decode_sm90_small", {"batch_invariant": True, "split_tokens": 64}),
    ],
    ids=["small", "w_uv", "two arrays", "cluster", "seesaw", "pieces"],
)
def test_same_results(kernel: str, plan: dict[str, Any], seqlens: tuple[int, int]) -> None:
    wanted, got = (call(kernel, early, seqlens, **plan) for early in (False, True))
    assert all(a.tobytes() == b.tobytes() for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("kernel", ["decode_sm90_small", "decode_sm90_small_cluster8"])
@pytest.mark.parametrize("seqlens", [OLD, NONE], ids=["old", "none"])
def test_no_result_before_the_wait(kernel: str, early: bool, seqlens: tuple[int, int]) -> None:
    assert all((x == MARK).all() for x in call(kernel, early, seqlens, "exit;"))
    with pytest.raises(ptxsim.SimError, match="trap"):  # every launch waits, also without work
        call(kernel, early, seqlens, "trap;")


def test_a_flag() -> None:
    with pytest.raises(mla_cupy.ArgumentError, match="after_prepare: got 2, expected True or False"):
        mla_cupy.plan_decode(**SIZES, after_prepare=2)  # type: ignore[arg-type]
