"""`flash_attn_varlen_func` and its packed forms against the oracle, with arrays of several libraries."""

from __future__ import annotations

import doctest
from typing import Any

import numpy as np
import pytest

from mla_cupy import ArgumentError, DTypeError, ShapeError
from mla_cupy.compat import flash_mla_varlen
from mla_cupy.compat.flash_mla import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from tests.interop.test_torch import tensor
from tests.support.dense_cases import DenseCase, DenseInputs, make
from tests.support.tolerance import check

pytestmark = pytest.mark.usefixtures("_numpy_backend")

GROUPED = DenseCase(((3, 5), (0, 2), (4, 2)), h_q=4, h_kv=2, k_rope="within")
SQUARE = DenseCase(((3, 3), (4, 4)), h_q=2, d_qk=128, k_rope="within", dtype="float16", causal=False)


def starts_of(inputs: DenseInputs) -> list[Any]:
    return [inputs.options[name] for name in ("cu_seqlens_q", "cu_seqlens_kv")]


@pytest.mark.parametrize("case", [GROUPED, SQUARE], ids=lambda case: case.id)
def test_forward(library: Any, case: DenseCase) -> None:
    """The first case has queries that see no key."""
    make_array, back = library
    inputs = make(case)
    arrays = [make_array(np.ascontiguousarray(x)) for x in (inputs.q, inputs.k, inputs.v, *starts_of(inputs))]
    out, lse = flash_attn_varlen_func(*arrays, 5, 5, causal=case.causal)
    assert np.isneginf(inputs.exact[1]).any() == (case is GROUPED)
    check((back(out), back(lse)), inputs.exact, inputs.rounded, case.dtype)


def test_packed_forms(library: Any) -> None:
    make_array, back = library
    inputs = make(SQUARE)
    q, k, v = (np.ascontiguousarray(x) for x in (inputs.q, inputs.k, inputs.v))
    starts, scale = inputs.options["cu_seqlens_q"], 0.05
    kv, qkv = np.concatenate([k, v], axis=2), np.concatenate([q, k, v], axis=2)
    given = [make_array(x) for x in (q, k, v, kv, qkv, starts)]
    wanted = flash_attn_varlen_func(*given[:3], *given[5:] * 2, 4, 4, softmax_scale=scale)
    by_kv = flash_attn_varlen_kvpacked_func(given[0], given[3], *given[5:] * 2, 4, 4, 128, softmax_scale=scale)
    by_qkv = flash_attn_varlen_qkvpacked_func(given[4], given[5], 4, 128, softmax_scale=scale)
    for found in (by_kv, by_qkv):
        for x, y in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(back(x), back(y))


def good_call() -> dict[str, Any]:
    inputs = make(SQUARE)
    q, k, v = (np.ascontiguousarray(x) for x in (inputs.q, inputs.k, inputs.v))
    starts = dict(zip(("cu_seqlens_qo", "cu_seqlens_kv"), starts_of(inputs), strict=True))
    return {"q": q, "k": k, "v": v, **starts, "max_seqlen_qo": 4, "max_seqlen_kv": 4}


MISTAKES = [
    ({"dropout_p": 0.1}, ArgumentError, "dropout_p: got 0.1, expected 0"),
    ({"deterministic": 2}, ArgumentError, "deterministic: got 2"),
    ({"is_varlen": "yes"}, ArgumentError, "is_varlen: got 'yes'"),
    ({"causal": None}, ArgumentError, "causal: got None"),
    ({"softmax_scale": 0.0}, ArgumentError, "^softmax_scale: got 0.0"),
    ({"v": np.zeros((7, 2, 64), np.float16)}, ShapeError, "v.shape"),
    ({"k": np.zeros((7, 2, 192), np.float16)}, ShapeError, "the width of k: got 192, expected 128, like q"),
    ({"k": np.zeros((7, 2, 128), np.float32)}, DTypeError, "k.dtype: got float32"),
    ({"cu_seqlens_qo": None}, ArgumentError, "^cu_seqlens_qo: got None"),
]


@pytest.mark.parametrize(("change", "error", "message"), MISTAKES, ids=lambda x: str(x)[:30])
def test_mistakes(change: dict[str, Any], error: type[Exception], message: str) -> None:
    flash_attn_varlen_func(**good_call())
    with pytest.raises(error, match=message):
        flash_attn_varlen_func(**{**good_call(), **change})


@pytest.mark.parametrize("head_dim_qk", [0, 192, 128.0, None])
def test_no_such_width(head_dim_qk: Any) -> None:
    call = good_call()
    starts = call["cu_seqlens_qo"]
    qkv = np.concatenate([call[name] for name in ("q", "k", "v")], axis=2)
    with pytest.raises(ArgumentError, match=r"head_dim_qk: got .*, expected an integer from 1 to 191"):
        flash_attn_varlen_qkvpacked_func(qkv, starts, 4, head_dim_qk)
    with pytest.raises(ShapeError, match=r"kv.shape: got \(2, 384\)"):
        flash_attn_varlen_kvpacked_func(call["q"], qkv[0], starts, starts, 4, 4, 128)


def test_tensors_have_the_tokens_side_by_side(torch: Any) -> None:
    call = good_call()
    arrays = [tensor(torch, x) for x in list(call.values())[:5]]
    out, lse = flash_attn_varlen_func(*arrays, 4, 4, deterministic=True)
    assert lse.stride() == (1, len(out))
    with pytest.raises(ShapeError, match=r"q\.shape"):
        flash_attn_varlen_func(arrays[0][0], *arrays[1:], 4, 4)
    with pytest.raises(DTypeError, match=r"^v: got None"):
        flash_attn_varlen_func(*arrays[:2], None, *arrays[3:], 4, 4)


def textbook(torch: Any, arrays: list[Any], starts: list[list[int]], scale: float) -> tuple[Any, Any]:
    """Causal attention of each sequence with its matrix of scores."""
    parts = []
    for begin, end, first, last in zip(starts[0], starts[0][1:], starts[1], starts[1][1:], strict=False):
        q, k, v = (x.transpose(0, 1) for x in (arrays[0][begin:end], arrays[1][first:last], arrays[2][first:last]))
        group = len(q) // len(k)
        scores = scale * q @ k.repeat_interleave(group, 0).transpose(1, 2)
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(last - first - (end - begin) + 1)
        scores = scores.masked_fill(hidden, -torch.inf)
        out = scores.softmax(-1) @ v.repeat_interleave(group, 0)
        parts.append((out.transpose(0, 1), scores.logsumexp(-1).T))
    return tuple(torch.cat(x) for x in zip(*parts, strict=True))  # type: ignore[return-value]


def test_gradients(torch: Any) -> None:
    """Gradients of out and of lse, with grouped heads; `deterministic` requires autograd's own setting."""
    generator, starts = torch.Generator().manual_seed(0), [[0, 4, 9], [0, 6, 11]]

    def random(*shape: int) -> Any:
        return torch.randn(shape, generator=generator).half()

    given = [random(9, 4, 192), random(11, 2, 192), random(11, 2, 128)]
    dout, dlse, lists = random(9, 4, 128), random(9, 4), [torch.tensor(x, dtype=torch.int32) for x in starts]
    ours, exact = ([cast(x).requires_grad_() for x in given] for cast in (torch.clone, torch.Tensor.double))
    out, lse = flash_attn_varlen_func(*ours, *lists, 5, 6, causal=True)
    assert lse.stride() == (1, 9)
    wanted = textbook(torch, exact, starts, 192**-0.5)
    for results in ((out, lse), wanted):
        loss = (results[0] * dout.to(results[0])).sum() + (results[1] * dlse.to(results[1])).sum()
        loss.backward()
    for x, y in zip(ours, exact, strict=True):
        assert (x.grad.double() - y.grad).norm() < 2e-3 * y.grad.norm()
    with pytest.raises(ArgumentError, match=r"deterministic: got True, expected False, with gradients; call torch"):
        flash_attn_varlen_func(*ours, *lists, 5, 6, deterministic=True)


def test_docstrings() -> None:
    result = doctest.testmod(flash_mla_varlen, raise_on_error=False)
    assert result.attempted > 0
    assert result.failed == 0
