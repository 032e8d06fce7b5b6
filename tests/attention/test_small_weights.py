"""Weights far below a row's largest, of kernels whose weights are float16 beside FP8 records."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import mla_cupy
from mla_cupy import reference
from mla_cupy.cache_formats import FORMATS
from tests.cache.inputs import empty_cache
from tests.support.flat import flat, mla_decode
from tests.support.mutants import Mutant, Plant
from tests.support.sim_driver import simulated

Array = npt.NDArray[Any]

TOKENS, PAGE = 144, 16
SCALE = float(np.log(2)) * (1 - 1e-6)  # a score is a power of two, or just below
#: Operation, kernel, record, heads: each kernel with raised weights.
KERNELS = (
    ("dense", "decode_sm90_records", "fp8", 2),
    ("dense", "decode_sm90_records_seesaw", "v32", 33),
    ("sparse", "sparse_decode_sm90_small", "v32", 2),
    ("sparse", "sparse_decode_sm90", "v32", 33),
    ("forward", "sparse_forward_sm90_records", "v32", 2),
)
IN_EVERY_RUN = (KERNELS[0], KERNELS[3])


def attend(operation: str, kernel: str, record: str, heads: int, scores: Array) -> tuple[Array, Array]:
    """The first head's out and lse for keys with these scores, in base 2; the values of token t are 1 in column t."""
    layout, b = FORMATS[record], 1
    cache = empty_cache(layout, TOKENS // PAGE, PAGE)
    latent = np.zeros((TOKENS, layout.d_latent), np.float32)
    rope = np.zeros((TOKENS, layout.d_rope), np.float32)
    latent[np.arange(TOKENS), np.arange(TOKENS)] = 1
    rope[:, 0] = scores
    dtype = ml_dtypes.bfloat16
    reference.cache_append(latent.astype(dtype), rope.astype(dtype), cache, np.arange(TOKENS), kv_format=record)
    q = np.zeros((b, 1, heads, 576), dtype)
    q[..., 512] = 1
    slots = np.arange(TOKENS, dtype=np.int32)
    options: dict[str, Any] = {"scale": SCALE, "kernel": kernel, "out_dtype": "float32"}
    with simulated(1):
        if operation == "dense":
            table, lengths = np.arange(TOKENS // PAGE, dtype=np.int32)[None], np.array([TOKENS], np.int32)
            out, lse = mla_decode(q, cache, table, lengths, **options)
            return out[0, 0, 0], lse[0, 0]
        if operation == "sparse":
            out, lse = flat(mla_cupy.sparse_mla_decode)(q, cache, slots[None, None], **options)
            return out[0, 0, 0], lse[0, 0, 0]
        out, lse, _ = flat(mla_cupy.sparse_mla_forward)(q[0], cache, slots[None], **options)
        return out[0, 0], lse[0, 0]


def verdict(case: tuple[str, str, str, int]) -> str:
    """Errors of small weights, and of scores that rise too little to move the maximum."""
    scores = np.zeros(TOKENS)
    # 2^8 of the first tile's, in the third one, of the same warpgroup wherever two share tiles: no maximum follows.
    scores[0], scores[128:] = 28, 32
    scores[129] = 36
    exact = np.exp2(scores * (1 - 1e-6))
    out, lse = attend(*case, scores)
    wrong = np.abs(out[:TOKENS] / (exact / exact.sum()) - 1)
    if not wrong[scores > 0].max() < 2e-3:
        return f"weights are wrong by {wrong[scores > 0].max():.3g}"
    scores = np.zeros(TOKENS)
    scores[0] = 28
    exact = np.exp2(scores * (1 - 1e-6))
    out, own_lse = attend(*case, scores)
    wrong = np.abs(out[:TOKENS] / (exact / exact.sum()) - 1)
    if not wrong.max() < 0.07:  # 2^-21: float16 keeps three bits of it
        return f"small weights are wrong by {wrong.max():.3g}"
    expected = np.log(np.exp2(28 * (1 - 1e-6)) + TOKENS - 1)
    return "" if abs(own_lse - expected) < 1e-4 and np.isfinite(lse) else f"lse is {own_lse}, not {expected}"


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", IN_EVERY_RUN, ids=lambda case: case[1])
def test_small_weights_count(case: tuple[str, str, str, int]) -> None:
    assert verdict(case) == ""


@pytest.mark.slow
@pytest.mark.parametrize("case", KERNELS, ids=lambda case: case[1])
def test_small_weights_count_in_each_kernel(case: tuple[str, str, str, int]) -> None:
    assert verdict(case) == ""


RAISED = "attention/sm90/raised_weights.cuh"
MUTANT = Mutant("weights that are not raised", RAISED, "kRaisedWeightsLog2 = 7", "kRaisedWeightsLog2 = 0")


@pytest.mark.slow
def test_is_caught(plant: Plant) -> None:
    plant(MUTANT)
    for case in IN_EVERY_RUN:
        assert verdict(case), f"nothing shows {MUTANT.name}"
