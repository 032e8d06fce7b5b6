"""The adapters of the sparse operations: ours on the NumPy backend, the peers' with a PyTorch made of NumPy."""

from __future__ import annotations

import sys
import types
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

import mla_cupy
from bench.core.implementation import Choices, make
from bench.operations import SPARSE_BACKWARD, SPARSE_FORWARD
from bench.ops.sparse_backward import SparseBackwardCase
from bench.ops.sparse_forward import SparseForwardCase
from bench.peers.torch_ops import peak_bytes
from mla_cupy import reference
from tests.bench import fake_torch
from tests.bench.fake_torch import Tensor, tensor

FORWARD = SparseForwardCase(s_q=2, s_kv=140, h_q=3, topk=128)
BACKWARD = SparseBackwardCase(s_q=6, s_kv=30, h_q=3, topk=8)


class FakeCuda:
    """`torch.cuda` with a memory that calls claim by hand."""

    def __init__(self):
        self.used = self.peak = 0
        self.streams = []
        self.ExternalStream = int

    def stream(self, stream):
        self.streams.append(stream)
        return nullcontext()

    def synchronize(self):
        pass

    def reset_peak_memory_stats(self):
        self.peak = self.used

    def memory_allocated(self):
        return self.used

    def max_memory_allocated(self):
        return self.peak

    def claim(self, temporary, kept):
        self.peak = max(self.peak, self.used + temporary + kept)
        self.used += kept


@pytest.fixture
def torch(monkeypatch):
    """PyTorch and CuPy, as far as the adapters use them."""
    fake = fake_torch.install(monkeypatch)
    fake.cuda, fake.ops._flashmla_C = FakeCuda(), SimpleNamespace()
    fake.full = lambda shape, value, device: tensor(np.full(shape, value, np.float32))
    return fake


def flashmla(calls):
    """Its operator by the oracle: the order of arguments and results is its own."""

    def prefill(q, kv, indices, scale, d_v, attn_sink, topk_length, out):
        assert (kv.ndim, indices.ndim, d_v) == (3, 3, 512)
        assert attn_sink is topk_length is out is None
        calls.append(q.shape)
        out, lse, max_logits = reference.sparse_mla_forward(q, kv, indices, scale=scale)
        return tensor(out.astype(q.dtype)), tensor(max_logits.astype("f4")), tensor(lse.astype("f4"))

    return prefill


@pytest.mark.parametrize(("h_q", "heads"), [(3, 64), (64, 64), (65, 128)])
def test_flashmla_gets_the_heads_it_knows(rows_of, torch, tmp_path, h_q, heads):
    calls = []
    torch.ops._flashmla_C.sparse_prefill_fwd = flashmla(calls)
    (tmp_path / "_flashmla_C.abi3.so").touch()
    case = SparseForwardCase(FORWARD.s_q, FORWARD.s_kv, h_q, FORWARD.topk)
    row = rows_of(SPARSE_FORWARD, case, ["flashmla"], Choices(tmp_path))["flashmla"]
    assert row["status"] == "ok", row["reason"]
    assert set(calls) == {(2, heads, 576)}
    assert row["kernel"] == ("" if h_q == heads else f"padded to {heads} heads")
    assert row["check"]["errors"].keys() == {"out", "lse", "max_logits"}
    assert row["flops"] == case.cost.flops, "padding is no work done"
    assert (row["timing"]["method"], set(torch.cuda.streams)) == ("events", {77})


@pytest.mark.parametrize(
    ("case", "dtype", "reason"),
    [
        (FORWARD, "float16", "bfloat16"),
        (SparseForwardCase(1, 1, 129), "bfloat16", "128 heads"),
        (SparseForwardCase(1, 1, 64, topk=64), "bfloat16", "multiple of 128"),
        (FORWARD, "bfloat16", None),
    ],
)
def test_what_flashmla_cannot_do(torch, tmp_path, case, dtype, reason):
    torch.ops._flashmla_C.sparse_prefill_fwd = None
    (tmp_path / "_flashmla_C.abi3.so").touch()
    (_, peer) = make(["flashmla"], SPARSE_FORWARD.implementations(Choices(tmp_path)))
    said = peer.unsupported(case, dtype)
    assert said is None if reason is None else reason in said


def test_cudnn_frontend(rows_of, torch, monkeypatch):
    def backward(q, kv, out, dout, lse, attn_sink, topk_idxs, softmax_scale):
        assert (np.isneginf(attn_sink).all(), attn_sink.shape) == (True, (3,))
        arrays = q, kv, out, dout, lse, topk_idxs
        dq, dkv, d_sink = reference.sparse_mla_backward(*arrays, scale=softmax_scale, attn_sink=attn_sink)
        torch.cuda.claim(temporary=9000, kept=dq.size * 2 + dkv.size * 2 + d_sink.size * 4)
        return {"dq": tensor(dq.astype(q.dtype)), "dkv": tensor(dkv.astype(q.dtype)), "d_sink": tensor(d_sink[:, None])}

    package, module = types.ModuleType("cudnn"), types.ModuleType("cudnn.deepseek_sparse_attention")
    module.DSA = SimpleNamespace(sparse_attention_backward_wrapper=backward)
    monkeypatch.setitem(sys.modules, "cudnn", package)
    monkeypatch.setitem(sys.modules, "cudnn.deepseek_sparse_attention", module)
    row = rows_of(SPARSE_BACKWARD, BACKWARD, ["cudnn"], Choices())["cudnn"]
    assert row["status"] == "ok", row["reason"]
    assert row["check"]["errors"].keys() == {"dq", "dkv"}
    assert row["workspace_bytes"] == 9000 - 3 * 4, "the fake returns the sink's gradient in float64"


def test_peak_bytes(torch):
    torch.cuda.used = 500
    kept = [np.zeros(30, np.float32).view(Tensor)]
    assert peak_bytes(torch, lambda: torch.cuda.claim(temporary=1000, kept=120), lambda: kept) == 1000


def test_the_forward_through_its_public_call(rows_of):
    rows = rows_of(SPARSE_FORWARD, FORWARD, ["generic"], Choices())
    assert {name: row["status"] for name, row in rows.items()} == {"mla_cupy": "ok", "generic": "ok"}, rows
    assert rows["mla_cupy"]["workspace_bytes"] == 12345
    assert rows["generic"]["kernel"] == "attention_generic"


def test_the_backward_through_its_public_call(rows_of, monkeypatch):
    asked = []
    backward = mla_cupy.sparse_mla_backward

    def watched(*arrays, **options):
        asked.append((options["deterministic"], options.get("kernel")))
        return backward(*arrays, **options)

    monkeypatch.setattr(mla_cupy, "sparse_mla_backward", watched)
    rows = rows_of(SPARSE_BACKWARD, BACKWARD, ["deterministic", "generic"], Choices())
    assert {name: row["status"] for name, row in rows.items()} == {
        "mla_cupy": "ok",
        "deterministic": "ok",
        "generic": "ok",
    }, rows
    assert set(asked) == {(False, None), (True, None), (False, "sparse_backward_generic")}


@pytest.mark.parametrize(("operation", "case"), [(SPARSE_FORWARD, FORWARD), (SPARSE_BACKWARD, BACKWARD)])
def test_a_kernel_that_does_not_exist_is_an_error(rows_of, operation, case):
    """So those that the generic rows name do exist."""
    rows = rows_of(operation, case, ["generic"], Choices(kernel="no_such_kernel"))
    assert {name: row["status"] for name, row in rows.items()} == {"mla_cupy": "error", "generic": "ok"}
    assert "no_such_kernel" in rows["mla_cupy"]["reason"]
