"""Bugs planted in the kernels of dense attention: each must show."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from mla_cupy.kernels.dense import pipeline
from tests.dense.runs import HOPPER, run
from tests.support import mutants
from tests.support.dense_cases import DenseCase, make

SOURCE, ROWS, SCHEDULE = "dense/sm90.cu", "dense/sm90_rows.cuh", "dense/schedule.cu"
ONE = "dense/one_sequence.cuh"
FINDER = "tile/nonfinite.cuh"
ENDS = DenseCase(((3, 5), (4, 4)))
LONG = DenseCase(((70, 259),))  # a warpgroup sees a tile less
PIECES = DenseCase(((5, 9),), h_q=4, h_kv=2, k_rope="per_head")
RISING = DenseCase(((8, 300),), scale=1.0)
ITEMS = DenseCase(((70, 300), (9, 200)), h_q=3)  # a warpgroup has no row
HEADS = DenseCase(((3, 5), (4, 4)), h_q=7)  # more than the last group has
STATE = DenseCase(((4, 6),), h_q=2, state="float32")
ALONE = DenseCase(((3, 7),), around=(2, 1))  # has no schedule
TURNS = DenseCase(((1, 9),), h_q=4)
LATE = ("late", 0)


@dataclass(frozen=True)
class Mutant(mutants.Mutant):
    """The case that shows it, a mode of the simulator, and whether values that only later queries see are infinite."""

    case: DenseCase = ENDS
    mode: tuple[str, int] = ("early", 0)
    infinite: bool = False


MUTANTS = [
    Mutant(
        "values are not cleaned", ROWS, "if (!zero_nonfinite<Element>(clean)) continue;", "continue;", infinite=True
    ),
    Mutant("a value too few is cleaned", SOURCE, "max(0, trusted - i", "1 + max(0, trusted - i", infinite=True),
    Mutant("what was cleaned is lost", SOURCE, "if (slot.nonfinite) add_", "if (0) add_", infinite=True),
    Mutant("a key too many", SOURCE, "(math.thread, i) >= seen", "(math.thread, i) > seen"),
    Mutant("a mask too few", ROWS, "tile.seen_by_all() / kTileKeys)", "(tile.seen_by_all() + 127) / kTileKeys)", LONG),
    Mutant("the output keeps its scale", SOURCE, "    attention::rescale(math.out, scale);\n", "", RISING),
    Mutant("the first head's last columns", SOURCE, "min(kv_head, p.k_rope_heads - 1)", "0", PIECES),
    Mutant("the first columns again", ROWS, "last ? from.last_column :", "last ? 0 :", PIECES),
    Mutant("keys of another head", SOURCE, "i32 kv_head = head / (p.h_q / p.h_kv);", "i32 kv_head = 0;", PIECES),
    Mutant("rows of the next sequence", SOURCE, "math.row(kRow) < tile.queries", "true"),
    Mutant("an empty state is read", SOURCE, "stored && result.earlier != 0.f", "stored && p.state_lse", STATE),
    Mutant("one sequence: the diagonal at the top left", ONE, "keys - queries + first : keys", "first : keys", ALONE),
    Mutant("one sequence: ends that are not clamped", ONE, "max(0, min(starts[at], total))", "starts[at]", ALONE),
    Mutant(
        "one sequence: none before it",
        ONE,
        "tiles_before = ceil_div(first_query, kTileQueries)",
        "tiles_before = 0",
        ALONE,
    ),
    Mutant("one sequence: an item is left out", ONE, "return turn * blocks", "return (turn + 1) * blocks", TURNS),
    Mutant(
        "the first warpgroup's last panel", SOURCE, "s.q[kSharedPanels] + math.warpgroup * kSw128Bytes", "s.q[2]", LONG
    ),
    Mutant("the last panel by the keys' first", SOURCE, "advance(b, kSharedPanels * kKeyPanelBytes)", "b", LONG),
    Mutant("keys are not waited for", SOURCE, *mutants.steps("mbarrier.try_wait", 5, 7, of=19), LONG, LATE),
    Mutant(
        "values are not waited for",
        SOURCE,
        *mutants.steps("mbarrier.try_wait", 9, of=19),
        ENDS,
        LATE,
    ),
    Mutant("values are released before", SOURCE, *mutants.steps("wgmma.wait_group", 2, 4, 5, of=6), LONG, LATE),
    Mutant("queries are released with each tile", SOURCE, "if (last) release(s.q_empty", "release(s.q_empty", ITEMS),
    Mutant(
        "a tile that is left out is kept",
        SOURCE,
        *mutants.steps("mbarrier.arrive", 0, 15, of=25),
        LONG,
    ),
    Mutant("idle warpgroups take no part", SOURCE, "skip_keys(s, math), skip_values(s, math);", ";", ITEMS),
    Mutant(
        "even columns are not looked into",
        FINDER,
        "0x80008000u) != 0x80008000u",
        "0x80000000u) != 0x80000000u",
        infinite=True,
    ),
    Mutant(
        "odd columns are not looked into", FINDER, "0x80008000u) != 0x80008000u", "0x8000u) != 0x8000u", infinite=True
    ),
    Mutant("nobody passes the turn", SOURCE, "    if (warpgroup == 1) pass_turn<Turn0>(math.warpgroup);\n", ""),
    Mutant("the diagonal at the top left", SCHEDULE, "keys - all.queries + first : keys", "first : keys"),
    Mutant(
        "starts as they are", SCHEDULE, "return max(0, min(starts[n * stride], total));", "return starts[n * stride];"
    ),
    Mutant("each head of the first group", "dense/tiles.cuh", "first_head + within %", "within %", HEADS),
]


@pytest.fixture(autouse=True)
def two_heads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the L2 were too small for more."""
    monkeypatch.setattr(pipeline, "heads_at_once", lambda problem, device: min(2, problem.h_q))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_is_caught(mutant: Mutant, plant: mutants.Plant) -> None:
    plant(mutant)
    with pytest.raises(mutants.CAUGHT):
        attempt(mutant)


@pytest.mark.parametrize("mutant", {one.case: one for one in MUTANTS}.values(), ids=lambda one: one.case.id)
def test_as_it_is(mutant: Mutant) -> None:
    attempt(mutant)


def attempt(mutant: Mutant) -> None:
    """The case, with ends that nobody may follow."""
    inputs = make(mutant.case)
    if mutant.infinite:
        inputs.v[3, 0, 5] = inputs.v[4, 0, 4] = float("inf")  # of keys that the first query does not see
    for name in ("cu_seqlens_q", "cu_seqlens_kv"):
        inputs.options[name][-1] += 99
    run(inputs, HOPPER, 1, mutant.mode)
