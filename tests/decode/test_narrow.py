"""Dense decode with keys of 320 and 288 columns, whose first 256 are the values: the plain kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mla_cupy
from mla_cupy import ArgumentError, ShapeError, UnsupportedDeviceError, reference
from tests.support.calls import plan_of
from tests.support.cases import DecodeCase, make
from tests.support.gpu import run_and_check
from tests.support.kernels import DECODE_KERNELS
from tests.support.mutants import CAUGHT, Mutant, Plant
from tests.support.recorder import Recorder
from tests.support.sim_driver import simulated
from tests.support.tolerance import check

GENERIC = "attention_generic"
CASES = (
    DecodeCase(b=3, seqlens=(70, 0, 5), s_q=2, h_q=6, d_qk=320, page_size=16, missing_pages=1),
    DecodeCase(b=2, seqlens=(66, 131), s_q=3, h_q=4, h_kv=2, d_qk=288, dtype="float16", strides="odd"),
    DecodeCase(b=1, seqlens=400, h_q=3, d_qk=320, dtype="float16"),  # split
    DecodeCase(b=2, seqlens=(300, 40), h_q=9, d_qk=288, page_size=24, cp_world=2, cp_rank=1),
)
SPLIT = CASES[2]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_equals_the_oracle(case: DecodeCase) -> None:
    """Results in 16 bits; those behind them, where wider ones would be, stay as they are."""
    inputs = make(case)
    whole = np.full((case.b, case.s_q, case.h_q, 520), 7, inputs.q.dtype)
    with simulated(3, mode=("early", "late")[case.b % 2], seed=3) as target:
        out, lse = mla_cupy.mla_decode(*inputs.arguments, **case.options, out=whole[..., :256])
    assert f"mla_{GENERIC}" in target.launched
    check((out, lse), inputs.exact, inputs.rounded, case.dtype)
    assert (whole[..., 256:] == 7).all()


@pytest.mark.parametrize("d_qk", [320, 288])
def test_with_a_sink_and_a_plan(d_qk: int) -> None:
    case = replace(SPLIT, d_qk=d_qk)
    inputs, sink = make(case), np.array([0.5, -np.inf, 3.0], np.float32)
    with simulated(3):
        plan = plan_of(inputs, attn_sink=True, device=0)
        plan.update(inputs.seqlens)
        got = mla_cupy.mla_decode(*inputs.arguments, **case.options, attn_sink=sink, plan=plan, out_dtype="float32")
    exact = reference.mla_decode(*inputs.arguments, **case.options, attn_sink=sink)
    for mine, wanted in zip(got, exact, strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=2e-5, atol=2e-5)


def test_a_tree() -> None:
    case = DecodeCase(b=2, seqlens=(70, 3), s_q=3, h_q=2, d_qk=320)
    inputs, tree = make(case), np.array([[1, 3, 5], [1, 3, 7]], np.uint64)
    with simulated(2):
        got = mla_cupy.mla_decode(*inputs.arguments, d_v=256, tree_mask=tree, out_dtype="float32")
    exact = reference.mla_decode(*inputs.arguments, d_v=256, tree_mask=tree)
    for mine, wanted in zip(got, exact, strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=2e-5, atol=2e-5)


def test_the_oracle_is_attention_to_the_first_columns() -> None:
    """The oracle of 576 columns, of keys that have zeros between the latent and RoPE."""
    inputs = make(CASES[0])
    spread = [
        np.concatenate([x[..., :256], np.zeros_like(x[..., :256]), x[..., 256:]], -1) for x in inputs.arguments[:2]
    ]
    expected = reference.mla_decode(*spread, *inputs.arguments[2:], scale=320**-0.5)
    np.testing.assert_allclose(inputs.exact[0], expected[0][..., :256], rtol=1e-12)
    np.testing.assert_allclose(inputs.exact[1], expected[1], rtol=1e-12)


def call(**changes: Any) -> dict[str, Any]:
    inputs = make(DecodeCase(b=2, seqlens=(5, 3), h_q=4, d_qk=320))
    names = ("q", "kv_cache", "block_table", "seqlens")
    return {**dict(zip(names, inputs.arguments, strict=True)), "d_v": 256, **changes}


BAD: tuple[tuple[str, Callable[[], Any], type[Exception], str], ...] = (
    ("wide values", lambda: call(d_v=512), ArgumentError, "d_v: got 512, expected 256.*d_qk = 320"),
    ("other keys", lambda: call(kv_cache=np.zeros((4, 8, 1, 288), ml_dtypes.bfloat16)), ShapeError, "d_qk=320"),
    ("w_uv", lambda: call(w_uv=np.zeros((4, 64, 512), ml_dtypes.bfloat16)), ArgumentError, "w_uv.*d_v=256"),
    ("q_rope", lambda: call(q_rope=np.zeros((2, 1, 4, 64), ml_dtypes.bfloat16)), ShapeError, "512 with q_rope"),
    ("out", lambda: call(out=np.zeros((2, 1, 4, 512), ml_dtypes.bfloat16)), ShapeError, "out.shape.*256"),
    ("window", lambda: call(window=3), UnsupportedDeviceError, "takes no window"),
    ("FP8", lambda: call(kv_cache=np.zeros((4, 8, 656), np.uint8)), ShapeError, "576 for v32"),
)  # fmt: skip


@pytest.mark.parametrize(("make_call", "error", "match"), [bad[1:] for bad in BAD], ids=[bad[0] for bad in BAD])
def test_refuses(make_call: Callable[[], Any], error: type[Exception], match: str, recorder: Recorder) -> None:
    with pytest.raises(error, match=match):
        mla_cupy.mla_decode(**make_call())
    assert recorder.launches == []


@pytest.mark.parametrize("kernel", [name for name in DECODE_KERNELS if name != GENERIC])
def test_other_kernels_say_why_not(kernel: str, recorder: Recorder) -> None:
    with pytest.raises(UnsupportedDeviceError, match="takes no values of 256 columns"):
        mla_cupy.mla_decode(**call(kernel=kernel))
    assert recorder.launches == []


@pytest.mark.parametrize("changes", [{"batch_invariant": True}, {"d_head": 64}], ids=str)
def test_plans_say_why_not(changes: dict[str, Any]) -> None:
    sizes = {"max_b": 2, "s_q": 1, "h_q": 4, "max_pages": 4, "page_size": 16, "dtype": "bfloat16"}
    with pytest.raises(ArgumentError, match="none with d_qk=288"):
        mla_cupy.plan_decode(**sizes, d_qk=288, **changes)


MUTANTS = (
    (SPLIT, Mutant("merges into columns that are not there", "attention/merge_partials.cuh",
                   "if (kColumns < kHeadDimV && 4 * vector >= kColumns) continue;", "")),
    (CASES[0], Mutant("all threads have columns", "attention/generic_rows.cuh",
                      "if (threadIdx.x >= kColumnThreads) return;", "")),
)  # fmt: skip


@pytest.mark.parametrize(("case", "mutant"), MUTANTS, ids=[mutant.id for _, mutant in MUTANTS])
def test_planted_bugs_show(case: DecodeCase, mutant: Mutant, plant: Plant) -> None:
    plant(mutant)
    with pytest.raises(CAUGHT):
        test_equals_the_oracle(case)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [*CASES, DecodeCase(b=40, h_q=32, d_qk=320), DecodeCase(b=5, h_q=40, d_qk=288)], ids=str
)
def test_on_a_gpu(case: DecodeCase, gpu: object) -> None:
    run_and_check(case, kernel=GENERIC)
