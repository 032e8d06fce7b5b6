"""Context parallelism: every rank attends to its share of the tokens, and the merged results are the whole cache's."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from mla_cupy import reference
from tests.support.cases import DecodeCase, DecodeInputs, make
from tests.support.flat import mla_decode
from tests.support.kernels import SCHEDULED_KERNELS, cc_of, on_hopper
from tests.support.mutant_suite import mutant_suite
from tests.support.mutants import Mutant
from tests.support.sim_driver import simulated
from tests.support.tolerance import check

Array = npt.NDArray[Any]

GENERIC = "attention_generic"
KERNELS = (*on_hopper(SCHEDULED_KERNELS), "decode_sm100", GENERIC)
#: The causal edge on both sides of the end of a rank's tile, in a rank's first token, and ranks without any token.
WHOLE = DecodeCase(b=5, seqlens=(131, 2, 0, 4, 67), s_q=3, h_q=3, page_size=16)
#: The kernels for Hopper, one after the other, in every run; everything under -m slow.
QUICK = {
    (kernel, world) for kernel, world in zip(itertools.cycle(on_hopper(SCHEDULED_KERNELS)), (2, 3, 4), strict=False)
}
MODES = ("early", "late", "random")


def _shard(whole: DecodeInputs, world: int, rank: int) -> tuple[Array, Array, Array, Array]:
    """The arguments of one rank: every `world`-th token from `rank` on, in pages of its own, between poison."""
    page_size, lengths = whole.case.page_size, whole.case.lengths()
    local = [np.arange(rank, length, world) for length in lengths]
    max_pages = max(1, *(-(-len(tokens) // page_size) for tokens in local))
    table = np.arange(len(lengths) * max_pages, dtype=np.int32).reshape(-1, max_pages)[:, ::-1].copy()
    pool = np.full((table.size, *whole.kv_cache.shape[1:]), np.nan, whole.kv_cache.dtype)
    for i, tokens in enumerate(local):
        places = np.arange(len(tokens))
        keys = whole.kv_cache[whole.block_table[i, tokens // page_size], tokens % page_size]
        pool[table[i, places // page_size], places % page_size] = keys
    return whole.q, pool, table, whole.seqlens


def _pairs() -> list[Any]:
    pairs = itertools.product(KERNELS, (1, 2, 3, 4))
    return [pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.slow) for pair in pairs]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("kernel", "world"), _pairs())
def test_merged_ranks_equal_the_whole(kernel: str, world: int) -> None:
    inputs = make(WHOLE)
    states = []
    for rank in range(world):
        with simulated(2, cc_of(kernel), MODES[rank % len(MODES)], rank):
            shard, options = _shard(inputs, world, rank), {"cp_world": world, "cp_rank": rank, "kernel": kernel}
            states.append(mla_decode(*shard, **options, out_dtype="float32"))
    out, lse = reference.merge_states(*(np.stack(parts) for parts in zip(*states, strict=True)))
    check((out.astype(np.float32), lse.astype(np.float32)), inputs.exact, inputs.rounded, WHOLE.dtype)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kernel", KERNELS)
def test_nan_reaches_only_the_rows_that_see_it(kernel: str) -> None:
    """Token 66 of rank 1 of 2 is token 133 of 135: the last two of four queries see it."""
    case = DecodeCase(b=1, seqlens=135, s_q=4, h_q=2, cp_world=2, cp_rank=1)
    inputs = make(case)
    inputs.kv_cache[inputs.block_table[0, 1], 66 - 64, 0, [3, 300]] = np.nan, np.inf
    with simulated(1, cc_of(kernel), "late"):
        got = mla_decode(*inputs.arguments, **case.options, kernel=kernel)
    seen = np.isnan(got[0].astype(np.float32)).any(axis=(0, 2, 3))
    assert seen.tolist() == [False, False, True, True]
    check(got, inputs.exact, inputs.rounded, case.dtype)


def _run() -> None:
    """Rank 2 of 3 with one page of four tokens: positions 2, 5, 8 and 11 of 14, 10 and 3."""
    case = DecodeCase(b=3, seqlens=(14, 10, 3), s_q=4, h_q=2, page_size=4, cp_world=3, cp_rank=2)
    inputs = make(case)
    table = np.ascontiguousarray(inputs.block_table[:, :1])
    with simulated(1):
        got = mla_decode(inputs.q, inputs.kv_cache, table, inputs.seqlens, **case.options, kernel=GENERIC)
    check(got, inputs.exact, inputs.rounded, case.dtype)


test_is_caught, test_as_it_is = mutant_suite(
    GENERIC,
    [_run],
    {
        "bar.sync": (5, [0, 2]),
    },
    [
        Mutant(
            "tokens of later ranks not counted",
            "attention/decode_params.cuh",
            "(hidden + p.cp_world - 1 - behind_last) / p.cp_world",
            "(hidden + p.cp_world - 1) / p.cp_world",
        ),
    ],
)
