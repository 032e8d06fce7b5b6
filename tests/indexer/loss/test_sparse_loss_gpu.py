"""The sparse stage's loss on a GPU: against the oracle, chunks, repeats, graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import reference
from mla_cupy.kernels.indexer.loss import SPARSE_LOSS
from mla_cupy.kernels.indexer.loss.problem import LossProblem
from mla_cupy.runtime import device
from tests.support.gpu import upload
from tests.support.kernels import by_name
from tests.support.loss_cases import TENSOR_CORE_ERROR, of_one_rank, run_loss, shares
from tests.support.sparse_loss_cases import SparseLossCase, check_sparse_loss, sparse_loss_inputs

pytestmark = pytest.mark.gpu

RAGGED = ((1, 1), (120, 220), (0, 3), (79, 250))
CASES = [
    SparseLossCase(s_q=1, s_kv=1, topk=1, h=1, h_i=1, d=1),
    SparseLossCase(s_q=200, s_kv=333, topk=70, h=16, h_i=8, d=128, d_i=128),
    SparseLossCase(s_q=130, s_kv=1000, topk=256, h=64, h_i=64, d=576, d_i=128, lse=True, lengths=True),
    SparseLossCase(s_q=130, s_kv=1000, topk=300, h=128, h_i=64, d=576, d_i=64, weights="bfloat16"),
    SparseLossCase(s_q=130, s_kv=1000, topk=300, h=64, h_i=64, d=576, d_i=128, lse=True, codes="uint8"),
    SparseLossCase(s_q=200, s_kv=474, topk=33, h=8, h_i=5, d=100, d_i=64, causal=True, sequences=RAGGED),
]


def on_gpu(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: upload(x) for name, x in inputs.items()}


def on_host(results: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(None if x is None else x.get() for x in results)


def kernels(case: SparseLossCase) -> list[str]:
    """Kernels that support the case on this GPU."""
    problem = LossProblem(case.s_q, case.s_kv, case.h, case.h_i, case.d, case.d_i, topk=case.topk)
    problem = replace(problem, aligned=case.d % 8 == 0)
    return [name for name, one in by_name(SPARSE_LOSS).items() if not one.unsupported(problem, device.describe(0))]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_loss(case: SparseLossCase, deterministic: bool, gpu: object) -> None:
    inputs = sparse_loss_inputs(case)
    exact = reference.indexer_sparse_loss(**inputs, causal=case.causal)
    for kernel in kernels(case):
        plain_error = 3e-4 if deterministic else 1e-4  # bins hold fewer bits
        for limit in (1 << 29, 1 << 14):
            options = {"causal": case.causal, "deterministic": deterministic, "buffer_bytes": limit, "kernel": kernel}
            got = on_host(run_loss(mla_cupy.indexer_sparse_loss, **on_gpu(inputs), **options))
            check_sparse_loss(got, exact, TENSOR_CORE_ERROR if "sm90" in kernel else plain_error)


def test_the_same_in_every_run(gpu: object) -> None:
    """Deterministic: all bits, in chunks of any size; else all bits except the gradient's by keys."""
    case = CASES[1]
    given = on_gpu(sparse_loss_inputs(case))
    for deterministic in (False, True):
        first = on_host(run_loss(mla_cupy.indexer_sparse_loss, **given, deterministic=deterministic))
        for turn in range(5):
            limit = 1 << 29 if turn % 2 else 1 << 16
            again = on_host(
                run_loss(mla_cupy.indexer_sparse_loss, **given, deterministic=deterministic, buffer_bytes=limit)
            )
            for at, (x, y) in enumerate(zip(first, again, strict=True)):
                assert x.tobytes() == y.tobytes() or (at == 4 and not deterministic)


def test_a_captured_call_follows_its_indices(gpu: object) -> None:
    import cupy

    case = SparseLossCase(s_q=20, s_kv=50, topk=9, lse=True)
    first, then = (sparse_loss_inputs(SparseLossCase(**{**vars(case), "seed": seed})) for seed in (1, 2))
    given = on_gpu(first)
    options: dict[str, Any] = {"scale": case.d**-0.5, "causal": case.causal}
    results = mla_cupy.indexer_sparse_loss(**given, **options)
    nbytes = mla_cupy.workspace_bytes(mla_cupy.indexer_sparse_loss, **given, **options)
    options |= {"results": mla_cupy.LossResults(*results), "workspace": cupy.empty(nbytes, np.uint8)}
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        mla_cupy.indexer_sparse_loss(**given, **options)
        graph = stream.end_capture()
    for inputs in (first, then):
        for name, x in inputs.items():
            given[name].set(x)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        exact = reference.indexer_sparse_loss(**inputs, causal=case.causal)
        check_sparse_loss(on_host(results), exact, TENSOR_CORE_ERROR)


@pytest.mark.parametrize("case", CASES[1:], ids=lambda case: case.id)
def test_ranks(case: SparseLossCase, gpu: object) -> None:
    """Ranks of tensor parallelism, in chunks, against one rank with all heads."""
    inputs = sparse_loss_inputs(case)
    options = {"causal": case.causal, "buffer_bytes": 1 << 16}
    total = sum(run_loss(mla_cupy.indexer_head_sums, **on_gpu(mine), **options) for mine in shares(inputs, 3))
    got = on_host(
        run_loss(mla_cupy.indexer_sparse_loss, **on_gpu(of_one_rank(inputs, 3, 2)), head_sums=total, **options)
    )
    check_sparse_loss(got, reference.indexer_sparse_loss(**inputs, causal=case.causal), TENSOR_CORE_ERROR)
