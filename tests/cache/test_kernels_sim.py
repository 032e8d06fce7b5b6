"""The kernels of the cache in the simulator, which also reports every access outside of an array."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import mla_cupy
from tests.cache.runs import (
    CASES,
    COPIES,
    SLOTS_CASES,
    CacheCase,
    SlotsCase,
    check_append_and_gather,
    check_copy,
    check_slots,
    check_ties,
    check_update,
    make,
)
from tests.support.sim_driver import simulated

SIZES = ((6, 5, 3), (3, 200, 64))


def same(x: object) -> object:
    return x


@pytest.mark.one_in(8)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_append_and_gather(case: CacheCase) -> None:
    with simulated(2):
        check_append_and_gather(case, same, np.asarray)


@pytest.mark.parametrize("record", ["v32", "v32-nope", "v4", "v41", "v41-fp4", "fp8", "bf16"])
@pytest.mark.parametrize("n", [13, 22])
def test_nothing_is_written_beside_the_rows(record: str, n: int) -> None:
    """Rows of an array that goes on before and behind them."""
    inputs = make(CacheCase(record, n=n))
    (exact,) = mla_cupy.reference.cache_gather(inputs.cache, inputs.slots, kv_format=record)
    n = len(exact)
    around = np.full((n + 16, exact.shape[1]), 7, ml_dtypes.bfloat16)
    with simulated(2):
        mla_cupy.cache_gather(inputs.cache, inputs.slots, kv_format=record, out=around[8 : 8 + n])
    assert (around[:8] == 7).all()
    assert (around[8 + n :] == 7).all()


@pytest.mark.parametrize("name", ["v32", "v4", "v41", "v41-fp4"])
def test_without_instructions_for_e4m3(name: str) -> None:
    """Ampere and Turing convert by integer arithmetic."""
    with simulated(2, (8, 0)):
        check_append_and_gather(CacheCase(name, dtype="float32", special=True, n=13), same, np.asarray)


@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16"])
def test_shorter_tokens_without_rope(out_dtype: str) -> None:
    """Tokens of 528 bytes lack the reserved ones of 656, and nothing else."""
    inputs = make(CacheCase("v32-nope", gap=0))
    short = inputs.cache[..., :528].copy()
    with simulated(2):
        rows = []
        for cache in (inputs.cache, short):
            mla_cupy.cache_append(inputs.latent, None, cache, inputs.slots, kv_format="v32-nope")
            rows.append(mla_cupy.cache_gather(cache, inputs.slots, kv_format="v32-nope", out_dtype=out_dtype))
    np.testing.assert_array_equal(short, inputs.cache[..., :528])
    np.testing.assert_array_equal(*rows)


def test_ties_of_e2m1_go_to_even() -> None:
    with simulated(2):
        check_ties(same, np.asarray)


@pytest.mark.parametrize("shape", COPIES, ids=str)
def test_copy(shape: tuple[int, int, int, int]) -> None:
    with simulated(2):
        check_copy(shape, same, np.asarray)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_update(sizes: tuple[int, int, int]) -> None:
    with simulated(2):
        check_update(same, np.asarray, sizes)


@pytest.mark.parametrize("case", SLOTS_CASES, ids=str)
def test_slots(case: SlotsCase) -> None:
    with simulated(2):
        check_slots(case, same, np.asarray)


def test_nothing_to_do_is_no_launch() -> None:
    inputs = make(CacheCase("v32"))
    with simulated(2) as target:
        mla_cupy.cache_append(inputs.latent[:0], inputs.rope[:0], inputs.cache, inputs.slots[:0])  # type: ignore[index]
        mla_cupy.cache_append(inputs.latent, inputs.rope, inputs.cache[:0], inputs.slots)
        assert mla_cupy.cache_gather(inputs.cache, inputs.slots[:0]).shape == (0, 576)
        mla_cupy.cache_copy_pages(np.zeros((2, 3, 16), np.uint8), np.zeros((0, 2), np.int32))
        assert target.launched == []
