"""Bugs planted in the kernel of the queries' gradient, which runs alone after the statistics."""

from __future__ import annotations

from functools import partial
from unittest import mock

import mla_cupy
from mla_cupy.kernels.dense import backward
from mla_cupy.kernels.dense.backward import DenseBackwardConfig, DenseBackwardPipeline
from mla_cupy.kernels.dense.backward_sm90 import SM90_KEYS
from mla_cupy.kernels.dense.backward_table import DK_ROPE
from mla_cupy.kernels.pipeline import Call, Launch, Step
from tests.support.dense_cases import DenseCase
from tests.support.dense_gradients import check_gradients, make_gradients
from tests.support.flat import flat
from tests.support.mutant_suite import mutant_suite
from tests.support.mutants import Mutant
from tests.support.sim_driver import simulated

KERNEL, SOURCE = "dense_sm90_backward_queries", "dense_sm90_backward_queries"
ENDS = DenseCase(((3, 5), (4, 4)))
LONG = DenseCase(((70, 325),))
ITEMS = DenseCase(((70, 325), (9, 200)), h_q=3)  # a warpgroup sees a tile less, or has no row
STEPS = DenseBackwardPipeline.steps


def fewer(self: DenseBackwardPipeline, config: DenseBackwardConfig, call: Call) -> list[Step]:
    """Without the kernels for the gradients of keys and values."""
    left_out = SM90_KEYS, DK_ROPE
    return [one for one in STEPS(self, config, call) if not (isinstance(one, Launch) and one.kernel in left_out)]


def run(case: DenseCase, mode: tuple[str, int], nan: bool = False) -> None:
    """The gradient of the queries passes the tolerance rule, also with a NaN that the first query does not see.

    As if the L2 were too small for three heads.
    """
    inputs = make_gradients(case)
    if nan:
        inputs.forward.k[3, 0, 5] = float("nan")
    with (
        mock.patch.object(DenseBackwardPipeline, "steps", fewer),
        mock.patch.object(backward, "heads_at_once", lambda problem, _: min(2, problem.h_q)),
        simulated(1, (9, 0), *mode) as target,
    ):
        got = flat(mla_cupy.mla_prefill_backward)(
            *inputs.arguments, **inputs.options, kernel=SM90_KEYS.name, deterministic=True
        )
    assert target.launched[-1] == f"mla_{KERNEL}"
    assert "mla_dense_sm90_backward_keys" not in target.launched
    check_gradients(got, inputs, ("dq", "dq_rope"))


TEXTS = [
    Mutant("delta of the other row", SOURCE, "math.dp[i] - math.delta[r]", "math.dp[i] - math.delta[0]"),
]

test_is_caught, test_as_it_is = mutant_suite(
    KERNEL,
    [
        partial(run, LONG, ("late", 0)),
        partial(run, ENDS, ("late", 0), nan=True),
        partial(run, LONG, ("early", 0)),
        partial(run, ITEMS, ("random", 1)),
    ],
    {
        "fence.proxy": (1, [0]),
        "bar.sync": (8, [0, 4]),
        "bar.arrive": (6, [0]),
        "mbarrier.try_wait": (23, [0, 11]),
        "mbarrier.arrive": (31, [15]),
        "fence.mbarrier_init": (1, [0]),
        "wgmma.fence": (9, [0]),
        "wgmma.wait_group": (7, [0]),
    },
    TEXTS,
)
