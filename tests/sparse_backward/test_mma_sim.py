"""The mma.sync kernels of the sparse backward in the simulator, from the PTX of the GPUs that they are for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from mla_cupy.kernels.sparse_backward import mma
from tests.sparse_backward.test_sim import run
from tests.support import mutants
from tests.support.gradients import check_gradients
from tests.support.sparse_cases import SparseCase, make

WIDE_KB, LEAST = (kernel.name for kernel in mma.KERNELS)
SOURCE = "sparse_backward/mma.cu"


@pytest.mark.parametrize("deterministic", [False, True])
def test_on_the_newest_gpu(deterministic: bool) -> None:
    """The other tests of the kernels run on older ones."""
    inputs = make(SparseCase(s_q=2, s_kv=90, h_q=35, topk=40, lengths=True))
    got = run(inputs, LEAST, ("random", 2), (12, 0), deterministic=deterministic)
    check_gradients(got, inputs, deterministic=deterministic)


@pytest.mark.parametrize("kernel", [WIDE_KB, LEAST])
def test_what_counts_for_nothing_may_be_anything(kernel: str) -> None:
    """Heads without a gradient, and rows that nobody selects."""
    case = SparseCase(s_q=2, s_kv=60, h_q=35, topk=20, invalid=0.0)
    inputs = make(case)
    heads = [0, 34]
    inputs.lse[:, heads] = -np.inf
    inputs.q[:, heads] = np.nan
    inputs.dout[:, 34] = np.inf
    unselected = np.setdiff1d(np.arange(case.s_kv), inputs.indices)
    inputs.kv[unselected] = np.nan
    dq, dkv, _ = (x if x is None else x.astype(np.float32) for x in run(inputs, kernel, ("random", 4)))
    assert unselected.size > 0
    assert not dq[:, heads].any()
    assert not dkv[unselected].any()
    assert np.isfinite(dq).all()
    assert np.isfinite(dkv).all()
    assert dq[:, 1:34].any(axis=-1).all()


@dataclass(frozen=True)
class Mutant(mutants.Mutant):
    """A mode of the simulator that shows it, and a kernel."""

    mode: tuple[str, int] = ("early", 0)
    kernel: str = LEAST


MUTANTS = [
    Mutant("keys are not waited for", SOURCE, *mutants.steps("cp.async.wait_all", 0, of=1), ("late", 0)),
    Mutant("others' keys are not waited for", SOURCE, *mutants.steps("bar.sync", 1, of=5)),
    Mutant("parts are not waited for", SOURCE, *mutants.steps("bar.sync", 2, of=5)),
    Mutant("weights are not waited for", SOURCE, *mutants.steps("bar.sync", 3, of=5)),
    Mutant("keys are overwritten", SOURCE, *mutants.steps("bar.sync", 4, of=5)),
    Mutant("one stage for two", SOURCE, "s.k[step % kStages]);", "s.k[0]);", kernel=WIDE_KB),
    Mutant("rows of one step", SOURCE, "block.s.rows[step % 2][key] = row;", "block.s.rows[0][key] = row;"),
    Mutant("half of the columns", SOURCE, "low[r].x + high[r].x", "low[r].x"),
    Mutant("a step too few", SOURCE, "step * kStepKeys < count; ++step", "(step + 1) * kStepKeys < count; ++step"),
    Mutant("heads past the last one", SOURCE, "const bool stored = head < block.heads;", "const bool stored = true;"),
    Mutant("a neighbour's RoPE columns", SOURCE, "block.warp % 2 ? b[2] : b[0]", "block.warp % 2 ? b[0] : b[2]"),
    Mutant("statistics are not waited for", SOURCE, *mutants.steps("bar.sync", 0, of=5)),
]
#: Several steps of both kernels, the last one not whole; a part of the heads.
HARD = SparseCase(s_q=2, s_kv=90, h_q=20, topk=75, invalid=0.0)


@mutants.as_verdict
def verdict(kernel: str, mode: tuple[str, int]) -> None:
    """What a run shows; empty if nothing."""
    inputs = make(HARD)
    check_gradients(run(inputs, kernel, mode, (8, 0)), inputs)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_is_caught(mutant: Mutant, plant: mutants.Plant) -> None:
    plant(mutant)
    assert verdict(mutant.kernel, mutant.mode), f"nothing shows that {mutant.name}"


@pytest.mark.parametrize(("kernel", "mode"), {(mutant.kernel, mutant.mode): None for mutant in MUTANTS}, ids=str)
def test_kernel_as_it_is(kernel: str, mode: tuple[str, int]) -> None:
    assert verdict(kernel, mode) == ""
