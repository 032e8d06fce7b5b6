"""Bugs planted in dense attention over e4m3 codes."""

from __future__ import annotations

from functools import partial

from tests.dense.runs import GENERIC_FP8, HOPPER_FP8, run
from tests.support.dense_cases import DenseCase, make
from tests.support.mutant_suite import mutant_suite
from tests.support.mutants import Mutant

F8 = "float8_e4m3fn"
SCALED = DenseCase(((3, 5), (4, 4)), h_q=2, dtype=F8, scales="qkv")
LONG = DenseCase(((70, 259),), dtype=F8)  # a warpgroup sees a tile less


def attempt(case: DenseCase, kernel: str, mode: tuple[str, int]) -> None:
    """The case, with ends that nobody may follow."""
    inputs = make(case)
    for name in ("cu_seqlens_q", "cu_seqlens_kv"):
        inputs.options[name][-1] += 99
    run(inputs, kernel, 1, mode)


TEXTS = [Mutant("a key too many", "dense_sm90_fp8", "(math.thread, i) >= seen", "(math.thread, i) > seen")]
TEXTS_OF_GENERIC = [
    Mutant("values are not scaled", "dense_generic_fp8", " * sums.out[i] * value_scale", " * sums.out[i]"),
]

test_is_caught, test_as_it_is = mutant_suite(
    HOPPER_FP8,
    [partial(attempt, LONG, HOPPER_FP8, mode) for mode in (("late", 0), ("early", 0), ("random", 1))],
    {
        "bar.sync": (7, [0, 3]),
        "bar.arrive": (6, [0]),
        "mbarrier.try_wait": (21, [0, 19]),
        "mbarrier.arrive": (31, [0]),
        "fence.proxy": (1, [0]),
        "fence.mbarrier_init": (1, [0]),
        "wgmma.fence": (15, [0]),
        "wgmma.wait_group": (15, [0]),
    },
    TEXTS,
)
test_is_caught_of_generic, test_as_it_is_of_generic = mutant_suite(
    GENERIC_FP8, [partial(attempt, SCALED, GENERIC_FP8, ("late", 0))], {}, TEXTS_OF_GENERIC
)
