"""Dense decode with keys of 320 and 288 columns, whose first 256 are the values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mla_cupy import ArgumentError, ShapeError, UnsupportedDeviceError, reference
from mla_cupy.kernels.decode import DECODE
from mla_cupy.kernels.decode.problem import DecodeProblem
from mla_cupy.kernels.spec import HOPPER
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.simulation import fake_gpu
from tests.decode.test_small_mutants import alike_where_finite
from tests.support.calls import plan_of
from tests.support.cases import DecodeCase, make
from tests.support.flat import mla_decode, plan_decode
from tests.support.gpu import run_and_check
from tests.support.kernels import DECODE_KERNELS, NARROW_KERNELS
from tests.support.mutant_suite import mutant_suite
from tests.support.mutants import Mutant
from tests.support.recorder import Recorder
from tests.support.sim_driver import simulated
from tests.support.tolerance import check

GENERIC = "attention_generic"
CASES = (
    DecodeCase(b=3, seqlens=(70, 0, 5), s_q=2, h_q=6, d_qk=320, page_size=16, missing_pages=1),
    DecodeCase(b=2, seqlens=(66, 131), s_q=3, h_q=4, d_qk=288, dtype="float16", strides="odd"),
    DecodeCase(b=1, seqlens=400, h_q=3, d_qk=320, dtype="float16"),  # split
    DecodeCase(b=2, seqlens=(300, 40), h_q=9, d_qk=288, page_size=24, cp_world=2, cp_rank=1),
)
SPLIT = CASES[2]
SM90, MMA = "decode_sm90_small", "attention_mma_small"
#: Compute capability of a GPU that has the kernel.
GPUS = {GENERIC: (9, 0), SM90: (9, 0), MMA: (8, 9)}
#: Blocks of 32 rows and of 64 on Hopper, with rows past the last one; several row blocks; heads that share keys; tiles
#: that are one more than the ring has stages.
FAST_CASES = (
    DecodeCase(b=3, seqlens=(70, 0, 5), s_q=2, h_q=6, d_qk=320, page_size=16, missing_pages=1),
    DecodeCase(b=2, seqlens=(66, 131), s_q=3, h_q=8, d_qk=288, dtype="float16", head_axis=True),
    DecodeCase(b=1, seqlens=330, h_q=40, d_qk=288),
    DecodeCase(b=2, seqlens=(200, 40), s_q=2, h_q=40, d_qk=320, dtype="float16", page_size=8, causal=False),
    DecodeCase(b=2, seqlens=(300, 40), h_q=9, d_qk=288, page_size=24, cp_world=2, cp_rank=1),
)
IN_A_RUN = [
    (GENERIC, CASES[0], "early"),
    (GENERIC, CASES[1], "late"),
    (GENERIC, CASES[2], "early"),
    (GENERIC, CASES[3], "late"),
    (SM90, FAST_CASES[0], "late"),
    (SM90, FAST_CASES[1], "random"),
    (SM90, FAST_CASES[2], "early"),
    (SM90, FAST_CASES[4], "random"),
    (MMA, FAST_CASES[0], "random"),
    (MMA, FAST_CASES[1], "late"),
    (MMA, FAST_CASES[4], "early"),
]


def test_every_kernel_is_tested_here() -> None:
    assert set(GPUS) == NARROW_KERNELS.keys()


def run(kernel: str, case: DecodeCase, mode: str, sm_count: int = 2) -> None:
    """Results in 16 bits; those behind them, where wider ones would be, stay as they are."""
    inputs = make(case)
    whole = np.full((case.b, case.s_q, case.h_q, 520), 7, inputs.q.dtype)
    with simulated(sm_count, GPUS[kernel], mode, 3) as target:
        out, lse = mla_decode(*inputs.arguments, **case.options, out=whole[..., :256], kernel=kernel)
    assert f"mla_{kernel.removesuffix('_narrow')}" in target.launched
    check((out, lse), inputs.exact, inputs.rounded, case.dtype)
    assert (whole[..., 256:] == 7).all()


@pytest.mark.one_in(8)
@pytest.mark.parametrize(("kernel", "case", "mode"), IN_A_RUN, ids=lambda x: getattr(x, "id", x))
def test_equals_the_oracle(kernel: str, case: DecodeCase, mode: str) -> None:
    run(kernel, case, mode)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [SM90, MMA])
@pytest.mark.parametrize("case", FAST_CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("mode", ["early", "late", "random"])
@pytest.mark.parametrize("sm_count", [1, 3])
def test_all_pairs(kernel: str, case: DecodeCase, mode: str, sm_count: int) -> None:
    run(kernel, case, mode, sm_count)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("d_qk", "kernel"), [(320, GENERIC), (288, GENERIC), (288, SM90), (320, MMA)])
def test_with_a_sink_and_a_plan(d_qk: int, kernel: str) -> None:
    case = replace(SPLIT, d_qk=d_qk, seqlens=200)
    inputs, sink = make(case), np.array([0.5, -np.inf, 3.0], np.float32)
    with simulated(3, GPUS[kernel]):
        plan = plan_of(inputs, attn_sink=True, device=0, kernel=kernel)
        plan.update(inputs.seqlens)
        options = {**case.options, "attn_sink": sink, "out_dtype": "float32"}
        out, lse = mla_decode(*inputs.arguments, **options, plan=plan)
    exact = reference.mla_decode(*inputs.arguments, **case.options, attn_sink=sink)
    close = 2e-5 if kernel == GENERIC else 2e-3  # P is rounded to float16
    np.testing.assert_allclose(out, exact[0], rtol=close, atol=close)
    np.testing.assert_allclose(lse, exact[1], rtol=2e-5, atol=2e-5)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kernel", [SM90, MMA])
def test_what_only_later_queries_see_does_not_reach_earlier_ones(kernel: str) -> None:
    inputs = make(DecodeCase(b=1, seqlens=66, s_q=3, h_q=14, d_qk=288))
    hidden = 64  # from the first query only
    inputs.kv_cache[inputs.block_table[0, hidden // 64], hidden % 64, 0, [3, 200]] = np.nan, np.inf
    with simulated(1, GPUS[kernel], "late"):
        got = mla_decode(*inputs.arguments, kernel=kernel)
    assert np.isfinite(got[0][:, :1].astype(np.float32)).all()
    check(got, inputs.exact, inputs.rounded, "bfloat16")


@pytest.mark.parametrize(
    ("cc", "changes", "kernel"),
    [
        ((9, 0), {}, SM90),
        ((9, 0), {"strides": "odd"}, GENERIC),
        ((8, 0), {"h_q": 40}, MMA),
        ((10, 0), {}, MMA),
        ((12, 0), {"s_q": 9}, MMA),
        ((8, 6), {"strides": "odd"}, GENERIC),
        ((7, 5), {}, GENERIC),
    ],
    ids=str,
)
def test_which_kernel_runs(cc: tuple[int, int], changes: dict[str, Any], kernel: str) -> None:
    case = DecodeCase(**{"b": 1, "h_q": 4, "d_qk": 320, **changes})
    problem = DecodeProblem(case.s_q, case.h_q, case.dtype, case.strides != "odd", case.d_qk)
    assert DECODE.configure(problem, fake_gpu(2, cc)).kernel.name == kernel


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kernel", [GENERIC, None])
def test_a_tree(kernel: str | None) -> None:
    """Trees run on the fallback; and on a Hopper's mma.sync kernel, since its own kernel of this width has no trees."""
    case = DecodeCase(b=2, seqlens=(70, 3), s_q=3, h_q=2, d_qk=320)
    inputs, tree = make(case), np.array([[1, 3, 5], [1, 3, 7]], np.uint64)
    with simulated(2) as target:
        got = mla_decode(*inputs.arguments, tree_mask=tree, out_dtype="float32", kernel=kernel)
    assert f"mla_{kernel or 'attention_mma_small'}" in target.launched
    exact = reference.mla_decode(*inputs.arguments, d_v=256, tree_mask=tree)
    close = 2e-5 if kernel else 2e-2  # P is rounded to bfloat16
    np.testing.assert_allclose(got[0], exact[0], rtol=close, atol=close)
    np.testing.assert_allclose(got[1], exact[1], rtol=2e-5, atol=2e-5)


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
    return {**dict(zip(names, inputs.arguments, strict=True)), **changes}


BAD: tuple[tuple[str, Callable[[], Any], type[Exception], str], ...] = (
    ("other keys", lambda: call(kv_cache=np.zeros((4, 8, 1, 288), ml_dtypes.bfloat16)), ShapeError, "d_qk=320"),
    ("w_uv", lambda: call(w_uv=np.zeros((4, 64, 512), ml_dtypes.bfloat16)), ArgumentError, "project: got .*of 320"),
    ("q_rope", lambda: call(q_rope=np.zeros((2, 1, 4, 64), ml_dtypes.bfloat16)), ShapeError, "512 with q_rope"),
    ("out", lambda: call(out=np.zeros((2, 1, 4, 512), ml_dtypes.bfloat16)), ShapeError, "out.shape.*256"),
    ("window", lambda: call(window=3), ArgumentError, "window: got 3, expected None for keys of 320"),
    ("FP8", lambda: call(kv_cache=np.zeros((4, 8, 656), np.uint8)), ShapeError, "576 for v32"),
)  # fmt: skip


@pytest.mark.parametrize(("make_call", "error", "match"), [bad[1:] for bad in BAD], ids=[bad[0] for bad in BAD])
def test_refuses(make_call: Callable[[], Any], error: type[Exception], match: str, recorder: Recorder) -> None:
    with pytest.raises(error, match=match):
        mla_decode(**make_call())
    assert recorder.launches == []


@pytest.mark.parametrize("kernel", [name for name in DECODE_KERNELS if name not in GPUS])
def test_other_kernels_say_why_not(kernel: str, recorder: Recorder) -> None:
    with pytest.raises(UnsupportedDeviceError, match="takes no values of 256 columns"):
        mla_decode(**call(kernel=kernel))
    assert recorder.launches == []


def test_hopper_says_why_no_tree(recorder: Recorder) -> None:
    with pytest.raises(UnsupportedDeviceError, match="takes a tree_mask with keys of 576 only"):
        mla_decode(**call(tree_mask=np.ones((2, 1), np.uint64), kernel=SM90))
    assert recorder.launches == []


@pytest.mark.parametrize("changes", [{"batch_invariant": True}, {"d_head": 64}], ids=str)
def test_plans_say_why_not(changes: dict[str, Any]) -> None:
    sizes = {"max_b": 2, "s_q": 1, "h_q": 4, "max_pages": 4, "page_size": 16, "dtype": "bfloat16"}
    with pytest.raises(ArgumentError, match="for keys of 288 columns"):
        plan_decode(**sizes, d_qk=288, **changes)


#: More tiles than the ring has stages, hidden tokens, rows past the last one, more heads than a warp has lanes.
PLANTED_IN_SM90 = DecodeCase(b=2, seqlens=(200, 70), s_q=2, h_q=17, d_qk=288, page_size=16, missing_pages=1)
PLANTED_IN_MMA = DecodeCase(b=2, seqlens=(170, 70), s_q=2, h_q=7, d_qk=288, page_size=16, missing_pages=1)


def run_with_infinity(kernel: str, case: DecodeCase, mode: str) -> None:
    """The last token of the first request has an infinity."""
    inputs = make(case)
    last = case.lengths()[0] - 1
    inputs.kv_cache[inputs.block_table[0, last // case.page_size], last % case.page_size, 0, 200] = np.inf
    with simulated(1, GPUS[kernel], mode, 1):
        got = mla_decode(*inputs.arguments, **case.options, kernel=kernel)
    alike = [alike_where_finite(mine, exact) for mine, exact in zip(got, inputs.exact, strict=True)]
    check((alike[0], alike[1]), inputs.exact, inputs.rounded, case.dtype)


test_sm90_is_caught, test_sm90_as_it_is = mutant_suite(
    SM90,
    [partial(run_with_infinity, SM90, PLANTED_IN_SM90, mode) for mode in ("late", "early", "random")],
    {},
    [
        Mutant(
            "queries that are not padded",
            "decode/split_rows.cuh",
            "present && (!kPadded || chunk < kChunks)",
            "present",
        ),
    ],
)
test_mma_is_caught, test_mma_as_it_is = mutant_suite(
    MMA,
    [partial(run_with_infinity, MMA, PLANTED_IN_MMA, "late")],
    {},
    [
        Mutant(
            "queries padded too early",
            "attention/mma/few_rows.cuh",
            "* kMmaDepth >= C::kHeadDimQk;",
            "* kMmaDepth + 16 >= C::kHeadDimQk;",
        ),
    ],
)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [*CASES, *FAST_CASES, DecodeCase(b=40, h_q=32, d_qk=320), DecodeCase(b=5, h_q=40, d_qk=288)], ids=str
)
@pytest.mark.parametrize("kernel", GPUS)
def test_on_a_gpu(case: DecodeCase, kernel: str, gpu: DeviceInfo) -> None:
    if kernel != GENERIC and (case.strides == "odd" or (kernel == SM90 and gpu.arch not in HOPPER)):
        pytest.skip("not of this kernel")
    run_and_check(case, kernel=kernel)
