"""The indexer's losses with their gradients: of the warm-up, per head, and of the sparse stage; sums over heads."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import mla_cupy
from mla_cupy import reference
from mla_cupy.kernels.indexer.loss import LOSS, SPARSE_LOSS
from tests.stress.sanitized import Call
from tests.support.gpu import fetch, upload
from tests.support.kernels import by_name
from tests.support.loss_cases import TENSOR_CORE_ERROR, LossCase, check_loss, loss_inputs, of_one_rank, run_loss, shares
from tests.support.sparse_loss_cases import SparseLossCase, check_sparse_loss, sparse_loss_inputs

RAGGED = ((1, 1), (20, 120), (0, 3), (18, 150))
CASES = (
    LossCase(s_q=1, s_kv=1, h=1, h_i=1, d=1),
    LossCase(s_q=70, s_kv=140, h=4, h_i=3, d=128, d_i=128, lse=True, weights="bfloat16"),
    LossCase(s_q=40, s_kv=300, h=5, h_i=66, d=576, d_i=64, lse=True, sequences=RAGGED),
    LossCase(s_q=40, s_kv=300, h=3, h_i=5, d=64, d_i=32, sequences=RAGGED),  # its own log-sum-exps
    LossCase(s_q=40, s_kv=150, h=3, h_i=5, d=128, d_i=32, d_v=128),  # and the attention
    LossCase(s_q=40, s_kv=300, h=3, h_i=3, d=128, d_i=128, d_v=128, target="per_head", sequences=RAGGED),
    LossCase(s_q=130, s_kv=140, h=2, h_i=2, d=64, d_i=32, d_v=20, target="per_head", target_scale=0.3),
    LossCase(s_q=140, s_kv=150, h=3, h_i=2, d=192, d_i=128, h_kv=3, pairs="qk", codes="uint8", lse=True),
    LossCase(s_q=40, s_kv=300, h=4, h_i=3, d=136, d_i=64, h_kv=2, sequences=RAGGED),
)
SPARSE_CASES = (
    SparseLossCase(s_q=1, s_kv=1, topk=1, h=1, h_i=1, d=1),
    SparseLossCase(s_q=5, s_kv=150, topk=140, h=3, h_i=2, d=128, d_i=64, lse=True, weights="bfloat16"),
    SparseLossCase(s_q=5, s_kv=150, topk=140, h=3, h_i=2, d=128, d_i=64, lse=True, codes="uint8"),
    SparseLossCase(s_q=40, s_kv=280, topk=33, h=5, h_i=3, d=576, d_i=128, lengths=True, causal=True, sequences=RAGGED),
)


def calls() -> Iterator[Call]:
    """Every kernel, in one chunk and in several."""
    for case in CASES:
        for kernel in by_name(LOSS):
            yield Call(f"{kernel} {case.id}", partial(warmup, case, kernel))
    for case in SPARSE_CASES:
        for kernel in by_name(SPARSE_LOSS):
            for deterministic in (False, True):
                run = partial(sparse_stage, case, kernel, deterministic)
                yield Call(f"{kernel} {case.id}{' deterministic' if deterministic else ''}", run)
    for number in (1, 2):
        yield Call(f"sums over heads {CASES[number].id}", partial(ranks, CASES[number]))


def warmup(case: LossCase, kernel: str) -> None:
    """Loss and gradients."""
    inputs = loss_inputs(case)
    exact = reference.indexer_warmup_loss(**inputs, **case.options)
    for limit in (1 << 29, 1 << 14):
        got = run_loss(
            mla_cupy.indexer_warmup_loss, **_uploaded(inputs), **case.options, kernel=kernel, buffer_bytes=limit
        )
        check_loss(_fetched(got), exact, _error(kernel))


def sparse_stage(case: SparseLossCase, kernel: str, deterministic: bool) -> None:
    """Loss and gradients."""
    inputs = sparse_loss_inputs(case)
    exact = reference.indexer_sparse_loss(**inputs, causal=case.causal)
    for limit in (1 << 29, 1 << 14):
        options = {"causal": case.causal, "deterministic": deterministic, "buffer_bytes": limit, "kernel": kernel}
        got = run_loss(mla_cupy.indexer_sparse_loss, **_uploaded(inputs), **options)
        check_sparse_loss(_fetched(got), exact, _error(kernel))


def ranks(case: LossCase) -> None:
    """Ranks of tensor parallelism."""
    inputs = loss_inputs(case)
    options = {"causal": case.causal, "buffer_bytes": 1 << 14}
    total = sum(run_loss(mla_cupy.indexer_head_sums, **_uploaded(mine), **options) for mine in shares(inputs, 2))
    given = _uploaded(of_one_rank(inputs, 2, 1))
    got = run_loss(mla_cupy.indexer_warmup_loss, **given, head_sums=total, **options)
    check_loss(_fetched(got), reference.indexer_warmup_loss(**inputs, **case.options), TENSOR_CORE_ERROR)


def _error(kernel: str) -> float:
    """Allowed error; bins of deterministic sums hold fewer bits than float32."""
    return TENSOR_CORE_ERROR if "sm90" in kernel else 3e-4


def _uploaded(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: upload(x) for name, x in inputs.items()}


def _fetched(results: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(None if x is None else fetch(x) for x in results)
