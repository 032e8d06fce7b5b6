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


@pytest.mark.one_in(4)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("kernel", "cc"), [(LEAST, (12, 0)), (WIDE_KB, (9, 0))])
def test_on_newer_gpus(kernel: str, cc: tuple[int, int], deterministic: bool) -> None:
    """Four numbers are added at once, in another order; the other tests of the kernels run on older ones."""
    inputs = make(SparseCase(s_q=2, s_kv=90, h_q=35, topk=40, lengths=True))
    got = run(inputs, kernel, ("random", 2), cc, deterministic=deterministic)
    check_gradients(got, inputs, deterministic=deterministic)


@pytest.mark.one_in(4)
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
    """A mode of the simulator that shows it, a kernel, and a GPU: vector additions are of those from 9.0 on."""

    mode: tuple[str, int] = ("early", 0)
    kernel: str = LEAST
    cc: tuple[int, int] = (8, 0)


MUTANTS = [
    Mutant("keys are not waited for", SOURCE, *mutants.steps("cp.async.wait_all", 1, of=2), ("late", 0)),
    Mutant("queries are not waited for", SOURCE, *mutants.steps("cp.async.wait_all", 0, of=2), ("late", 0)),
    Mutant("others' queries are not waited for", SOURCE, *mutants.steps("bar.sync", 1, of=6)),
    Mutant("others' keys are not waited for", SOURCE, *mutants.steps("bar.sync", 2, of=6)),
    Mutant("parts are not waited for", SOURCE, *mutants.steps("bar.sync", 3, of=6)),
    Mutant("weights are not waited for", SOURCE, *mutants.steps("bar.sync", 4, of=6)),
    Mutant("keys are overwritten", SOURCE, *mutants.steps("bar.sync", 5, of=6)),
    Mutant("one stage for two", SOURCE, "s.k[step % kStages]);", "s.k[0]);", kernel=WIDE_KB),
    Mutant("rows of one step", SOURCE, "block.s.rows[step % 2][key] = row;", "block.s.rows[0][key] = row;"),
    Mutant("half of the columns", SOURCE, "low[r].x + high[r].x", "low[r].x"),
    Mutant("a step too few", SOURCE, "step * kStepKeys < count; ++step", "(step + 1) * kStepKeys < count; ++step"),
    Mutant("heads past the last one", SOURCE, "const bool stored = head < block.heads;", "const bool stored = true;"),
    Mutant("a neighbour's RoPE columns", SOURCE, "block.warp % 2 ? b[2] : b[0]", "block.warp % 2 ? b[0] : b[2]"),
    Mutant("a fragment too few", SOURCE, "step < min(kHeldSteps,", "step + 1 < min(kHeldSteps,"),
    Mutant("both halves are the first", SOURCE, "2 * (half * kPartSteps<kColumns> + step)", "2 * step"),
    Mutant("RoPE columns of one warp of two", SOURCE, "(block.warp + step *", "(step *"),
    Mutant("16 keys for 32", SOURCE, "rows[step % 2][key_step * kMmaDepth]", "rows[step % 2][0]", kernel=WIDE_KB),
    Mutant("the other quad's row", SOURCE, "quad / 2 * 2 + i % 2]", "quad / 2 * 2 + 1 - i % 2]", cc=(12, 0)),
    Mutant(
        "rows of the plain order", SOURCE, "quad % 2 * 16 + lane % 4 * 4", "quad % 2 * 4 + lane % 4 * 8", cc=(12, 0)
    ),
    Mutant("the first 32 columns", SOURCE, "+ first * kMmaColumns;", ";", cc=(12, 0)),
    Mutant("statistics are not waited for", SOURCE, *mutants.steps("bar.sync", 0, of=6)),
]
#: Several steps of both kernels, the last one not whole; a part of the heads.
HARD = SparseCase(s_q=2, s_kv=90, h_q=20, topk=75, invalid=0.0)


@mutants.as_verdict
def verdict(kernel: str, mode: tuple[str, int], cc: tuple[int, int]) -> None:
    """What a run shows; empty if nothing."""
    inputs = make(HARD)
    check_gradients(run(inputs, kernel, mode, cc), inputs)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_is_caught(mutant: Mutant, plant: mutants.Plant) -> None:
    plant(mutant)
    assert verdict(mutant.kernel, mutant.mode, mutant.cc), f"nothing shows that {mutant.name}"


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("kernel", "mode", "cc"), {(mutant.kernel, mutant.mode, mutant.cc): None for mutant in MUTANTS}, ids=str
)
def test_kernel_as_it_is(kernel: str, mode: tuple[str, int], cc: tuple[int, int]) -> None:
    assert verdict(kernel, mode, cc) == ""
