"""Bugs planted in the decode kernel for few rows."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support.cases import DecodeCase, make
from tests.support.flat import mla_decode
from tests.support.mutant_suite import mutant_suite
from tests.support.mutants import Mutant
from tests.support.sim_driver import simulated
from tests.support.tolerance import check

Array = npt.NDArray[Any]

KERNEL = "decode_sm90_small"
SMALL = "decode/sm90_small.cuh"
SWAPPED = "attention/sm90/swapped.cuh"
MODES = (("late", 0), ("early", 0), ("random", 1), ("random", 2))
#: 24 rows in a block of 24; one block works on all three requests, of four, two and three tiles.
CASE = DecodeCase(b=3, seqlens=(200, 66, 130), s_q=2, h_q=12, page_size=16, missing_pages=1)

TEXTS = [
    Mutant("keys freed by one warp too few", SMALL, "s.kv_empty[stage], kWarpgroupWarps)", "s.kv_empty[stage], 3)"),
    Mutant("O not re-scaled", SWAPPED, "for (auto& columns : math.out) scale.multiply(columns);", ";"),
    Mutant("hidden values not sanitized", SMALL, "sanitize_v<C>(block, s.kv[math.stage], item, tile, thread);", ""),
]


def alike_where_finite(got: Array, exact: Array) -> Array:
    """`got` with what is not finite in `exact` taken from there, if the same elements are finite in both.

    An infinite key gives some rows a score of -inf: the oracle's 0 * inf is NaN, the kernel's result is infinite.
    """
    finite = np.isfinite(exact)
    assert (np.isfinite(got.astype(np.float32)) == finite).all()
    return np.where(finite, got, exact).astype(got.dtype)


def run(mode: tuple[str, int]) -> None:
    """Values that only the last query sees are infinite, and maxima rise."""
    inputs = make(CASE)
    last = CASE.lengths()[0] - 1  # of the first request: only its last query sees it
    page = inputs.kv_cache[inputs.block_table[0, last // 16], :, 0]
    page[last % 16, 7] = np.inf
    page[last % 16 - 1] *= np.asarray(8, page.dtype)  # raises the maxima of the last tile
    with simulated(1, mode=mode[0], seed=mode[1]):
        got = mla_decode(*inputs.arguments, kernel=KERNEL)
    alike = [alike_where_finite(mine, exact) for mine, exact in zip(got, inputs.exact, strict=True)]
    check((alike[0], alike[1]), inputs.exact, inputs.rounded, CASE.dtype)


test_is_caught, test_as_it_is = mutant_suite(
    KERNEL,
    [partial(run, mode) for mode in MODES],
    {
        "bar.sync": (6, [0, 1, 3, 4]),
        "mbarrier.try_wait": (6, [0, 1, 3, 4]),
        "mbarrier.arrive": (6, [0, 3]),
        "fence.proxy": (2, [0, 1]),
        "fence.mbarrier_init": (1, [0]),
        "cp.async.wait_all": (1, [0]),
        "wgmma.fence": (4, [0, 3]),
        "wgmma.commit_group": (2, [0, 1]),
        "wgmma.wait_group": (2, [0, 1]),
    },
    TEXTS,
)
