"""Arrays in the simulator lie as they do on the host, so that results over inputs are refused there too."""

from __future__ import annotations

import numpy as np
import pytest

import mla_cupy
from mla_cupy.errors import ShapeError
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
        mla_cupy.cache_gather(cache, slots, out=pool[TOKENS : TOKENS + 4])  # beside it, in the same array
        assert gpu.launched
