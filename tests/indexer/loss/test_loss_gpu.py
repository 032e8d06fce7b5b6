"""The warm-up loss on a GPU: every kernel against the oracle, chunks, repeats, hostile sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import reference
from mla_cupy.kernels.indexer.loss import LOSS
from mla_cupy.kernels.indexer.loss.problem import LossProblem
from mla_cupy.runtime import device
from tests.support.flat import mla_decode
from tests.support.gpu import upload
from tests.support.kernels import by_name
from tests.support.loss_cases import TENSOR_CORE_ERROR, LossCase, check_loss, loss_inputs, of_one_rank, run_loss, shares

pytestmark = pytest.mark.gpu

RAGGED = ((1, 1), (120, 220), (0, 3), (179, 250))
CASES = [
    LossCase(s_q=1, s_kv=1, h=1, h_i=1, d=1),
    LossCase(s_q=200, s_kv=333, h=16, h_i=8, d=128, d_i=128, d_v=128),
    LossCase(s_q=130, s_kv=300, h=64, h_i=64, d=128, d_i=64, lse=True, weights="bfloat16"),
    LossCase(s_q=257, s_kv=257, h=128, h_i=64, d=576, d_i=128, lse=True),
    LossCase(s_q=300, s_kv=500, h=64, h_i=64, lse=True, d=128, d_i=64, sequences=RAGGED),
    LossCase(s_q=300, s_kv=500, h=64, h_i=64, d=576, d_i=128, sequences=RAGGED),
    LossCase(s_q=257, s_kv=257, h=16, h_i=8, d=64, d_i=32, spread=3),
    LossCase(s_q=90, s_kv=190, h=8, h_i=8, d=576, d_i=32, d_v=512, causal=False),
    LossCase(s_q=100, s_kv=260, h=16, h_i=16, d=128, d_i=64, d_v=128, target="per_head"),
    LossCase(s_q=300, s_kv=500, h=16, h_i=16, d=128, d_i=128, target="per_head", sequences=RAGGED, weights="bfloat16"),
    LossCase(s_q=400, s_kv=400, h=4, h_i=4, d=64, d_i=32, d_v=72, target="per_head", target_scale=0.1, spread=3),
    LossCase(s_q=300, s_kv=500, h=16, h_i=8, d=128, d_i=64, d_v=128, sequences=RAGGED),
    LossCase(s_q=200, s_kv=333, h=16, h_i=8, d=192, d_i=128, h_kv=16, pairs="k", lse=True),
    LossCase(s_q=300, s_kv=500, h=16, h_i=64, d=192, d_i=64, h_kv=16, pairs="qk", sequences=RAGGED),
    LossCase(s_q=257, s_kv=400, h=8, h_i=8, d=128, d_i=64, h_kv=2, d_v=64),
    LossCase(s_q=1700, s_kv=1700, h=2, h_i=2, d=128, d_i=32, h_kv=2, pairs="K", codes="uint8", lse=True),
    LossCase(s_q=257, s_kv=257, h=128, h_i=64, d=576, d_i=128, pairs="qk", codes="uint8", lse=True),
    LossCase(s_q=300, s_kv=500, h=16, h_i=66, d=72, d_i=32, codes="uint8", sequences=RAGGED, weights="bfloat16"),
]  # fmt: skip


def on_gpu(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: upload(x) for name, x in inputs.items()}


def on_host(results: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(None if x is None else x.get() for x in results)


def kernels(case: LossCase) -> list[str]:
    """Kernels that support the case on this GPU."""
    problem = LossProblem(
        *(case.s_q, case.s_kv, case.h, case.h_i, case.d, case.d_i, case.d_v),
        **{**case.problem, "aligned": True},
    )
    return [name for name, kernel in by_name(LOSS).items() if not kernel.unsupported(problem, device.describe(0))]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_loss(case: LossCase, gpu: object) -> None:
    inputs = loss_inputs(case)
    exact, given = reference.indexer_warmup_loss(**inputs, **case.options), on_gpu(inputs)
    for kernel in kernels(case):
        error = TENSOR_CORE_ERROR if "sm90" in kernel else 1e-4
        got = run_loss(mla_cupy.indexer_warmup_loss, **given, **case.options, kernel=kernel)
        check_loss(on_host(got), exact, error)


def test_131072_keys(gpu: object) -> None:
    """Allocations of a call, results and workspace; and a few rows against the oracle."""
    import cupy

    tokens, rng = 131_072, np.random.default_rng(0)
    shapes = {"q": (tokens, 2, 64), "k": (tokens, 64), "index_q": (tokens, 2, 32), "index_k": (tokens, 32)}
    inputs = {name: rng.standard_normal(shape, np.float32).astype("bfloat16") for name, shape in shapes.items()}
    inputs["weights"] = rng.standard_normal((tokens, 2), np.float32)
    given, pool = on_gpu(inputs), cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        got = run_loss(mla_cupy.indexer_warmup_loss, **given)
    assert pool.total_bytes() < 640 << 20
    for row in (0, 70_001, tokens - 1):
        of_row = {name: x[: row + 1] if name in ("k", "index_k") else x[row : row + 1] for name, x in inputs.items()}
        exact = reference.indexer_warmup_loss(**of_row)
        np.testing.assert_allclose(float(got[0][row]), exact.kl[0], rtol=1e-3, atol=1e-3)
        assert exact.d_index_q is not None
        of_queries = got[3][row].get().astype(np.float64)
        largest = max(1e-4, float(np.abs(exact.d_index_q).max()))
        np.testing.assert_allclose(of_queries, exact.d_index_q[0], rtol=0, atol=2**-6 * largest)


def test_the_same_in_every_run(gpu: object) -> None:
    case = CASES[4]
    given = on_gpu(loss_inputs(case))
    for kernel in kernels(case):
        first = on_host(run_loss(mla_cupy.indexer_warmup_loss, **given, **case.options, kernel=kernel))
        for _ in range(5):
            again = on_host(run_loss(mla_cupy.indexer_warmup_loss, **given, **case.options, kernel=kernel))
            for x, y in zip(first[:6], again[:6], strict=True):
                assert x.tobytes() == y.tobytes()


def test_chunks(gpu: object) -> None:
    """Chunks of a few tokens give rows with equal bits."""
    case = CASES[2]
    given = on_gpu(loss_inputs(case))
    for kernel in kernels(case):
        whole = on_host(run_loss(mla_cupy.indexer_warmup_loss, **given, **case.options, kernel=kernel))
        cut = on_host(
            run_loss(mla_cupy.indexer_warmup_loss, **given, **case.options, kernel=kernel, buffer_bytes=1 << 17)
        )
        for name, x, y in zip(whole_fields(), whole[:6], cut[:6], strict=True):
            if name == "d_index_k":
                np.testing.assert_allclose(x.astype(np.float32), y.astype(np.float32), rtol=2**-7, atol=1e-5)
            else:
                assert x.tobytes() == y.tobytes(), name


def whole_fields() -> tuple[str, ...]:
    return reference.WarmupLoss._fields[:6]


def test_hostile_sequences(gpu: object) -> None:
    case = LossCase(s_q=64, s_kv=200, h=16, h_i=16, d=128, d_i=64, lse=True)
    inputs = loss_inputs(case)
    for starts_q, starts_kv in (([-5, 20, 2**31 - 1], [-9, 140, 2**31 - 1]), ([30, 0, 64], [150, 20, 200])):
        sequences = {"cu_seqlens_q": np.array(starts_q, np.int32), "cu_seqlens_kv": np.array(starts_kv, np.int32)}
        exact = reference.indexer_warmup_loss(**inputs, **sequences)
        for kernel in kernels(case):
            got = run_loss(mla_cupy.indexer_warmup_loss, **on_gpu({**inputs, **sequences}), kernel=kernel)
            check_loss(on_host(got), exact, TENSOR_CORE_ERROR)


def test_codes_score_as_the_logits(gpu: object) -> None:
    """The normaliser of the scores matches the served scores."""
    case = CASES[-3]
    given = on_gpu(loss_inputs(case))
    _, _, index_lse, *_ = run_loss(mla_cupy.indexer_warmup_loss, **given, **case.options, gradients=False)
    scored = (given[name] for name in ("index_q", "index_k", "weights"))
    ends = upload(np.arange(1, case.s_q + 1, dtype=np.int32))
    logits = mla_cupy.indexer_logits(*scored, ke=ends, k_scale=given["k_scale"]).get().astype(np.float64)
    largest = logits.max(axis=1)
    wanted = largest + np.log(np.exp(logits - largest[:, None]).sum(axis=1))
    np.testing.assert_allclose(index_lse.get(), wanted, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("case", [CASES[2], CASES[4], CASES[13], CASES[14]], ids=lambda case: case.id)
def test_ranks(case: LossCase, gpu: object) -> None:
    """Ranks of tensor parallelism, with the loss in chunks, against one rank with all heads."""
    inputs = loss_inputs(case)
    exact = reference.indexer_warmup_loss(**inputs, **case.options)
    for kernel in kernels(case):
        error = TENSOR_CORE_ERROR if "sm90" in kernel else 1e-4
        options = {"causal": case.causal, "kernel": kernel, "buffer_bytes": 1 << 17}
        total = sum(run_loss(mla_cupy.indexer_head_sums, **on_gpu(mine), **options) for mine in shares(inputs, 2))
        given = on_gpu({name: x for name, x in of_one_rank(inputs, 2, 1).items() if name != "v"})
        got = on_host(run_loss(mla_cupy.indexer_warmup_loss, **given, head_sums=total, **{**case.options, **options}))
        check_loss(got, exact._replace(out=None, attention_lse=None), error)


def test_without_lse(gpu: object) -> None:
    """The result equals the one with attention's lse: the package's own, over the keys as pages."""
    inputs = loss_inputs(LossCase(s_q=256, s_kv=256, h=64, h_i=64, d=576, d_i=128))
    given = on_gpu(inputs)
    pages = {"block_table": upload(np.arange(4, dtype=np.int32)[None]), "seqlens": upload(np.array([256], np.int32))}
    _, lse = mla_decode(given["q"][None], given["k"].reshape(4, 64, 576), **pages)
    got = on_host(run_loss(mla_cupy.indexer_warmup_loss, **given))
    with_lse = on_host(run_loss(mla_cupy.indexer_warmup_loss, **given, lse=lse[0].T))
    for x, y in zip(got[:3], with_lse[:3], strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-3)
    check_loss(got, reference.indexer_warmup_loss(**inputs), TENSOR_CORE_ERROR)
