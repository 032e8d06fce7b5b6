"""Bugs planted in the kernel of the gradients of keys and values: each must show."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest

from mla_cupy.kernels.dense import backward
from tests.dense.backward_runs import HOPPER, run
from tests.support import mutants
from tests.support.dense_cases import DenseCase
from tests.support.dense_gradients import make_gradients

SOURCE, ROWS = "dense/sm90_backward_keys.cu", "dense/sm90_rows.cuh"
ENDS = DenseCase(((3, 5), (4, 4)))
SEEN = DenseCase(((3, 5), (4, 4)), causal=False)
FULL = DenseCase(((130, 128),), causal=False)  # two tiles without a mask
LONG = DenseCase(((200, 130),))
PIECES = DenseCase(((5, 9),), h_q=4, h_kv=2, k_rope="per_head", q_pair=True)
ITEMS = DenseCase(((66, 130), (9, 4)), h_q=3, dtype="float16")
NARROW = DenseCase(((70, 3),), d_qk=128, d_v=128, h_q=2, k_rope="within")
LATE = ("late", 0)
SQUARE = DenseCase(((200, 200),), d_qk=128, d_v=128)
STATISTICS = "dense/delta.cu"  # and the schedule of one sequence
ALONE = DenseCase(((9, 12),), h_q=2, around=(2, 3))


@dataclass(frozen=True)
class Mutant(mutants.Mutant):
    """The case that shows it, and a mode of the simulator.

    Attributes
    ----------
    nonfinite : str
        Whether there is NaN in a key ("k") or a value ("v") that only later queries see, or in a query ("q") or its
        gradient ("dout") that only earlier keys are seen by.
    deterministic : bool
        Whether the queries' gradient is left to another kernel.
    """

    case: DenseCase = ENDS
    mode: tuple[str, int] = ("early", 0)
    nonfinite: str = ""
    deterministic: bool = False


MUTANTS = [
    Mutant("rows of one sequence", STATISTICS, "own + tile.first_query - one.first_query", "tile.first_query", ALONE),
    Mutant("one diagonal of keys", STATISTICS, "first - (end - begin - queries)", "first", ALONE),
    Mutant("tiles of keys are not counted", STATISTICS, "*p.key_schedule = Schedule{key_tiles, 0};", "", ALONE),
    Mutant(
        "keys before the sequence are left out",
        STATISTICS,
        "before = ceil_div(one.first_key, kKeyTileKeys)",
        "before = 0",
        ALONE,
    ),
    Mutant("keys are not cleaned", ROWS, "if (!zero_nonfinite<Element>(clean)) continue;", "continue;", nonfinite="k"),
    Mutant("nor queries", ROWS, "if (!zero_nonfinite<Element>(clean)) continue;", "continue;", nonfinite="q"),
    Mutant("nor dout", ROWS, "if (!zero_nonfinite<Element>(clean)) continue;", "continue;", nonfinite="dout"),
    Mutant("a NaN of a key is lost", SOURCE, "if (kSumsDq) poison_scores(", "if (0) poison_scores(", nonfinite="k"),
    Mutant("a NaN of a query is lost", SOURCE, "s.lse2[stage][row] = not_a_number();", "", nonfinite="q"),
    Mutant("a NaN of dout is lost", SOURCE, "if (slot.nonfinite_dout) add_", "if (0) add_", nonfinite="dout"),
    Mutant("a query too many", SOURCE, "column >= from[r] &&", "column + 1 >= from[r] &&"),
    Mutant("queries of the next sequence", SOURCE, "&& column < to[r];", ";"),
    Mutant("keys of the next sequence", SOURCE, "math.row(r) < tile.keys ? tile.queries", "true ? tile.queries", SEEN),
    Mutant(
        "a mask too few",
        SOURCE,
        "whole = ceil_div(tile.first_to_see_all(), kStepQueries);",
        "whole = tile.first_to_see_all() / kStepQueries;",
        SQUARE,
    ),
    Mutant("a tile that ends with its sequence is whole", SOURCE, "max(whole, tile.queries /", "max(end, end /", FULL),
    Mutant("no masked tile before the whole ones", SOURCE, "masked < whole ? masked :", "false ? masked :", SQUARE),
    Mutant(
        "hidden gradients remain",
        SOURCE,
        "            low = seers.sees(column, r) ? low : 0.f;\n"
        "            high = seers.sees(column + 1, r) ? high : 0.f;\n        }\n        to",
        "        }\n        to",
        nonfinite="v",
    ),
    Mutant("the first group of heads", SOURCE, "slot.head = item.head * group;", "slot.head = item.head;", PIECES),
    Mutant("the first head's last columns", SOURCE, "min(item.kv_head, p.k_rope_heads - 1)", "0", PIECES),
    Mutant(
        "statistics of another head", SOURCE, "(i64)head * p.num_rows + item.tile.first_row + first;", "first;", ITEMS
    ),
    Mutant("sums of another head", SOURCE, "((i64)head * p.num_rows + item", "(item", ITEMS),
    Mutant("the last columns go to the others", SOURCE, "u16* last = p.dk_rope +", "u16* last = p.dk +", PIECES),
    Mutant("rows of the next sequence", SOURCE, "stored = math.row(r) < tile.keys", "stored = true"),
    Mutant("panels in their own order", SOURCE, "panel < kLastSlot ? panel : panel + 1", "panel + 1"),
    Mutant("half a panel of the other warpgroup", SOURCE, "w == 0 ? kThird :", "true ? kThird :"),
    Mutant(
        "queries are not waited for",
        SOURCE,
        *mutants.steps("mbarrier.try_wait", 3, 5, of=14),
        ENDS,
        LATE,
    ),
    Mutant(
        "dout is not waited for",
        SOURCE,
        *mutants.steps("mbarrier.try_wait", 4, 6, of=14),
        FULL,
        LATE,
    ),
    Mutant(
        "keys are not waited for",
        SOURCE,
        *mutants.steps("mbarrier.try_wait", 1, of=14),
        FULL,
        LATE,
    ),
    Mutant(
        "values are not waited for",
        SOURCE,
        *mutants.steps("mbarrier.try_wait", 2, of=14),
        ENDS,
        LATE,
    ),
    Mutant("dS is not waited for", SOURCE, *mutants.steps("bar.sync", 2, 4, of=8)),
    Mutant("dS is overwritten", SOURCE, *mutants.steps("bar.sync", 1, 3, of=8), FULL),
    Mutant("dS is not fenced", SOURCE, *mutants.steps("fence.proxy.async", 0, 2, of=7)),
    Mutant(
        "own dS is not waited for", SOURCE, *mutants.steps("bar.sync", 1, 2, 3, 4, of=7), FULL, LATE, deterministic=True
    ),
    Mutant("dQ is not fenced", SOURCE, *mutants.steps("fence.proxy.async", 1, 3, of=7)),
    Mutant(
        "dQ is overwritten",
        SOURCE,
        *mutants.steps("cp.async.bulk.wait_group", 0, 1, of=3),
        FULL,
        LATE,
    ),
    Mutant(
        "dQ is not waited for",
        SOURCE,
        *mutants.steps("wgmma.wait_group", 4, 9, of=11),
        FULL,
        LATE,
    ),
    Mutant("the rest of dK's product is left out", SOURCE, "if (!first) start_dk<", "if (false) start_dk<", FULL),
    Mutant(
        "the rest of dK's product is left out, deterministic",
        SOURCE,
        "if (!first) start_dk<",
        "if (false) start_dk<",
        FULL,
        deterministic=True,
    ),
    Mutant(
        "the rest of dK's product is another tile's",
        SOURCE,
        "before = (stage + kStages - 1) % kStages;",
        "before = stage;",
        FULL,
    ),
    Mutant(
        "queries are released at once",
        SOURCE,
        "if (!first) finish_dk(s, math, before);",
        "finish_dk(s, math, stage);",
        FULL,
    ),
    Mutant("the last part of dK's product is left out", SOURCE, "    last_step(s, math);\n", "", FULL),
]


#: Those that others resemble.
SLOW = {
    "nor queries",
    "nor dout",
    "queries of the next sequence",
    "a tile that ends with its sequence is whole",
    "no masked tile before the whole ones",
    "hidden gradients remain",
    "the first head's last columns",
    "statistics of another head",
    "sums of another head",
    "the last columns go to the others",
    "panels in their own order",
    "half a panel of the other warpgroup",
    "the rest of dK's product is left out, deterministic",
    "the rest of dK's product is another tile's",
    "queries are released at once",
    "own dS is not waited for",
    "dQ is overwritten",
    "dQ is not fenced",
    "values are not waited for",
    "dout is not waited for",
    "the rest of dK's product is left out",
    "the first group of heads",
}


@pytest.fixture(autouse=True)
def two_heads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the L2 were too small for more."""
    monkeypatch.setattr(backward, "kv_heads_at_once", lambda problem, device, sums_dq: min(2, problem.h_kv))


def marked(chosen: Iterable[Mutant], name: Callable[[Mutant], str]) -> list[Any]:
    """The parameters of a test; those of `SLOW` alone are long forms."""
    return [pytest.param(one, id=name(one), marks=[pytest.mark.slow] if one.name in SLOW else []) for one in chosen]


@pytest.mark.parametrize("mutant", marked(MUTANTS, lambda one: one.id))
def test_is_caught(mutant: Mutant, plant: mutants.Plant) -> None:
    plant(mutant)
    with pytest.raises(mutants.CAUGHT):
        attempt(mutant)


#: Of what shows some of them, one; none of `SLOW` if there is another.
CASES = {
    (one.case, one.nonfinite, one.deterministic): one
    for one in (*sorted(MUTANTS, key=lambda one: one.name not in SLOW), Mutant("", SOURCE, "", "", NARROW))
}


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    "mutant", marked(CASES.values(), lambda one: f"{one.case.id}-{one.nonfinite}-{one.deterministic}")
)
def test_as_it_is(mutant: Mutant) -> None:
    attempt(mutant)


def attempt(mutant: Mutant) -> None:
    """The case; what no query of its sequence sees is NaN."""
    inputs = make_gradients(mutant.case)
    if mutant.nonfinite == "k":
        inputs.forward.k[3, 0, 5] = float("nan")  # the first query does not see it
    elif mutant.nonfinite == "v":
        inputs.forward.v[3, 0, 5] = float("nan")
    elif mutant.nonfinite == "q":
        inputs.forward.q[0, 0, 5] = float("nan")  # it does not see the last key
    elif mutant.nonfinite:
        inputs.dout[0, 0, 5] = float("nan")
    run(inputs, HOPPER, 1, mutant.mode, deterministic=mutant.deterministic)
