"""The adapters of attention with keys per head: the peers' calls are the oracle's, with a PyTorch made of NumPy."""

from __future__ import annotations

import types

import numpy as np
import pytest

from bench.core.errors import BenchError
from bench.core.implementation import Choices, make
from bench.operations import PREFILL, PREFILL_BACKWARD
from mla_cupy import reference
from tests.bench import fake_torch
from tests.bench.fake_torch import tensor

CASES = ["b2-sq3-skv3-hq2", "b1-sq2-skv5-hq4-hkv2-d128x128", "b2-sq2-skv3-hq1-full"]
SEQUENCES = ("causal", "scale", "cu_seqlens_q", "cu_seqlens_kv")


@pytest.fixture
def fa4(monkeypatch):
    """flash-attn-4's functions; what each was called with, as (name, shapes of whole keys and values, options)."""
    made = []

    def common(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal):
        assert (max_seqlen_q, max_seqlen_k) == (np.diff(cu_seqlens_q).max(), np.diff(cu_seqlens_k).max())
        return dict(zip(SEQUENCES, (causal, softmax_scale, cu_seqlens_q, cu_seqlens_k), strict=True))

    def forward(q, k, v, return_lse, **sequences):
        made.append(("forward", k.shape, v.shape, return_lse))
        out, lse = reference.mla_prefill(q, k, v, **common(q, k, v, **sequences))
        return tensor(out.astype(q.dtype)), tensor(lse.astype(np.float32).T)  # (h, tokens)

    def backward(q, k, v, out, dout, lse, deterministic, **sequences):
        made.append(("backward", k.shape, v.shape, deterministic))
        found = reference.mla_prefill_backward(q, k, v, out, dout, lse.T, **common(q, k, v, **sequences))
        return tuple(tensor(x.astype(q.dtype)) for x in found[:3])

    interface = types.ModuleType("flash_attn.cute.interface")
    interface.flash_attn_varlen_func, interface._flash_attn_bwd = forward, backward
    modules = {"flash_attn": types.ModuleType("flash_attn"), "flash_attn__cute": types.ModuleType("flash_attn.cute")}
    torch = fake_torch.install(monkeypatch, **modules, flash_attn__cute__interface=interface)
    torch.cat = lambda arrays, dim: tensor(np.concatenate(arrays, axis=dim))
    for module in ("dense", "dense_backward"):
        monkeypatch.setattr(f"bench.peers.{module}.peak_bytes", lambda torch, call, results: 1)
    return made


@pytest.mark.parametrize("case", CASES)
def test_fa4_forward(rows_of, fa4, case):
    row = rows_of(PREFILL, case, ["fa4"])["fa4"]
    assert row["status"] == "ok", row["reason"]
    assert row["check"]["errors"].keys() == {"out"}
    assert "with_concatenation" in row["figures_us"]
    case = PREFILL.parse(case)
    keys = case.b * case.s_kv, case.heads_kv
    assert set(fa4) == {("forward", (*keys, case.d_qk), (*keys, case.d_v), True)}


@pytest.mark.parametrize("name", ["fa4", "fa4_deterministic"])
@pytest.mark.parametrize("case", CASES)
def test_fa4_backward(rows_of, fa4, case, name):
    row = rows_of(PREFILL_BACKWARD, case, [name])[name]
    assert row["status"] == "ok", row["reason"]
    assert row["check"]["errors"].keys() == {"dq", "dk", "dv"}
    assert "with_concatenation" in row["figures_us"]
    assert {call[3] for call in fa4 if call[0] == "backward"} == {name != "fa4"}


@pytest.mark.parametrize("case", ["b1-sq3-skv3-hq2-topk2", "b1-sq3-skv3-hq2-fp8", "b1-sq3-skv3-hq2-state"])
def test_what_fa4_is_not_asked(rows_of, fa4, case):
    (_, peer) = make(["fa4"], PREFILL.implementations(Choices()))
    assert peer.unsupported(PREFILL.parse(case), "bfloat16")


@pytest.mark.parametrize("operation", [PREFILL, PREFILL_BACKWARD], ids=lambda operation: operation.name)
def test_without_flash_attn(monkeypatch, operation):
    fake_torch.install(monkeypatch, flash_attn=None)
    with pytest.raises(BenchError, match="flash-attn-4"):
        make(["fa4"], operation.implementations(Choices()))
