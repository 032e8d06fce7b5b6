"""The benchmark of the indexer's loss on the NumPy device, and cudnn-frontend's adapter with a stand-in for it."""

from __future__ import annotations

import io
import types
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from bench.core import table
from bench.operations import INDEXER_LOSS
from bench.ops.indexer_loss import CASES, LossCase
from mla_cupy import reference
from tests.bench import fake_torch
from tests.bench.small import SMALL as EVERY

KINDS = EVERY["indexer-loss"]
SMALL, LISTS, PER_HEAD, *_ = KINDS
PEERED = [SMALL, LISTS, PER_HEAD]


def test_cost():
    """The FLOPs that the kernel's page names for the two targets."""
    assert [case.cost.flops / 1e12 for case in CASES[:2]] == pytest.approx([0.481, 7.70], rel=2e-3)
    own, fp8 = LossCase(1, 2, 3, 72, 7, 32, mha=True), LossCase(1, 2, 3, 72, 7, 32, mha=True, fp8=True)
    assert own.cost.nbytes - fp8.cost.nbytes == 2 * 8 * 32
    assert LossCase(2, 9, 3, 5, 7, 32, topk=4).pairs == 2 * (1 + 2 + 3 + 4 * 6)


@pytest.fixture
def run(rows_of):
    return partial(rows_of, INDEXER_LOSS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("few", [512, 0], ids=["as a whole", "by the identity"])
@pytest.mark.parametrize("name", ["kl", "d_index_q", "d_index_k", "d_weights"])
def test_a_wrong_result_is_found(device, numpy_backend, monkeypatch, name, few, kind):
    monkeypatch.setattr("bench.ops.indexer_loss.FEW_TOKENS", few)
    case = INDEXER_LOSS.parse(kind)
    inputs = INDEXER_LOSS.inputs(case, "bfloat16", 0, device)
    expected = INDEXER_LOSS.expect(case, "bfloat16", inputs, device)
    options = {"target": "per_head"} if case.per_head else {}
    exact = getattr(reference, case.op)(**inputs.host, **options)
    outputs = SimpleNamespace(**{key: getattr(exact, key) for key in ("kl", "d_index_q", "d_index_k", "d_weights")})
    assert INDEXER_LOSS.judge(expected, outputs, "bfloat16", device).ok
    setattr(outputs, name, 1.2 * getattr(exact, name))
    verdict = INDEXER_LOSS.judge(expected, outputs, "bfloat16", device)
    assert not verdict.ok
    assert name in verdict.reason


@pytest.fixture
def cudnn(monkeypatch):
    """The three steps by the oracle; the first two only hand their inputs on."""
    seen = {}

    def attention(q, k, lse, scale, qhead_per_kv_head):
        assert (qhead_per_kv_head, k.shape[2]) == (q.shape[2], 1)
        seen.update(q=q, k=k[:, :, 0], lse=lse, scale=scale)
        return {"out": "target", "denom": "mass"}

    def scores(index_q, index_k, weights, qhead_per_kv_head):
        assert (qhead_per_kv_head, index_k.shape[2]) == (index_q.shape[2], 1)
        return {"out": "scores", "denom": "lse"}

    def gradients(index_q, weights, index_k, loss_coeff, loss, more):
        """A mean over the tokens, times the coefficient."""
        unit = (index_q.shape[2] * index_q.shape[3]) ** -0.5
        rows = [
            loss(
                *(np.asarray(x[n]) for x in (seen["q"], seen["k"], index_q, index_k)),
                np.asarray(weights[n]).astype(np.float32) / unit,
                *(np.asarray(x[n]) for x in more),
                lse=np.asarray(seen["lse"][n]),
                scale=seen["scale"],
            )
            for n in range(len(index_q))
        ]
        mean = loss_coeff / (index_q.shape[0] * index_q.shape[1])
        made = {name: mean * np.stack([getattr(x, name) for x in rows]) for name in ("d_index_q", "d_index_k")}
        made["d_weights"] = (mean * np.stack([x.d_weights for x in rows]) / unit).view(fake_torch.Tensor)
        return made

    def backward(index_q, weights, index_k, target, mass, found, lse, one, loss_coeff):
        assert (target, mass, found, lse) == ("target", "mass", "scores", "lse")
        return gradients(index_q, weights, index_k, loss_coeff, reference.indexer_warmup_loss, [])

    def sparse_attention(q, k, lse, indices, scale, qhead_per_kv_head):
        assert (qhead_per_kv_head, k.ndim, indices.ndim) == (q.shape[2], 3, 3)
        seen.update(q=q, k=k, lse=lse, scale=scale, indices=indices)
        return {"target": "target"}

    def sparse_scores(index_q, index_k, weights, indices, qhead_per_kv_head):
        assert (qhead_per_kv_head, index_k.ndim) == (index_q.shape[2], 3)
        return {"predict": "softmax"}

    def sparse_backward(index_q, weights, index_k, target, softmax, indices, one, loss_coeff):
        assert (target, softmax) == ("target", "softmax")
        return gradients(index_q, weights, index_k, loss_coeff, reference.indexer_sparse_loss, [indices])

    dsa = SimpleNamespace(
        sparse_attn_score_recompute_wrapper=sparse_attention,
        sparse_indexer_score_recompute_wrapper=sparse_scores,
        indexer_backward_wrapper=sparse_backward,
        dense_attn_score_recompute_wrapper=attention,
        dense_indexer_score_recompute_wrapper=scores,
        dense_indexer_backward_wrapper=backward,
    )
    attend = SimpleNamespace(sdpa_kernel=lambda backend: nullcontext(), SDPBackend=SimpleNamespace(FLASH_ATTENTION=1))
    functional = SimpleNamespace(scaled_dot_product_attention=lambda q, k, v, is_causal: q)
    stage = types.ModuleType("cudnn.deepseek_sparse_attention")
    stage.DSA = dsa
    torch = fake_torch.install(monkeypatch, cudnn=types.ModuleType("cudnn"), cudnn__deepseek_sparse_attention=stage)
    torch.ones, torch.ones_like = lambda n, device: np.ones(n), np.ones_like
    torch.nn = SimpleNamespace(attention=attend, functional=functional)
    torch.autograd = SimpleNamespace(grad=lambda out, inputs, ones: tuple(np.ones(x.shape, np.float32) for x in inputs))
    for peer in ("cudnn_loss", "torch_flash"):
        monkeypatch.setattr(f"bench.peers.{peer}.recorder_for", lambda torch, device: device.recorder())
        monkeypatch.setattr(f"bench.peers.{peer}.peak_bytes", lambda torch, call, results: 1)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("b1-s9-h64x128-i32x128", "64 index heads"),
        ("b1-s9-h96x128-i64x64", "multiple of 64"),
        ("b1-s9-h1x8-i64x64", "2 to"),
    ],
)
def test_what_cudnn_does_not_take(run, cudnn, name, reason):
    assert reason in run(name, ["cudnn"])["cudnn"]["reason"]


@pytest.mark.parametrize("name", KINDS[:2])
def test_cudnn(run, cudnn, monkeypatch, name):
    monkeypatch.setattr("bench.peers.cudnn_loss.MIN_INDEX_HEADS", 1)
    monkeypatch.setattr("bench.peers.cudnn_loss.LIST_TILE", 4)
    rows = run(name, ["cudnn"])
    assert {row["status"] for row in rows.values()} == {"ok"}, [row["reason"] for row in rows.values()]
    assert rows["mla_cupy"]["speed_vs_best_peer"] is not None


PEERS = ["deterministic", "cudnn", "flash"]


@pytest.mark.parametrize(
    ("name", "aims"), list(zip(PEERED, [[0.65, None, None], [1.0, 1.5], [1.3, 0.95]], strict=True)), ids=PEERED
)
def test_ratios(run, cudnn, monkeypatch, name, aims):
    """Ratios of all rows and figures; printed with their aims."""
    monkeypatch.setattr("bench.peers.cudnn_loss.MIN_INDEX_HEADS", 1)
    monkeypatch.setattr("bench.peers.cudnn_loss.LIST_TILE", 4)
    rows = run(name, PEERS)
    found = INDEXER_LOSS.ratios(list(rows.values()))
    assert [ratio.aim for ratio in found] == aims
    us = {name: row["timing"]["us_median"] for name, row in rows.items() if row["timing"]}
    forward = {name: row["figures_us"].get("forward") for name, row in rows.items()}
    own = us["mla_cupy"]
    wanted = {
        SMALL: lambda: [own / us["cudnn"], forward["mla_cupy"] / own, own / us["flash"]],
        LISTS: lambda: [own / us["cudnn"], us["deterministic"] / own],
        PER_HEAD: lambda: [forward["mla_cupy"] / forward["flash"], own / us["flash"]],
    }
    assert [ratio.value for ratio in found] == pytest.approx(wanted[name]())
    console = Console(file=io.StringIO(), width=200)
    table.show(console, list(rows.values()), found)
    lines = [line for line in console.file.getvalue().splitlines() if line.startswith("  ratio ")]
    assert len(lines) == len(aims)
    assert f"ratio {found[0].value:.3f} (aim: {aims[0]:g} at most)" in lines[0]


def test_ratios_of_rows_that_are_there(run):
    assert len(INDEXER_LOSS.ratios(list(run(SMALL).values()))) == 1
    assert INDEXER_LOSS.ratios(list(run(PER_HEAD).values())) == []
