"""Bugs planted in what masks add to dense attention, and in the kernel that makes them: each must show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest

from tests.dense import test_mask as masked
from tests.dense.runs import HOPPER
from tests.support import mutants

SOURCE, MASK, INDICES = "dense/sm90.cu", "dense/mask.cuh", "dense/mask.cu"


ends, long, wide = (partial(masked.test_mask, case) for case in (masked.ENDS, masked.LONG, masked.WIDE))
hidden = partial(masked.test_hidden_values_never_show, masked.LONG, HOPPER)
own_row = masked.test_only_who_waited_stores_again
narrow = partial(masked.test_narrow_and_wide_masks, HOPPER)
indices = partial(masked.test_mask_of_indices, *masked.SELECTIONS[1], False)
hostile = partial(masked.test_mask_of_indices, *masked.SELECTIONS[2], True)


@dataclass(frozen=True)
class Mutant(mutants.Mutant):
    """What shows it."""

    attempt: Callable[[], None] = ends


MUTANTS = [
    Mutant("a mask is not waited for", SOURCE, *mutants.steps("mbarrier.try_wait", 3, 5, 9, 12, 15, of=28), ends),
    Mutant("a mask is overwritten", SOURCE, *mutants.steps("mbarrier.try_wait", 18, 20, of=28), long),
    Mutant("a mask of a whole tile is left out", SOURCE, "kHasMask && i >= 0; --i", "kHasMask && i > 0; --i", long),
    Mutant("one row for both", SOURCE, "s.mask[math.row(r)]", "s.mask[math.row(0)]", own_row),
    Mutant("the first lane's columns", MASK, "i32 shift = fragment_column(thread);", "i32 shift = 0;", ends),
    Mutant("tiles of whole words", MASK, "i32 shift = tile * kTileKeys % 32;", "i32 shift = 0;", wide),
    Mutant("bits beyond the mask", MASK, "present && byte < p.mask_bytes", "present", narrow),
    Mutant("nobody waits for the second time", SOURCE, "if (__all_sync(kFullWarp, finite)) return", "return", hidden),
    Mutant(
        "the second time as the first", SOURCE, "return kHasMask && s.repeats.again[slot];", "return false;", hidden
    ),
    Mutant("the last item does not come again", SOURCE, "if (!no_work) return false;", "return false;", hidden),
    Mutant("all store again", SOURCE, "return !__any_sync(kFullWarp, wanted);", "return false;", own_row),
    Mutant("masked values are added back", SOURCE, "if (kHasMask && !mask_bit(", "if (false && !mask_bit(", hidden),
    Mutant("an index of another sequence", INDICES, "key >= (u32)keys.count", "key >= 1u << 30", indices),
    Mutant("starts go down", INDICES, "if (n < next) atomicMax(&s.start, start);", "s.start = start;", hostile),
    Mutant("a word too few", INDICES, "atomicOr(&s.words[word], bits);\n            word", "word", indices),
]


#: Every run has those of barriers, and of who stores when.
SLOW = {mutant.name for mutant in MUTANTS[2:9]}
PARAMETERS = [
    pytest.param(mutant, id=mutant.id, marks=[pytest.mark.slow] if mutant.name in SLOW else []) for mutant in MUTANTS
]


@pytest.mark.parametrize("mutant", PARAMETERS)
def test_is_caught(mutant: Mutant, plant: mutants.Plant) -> None:
    plant(mutant)
    with pytest.raises(mutants.CAUGHT):
        mutant.attempt()
