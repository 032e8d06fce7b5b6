"""The functions that training frameworks call, on the shapes that they document, against attention in plain PyTorch."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy as np
import pytest

from mla_cupy import ArgumentError, DTypeError, ShapeError, UnsupportedDeviceError
from tests.bindings.stand_in import install_modules

pytestmark = pytest.mark.usefixtures("_numpy_backend")

S_Q, S_KV, HEADS, TOPK, D_QK, D_V = 6, 50, 4, 9, 576, 512
SCALE = D_QK**-0.5
TOLERANCE = 1e-2
"""Tolerance for bfloat16, relative to the largest value."""


@pytest.fixture
def problem(torch: Any) -> dict[str, Any]:
    """Distinct rows for each query, -1 among them; the last query selects nothing."""
    rng = np.random.default_rng(3)
    generator = torch.Generator().manual_seed(3)
    q, kv, dout = (
        torch.randn(shape, generator=generator).bfloat16()
        for shape in ((S_Q, HEADS, D_QK), (S_KV, D_QK), (S_Q, HEADS, D_V))
    )
    indices = np.stack([rng.permutation(S_KV)[:TOPK] for _ in range(S_Q)])
    indices[:, 4] = -1
    indices[-1] = -1
    sink = torch.randn(HEADS, generator=generator)
    return {"q": q, "kv": kv, "dout": dout, "indices": torch.from_numpy(indices), "sink": sink}


def attention(torch: Any, q: Any, kv: Any, indices: Any, sink: Any = None) -> tuple[Any, Any]:
    """out and lse in float64; zeros and -inf where nothing is selected."""
    rows = kv[indices.clamp(min=0)]
    scores = torch.einsum("shd,skd->shk", q, rows) * SCALE
    scores = scores.masked_fill((indices < 0)[:, None], -torch.inf)
    lse = torch.logsumexp(scores, -1)
    total = lse if sink is None else torch.logaddexp(lse, sink[None].expand_as(lse))
    some = (indices >= 0).any(-1)[:, None, None]
    weights = torch.exp(scores.where(some, 0) - total.where(some[..., 0], 0)[..., None]).where(some, 0)
    return torch.einsum("shk,skd->shd", weights, rows[..., :D_V]), lse


def check(got: Any, wanted: Any) -> None:
    error = float((got.detach().double() - wanted.detach()).abs().max())
    assert error <= TOLERANCE * max(1.0, float(wanted.detach().abs().max()))


# ---- cudnn-frontend ----------------------------------------------------------------------------------------------


@pytest.fixture
def backward(torch: Any) -> Any:
    return importlib.import_module("mla_cupy.compat.cudnn_dsa").sparse_attention_backward_wrapper


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("compacted", [False, True], ids=["-1 anywhere", "lengths"])
def test_cudnn_backward(torch: Any, backward: Any, problem: dict[str, Any], with_sink: bool, compacted: bool) -> None:
    """Lists in cuDNN's form: rows in front and their number, zeros after them; or with -1 in between."""
    indices = problem["indices"]
    leaves = [problem[name].double().requires_grad_() for name in ("q", "kv", "sink")]
    out, lse = attention(torch, leaves[0], leaves[1], indices, leaves[2] if with_sink else None)
    out.backward(problem["dout"].double())
    lengths = None
    if compacted:
        lengths = (indices >= 0).sum(-1, dtype=torch.int32)
        indices = indices.sort(dim=-1, descending=True).values.clamp_min(0)
    sink = problem["sink"] if with_sink else torch.full((HEADS,), -torch.inf)
    got = backward(
        *(problem["q"], problem["kv"], out.detach().bfloat16(), problem["dout"], lse.detach().float(), sink),
        indices.int(),
        softmax_scale=SCALE,
        topk_length=lengths,
    )
    assert isinstance(got, dict)
    assert {name: (tuple(x.shape), x.dtype) for name, x in got.items()} == {
        "dq": ((S_Q, HEADS, D_QK), torch.bfloat16),
        "dkv": ((S_KV, D_QK), torch.bfloat16),
        "d_sink": ((HEADS,), torch.float32),
    }
    check(got["dq"], leaves[0].grad)
    check(got["dkv"], leaves[1].grad)
    check(got["d_sink"], leaves[2].grad if with_sink else torch.zeros(HEADS).double())
    assert (got["dq"][-1] == 0).all(), "a query without rows has no gradient"


def test_cudnn_backward_into_given_memory(torch: Any, backward: Any, problem: dict[str, Any]) -> None:
    out, lse = attention(torch, problem["q"].double(), problem["kv"].double(), problem["indices"])
    arguments = (problem["q"], problem["kv"], out.bfloat16(), problem["dout"], lse.float(), None)
    dq, dkv = torch.empty_like(problem["q"]), torch.empty(S_KV, D_QK)
    got = backward(*arguments, problem["indices"].int(), dq=dq, dkv=dkv, block_tile=64)
    assert got["dq"] is dq
    assert got["dkv"] is dkv
    assert got["d_sink"] is None
    wanted = backward(*arguments, problem["indices"].int())
    assert torch.equal(dq, wanted["dq"])
    assert dkv.dtype == torch.float32
    check(wanted["dkv"], dkv.double())


def test_cudnn_backward_of_an_infinite_lse(torch: Any, backward: Any, problem: dict[str, Any]) -> None:
    """FlashMLA marks queries without rows by +inf, others by -inf."""
    out, lse = attention(torch, problem["q"].double(), problem["kv"].double(), problem["indices"])
    results = [
        backward(
            *(problem["q"], problem["kv"], out.bfloat16(), problem["dout"], lse.float().masked_fill(lse < -1e30, mark)),
            *(None, problem["indices"].int()),
        )
        for mark in (torch.inf, -torch.inf)
    ]
    assert torch.equal(results[0]["dq"], results[1]["dq"])
    assert torch.equal(results[0]["dkv"], results[1]["dkv"])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"dout": None}, "^dout: got None, expected a tensor"),
        ({"topk_idxs": 3}, "^topk_idxs: got an int"),
        ({"softmax_scale": "x"}, "^softmax_scale: got 'x'"),
        ({"stream": "x"}, "^stream: got 'x', expected a raw handle"),
    ],
)
def test_cudnn_and_wrong_arguments(
    torch: Any, backward: Any, problem: dict[str, Any], change: dict[str, Any], text: str
) -> None:
    out, lse = attention(torch, problem["q"].double(), problem["kv"].double(), problem["indices"])
    given = {"q": problem["q"], "kv": problem["kv"], "out": out.bfloat16(), "dout": problem["dout"], "lse": lse.float()}
    given |= {"attn_sink": None, "topk_idxs": problem["indices"]}
    with pytest.raises((ArgumentError, DTypeError), match=text):
        backward(**{**given, **change})


# ---- xtuner ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["int32", "int64"])
@pytest.mark.parametrize("scaling", [None, SCALE])
def test_xtuner(torch: Any, problem: dict[str, Any], kind: str, scaling: float | None) -> None:
    sparse_mla = importlib.import_module("mla_cupy.compat.xtuner").sparse_mla
    q, kv = problem["q"].clone().requires_grad_(), problem["kv"][:, None].clone().requires_grad_()
    got = sparse_mla(q, kv, problem["indices"].to(getattr(torch, kind))[:, None], scaling=scaling, value_dim=D_V)
    exact = [x.detach().double().requires_grad_() for x in (q, kv)]
    out, lse = attention(torch, exact[0], exact[1][:, 0], problem["indices"])
    assert (got.raw_output.dtype, got.softmax_lse.dtype) == (torch.bfloat16, torch.float32)
    assert got == (got.raw_output, got.softmax_lse)
    check(got.raw_output, out)
    assert torch.allclose(got.softmax_lse.double(), lse.detach(), rtol=0, atol=1e-4)
    got.raw_output.backward(problem["dout"])
    out.backward(problem["dout"].double())
    check(q.grad, exact[0].grad)
    check(kv.grad, exact[1].grad)


def test_xtuner_says_what_it_cannot(torch: Any, problem: dict[str, Any]) -> None:
    sparse_mla = importlib.import_module("mla_cupy.compat.xtuner").sparse_mla
    kv, indices = problem["kv"][:, None], problem["indices"][:, None]
    with pytest.raises(ArgumentError, match="value_dim: got 576, expected 512 or None"):
        sparse_mla(problem["q"], kv, indices, scaling=None, value_dim=576)
    with pytest.raises(ShapeError, match="1 head"):
        sparse_mla(problem["q"], kv.expand(-1, 2, -1), indices, scaling=None)


WRONG_INDICES: list[tuple[Any, type[Exception], str]] = [
    (lambda x: x.masked_fill(x == x.max(), 2**32 + 1), ArgumentError, "got 4294967297, expected an integer of 32 bits"),
    (lambda x: x.float(), DTypeError, "got float32, expected int32 or int64"),
    (lambda x: x > 0, DTypeError, "got bool, expected int32 or int64"),
    (lambda x: x.numpy(), DTypeError, "got a ndarray"),
    (lambda x: None, DTypeError, "got None"),
]
wrong_indices = pytest.mark.parametrize(
    ("change", "kind", "text"), WRONG_INDICES, ids=[x[2][:12] for x in WRONG_INDICES]
)


@wrong_indices
def test_xtuner_and_wrong_indices(torch: Any, problem: dict[str, Any], change: Any, kind: Any, text: str) -> None:
    """Indices beyond 32 bits are refused, not narrowed."""
    sparse_mla = importlib.import_module("mla_cupy.compat.xtuner").sparse_mla
    with pytest.raises(kind, match=rf"^indices.*: {text}"):
        sparse_mla(problem["q"], problem["kv"][:, None], change(problem["indices"][:, None]), scaling=SCALE)
    with pytest.raises(ArgumentError, match=r"^scaling: got"):
        sparse_mla(problem["q"], problem["kv"][:, None], problem["indices"][:, None], scaling=-1.0)


# ---- Megatron ----------------------------------------------------------------------------------------------------


@pytest.fixture
def megatron(torch: Any) -> Any:
    return importlib.import_module("mla_cupy.compat.megatron")


@pytest.mark.parametrize("b", [1, 2])
@pytest.mark.parametrize("with_lengths", [False, True])
def test_megatron_attention(torch: Any, megatron: Any, problem: dict[str, Any], b: int, with_lengths: bool) -> None:
    """Sequence first; the indices batch first, each into its own sequence."""
    indices = torch.stack([problem["indices"], problem["indices"].roll(1, 0)])[:b]
    query = torch.stack([problem["q"], -problem["q"]], 1)[:, :b].clone().requires_grad_()
    key = torch.stack([problem["kv"], problem["kv"].flip(0)], 1)[:, :b, None].clone().requires_grad_()
    lengths = torch.full((b, S_Q), 4) if with_lengths else None
    shown = indices.clone()
    if with_lengths:
        shown[..., 4:] = -1
    got = megatron.run_fused_absorbed_sparse_attention(query, key, indices, SCALE, D_V, lengths)
    assert (tuple(got.shape), got.dtype) == ((S_Q, b, HEADS, D_V), torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in (query, key)]
    wanted = torch.stack([attention(torch, exact[0][:, i], exact[1][:, i, 0], shown[i])[0] for i in range(b)], 1)
    check(got, wanted)
    dout = torch.stack([problem["dout"]] * b, 1)
    got.backward(dout)
    wanted.backward(dout.double())
    check(query.grad, exact[0].grad)
    check(key.grad, exact[1].grad)


@wrong_indices
@pytest.mark.parametrize("name", ["topk_indices", "topk_length"])
def test_megatron_and_wrong_indices(
    torch: Any, megatron: Any, problem: dict[str, Any], name: str, change: Any, kind: Any, text: str
) -> None:
    given = {"topk_indices": problem["indices"][None], "topk_length": torch.full((1, S_Q), TOPK)}
    given[name] = change(given[name])
    query, key = problem["q"][:, None], problem["kv"][:, None, None]
    attend = megatron.run_fused_absorbed_sparse_attention
    if name == "topk_length" and given[name] is None:  # which counts all
        assert attend(query, key, softmax_scale=SCALE, v_channels=D_V, **given) is not None
        return
    with pytest.raises(kind, match=rf"^{name}.*: {text}"):
        attend(query, key, softmax_scale=SCALE, v_channels=D_V, **given)


def test_megatron_without_sequences(torch: Any, megatron: Any) -> None:
    query, key = torch.zeros(S_Q, 0, HEADS, D_QK).bfloat16(), torch.zeros(S_KV, 0, 1, D_QK).bfloat16()
    indices = torch.zeros(0, S_Q, TOPK, dtype=torch.int32)
    got = megatron.run_fused_absorbed_sparse_attention(query, key, indices, SCALE, D_V)
    assert (got.shape, got.dtype) == ((S_Q, 0, HEADS, D_V), torch.bfloat16)


@pytest.mark.parametrize(
    "change",
    [
        {"v_channels": 576},
        {"query": (S_Q, 1, HEADS, 320)},
        {"key": (S_KV, 1, 2, D_QK)},
        {"key": (S_KV, 2, 1, D_QK)},
        {"topk_indices": (1, S_Q + 1, TOPK)},
        {"topk_indices": (S_Q, TOPK)},
        {"dtype": "float32"},
    ],
    ids=str,
)
def test_megatron_falls_back(torch: Any, megatron: Any, change: dict[str, Any]) -> None:
    shapes = {"query": (S_Q, 1, HEADS, D_QK), "key": (S_KV, 1, 1, D_QK), "topk_indices": (1, S_Q, TOPK), **change}
    dtype = getattr(torch, change.get("dtype", "bfloat16"))
    query, key = (torch.zeros(shapes[name], dtype=dtype) for name in ("query", "key"))
    indices = torch.zeros(shapes["topk_indices"], dtype=torch.int64)
    hook = megatron.run_fused_absorbed_sparse_attention
    assert hook(query, key, indices, SCALE, change.get("v_channels", D_V)) is None


@pytest.mark.parametrize("place", [0, 1])
def test_megatron_registration(megatron: Any, monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    """Registration works in either place of Megatron's table."""
    table = {"tilelang": "somewhere"}
    name = megatron._DISPATCHERS[place]
    install_modules(monkeypatch, {name: {"_BACKEND_MODULE_NAME_BY_BACKEND": table}})
    megatron.register()
    assert table == {"tilelang": "somewhere", "mla_cupy": "mla_cupy.compat.megatron"}
    backend = importlib.import_module(table["mla_cupy"])
    assert callable(backend.run_fused_absorbed_sparse_attention)


def test_megatron_that_is_not_known(megatron: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in megatron._DISPATCHERS:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UnsupportedDeviceError, match="this Megatron is not known"):
        megatron.register()
