"""Dense decode in FP8 with scales on the device: one per row of queries, and the cache's."""

from __future__ import annotations

from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import mla_cupy
from mla_cupy import ArgumentError, DTypeError, ShapeError, reference
from tests.decode.test_fp8_math import CASES, CODED, KERNEL, fp8, run
from tests.decode.test_tree_mask import tree_inputs
from tests.support.calls import plan_of
from tests.support.cases import DecodeCase, DecodeInputs, make
from tests.support.flat import mla_decode, plan_decode
from tests.support.mutant_suite import mutant_suite
from tests.support.mutants import Mutant
from tests.support.recorder import Recorder
from tests.support.sim_driver import simulated
from tests.support.sim_modes import MODES

Array = npt.NDArray[Any]


def prepared(inputs: DecodeInputs) -> tuple[Array, Array]:
    """Codes and scales of queries in 16 bits, as `mla_prepare` makes them; the scales in an array with NaN between."""
    b, s_q, h_q, d_qk = inputs.q.shape
    codes, scales, _ = reference.mla_prepare(inputs.q.reshape(b * s_q, h_q, d_qk), quantise=True)
    spread = np.full((s_q, b + 1, 3 * h_q), np.nan, np.float32)[:, :b, ::3].transpose(1, 0, 2)
    spread[...] = scales.reshape(b, s_q, h_q)
    return codes.astype(ml_dtypes.float8_e4m3fn).view(np.uint8).reshape(inputs.q.shape), spread


def same_bits(mine: Any, other: Any) -> None:
    for x, y in zip(mine, other, strict=True):
        np.testing.assert_array_equal(x.view(np.uint8), y.view(np.uint8))


def check_prepared(case: DecodeCase, sm_count: int, mode: tuple[str, int]) -> None:
    """Queries that come as codes with a scale for each row leave the bits that decode's own rounding leaves."""
    inputs = make(case)
    inputs.q[0, 0, 1] *= 512  # rows of several magnitudes
    inputs.q[-1, -1, 0] = 0
    inputs.q[0, -1, 2, 7] = np.inf
    codes, scales = prepared(inputs)
    expected = run(inputs, sm_count, mode)
    given = DecodeInputs(case, codes, *inputs.arguments[1:])
    got = run(given, sm_count, mode, q_scales=scales)
    assert np.isnan(got[0][0, -1, 2].astype(np.float32)).all()
    same_bits(got, expected)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("case", "sm_count"),
    [
        (fp8(b=2, seqlens=(3, 130), s_q=3, h_q=5, page_size=16), 3),
        (fp8(b=1, seqlens=66, s_q=2, h_q=40), 1),  # two blocks of rows
    ],
    ids=["narrow", "wide"],
)
def test_a_scale_for_each_row(case: DecodeCase, sm_count: int) -> None:
    check_prepared(case, sm_count, MODES[1])


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if case.h_q > 2], ids=lambda case: case.id)
def test_a_scale_for_each_row_in_all_modes(case: DecodeCase, mode: tuple[str, int]) -> None:
    check_prepared(case, 3, mode)


def test_one_scale_for_all_rows() -> None:
    """An array whose strides are 0, and the number: powers of two, which commute with every rounding."""
    inputs = make(CODED[1])
    scales = np.broadcast_to(np.float32(0.5), inputs.q.shape[:3])
    assert scales.strides == (0, 0, 0)
    expected = run(inputs, 1, MODES[0], q_scale=0.5)
    same_bits(run(inputs, 1, MODES[0], q_scales=scales), expected)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", [fp8(b=2, seqlens=(129, 1), h_q=3, queries=each) for each in ("", "uint8")], ids=str)
def test_the_caches_scale(case: DecodeCase) -> None:
    """The scale for 16-bit queries and for codes, also with a split request."""
    inputs = make(case)
    expected = run(inputs, 3, MODES[0], kv_scale=0.25)
    same_bits(run(inputs, 3, MODES[0], kv_scale=1.0, kv_scales=np.array([0.25], np.float32)), expected)


def test_with_a_plan_and_a_tree() -> None:
    """A schedule that was made before, and the build for drafts."""
    tree = tree_inputs(fp8(b=1, seqlens=70, s_q=4, h_q=8))
    inputs = tree.base
    codes, scales = prepared(inputs)
    cache_scale = np.array([0.25], np.float32)
    with simulated(2):
        results = []
        for q, more in ((inputs.q, {}), (codes, {"q_scales": scales})):
            given = DecodeInputs(inputs.case, q, *inputs.arguments[1:])
            plan = plan_of(given, device=0, tree_mask=True, dtype="bfloat16" if q is inputs.q else "float8_e4m3fn")
            plan.update(given.seqlens)
            options = {"math": "fp8", "kv_scales": cache_scale, "tree_mask": tree.masks, "plan": plan, **more}
            results.append(mla_decode(*given.arguments, **options))
    same_bits(*results)


def test_the_oracle_multiplies_by_the_scales() -> None:
    inputs = make(CODED[1])
    rng = np.random.default_rng(1)
    scales = rng.uniform(0.5, 2.0, inputs.q.shape[:3]).astype(np.float32)
    given = {**inputs.case.options, "kv_scale": 1.0}
    got = reference.mla_decode(*inputs.arguments, **given, q_scales=scales, kv_scales=np.array([0.03], np.float32))
    numbers = inputs.q.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * scales[..., None]
    options = {**inputs.case.options, "math": "exact", "kv_scale": float(np.float32(0.03))}
    expected = reference.mla_decode(numbers, *inputs.arguments[1:], **options)
    for mine, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-12, atol=1e-12)


# ---- Refusals --------------------------------------------------------------------------------------------------

ROWS = {"q_scales": np.ones((2, 3, 5), np.float32)}
CACHE = {"kv_scales": np.ones(1, np.float32)}
WRONG: dict[str, tuple[DecodeCase, dict[str, Any], type[Exception], str]] = {
    "half": (CASES[3], ROWS, ArgumentError, "fp8.q_scale: got an array, expected 1 for queries in bfloat16"),
    "shape": (CODED[1], {"q_scales": np.ones((2, 3, 4), np.float32)}, ShapeError, r"fp8.q_scale.shape\[-1\]: got 4"),
    "dtype": (
        CODED[1],
        {"q_scales": np.ones((2, 3, 5))},
        DTypeError,
        "fp8.q_scale.dtype: got float64, expected float32",
    ),
    "scales": (
        CODED[1],
        {"kv_scales": np.ones(2, np.float32)},
        ShapeError,
        r"fp8.kv_scale.shape\[0\]: got 2, expected 1",
    ),
    "exact": (
        fp8(b=2, math="exact", kv_scale=1.0),
        CACHE,
        ArgumentError,
        'fp8.kv_scale: got an array, expected a number with fp8.math="exact"; pass a Python number',
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_refusals(wrong: str, recorder: Recorder) -> None:
    case, more, error, match = WRONG[wrong]
    inputs = make(case)
    with pytest.raises(error, match=match):
        mla_decode(*inputs.arguments, **{**case.options, **more})
    assert recorder.launches == []


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf])
@pytest.mark.parametrize(("name", "shape", "place"), [("q_scales", (2, 3, 5), (1, 2, 4)), ("kv_scales", (1,), (0,))])
def test_scales_are_above_zero(
    name: str, shape: tuple[int, ...], place: tuple[int, ...], bad: float, recorder: Recorder
) -> None:
    inputs, scales = make(CODED[1]), np.ones(shape, np.float32)
    np.clip(inputs.block_table, 0, len(inputs.kv_cache) - 1, out=inputs.block_table)
    options = {**CODED[1].options, "check": True} | ({"kv_scale": 1.0} if name == "kv_scales" else {})
    mla_decode(*inputs.arguments, **options, **{name: scales})
    launches = len(recorder.launches)
    scales[place] = bad
    where = ", ".join(map(str, place))
    with pytest.raises(
        ArgumentError, match=rf"fp8\.{name[:-1]}\[{where}\]: got {bad}, expected a finite number, above 0"
    ):
        mla_decode(*inputs.arguments, **options, **{name: scales})
    assert len(recorder.launches) == launches


# ---- Planted bugs ----------------------------------------------------------------------------------------------

test_is_caught, test_as_it_is = mutant_suite(
    KERNEL,
    [
        partial(check_prepared, fp8(b=2, seqlens=(3, 130), s_q=3, h_q=5, page_size=16), 3, MODES[1]),
        partial(test_the_caches_scale, fp8(b=2, seqlens=(129, 1), h_q=3, queries="uint8")),
    ],
    {},
    [
        Mutant(
            "the scale of the first head",
            "attention/fp8_scales.cuh",
            "(kv_head * group + row % group)",
            "(kv_head * group)",
        ),
    ],
)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, fp8(b=5, seqlens="ragged-500", h_q=128)], ids=lambda case: case.id)
def test_on_a_gpu(hopper: object, case: DecodeCase) -> None:
    """Codes and scales of the package's own, made and read on the device."""
    import cupy as cp

    from tests.support.gpu import uploaded

    inputs = make(case)
    q, *others = uploaded(inputs)
    b, s_q, h_q, d_qk = q.shape
    codes, scales, _ = mla_cupy.mla_prepare(q.reshape(b * s_q, h_q, d_qk), quantise=True)
    expected = mla_decode(q, *others, **case.options)
    options = {**case.options, "kv_scale": 1.0, "kv_scales": cp.full(1, case.kv_scale, cp.float32)}
    got = mla_decode(codes.reshape(q.shape), *others, **options, q_scales=scales.reshape(b, s_q, h_q))
    for mine, other in zip(got, expected, strict=True):
        cp.testing.assert_allclose(mine.astype(cp.float32), other.astype(cp.float32), rtol=2e-2, atol=2e-2)
    assert (
        KERNEL
        in plan_decode(
            max_b=1, s_q=1, h_q=1, record="fp8", math="fp8", max_pages=1, page_size=64, dtype="float8_e4m3fn"
        ).kernel
    )
