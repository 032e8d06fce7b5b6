"""Dense decode with weights, and queries in 16 bits, as sums of two e4m3 numbers: math="fp8x2"."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import mla_cupy
from mla_cupy import ArgumentError, UnsupportedDeviceError, dtypes, reference
from mla_cupy.kernels.decode import DECODE
from mla_cupy.kernels.decode.problem import Batch, DecodeProblem
from mla_cupy.reference.attend import two_terms
from mla_cupy.reference.fp8_queries import dequantised, quantise_queries, quantise_query_terms
from tests.decode.test_fp8_math import E4M3, KERNEL, fp8, hostile_rows, run
from tests.decode.test_fp8_sums import MEANS, errors, with_values
from tests.support.calls import assert_same, plan_of
from tests.support.cases import DecodeCase, DecodeInputs, make
from tests.support.flat import mla_decode
from tests.support.gpu import run_and_check
from tests.support.mutant_suite import mutant_suite
from tests.support.mutants import Mutant
from tests.support.recorder import H200, Recorder
from tests.support.sim_driver import simulated
from tests.support.sim_modes import MODES
from tests.support.tolerance import check

Array = npt.NDArray[Any]


def terms(**changes: Any) -> DecodeCase:
    return fp8(**{"math": "fp8x2", "h_q": 17, **changes})


CASES = (
    terms(b=2, seqlens=(3, 130), s_q=3, h_q=12, page_size=16, missing_pages=1),  # the causal edge
    terms(b=1, seqlens=330, page_size=1, dtype="float16", strides="odd"),  # three stages of wide tiles, six tiles
    terms(b=3, seqlens=(300, 0, 70), page_size=24, kv_scale=1.0),  # four stages, five tiles; no token
    terms(b=1, seqlens=189, cp_world=3, cp_rank=1, causal=False, h_q=40),
)
CODED = (
    terms(b=1, seqlens=390, h_q=64, queries="float8_e4m3fn", q_scale=0.1),  # five stages, seven tiles
    terms(b=2, seqlens=(3, 130), s_q=3, h_q=12, page_size=16, missing_pages=1, queries="uint8"),
    terms(b=1, seqlens=66, page_size=1, strides="odd", queries="float8_e4m3fn"),
    terms(b=1, seqlens=200, h_q=80, queries="float8_e4m3fn", kv_scale=1.0),  # two blocks
)


# ---- The rule --------------------------------------------------------------------------------------------------


def _nearest(x: float) -> int:
    """The code of a number of magnitude up to 448, from all 256; a tie goes to the even one."""
    codes = [code for code in range(256) if np.isfinite(E4M3[code]) and (code >= 0x80) == bool(np.signbit(x))]
    least = min(abs(E4M3[code] - x) for code in codes)
    return min((code for code in codes if abs(E4M3[code] - x) == least), key=lambda code: code % 2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_queries_are_rounded_by_the_rule(dtype: str) -> None:
    """The first term equals a single one; the second one is the remainder, in the same units."""
    rows = hostile_rows(dtype)
    codes, remainders, scales = quantise_query_terms(rows)
    for mine, expected in zip((codes, scales), quantise_queries(rows), strict=True):
        np.testing.assert_array_equal(mine, expected)
    for row, first, second, scale in zip(rows.astype(np.float64), codes, remainders, scales, strict=True):
        if np.isnan(scale):
            assert (second == 0x7F).all()
        else:
            np.testing.assert_array_equal(second, [_nearest(x) for x in row / scale - E4M3[first]])
    assert np.isnan(scales).sum() == 2
    np.testing.assert_array_equal(dequantised(rows, terms=2), (E4M3[codes] + E4M3[remainders]) * scales[:, None])


def test_what_two_terms_hold_of_queries() -> None:
    """Numbers of bfloat16 down to 2^-9 of a row's largest, and each within 2^-17 of that."""
    rng = np.random.default_rng(2)
    rows = (rng.standard_normal((50, 576)) * 2.0 ** rng.integers(-12, 1, (50, 576))).astype(ml_dtypes.bfloat16)
    exact, kept = rows.astype(np.float64), dequantised(rows, terms=2)
    largest = np.abs(exact).max(axis=1, keepdims=True)
    small = np.abs(exact) < largest / 512
    assert 0.1 < small.mean() < 0.9
    np.testing.assert_array_equal(np.where(small, exact, kept), exact)
    assert (np.abs(kept - exact) <= largest * 2.0**-17).all()
    assert np.abs(dequantised(rows) - exact).max() > 0.01


def test_weights_are_rounded_by_the_rule() -> None:
    rng = np.random.default_rng(4)
    ties = np.array([17.0, 19.0, 16.5, 17.03125, 256.0, 0.0, 2.0**-10, 3 * 2.0**-11])
    weights = np.r_[np.exp2(rng.uniform(-12, 8, 400)), ties]
    for x, mine in zip(weights, two_terms(weights), strict=True):
        half = float(np.float16(x))
        first = E4M3[_nearest(half)]
        assert mine == first + E4M3[_nearest(half - first)]
    large = weights >= 0.25
    assert (np.abs(two_terms(weights) / np.where(large, weights, 1) - 1)[large] < 2.0**-8).all()
    assert (np.abs(two_terms(weights) - weights)[~large] <= 2.0**-10 + 2.0**-13).all()  # 2^-18 of the largest


@pytest.mark.parametrize("case", [CASES[0], CODED[1]], ids=lambda case: case.id)
def test_the_oracle_attends_with_these_queries(case: DecodeCase) -> None:
    """e4m3 queries are left unchanged."""
    inputs = make(case)
    options = {**case.options, "math": "fp8" if case.queries else "exact"}
    queries = inputs.q if case.queries else dequantised(inputs.q, terms=2)
    expected = reference.mla_decode(queries, *inputs.arguments[1:], **options)
    for mine, other in zip(inputs.exact, expected, strict=True):
        np.testing.assert_array_equal(mine, other)


# ---- Further refusals than with math="fp8" -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"h_q": 16}, r"takes 17 and more, not 16 query rows .*pass fp8=Fp8\(\"fp8\"\), or leave fp8.math out"),
        (
            {"s_q": 2, "h_q": 64, "tree_mask": True},
            r"takes no tree_mask with .*: pass fp8=Fp8\(\"fp8\"\)",
        ),
    ],
)
def test_what_other_arithmetic_is_better_for(changes: dict[str, Any], match: str) -> None:
    problem = DecodeProblem(1, 64, "bfloat16", record="fp8", math="fp8x2")
    with pytest.raises(UnsupportedDeviceError, match=match):
        DECODE.configure(replace(problem, **changes), H200)


def test_sparse_operations_have_one_term(recorder: Recorder) -> None:
    q, records = np.zeros((1, 64, 576), np.float16), np.zeros((4, 64, 576), np.uint8)
    indices = np.zeros((1, 64), np.int32)
    with pytest.raises(ArgumentError, match=r"math: got 'fp8x2', expected \"exact\" or \"fp8\""):
        mla_cupy.sparse_mla_forward(q, records, indices, scale=1.0, fp8=mla_cupy.Fp8("fp8x2"))
    with pytest.raises(ArgumentError, match=r"math: got 'fp8x2', expected \"exact\" or \"fp8\""):
        mla_cupy.sparse_mla_decode(q[None], records, indices[None], scale=1.0, fp8=mla_cupy.Fp8("fp8x2"))
    assert recorder.launches == []


# ---- Launches --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_builds(dtype: str) -> None:
    """One for each dtype, of 64 rows, however small the batch is."""
    problem = DecodeProblem(1, 128, dtype, record="fp8", math="fp8x2")
    for batch in (None, Batch(1, 64), Batch(128, 8192)):
        config = DECODE.configure(replace(problem, batch=batch), H200)
        build = config.variant
        assert (config.kernel.name, config.row_blocks) == (KERNEL, 2)
        assert (build.dtype, build.block_rows, build.terms) == (dtype, 64, 2)


# ---- The kernel in the simulator -------------------------------------------------------------------------------


@pytest.mark.one_in(8)
@pytest.mark.parametrize("case", [*CASES, *CODED], ids=lambda case: case.id)
def test_kernel(case: DecodeCase) -> None:
    inputs, number = make(case), [*CASES, *CODED].index(case)
    got = run(inputs, (1, 3)[number % 2], MODES[number % len(MODES)])
    check(got, inputs.exact, inputs.rounded, case.dtype)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("case", [*CASES, *CODED], ids=lambda case: case.id)
def test_kernel_in_all_modes(case: DecodeCase, mode: tuple[str, int]) -> None:
    inputs = make(case)
    for sm_count in (1, 3):
        check(run(inputs, sm_count, mode), inputs.exact, inputs.rounded, case.dtype)


@pytest.mark.slow
def test_hostile_queries() -> None:
    """Each row but the largest beside keys of a single 1: `lse` is then a number of the query's two terms."""
    columns = np.array([0, 127, 400, 511, 512, 575])
    all_rows = hostile_rows("bfloat16")
    rows = np.resize(np.delete(all_rows, [6, 7], axis=0), (17, all_rows.shape[1]))  # of scores that base 2 can round
    inputs = make(terms(b=len(columns), seqlens=1, kv_scale=1.0))
    inputs.q[...] = 0
    inputs.q[:, 0, :, columns] = rows.T[: len(columns), None]
    first, one = inputs.block_table[:, 0], 0x38
    inputs.kv_cache[first, 0] = 0
    inputs.kv_cache[first, 0, 0, columns] = one
    _, lse = run(inputs, 2, ("random", 1), scale=0.125)
    rounded = dequantised(inputs.q[0, 0], terms=2)[:, columns].T
    assert (rounded != dequantised(inputs.q[0, 0])[:, columns].T).any()
    np.testing.assert_allclose(lse[:, :, 0], rounded / 8, rtol=1e-6, atol=1e-6)


def test_numbers_of_e4m3_give_the_same_bits_in_16_bits() -> None:
    """A row with a largest number of 448 has a scale of 1, and second terms of zero."""
    inputs = make(terms(b=1, seqlens=70, queries="float8_e4m3fn"))
    inputs.q[..., 9] = -448
    got = run(inputs, 1, ("late", 1), out_dtype="float32")
    plain = replace(inputs, q=inputs.q.astype(dtypes.numpy_dtype("bfloat16")))
    for mine, other in zip(got, run(plain, 1, ("late", 1), out_dtype="float32"), strict=True):
        assert_same(mine, other)


def test_what_only_later_queries_see_does_not_reach_earlier_ones() -> None:
    """NaN in a latent and in the RoPE part, where second terms come to lie, of a token that the first does not see."""
    inputs = make(terms(b=1, seqlens=65, s_q=3, h_q=12))
    page, token = inputs.block_table[0, 0], 63
    inputs.kv_cache[page, token, 0, [3, 300]] = 0x7F, 0xFF
    inputs.kv_cache[page, token, 0, 570] = 0x7F
    got = run(inputs, 1, ("late", 0))
    assert np.isfinite(got[0][:, :1].astype(np.float32)).all()
    assert np.isnan(got[0][:, 1:].astype(np.float32)).all()
    first = [(out[:, :1], lse[..., :1]) for out, lse in (got, inputs.exact, inputs.rounded)]
    check(*first, "bfloat16")


def test_a_plan_gives_the_same_bits_in_any_batch() -> None:
    inputs = make(terms(b=2, seqlens=(70, 129), queries="float8_e4m3fn"))
    with simulated(2):
        plan = plan_of(inputs, device=0, batch_invariant=True, split_tokens=64)
        plan.update(inputs.seqlens)
        out, lse = mla_decode(*inputs.arguments, **inputs.case.options, plan=plan)
    check((out, lse), inputs.exact, inputs.rounded, "bfloat16")
    with simulated(3, mode="late"):
        plan = plan_of(inputs, device=0, batch_invariant=True, split_tokens=64)
        plan.update(inputs.seqlens[1:])
        q, cache, table, _ = inputs.arguments
        got = mla_decode(q[1:], cache, table[1:], inputs.seqlens[1:], **inputs.case.options, plan=plan)
    assert (got[0].tobytes(), got[1].tobytes()) == (out[1:].tobytes(), lse[1:].tobytes())


LESS = 0.99955
"""Factor of the sums of weights of more than 32 tokens."""


def test_sums_of_weights_are_those_before_rounding() -> None:
    """Weights of 256 and 242.19, which become 242.25 in two terms."""
    inputs = with_values(64, 1.0, 0.0, heads=17)
    inputs.q[..., :575] = 0
    inputs.q[..., 575] = 1
    tokens, one = np.arange(64), 0x38
    inputs.kv_cache[inputs.block_table[0, 0], tokens, 0, 575] = np.where(tokens, 0, one)
    out, _ = run(inputs, 1, ("late", 0), out_dtype="float32", scale=0.08 * np.log(2), math="fp8x2")
    expected = (256 + 63 * 242.25) / (256 + 63 * 2**7.92) / LESS
    np.testing.assert_allclose(out, expected, rtol=1e-4)


# ---- Errors ----------------------------------------------------------------------------------------------------


def check_errors(inputs: DecodeInputs, scale: float, got: Array, *, bias: float, rms: float) -> None:
    """Compare with the result without any rounding except the cache's."""
    exact, _ = reference.mla_decode(*inputs.arguments, math="exact", scale=scale)
    found = errors(got, exact)
    assert (abs(found[0]) <= bias, found[1] <= rms) == (True, True), found


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("mean", "sm_count"), [("0", 4), ("1", 1)])
def test_errors_are_those_of_eight_bits(mean: str, sm_count: int) -> None:
    """For values of mean 0 one term has an rms error of 2 %; sums of ones would make a piece per tile too large."""
    inputs = with_values(256, *MEANS[mean], heads=33)
    out, _ = run(inputs, sm_count, ("early", 0), out_dtype="float32", scale=1 / 8, math="fp8x2")
    check_errors(inputs, 1 / 8, out, bias=7e-4, rms=2.5e-3)


@pytest.mark.slow
@pytest.mark.parametrize("spread", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("mean", MEANS)
def test_errors_over_2048_tokens(mean: str, spread: float) -> None:
    inputs = with_values(2048, *MEANS[mean], heads=33)
    for sm_count in (1, 5):
        out, _ = run(inputs, sm_count, ("early", 0), out_dtype="float32", scale=spread / 8, math="fp8x2")
        check_errors(inputs, spread / 8, out, bias=7e-4, rms=2.5e-3)


# ---- Planted bugs ----------------------------------------------------------------------------------------------

MATH = "attention/sm90/fp8_math.cuh"


def run_case(case: DecodeCase) -> None:
    inputs = make(case)
    check(run(inputs, 1, MODES[1]), inputs.exact, inputs.rounded, case.dtype)


test_is_caught, test_as_it_is = mutant_suite(
    KERNEL,
    [partial(run_case, CASES[0]), test_sums_of_weights_are_those_before_rounding, test_hostile_queries],
    {},
    [
        Mutant("P_1 twice", MATH, "advance(p[kTerms - 1 - i / 2]", "advance(p[0]"),
    ],
)


# ---- On a GPU --------------------------------------------------------------------------------------------------

EDGES = tuple(64 * blocks + off for blocks in range(1, 9) for off in (-1, 0, 1))
ON_GPU = (
    *CASES,
    *CODED,
    *(terms(b=len(EDGES), seqlens=EDGES, h_q=h_q, dtype=d) for h_q, d in ((64, "bfloat16"), (128, "float16"))),
    *(terms(b=len(EDGES), seqlens=EDGES, h_q=h_q, queries="float8_e4m3fn") for h_q in (64, 128)),
    *(terms(page_size=page_size, s_q=3, h_q=40, b=5, seqlens="ragged-500") for page_size in (1, 2, 16, 65, 256)),
    terms(b=20, h_q=17, seqlens="ragged-300"),
    terms(b=1, h_q=64, seqlens=9000),
    terms(b=300, h_q=64, seqlens="ragged-200", kv_scale=1.0),
    terms(b=4, h_q=128, missing_pages=2, page_size=16, seqlens="ragged-300", queries="uint8"),
)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_GPU, ids=lambda case: case.id)
def test_kernel_on_a_gpu(hopper: object, case: DecodeCase) -> None:
    run_and_check(case, kernel=KERNEL)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1024, 8192, 131072])
@pytest.mark.parametrize("mean", MEANS)
def test_errors_on_a_gpu(hopper: object, mean: str, tokens: int) -> None:
    import cupy

    from tests.support.gpu import uploaded

    inputs = with_values(tokens, *MEANS[mean], heads=33)
    out, _ = mla_decode(*uploaded(inputs), math="fp8x2", out_dtype="float32", scale=1 / 8)
    check_errors(inputs, 1 / 8, cupy.asnumpy(out), bias=7e-4, rms=2.5e-3)
