"""`merge_states` in the simulator: rows that are aligned and rows that are not, and bugs planted in the kernel."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import mla_cupy
from tests.merge.test_merge import assert_close, states
from tests.support.mutant_suite import mutant_suite
from tests.support.mutants import Mutant
from tests.support.sim_driver import simulated


def check(n: int, d: int, dtype: str, out_dtype: str, *, aligned: bool = True, mode: str = "early") -> None:
    """Merge n states of 30 rows, a third of them empty with outputs of NaN; more NaN lies between the rows."""
    outs, lses = states(n, dtype, d, seed=d)
    if aligned:
        whole = np.full((*outs.shape[:-1], -(-d // 8) * 8 + 8), np.nan, outs.dtype)
        whole[..., :d] = outs
        outs = whole[..., :d]
    with simulated(mode=mode):
        got = mla_cupy.merge_states(outs, lses, out_dtype=out_dtype)
    assert_close(got, outs, lses, out_dtype)


@pytest.mark.parametrize("mode", ["early", "late"])
@pytest.mark.parametrize(
    ("n", "d", "dtype", "out_dtype"),
    [
        (2, 128, "bfloat16", "bfloat16"),  # eight rows a block
        (3, 24, "float16", "float32"),  # a lane of a row without a column
        (5, 1032, "float32", "bfloat16"),  # more columns than a block has at once
        (2, 7, "float32", "float32"),
    ],
)
def test_simulated_equals_oracle(n: int, d: int, dtype: str, out_dtype: str, mode: str) -> None:
    check(n, d, dtype, out_dtype, mode=mode)


@pytest.mark.parametrize(("n", "d", "dtype"), [(3, 128, "bfloat16"), (2, 12, "float32")])
def test_rows_of_any_alignment(n: int, d: int, dtype: str) -> None:
    check(n, d, dtype, dtype, aligned=False)


test_is_caught, test_as_it_is = mutant_suite(
    "merge_states",
    [partial(check, 3, 24, "float16", "float32")],
    {},
    [Mutant("empty states count", "merge_states", "return lse != negative_infinity();", "return true;")],
)
