"""Bugs planted in dense decode by pairs of SMs on Blackwell: each must show, the kernel as it is must not.

Those of products, softmax and results, which it shares with the sparse forward, are in
`tests/sparse_forward/test_sm100_joint_mutants.py`; here are those of its own roles and masks, and the steps once more.
A step that the compiler has written twice, for the values of a tile and for those of the last one, is left out at both.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from tests.decode.test_small_mutants import alike_where_finite
from tests.support import mutants
from tests.support.calls import plan_of
from tests.support.cases import DecodeCase, make
from tests.support.flat import mla_decode
from tests.support.mutants import Plant, as_verdict, steps
from tests.support.sim_driver import simulated
from tests.support.sim_modes import MODES
from tests.support.tolerance import check

KERNEL = "decode_sm100_joint"
SOURCE = "decode/sm100_joint.cu"
ROLES = "decode/sm100_joint.cuh"
#: One pair works on all requests, of four, no, three and one tiles: two, none, two and one joint tiles. Each block has
#: the rows of one of two queries.
CASE = DecodeCase(b=4, seqlens=(250, 0, 130, 40), s_q=2, h_q=64, page_size=16, missing_pages=1)

WAIT, ARRIVE, COMMIT = "mbarrier.try_wait", "mbarrier.arrive", "tcgen05.commit"
AFTER = "tcgen05.fence::after_thread_sync"


@dataclass(frozen=True)
class Mutant(mutants.Mutant):
    """With `pieces`, requests are cut into pieces of one tile of 64 tokens, half of a joint tile."""

    pieces: bool = False


MUTANTS = [
    # Waits
    Mutant("scores not waited for", SOURCE, *steps(WAIT, 0, of=17)),
    Mutant("present keys not waited for", SOURCE, *steps(WAIT, 1, of=17)),
    Mutant("P overwritten before it is multiplied", SOURCE, *steps(WAIT, 2, of=17)),
    Mutant("values mended before they are there", SOURCE, *steps(WAIT, 3, of=17)),
    Mutant("stored before the products are done", SOURCE, *steps(WAIT, 4, of=17)),
    Mutant("present keys overwritten", SOURCE, *steps(WAIT, 5, of=17)),
    Mutant("K loaded before it is free", SOURCE, *steps(WAIT, 6, of=17)),
    Mutant("Q loaded before it is free", SOURCE, *steps(WAIT, 7, of=17)),
    Mutant("V loaded before it is free", SOURCE, *steps(WAIT, 8, of=17)),
    Mutant("Q not waited for", SOURCE, *steps(WAIT, 9, of=17)),
    Mutant("Q of the peer not waited for", SOURCE, *steps(WAIT, 10, of=17)),
    Mutant("K not waited for", SOURCE, *steps(WAIT, 11, of=17)),
    Mutant("P not waited for", SOURCE, *steps(WAIT, 12, 14, of=17)),
    Mutant("V not waited for", SOURCE, *steps(WAIT, 13, 15, of=17)),
    Mutant("Q passed on before it is there", SOURCE, *steps(WAIT, 16, of=17)),
    # Arrivals and commits
    Mutant("present keys never released", SOURCE, *steps(ARRIVE, 0, of=8)),
    Mutant("P never announced", SOURCE, *steps(ARRIVE, 1, of=8)),
    Mutant("present keys never announced", SOURCE, *steps(ARRIVE, 2, of=8)),
    Mutant("K never expected", SOURCE, *steps(ARRIVE, 3, of=8)),
    Mutant("V never expected", SOURCE, *steps(ARRIVE, 5, of=8)),
    Mutant("V to mend never expected", SOURCE, *steps(ARRIVE, 6, of=8)),
    Mutant("Q never announced", SOURCE, *steps(ARRIVE, 4, of=8)),
    Mutant("Q never passed on", SOURCE, *steps(ARRIVE, 7, of=8)),
    Mutant("columns of K never released", SOURCE, *steps(COMMIT, 0, of=8)),
    Mutant("no commit of the scores", SOURCE, *steps(COMMIT, 2, of=8)),
    Mutant("Q never released", SOURCE, *steps(COMMIT, 3, of=8)),
    Mutant("columns of V never released", SOURCE, *steps(COMMIT, 4, 6, of=8)),
    Mutant("no commit of the values", SOURCE, *steps(COMMIT, 5, 7, of=8)),
    Mutant("bytes to mend counted by the leader", ROLES, "mend ? 0 : kBytes, block.rank", "kBytes, block.rank"),
    Mutant("half of the values to mend counted", ROLES, "kValueGroups * kBytes", "kValueGroups * kBytes / 2"),
    # Fences and barriers
    Mutant("no after_thread_sync of the products", SOURCE, *steps(AFTER, 4, 5, 6, 7, 8, 9, of=11)),
    Mutant("P without a proxy fence", SOURCE, *steps("fence.proxy.async", 0, of=2)),
    Mutant("Q without a proxy fence", SOURCE, *steps("fence.proxy.async", 1, of=2)),
    Mutant("maxima not waited for", SOURCE, *steps("bar.sync", 0, of=3)),
    Mutant("sums not waited for", SOURCE, *steps("bar.sync", 1, of=3)),
    Mutant("added to what is not stored yet", SOURCE, *steps("bar.sync", 2, of=3)),
    Mutant("pair begins alone", SOURCE, *steps("barrier.cluster", 0, 1, of=4)),
    Mutant("pair ends alone", SOURCE, *steps("barrier.cluster", 2, 3, of=4)),
    # Loads
    Mutant("both load the same keys", ROLES, "if (half == (i32)block.rank) load", "if (half == 0) load"),
    Mutant("both load the same dims", ROLES, "(i32)block.rank * kBlockDims + t", "t"),
    Mutant("nothing behind the last tile", ROLES, "? kHalves - 1 : half;", "? half : half;"),
    Mutant("values of the next group", ROLES, "t * kTileDims) / kSw128Columns", "(t ^ 1) * kTileDims) / kSw128Columns"),
    # Masks
    Mutant("absent pages count", ROLES, "        mask_keys_absent(scores, present);\n", ""),
    Mutant("present keys of the other half", ROLES, "s.present[at.stage()][half];", "s.present[at.stage()][half ^ 1];"),
    Mutant("hidden keys count", ROLES, "min(visible_tokens(p, item, row), item.tokens)", "item.tokens"),
    Mutant(
        "keys of the page behind the last tile",
        ROLES,
        "        window = BoxWindow{{kAbsentPage, kAbsentPage}, {0, 0}};\n",
        "",
        pieces=True,
    ),
    Mutant("what the own rows see decides", ROLES, "row0 - (i32)rank * kJointHeads", "row0"),
    Mutant("hidden values not mended", ROLES, "[&] { mend(item, tile); }", "[] {}"),
    Mutant("first keys mended twice", ROLES, "(tile + group % kHalves) * kTileTokens", "tile * kTileTokens"),
    Mutant(
        "NaN not given back",
        ROLES,
        "if (item.seen_by_all < min(item.tokens, item.tile_end * kTileTokens)) {",
        "if (false) {",
    ),
]


@as_verdict
def verdict(mode: tuple[str, int], pieces: bool = False) -> None:
    """What a run shows; empty if nothing."""
    inputs = make(CASE)
    last = CASE.lengths()[0] - 1  # of the first request: only its last query sees it
    page = inputs.kv_cache[inputs.block_table[0, last // 16], :, 0]
    page[last % 16, [7, 300]] = np.inf
    page[last % 16 - 1] *= np.asarray(8, page.dtype)  # raises the maxima of the last tile
    with simulated(1, (10, 0), *mode):
        if pieces:
            plan = plan_of(inputs, device=0, kernel=KERNEL, batch_invariant=True, split_tokens=64)
            plan.update(inputs.seqlens)
            got = mla_decode(*inputs.arguments, plan=plan)
        else:
            got = mla_decode(*inputs.arguments, kernel=KERNEL)
    alike = [alike_where_finite(mine, exact) for mine, exact in zip(got, inputs.exact, strict=True)]
    check((alike[0], alike[1]), inputs.exact, inputs.rounded, CASE.dtype)


@pytest.mark.one_in(12)  # each takes ten seconds
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_is_caught(mutant: Mutant, plant: Plant) -> None:
    """In one of the modes: late completion shows most."""
    plant(mutant)
    assert any(verdict(mode, mutant.pieces) for mode in MODES[1:] + MODES[:1]), f"nothing shows that {mutant.name}"


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=[pytest.mark.slow] if i > 1 else []) for i, mode in enumerate(MODES)], ids=str
)
def test_kernel_as_it_is(mode: tuple[str, int]) -> None:
    assert verdict(mode) == ""


@pytest.mark.slow
def test_kernel_as_it_is_in_pieces() -> None:
    assert verdict(("late", 0), pieces=True) == ""
