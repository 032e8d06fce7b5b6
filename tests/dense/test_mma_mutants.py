"""Bugs planted in dense attention by mma.sync: each must show, the kernel as it is must not."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from tests.dense import test_mask as masked
from tests.dense.runs import MMA, MMA_163KB, run
from tests.dense.test_mma_sim import HARD
from tests.support import mutants
from tests.support.dense_cases import DenseCase, make

SOURCE = "dense/mma.cu"
ENDS = DenseCase(((3, 5), (4, 4)))
#: Three tiles of the first group.
LONG = DenseCase(((40, 270),))
RISING = DenseCase(((8, 300),), scale=1.0)
PIECES = DenseCase(((5, 9),), h_q=4, h_kv=2, k_rope="per_head")
STATE = DenseCase(((4, 6),), h_q=2, state="float32")
MASK = DenseCase(((3, 140),), mask=0.5, state="float32")
NARROW_MASK = DenseCase(((2, 140),), causal=False, mask=1.0)  # of which the first 128 keys have bits
LATE = ("late", 0)


@dataclass(frozen=True)
class Mutant(mutants.Mutant):
    """The case and the mode that show it, the kernel, and whether values that only later queries see are infinite."""

    case: DenseCase = LONG
    mode: tuple[str, int] = LATE
    kernel: str = MMA_163KB
    infinite: bool = False


MUTANTS = [
    Mutant("keys are not waited for", SOURCE, *mutants.steps("mbarrier.test_wait", 0, of=4)),
    Mutant("values are not waited for", SOURCE, *mutants.steps("mbarrier.test_wait", 2, of=4)),
    Mutant("keys are overwritten", SOURCE, *mutants.steps("mbarrier.test_wait", 1, of=4)),
    Mutant("values are overwritten", SOURCE, *mutants.steps("mbarrier.test_wait", 3, of=4)),
    Mutant("a phase for all tiles", SOURCE, "    math.phase ^= 1;\n", ""),
    Mutant("queries are not waited for", SOURCE, *mutants.steps("cp.async.wait_group", 0, of=2), ENDS),
    Mutant(
        "a group's share is not waited for",
        SOURCE,
        *mutants.steps("bar.sync", 4, of=5),
    ),
    Mutant("shares before all is read", SOURCE, *mutants.steps("bar.sync", 3, of=5)),
    Mutant(
        "an item over the last one",
        SOURCE,
        *mutants.steps("bar.sync", 0, of=5),
        HARD,
    ),
    Mutant(
        "looks before the values are there",
        SOURCE,
        *mutants.steps("cp.async.wait_group", 1, of=2),
        infinite=True,
        case=ENDS,
    ),
    Mutant(
        "values are not cleaned",
        SOURCE,
        "if (i * kTileKeys + first + row < trusted(s)) continue;",
        "continue;",
        ENDS,
        infinite=True,
    ),
    Mutant("what was cleaned is lost", SOURCE, "if (s.nonfinite) add_", "if (false) add_", ENDS, infinite=True),
    Mutant("values past the last key", SOURCE, "chunk, row + i * kStep < present);", "chunk, true);", ENDS),
    Mutant("a key too many", SOURCE, "(lane, j) >= seen", "(lane, j) > seen", ENDS),
    Mutant(
        "a tile too few with an end",
        SOURCE,
        "s.tile.seen_by_all() / kTileKeys;",
        "s.tile.seen_by_all() / kTileKeys + 1;",
    ),
    Mutant(
        "a warp sees what its first query sees",
        SOURCE,
        "s.tile.seen(rows - 1)",
        "s.tile.seen(math.warp * kWarpRows)",
        DenseCase(((40, 80),)),
    ),
    Mutant(
        "the output keeps its scale",
        SOURCE,
        "attention::rescale(math.out[t], math.rows[t].move_max(maxima));",
        "math.rows[t].move_max(maxima);",
        RISING,
    ),
    Mutant(
        "the other group's scale",
        SOURCE,
        "factor[r] = ex2_approx((r == 0 ? rows.x : rows.y) - max);",
        "factor[r] = 1.f;",
        RISING,
    ),
    Mutant(
        "one tile of rows for both", SOURCE, "result.first_row = math.row(math.group,", "result.first_row = math.row(0,"
    ),
    Mutant(
        "chunks of queries not swizzled",
        SOURCE,
        "smem_addr(s.q) + row_offset<kQueryPanels>(row, chunk)",
        "smem_addr(s.q) + row_offset<kQueryPanels>(row, chunk ^ row % 8)",
        ENDS,
    ),
    Mutant("the first columns again", SOURCE, "last ? from.last +", "false ? from.last +", PIECES),
    Mutant(
        "keys of another head",
        SOURCE,
        "s.kv_head = item.head / (p.h_q / p.h_kv);",
        "s.kv_head = 0;",
        PIECES,
    ),
    Mutant("rows of the next sequence", SOURCE, "result.row(kRow) < s.tile.queries", "true", ENDS),
    Mutant("an empty state is read", SOURCE, "stored && weights.earlier != 0.f", "stored && p.state_lse", STATE),
    Mutant("held queries of one half", SOURCE, "[i % 2 + k % 2 * 2] =", "[i % 2 + k % 2] =", ENDS, kernel=MMA),
    Mutant(
        "held queries past the last one",
        SOURCE,
        "row < s.tile.queries);\n        }\n    }\n}",
        "true);\n        }\n    }\n}",
        ENDS,
        kernel=MMA,
    ),
    Mutant("bits of whole words", SOURCE, "i32 shift = i * kTileKeys % 32,", "i32 shift = 0,", MASK, kernel=MMA),
    Mutant("bits beyond the mask", SOURCE, "&& byte + 4 * word < p.mask_bytes", "", NARROW_MASK, kernel=MMA),
    Mutant(
        "masked values are trusted",
        SOURCE,
        "return kHasMask ? 0 :",
        "return false ? 0 :",
        MASK,
        kernel=MMA,
        infinite=True,
    ),
]
#: Of the ordinary run: what is waited for, what nobody may see, and what the kernels with less shared memory hold.
ORDINARY = {
    *("keys are not waited for", "values are overwritten", "shares before all is read"),
    *("values are not cleaned", "the other group's scale", "held queries of one half"),
}
PARAMETERS = [
    pytest.param(mutant, id=mutant.id, marks=[] if mutant.name in ORDINARY else [pytest.mark.slow])
    for mutant in MUTANTS
]


def attempt(mutant: Mutant) -> None:
    """The case, with ends that nobody may follow."""
    if mutant.case is NARROW_MASK:
        masked.test_narrow_and_wide_masks(mutant.kernel)
        return
    inputs = make(mutant.case)
    if mutant.case.mask and not mutant.infinite:
        inputs = masked.make_finite(mutant.case)
    elif mutant.infinite:
        inputs.v[3, 0, 5] = inputs.v[4, 0, 4] = float("inf")  # of keys that the first query does not see
        if mutant.case.mask:
            bits = np.unpackbits(inputs.options["mask"], axis=1, bitorder="little")
            bits[0, 3:5], bits[1, 3:5] = 0, 1
            inputs.options["mask"][:] = np.packbits(bits, axis=1, bitorder="little")
    for name in ("cu_seqlens_q", "cu_seqlens_kv"):
        inputs.options[name][-1] += 99
    run(inputs, mutant.kernel, 1, mutant.mode)


@pytest.mark.parametrize("mutant", PARAMETERS)
def test_is_caught(mutant: Mutant, plant: mutants.Plant) -> None:
    plant(mutant)
    with pytest.raises(mutants.CAUGHT):
        attempt(mutant)


AS_THEY_ARE = {
    (one.case, one.kernel, one.infinite): pytest.param(
        one, id=f"{one.case.id}-{one.kernel}", marks=[] if one.name in ORDINARY else [pytest.mark.slow]
    )
    for one in sorted(MUTANTS, key=lambda one: one.name in ORDINARY)
}


@pytest.mark.parametrize("mutant", AS_THEY_ARE.values())
def test_as_it_is(mutant: Mutant) -> None:
    attempt(mutant)
