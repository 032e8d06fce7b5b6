"""Arrays of every order in the simulator: they lie as on the host, so results over inputs are refused there too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy.errors import DTypeError, ShapeError
from mla_cupy.simulation import simulated

TOKENS, WIDTH = 8, 576


def test_a_result_inside_an_input_is_refused() -> None:
    pool = np.zeros((2 * TOKENS, WIDTH), np.float16)
    slots = np.arange(4, dtype=np.int32)
    cache = pool[:TOKENS].reshape(TOKENS, 1, 1, WIDTH)
    with simulated() as gpu:
        for out in (pool[:4], pool[TOKENS - 1 : TOKENS + 3], pool[1:8:2]):  # inside, across the end, with gaps
            with pytest.raises(ShapeError, match="out: got memory that overlaps cache"):
                mla_cupy.cache_gather(cache, slots, out=out)
        assert not gpu.launched
        mla_cupy.cache_gather(cache, slots, out=pool[TOKENS : TOKENS + 4])  # next to it, in the same array
        assert gpu.launched


ORDERS: dict[str, Callable[[Any], Any]] = {
    "C": np.ascontiguousarray,
    "Fortran": np.asfortranarray,
    "a part of Fortran's": lambda x: np.asfortranarray(np.stack([x, x]))[1],
    "axes in another order": lambda x: np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 1, 2)), 2, 1).copy(order="K"),
    "strided by hand": lambda x: np.lib.stride_tricks.as_strided(np.stack([x, x])[1:], x.shape, x.strides),
}


@pytest.mark.parametrize("order", ORDERS)
def test_arrays_of_any_order(order: str) -> None:
    rng = np.random.default_rng(3)
    outs = rng.standard_normal((3, 2, 3, 4, 64)).astype(np.float32)
    lses = rng.standard_normal((3, 2, 4, 3)).astype(np.float32)
    lse = ORDERS[order](np.zeros((2, 4, 3), np.float32))
    with simulated():
        wanted, wanted_lse = mla_cupy.merge_states(outs, lses)
        out, _ = mla_cupy.merge_states(outs, ORDERS[order](lses), lse=lse)
    np.testing.assert_array_equal(out, wanted)
    np.testing.assert_array_equal(lse, wanted_lse)


@pytest.mark.parametrize("name", ["outs", "lses", "out", "lse"])
def test_arrays_of_objects_are_refused_by_name(name: str) -> None:
    call = {"outs": np.ones((2, 1, 1, 4, 64), np.float32), "lses": np.zeros((2, 1, 4, 1), np.float32)}
    call |= {"out": np.ones((1, 1, 4, 64), np.float32), "lse": np.zeros((1, 4, 1), np.float32)}
    call[name] = call[name].astype(object)
    with simulated(), pytest.raises(DTypeError, match=rf"{name}.dtype: got object, expected "):
        mla_cupy.merge_states(**call)
