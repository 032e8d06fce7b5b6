"""The kernel of the queries' gradient, alone after the statistics, and bugs planted in it: each must show."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest

import mla_cupy
from mla_cupy.kernels.dense import backward
from mla_cupy.kernels.dense.backward import DenseBackwardConfig, DenseBackwardPipeline
from mla_cupy.kernels.dense.backward_sm90 import SM90_KEYS
from mla_cupy.kernels.dense.backward_table import DK_ROPE
from mla_cupy.kernels.pipeline import Call, Launch, Step
from tests.support import mutants
from tests.support.dense_cases import DenseCase
from tests.support.dense_gradients import GradientInputs, check_gradients, make_gradients
from tests.support.flat import flat
from tests.support.sim_driver import simulated

SOURCE, ROWS = "dense/sm90_backward_queries.cu", "dense/sm90_rows.cuh"
ENDS = DenseCase(((3, 5), (4, 4)))
LONG = DenseCase(((70, 325),))
PIECES = DenseCase(((5, 9),), h_q=4, h_kv=2, k_rope="per_head", q_pair=True)
ITEMS = DenseCase(((70, 325), (9, 200)), h_q=3, dtype="float16")  # a warpgroup sees a tile less, or has no row
HIDDEN = DenseCase(((70, 3),), d_qk=128, d_v=128, h_q=2, k_rope="within")  # from most queries
LATE = ("late", 0)


@dataclass(frozen=True)
class Mutant(mutants.Mutant):
    """The case that shows it, and a mode of the simulator.

    Attributes
    ----------
    nonfinite : str
        Whether there is NaN in a key ("k") or a value ("v") that only later queries see.
    blind : bool
        Whether a query with keys has an infinite lse, and NaN.
    """

    case: DenseCase = ENDS
    mode: tuple[str, int] = ("early", 0)
    nonfinite: str = ""
    blind: bool = False


MUTANTS = [
    Mutant("keys are not cleaned", ROWS, "if (!zero_nonfinite<Element>(clean)) continue;", "continue;", nonfinite="k"),
    Mutant(
        "a key too few is cleaned",
        SOURCE,
        "max(0, seen_by_all - first",
        "1 + max(0, seen_by_all - first",
        nonfinite="k",
    ),
    Mutant("rows of a NaN are finite", SOURCE, "tile.seen(math.row(r)) > first_nonfinite", "false", nonfinite="k"),
    Mutant("a row too many is NaN", SOURCE, "row(r)) > first_non", "row(r)) >= first_non", nonfinite="k"),
    Mutant("a key too many", SOURCE, "math.thread, i) >= seen[r]", "math.thread, i) > seen[r]"),
    Mutant("a mask too few", ROWS, "tile.seen_by_all() / kTileKeys)", "(tile.seen_by_all() + 79) / kTileKeys)", LONG),
    Mutant("hidden products remain", SOURCE, "math.scores[i] = 0.f;", "math.scores[i] *= 0.f;", nonfinite="v"),
    Mutant("rows without a key are sums", SOURCE, "empty ? 0.f : factor", "factor", blind=True),
    Mutant("delta of the other row", SOURCE, "math.dp[i] - math.delta[r]", "math.dp[i] - math.delta[0]", LONG),
    Mutant("statistics of another head", SOURCE, "(i64)head * p.num_rows", "0 * p.num_rows", PIECES),
    Mutant("the first head's last columns", SOURCE, "min(kv_head, p.k_rope_heads - 1)", "0", PIECES),
    Mutant("keys of another head", SOURCE, "i32 kv_head = head / (p.h_q / p.h_kv);", "i32 kv_head = 0;", PIECES),
    Mutant("the last columns go to the others", SOURCE, "u16* last = p.dq_rope +", "u16* last = p.dq +", PIECES),
    Mutant("rows of the next sequence", SOURCE, "stored = math.row(r) < tile.queries", "stored = true", HIDDEN),
    Mutant("keys are not waited for", SOURCE, *mutants.steps("mbarrier.try_wait", 2, 5, 7, 9, 12, of=23), LONG, LATE),
    Mutant(
        "values are not waited for",
        SOURCE,
        *mutants.steps("mbarrier.try_wait", 3, 6, 8, of=23),
        LONG,
        LATE,
    ),
    Mutant(
        "dout is not waited for",
        SOURCE,
        *mutants.steps("mbarrier.try_wait", 4, of=23),
        ENDS,
        LATE,
    ),
    Mutant(
        "keys are released with their scores",
        SOURCE,
        "finish_dq(s, math, before);",
        "finish_dq(s, math, math.k.stage);",
        LONG,
    ),
    Mutant(
        "queries are released with each tile", SOURCE, "    if (last) release(s.q_empty", "    release(s.q_empty", ITEMS
    ),
    Mutant("nobody passes the turn", SOURCE, "    if (warpgroup == 1) pass_turn<Turn0>(math.warpgroup);\n", ""),
    Mutant(
        "a tile that is left out is kept",
        SOURCE,
        *mutants.steps("mbarrier.arrive", 15, 20, of=31),
        ITEMS,
    ),
    Mutant("idle warpgroups take no part", SOURCE, "skip(s, math), ++i;", "++i;", ITEMS),
]


#: Those that others resemble, here or among the bugs of the forward and of the kernel of keys.
SLOW = {
    "a key too few is cleaned",
    "a row too many is NaN",
    "statistics of another head",
    "the first head's last columns",
    "keys of another head",
    "the last columns go to the others",
    "values are not waited for",
    "queries are released with each tile",
    "a tile that is left out is kept",
    "idle warpgroups take no part",
    "rows of a NaN are finite",
    "dout is not waited for",
}


def marked(chosen: Iterable[Mutant]) -> list[Any]:
    """The parameters of a test; those of `SLOW` alone are long forms."""
    return [pytest.param(one, id=one.id, marks=[pytest.mark.slow] if one.name in SLOW else []) for one in chosen]


@pytest.fixture(autouse=True)
def queries_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the kernels for the gradients of keys and values; as if the L2 were too small for three heads."""
    steps = DenseBackwardPipeline.steps

    def fewer(self: DenseBackwardPipeline, config: DenseBackwardConfig, call: Call) -> list[Step]:
        left_out = SM90_KEYS, DK_ROPE
        return [one for one in steps(self, config, call) if not (isinstance(one, Launch) and one.kernel in left_out)]

    monkeypatch.setattr(DenseBackwardPipeline, "steps", fewer)
    monkeypatch.setattr(backward, "heads_at_once", lambda problem, device: min(2, problem.h_q))


@pytest.mark.parametrize("mutant", marked(MUTANTS))
def test_is_caught(mutant: Mutant, plant: mutants.Plant) -> None:
    plant(mutant)
    with pytest.raises(mutants.CAUGHT):
        attempt(mutant)


#: Of what shows some of them, one; none of `SLOW` if there is another.
CASES = {(one.case, one.nonfinite, one.blind): one for one in sorted(MUTANTS, key=lambda one: one.name not in SLOW)}


@pytest.mark.one_in(8)
@pytest.mark.parametrize("mutant", marked(CASES.values()))
def test_as_it_is(mutant: Mutant) -> None:
    attempt(mutant)


def attempt(mutant: Mutant) -> None:
    """The case; what no query of its sequence sees is NaN."""
    inputs = make_gradients(mutant.case)
    if mutant.nonfinite:
        getattr(inputs.forward, mutant.nonfinite)[3, 0, 5] = float("nan")  # the first query does not see it
    if mutant.blind:
        inputs.lse[1, 0] = float("inf")
        inputs.forward.q[1, 0] = inputs.dout[1, 0] = inputs.out[1, 0] = float("nan")
    run(inputs, mutant.mode)


def run(inputs: GradientInputs, mode: tuple[str, int]) -> None:
    """The gradient of the queries passes the tolerance rule."""
    with simulated(1, (9, 0), *mode) as target:
        got = flat(mla_cupy.mla_prefill_backward)(
            *inputs.arguments, **inputs.options, kernel=SM90_KEYS.name, deterministic=True
        )
    assert target.launched[-1] == "mla_dense_sm90_backward_queries"
    assert "mla_dense_sm90_backward_keys" not in target.launched
    check_gradients(got, inputs, ("dq", "dq_rope"))
