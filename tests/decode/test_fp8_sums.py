"""Dense decode in FP8: sums of values are not shortened, nor sums of weights; bugs planted in the kernel."""

from __future__ import annotations

from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from mla_cupy import reference
from mla_cupy.reference.fp8_queries import dequantised
from tests.decode.test_fp8_math import CASES, E4M3, KERNEL, fp8, run
from tests.support.cases import DecodeCase, DecodeInputs, make
from tests.support.flat import mla_decode
from tests.support.mutant_suite import mutant_suite
from tests.support.mutants import Mutant
from tests.support.sim_modes import MODES
from tests.support.tolerance import check, check_lse

Array = npt.NDArray[Any]


# ---- Bias ------------------------------------------------------------------------------------------------------


def with_values(tokens: int, mean: float, spread: float, one_sided: bool = False, heads: int = 8) -> DecodeInputs:
    """A sequence whose values have this mean, and scores of deviation 1 or so, from the RoPE columns alone."""
    inputs = make(fp8(b=1, seqlens=tokens, h_q=heads, kv_scale=1.0, page_size=64, spare_pages=0))
    rng = np.random.default_rng([tokens, int(10 * abs(mean))])
    values = rng.standard_normal((tokens, 512)) * spread + mean
    positions = np.arange(tokens)
    rows = inputs.kv_cache[inputs.block_table[0, positions // 64], positions % 64, 0]
    stored = (np.abs(values) if one_sided else values).astype(ml_dtypes.float8_e4m3fn)
    rows[:, :512] = stored.view(np.uint8)
    inputs.kv_cache[inputs.block_table[0, positions // 64], positions % 64, 0] = rows
    inputs.q[..., :512] = 0
    inputs.q[..., 512:] = rng.standard_normal((1, 1, heads, 64)).astype(inputs.q.dtype)
    return inputs


def errors(got: Array, exact: Array) -> tuple[float, float]:
    """The signed bias, by the projection on the exact result, and the root mean square, relative."""
    mine = got.astype(np.float64)
    size = float((mine * exact).sum() / (exact * exact).sum())
    return size - 1, float(np.sqrt(((mine - exact) ** 2).sum() / (exact * exact).sum()))


def with_rounded_weights(inputs: DecodeInputs, scale: float) -> Array:
    """The result of one sequence in float64, of weights in e4m3, tile by tile: what the kernel's sums stand for."""
    positions = np.arange(int(inputs.seqlens[0]))
    rows = inputs.kv_cache[inputs.block_table[0, positions // 64], positions % 64, 0]
    keys = E4M3[rows.view(np.uint8)]
    scores = dequantised(inputs.q[0, 0]) @ keys.T * (scale / np.log(2))
    values = weights = np.zeros(())
    for first in range(0, len(keys), 64):
        tile = scores[:, first : first + 64]
        top = tile.max(axis=1, keepdims=True)
        rounded = np.exp2(8 + tile - top).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
        rounded *= np.exp2(top - scores.max(axis=1, keepdims=True))
        values = values + rounded @ keys[first : first + 64, :512]
        weights = weights + rounded.sum(axis=1, keepdims=True)
    return np.asarray(values / weights)[None, None]


def check_bias(inputs: DecodeInputs, spread: float, sm_count: int = 1) -> None:
    """Scores of deviation `spread`: the bias is at most 5e-4, beside the result of rounded weights.

    Or 6e-4 where a sequence is cut: pieces are merged by the sums of weights before they are rounded.
    """
    scale = spread / 8
    out, lse = run(inputs, sm_count, ("early", 0), scale=scale, out_dtype="float32")
    exact = reference.mla_decode(*inputs.arguments, math="fp8", scale=scale)
    rounded = reference.mla_decode(*inputs.arguments, math="fp8", scale=scale, rounding="bfloat16")
    bias, _ = errors(out, with_rounded_weights(inputs, scale))
    assert abs(bias) <= (5e-4 if sm_count == 1 else 6e-4), bias
    _, rms = errors(out, exact[0])
    _, rms_of_p = errors(rounded[0], exact[0])
    assert rms <= 1.5 * rms_of_p + 7e-4, (rms, rms_of_p)
    check_lse(lse, exact[1], rounded[1])


REGAIN = 1.00015
"""Factor of the sums of weights of more than 32 tokens."""

MEANS = {"0": (0.0, 1.0), "1": (1.0, 0.5), "100": (100.0, 1.0), "-1": (-1.0, 0.25)}


@pytest.mark.one_in(8)
@pytest.mark.parametrize("mean", MEANS)
def test_sums_are_not_shortened(mean: str) -> None:
    """Values of mean 1, say, which the tensor cores' own sums over 1,024 tokens would leave at 0.986 of their size."""
    check_bias(with_values(2048, *MEANS[mean]), 1.0)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("tokens", [1, 32, 33, 64, 96, 97])
def test_equal_tokens_are_exact(tokens: int) -> None:
    """Their sums lose nothing, nor do the sums of their weights; beyond 32 tokens these are made 0.00015 larger."""
    inputs = with_values(tokens, 1.0, 0.0)
    inputs.q[...] = 0
    out, _ = run(inputs, 1, ("early", 0), out_dtype="float32")
    np.testing.assert_allclose(out, 1.0 if tokens <= 32 else 1 / REGAIN, rtol=1e-6)


def test_a_token_that_the_first_query_sees_alone_is_exact() -> None:
    """A tile of 40 tokens, which its last query sees whole."""
    inputs = make(fp8(b=1, s_q=40, h_q=1, seqlens=40, kv_scale=1.0))
    out, _ = run(inputs, 1, ("early", 0), out_dtype="float32")
    first = E4M3[inputs.kv_cache[inputs.block_table[0, 0], 0, 0, :512].view(np.uint8)] / REGAIN
    np.testing.assert_allclose(out[0, 0, 0], first, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("spread", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("mean", MEANS)
def test_sums_of_values_of_a_mean(mean: str, spread: float) -> None:
    check_bias(with_values(2048, *MEANS[mean]), spread)
    check_bias(with_values(2048, *MEANS[mean]), spread, sm_count=5)


@pytest.mark.slow
def test_sums_of_one_sided_values() -> None:
    check_bias(with_values(2048, 0.0, 1.0, one_sided=True), 1.0)


@pytest.mark.slow
def test_sums_over_8192_tokens() -> None:
    check_bias(with_values(8192, 1.0, 0.5), 0.3)


def test_the_common_part_of_weights_cancels() -> None:
    """In each tile one weight is 256 and the others 242, which round to 240.

    Its sum is a number that needs no rounding; tiles are full.
    """
    inputs = with_values(192, 1.0, 0.0)
    inputs.q[..., :575] = 0
    inputs.q[..., 575] = 1
    zero, one = 0x00, 0x38
    tokens = np.arange(192)
    inputs.kv_cache[inputs.block_table[0, tokens // 64], tokens % 64, 0, 575] = np.where(tokens % 64, zero, one)
    out, lse = run(inputs, 1, ("late", 0), out_dtype="float32", scale=0.08 * np.log(2))
    np.testing.assert_allclose(out, 1 / REGAIN, rtol=1e-6)
    np.testing.assert_allclose(lse, np.log(3 * 2**0.08 + 189), rtol=1e-6)


def test_scores_of_a_common_mean() -> None:
    """Queries and keys of mean 1 and scores of 40; sums over all columns would lose 0.5 %."""
    inputs = make(fp8(b=1, seqlens=100, h_q=4, kv_scale=1.0))
    rng = np.random.default_rng(5)
    inputs.q[...] = (1 + rng.standard_normal(inputs.q.shape) / 4).astype(inputs.q.dtype)
    keys = 1 + rng.standard_normal((100, 576)) / 4
    positions = np.arange(100)
    inputs.kv_cache[inputs.block_table[0, positions // 64], positions % 64, 0] = keys.astype(
        ml_dtypes.float8_e4m3fn
    ).view(np.uint8)
    _, lse = run(inputs, 1, ("early", 0), scale=1 / 16)
    _, exact = reference.mla_decode(*inputs.arguments, math="fp8", scale=1 / 16)
    assert 35 < exact.min() < exact.max() < 50
    assert np.abs(lse / exact - 1).max() < 1e-3


# ---- Planted bugs ----------------------------------------------------------------------------------------------


def run_case(mode: tuple[str, int], case: DecodeCase) -> None:
    """The last of several queries alone sees a NaN."""
    inputs = make(case)
    if case.s_q > 1:
        last = int(inputs.seqlens[1]) - 1
        inputs.kv_cache[inputs.block_table[1, last // case.page_size], last % case.page_size, 0, 7] = 0x7F
    check(run(inputs, 1, mode), inputs.exact, inputs.rounded, case.dtype)


#: A page of 16 tokens, missing pages, and a NaN; then more tiles than stages.
test_is_caught, test_as_it_is = mutant_suite(
    KERNEL,
    [
        partial(run_case, MODES[1], CASES[3]),
        partial(run_case, MODES[2], CASES[3]),
        partial(run_case, MODES[1], fp8(b=2, seqlens=(700, 70), h_q=3)),
    ],
    {
        "bar.sync": (8, [0, 4]),
        "mbarrier.try_wait": (13, [0, 12]),
        "mbarrier.arrive": (8, [0]),
        "fence.proxy": (7, [3]),
        "wgmma.fence": (19, [0]),
        "wgmma.commit_group": (19, [9]),
        "wgmma.wait_group": (17, [0]),
    },
    [
        Mutant(
            "tokens of other positions",
            "tile/byte_fragments.cuh",
            "pairs[2], pairs[3], 0x6420",
            "pairs[2], pairs[3], 0x6240",
        ),
    ],
)


# ---- On a GPU --------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1024, 8192, 131072])
@pytest.mark.parametrize("mean", MEANS)
def test_sums_on_a_gpu(hopper: object, mean: str, tokens: int) -> None:
    import cupy

    from tests.support.gpu import uploaded

    inputs = with_values(tokens, *MEANS[mean])
    out, _ = mla_decode(*uploaded(inputs), math="fp8", out_dtype="float32", scale=1 / 8)
    exact = reference.mla_decode(*inputs.arguments, math="fp8", scale=1 / 8)
    rounded = reference.mla_decode(*inputs.arguments, math="fp8", scale=1 / 8, rounding="bfloat16")
    bias, _ = errors(cupy.asnumpy(out), with_rounded_weights(inputs, 1 / 8))
    assert abs(bias) <= 7e-4, bias
    _, rms = errors(cupy.asnumpy(out), exact[0])
    _, rms_of_p = errors(rounded[0], exact[0])
    assert rms <= 1.5 * rms_of_p + 7e-4
