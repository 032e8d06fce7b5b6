"""`merge_states` in the simulator: rows that are aligned and rows that are not, and bugs planted in the kernel."""

from __future__ import annotations

import numpy as np
import pytest

import mla_cupy
from tests.merge.test_merge import assert_close, states
from tests.support.mutants import Mutant, Plant, as_verdict
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


# ---- Mutants ---------------------------------------------------------------------------------------------------

FILE = "merge/states.cu"
MUTANTS = [
    Mutant("an empty state's output is used", FILE, "return lse != negative_infinity();", "return true;"),
    Mutant("states of an odd number", FILE, "if (state >= p.n) return false;", ""),
    Mutant(
        "only the first states", FILE, "for (i32 first = 0; first < p.n; first", "for (i32 first = 0; !first; first"
    ),
    Mutant(
        "only the first columns",
        FILE,
        "for (i32 column = lane * kColumns; column < p.d;",
        "for (i32 column = lane * kColumns; column < min(p.d, 1024);",
    ),
    Mutant("rows behind the last", FILE, "if (index >= (u32)(p.b * p.s_q * p.h_q)) return;", ""),
    Mutant("rows that are not aligned", FILE, "return strides % kColumns == 0 &&", "return"),
    Mutant("lanes share columns", FILE, "threadIdx.x % p.row_lanes;", "threadIdx.x % (p.row_lanes / 2);"),
]


@as_verdict
def shows() -> None:
    check(3, 1032, "float32", "bfloat16")
    check(3, 24, "float16", "float32")
    check(2, 12, "float32", "float32", aligned=False)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_mutants_are_caught(plant: Plant, mutant: Mutant) -> None:
    plant(mutant)
    assert shows()
