"""Bugs planted in the top-k: the simulator's findings, or a comparison with the oracle, show each.

Each needs a compilation: the ordinary run takes a few.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.indexer.topk.test_topk_sim import BLOCK, CLUSTER, WIDTHS, select
from tests.indexer.topk.topk_cases import assert_selected, expected, hard_rows
from tests.support.mutants import CAUGHT, Mutant, Plant, Steps, steps


def mutant(kernel: str, name: str, old: str | Steps, new: str, quick: bool = False) -> object:
    marks = () if quick else (pytest.mark.slow,)
    return pytest.param(
        kernel, Mutant(name, "indexer/topk/select.cu", old, new), id=name.replace(" ", "_"), marks=marks
    )


MUTANTS = [
    mutant(BLOCK, "ties are all taken", "first_bits(word.equal(), threshold.rank - before.equal)", "word.equal()"),
    mutant(BLOCK, "minus zero is below zero", "__float_as_uint(x + 0.f)", "__float_as_uint(x)"),
    mutant(BLOCK, "NaN is first", "return kNanKey;", "return kKeptKey;"),
    mutant(BLOCK, "two digits share a bin", "? digit + (digit >> 5)", "? (digit & ~1u) + (digit >> 5)"),
    mutant(CLUSTER, "neighbouring digits are exchanged", "{first & 1 ? high : low,", "{first & 1 ? low : high,"),
    mutant(
        CLUSTER,
        "keys that do not count share a bin",
        "min((keys.at[i] - base) >> shift, (u32)kBins)",
        "min((keys.at[i] - base) >> shift, (u32)kBins - 1)",
    ),
    mutant(BLOCK, "passes end a digit early", "pass < kPasses && found", "pass < kPasses - 1 && found"),
    mutant(
        BLOCK,
        "words are read before they are written",
        *steps("bar.sync", 5, of=13),
        quick=True,
    ),
    mutant(
        BLOCK,
        "bins are counted before all are zero",
        *steps("bar.sync", 0, of=13),
        quick=True,
    ),
    mutant(
        CLUSTER,
        "blocks do not wait for the others",
        *steps("barrier.cluster", 0, 1, of=4),
        quick=True,
    ),
    mutant(CLUSTER, "blocks write where the first one does", "above_before += (i32)block_sum", "(void)block_sum"),
    mutant(CLUSTER, "every block takes the ties", "before.equal = found.equal_before;", "before.equal = 0;"),
    mutant(BLOCK, "bins are not emptied", "        bin = 0;\n", ""),
]
ENDS = Mutant("every row sees the last key", "indexer/topk/select.cu", "- rows_after;", ";")


@pytest.mark.slow
def test_ends_of_sequences_are_caught(plant: Plant) -> None:
    logits, ke = np.tile(np.arange(50, dtype=np.float32), (4, 1)), np.array([50, 9], np.int32)
    plant(ENDS)
    with pytest.raises(CAUGHT):
        assert_selected(select(BLOCK, logits, k=3, ke=ke), expected(logits, k=3, ke=ke))


SORT = [
    Mutant("warps do not wait", "indexer/topk/select.cu", *steps("bar.sync", 9, 11, of=13)),
    Mutant(
        "ties in any order", "indexer/topk/select.cu", "sorted.places[n] = (u16)n;", "sorted.places[n] = (u16)(n ^ 1);"
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("planted_bug", SORT, ids=lambda bug: bug.id)
def test_a_wrong_order_is_caught(planted_bug: Mutant, plant: Plant) -> None:
    logits = hard_rows(WIDTHS[BLOCK])[4:6]
    plant(planted_bug)
    with pytest.raises(CAUGHT):
        assert_selected(select(BLOCK, logits, k=300, order="value"), expected(logits, k=300, order="value"))


KEPT = Mutant("keys past the range are kept", "indexer/topk/select.cu", "s < row.last && row.keeps(s)", "row.keeps(s)")


@pytest.mark.slow
def test_kept_keys_are_caught(plant: Plant) -> None:
    logits = hard_rows(300)[:1]
    plant(KEPT)
    with pytest.raises(CAUGHT):
        assert_selected(select(BLOCK, logits, k=20, keep_last=5), expected(logits, k=20, keep_last=5))


@pytest.mark.parametrize(("kernel", "planted_bug"), MUTANTS)
def test_is_caught(kernel: str, planted_bug: Mutant, plant: Plant) -> None:
    rows = hard_rows(WIDTHS[kernel])
    logits = rows[[2, 5, 7]] if kernel == BLOCK else np.where(np.arange(rows.shape[1]) % 3, rows[2:3], rows[:1])
    plant(planted_bug)
    with pytest.raises(CAUGHT):
        assert_selected(select(kernel, logits, k=300), expected(logits, k=300))
