"""The oracle of the losses: gradients against central differences, and special rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mla_cupy.reference import indexer_head_sums, indexer_logits, indexer_sparse_loss, indexer_warmup_loss
from mla_cupy.reference.indexer_loss import SparseLoss, WarmupLoss
from tests.support.loss_cases import LossCase, loss_inputs

Array = np.ndarray[Any, Any]
Inputs = dict[str, Array]


def inputs(s_q: int = 4, s_kv: int = 6, h: int = 3, h_i: int = 2, seed: int = 0) -> Inputs:
    rng = np.random.default_rng(seed)
    shapes = {"q": (s_q, h, 5), "k": (s_kv, 5), "index_q": (s_q, h_i, 4), "index_k": (s_kv, 4), "weights": (s_q, h_i)}
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def check_gradients(
    loss: Callable[..., SparseLoss | WarmupLoss], given: Inputs, row_weights: Array, **options: Any
) -> None:
    """Central differences of sum(row_weights * kl) by every element, away from the kinks of max(., 0)."""
    products = np.einsum("qhd,kd->qhk", given["index_q"], given["index_k"])
    assert np.abs(products).min() > 1e-3
    got = loss(**given, row_weights=row_weights, **options)

    def total(name: str, at: tuple[int, ...], by: float) -> float:
        moved = {**given, name: given[name].copy()}
        moved[name][at] += by
        kl = loss(**moved, **options).kl
        return float((kl.reshape(len(row_weights), -1).sum(axis=1) * row_weights).sum())

    for name, gradient in (("index_q", got.d_index_q), ("index_k", got.d_index_k), ("weights", got.d_weights)):
        step = 1e-5
        assert gradient is not None
        for at in np.ndindex(*given[name].shape):
            difference = (total(name, at, step) - total(name, at, -step)) / (2 * step)
            assert gradient[at] == pytest.approx(difference, rel=2e-7, abs=2e-9), (name, at)
        assert np.abs(gradient).max() > 1e-3


ROW_WEIGHTS = np.array([1.0, 0.0, 0.3, 2.0])


@pytest.mark.parametrize("causal", [False, True])
def test_warmup_gradients(causal: bool) -> None:
    check_gradients(indexer_warmup_loss, inputs(), ROW_WEIGHTS, causal=causal)


def test_warmup_gradients_of_two_sequences_with_mass_elsewhere() -> None:
    starts = {"cu_seqlens_q": [0, 3, 4], "cu_seqlens_kv": [0, 4, 6]}
    lse = np.random.default_rng(1).standard_normal((4, 3)) + 2
    check_gradients(indexer_warmup_loss, inputs(), ROW_WEIGHTS, lse=lse, scale=0.7, **starts)


def test_gradients_of_keys_per_head() -> None:
    """Two KV heads of two heads each, in pairs."""
    given, rng = inputs(h=4, seed=3), np.random.default_rng(4)
    given["k"] = rng.standard_normal((6, 2, 5))
    rope = {"q_rope": rng.standard_normal((4, 4, 3)), "k_rope": rng.standard_normal((6, 3))}
    check_gradients(indexer_warmup_loss, given, ROW_WEIGHTS, **rope)


def test_per_head_gradients() -> None:
    check_gradients(indexer_warmup_loss, inputs(h=2, seed=2), ROW_WEIGHTS, target="per_head", target_scale=0.8)


def test_sparse_gradients() -> None:
    indices = np.array([[0, 3, 3, -1], [5, 1, 2, 0], [4, 9, -2, 1], [2, 3, 4, 5]])
    lengths = np.array([4, 4, 4, 3])
    for causal in (False, True):
        check_gradients(indexer_sparse_loss, inputs(), ROW_WEIGHTS, indices=indices, topk_length=lengths, causal=causal)


def test_absorbed_and_not() -> None:
    """q W . c = q . W c for keys W c of each head: the same loss, gradients and log-sum-exps."""
    given, rng = inputs(), np.random.default_rng(5)
    up = rng.standard_normal((3, 7, 5))  # of each head, from the latent
    q = rng.standard_normal((4, 3, 7))
    keys, rope = np.einsum("hdc,sc->shd", up, given["k"]), (rng.standard_normal((4, 3, 2)), rng.standard_normal((6, 2)))
    absorbed = {**given, "q": np.einsum("thd,hdc->thc", q, up), "q_rope": rope[0], "k_rope": rope[1]}
    other = {**given, "q": q, "k": keys, "q_rope": rope[0], "k_rope": rope[1][:, None]}
    wanted = indexer_warmup_loss(**absorbed, scale=0.4, v=given["k"])
    got = indexer_warmup_loss(**other, scale=0.4, v=keys)
    for x, y in zip(got[:6], wanted[:6], strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-13)
    np.testing.assert_allclose(got.attention_lse, wanted.attention_lse, rtol=1e-12)
    np.testing.assert_allclose(got.out, np.einsum("hdc,thc->thd", up, wanted.out), rtol=1e-10, atol=1e-13)
    sums = [
        indexer_head_sums(x["q"], x["k"], scale=0.4, q_rope=x["q_rope"], k_rope=x["k_rope"]) for x in (absorbed, other)
    ]
    np.testing.assert_allclose(*sums, rtol=1e-10)


@pytest.mark.parametrize("target", ["head_sum", "per_head", "lists"])
def test_codes_are_what_they_stand_for(target: str) -> None:
    """The loss of dequantised arrays, whose gradients pass straight through; scores as the logits have them."""
    case = LossCase(h=2, h_i=2, codes="uint8", target="per_head" if target == "per_head" else "head_sum")
    given = loss_inputs(case)
    options: dict[str, Any] = {"indices": np.tile(np.arange(4), (5, 1))} if target == "lists" else case.options
    loss: Any = indexer_sparse_loss if target == "lists" else indexer_warmup_loss
    got = loss(**given, **options)
    values = {name: given[name].view(ml_dtypes.float8_e4m3fn).astype(float) for name in ("index_q", "index_k")}
    q_scale, k_scale = (given[name].astype(float) for name in ("q_scale", "k_scale"))
    unit = 1 if target == "per_head" else (2 * 32) ** -0.5
    plain = {name: x for name, x in given.items() if name not in ("q_scale", "k_scale")}
    plain["index_q"], plain["index_k"] = values["index_q"] * q_scale[..., None], values["index_k"] * k_scale[:, None]
    plain["weights"] = given["weights"] / (q_scale * unit)
    wanted = loss(**plain, **options)
    for x, y in zip(got[:5], wanted[:5], strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(got.d_weights, wanted.d_weights / (q_scale * unit), rtol=1e-6, atol=1e-12)
    by_codes = loss(**{name: x for name, x in given.items() if name != "q_scale"}, **options)
    np.testing.assert_allclose(by_codes.d_index_q, got.d_index_q * q_scale[..., None], rtol=1e-12)
    if target == "head_sum":
        logits = indexer_logits(*(given[name] for name in ("index_q", "index_k", "weights")), k_scale=k_scale)
        own = np.log(np.exp(logits[-1]).sum())
        assert got.index_lse[-1] == pytest.approx(own, rel=1e-12)


def test_by_definition() -> None:
    """The textbook form, with softmaxes over the causal keys and the indexer's logits from their own oracle."""
    given = inputs()
    got = indexer_warmup_loss(**given)
    logits = indexer_logits(given["index_q"], given["index_k"], given["weights"] * (2 * 4) ** -0.5)
    for t in range(4):
        n = 6 - 4 + t + 1
        attention = np.exp(given["q"][t] @ given["k"][:n].T * 5**-0.5)
        p = (attention / attention.sum(axis=1, keepdims=True)).mean(axis=0)
        softmax = np.exp(logits[t, :n]) / np.exp(logits[t, :n]).sum()
        assert got.kl[t] == pytest.approx((p * np.log(p / softmax)).sum(), rel=1e-12)
        assert got.mass[t] == pytest.approx(3, rel=1e-12)
        assert got.index_lse[t] == pytest.approx(np.log(np.exp(logits[t, :n]).sum()), rel=1e-12)
    assert (got.kl > 0).all()


def test_mass_elsewhere_cancels() -> None:
    """A common addition to the lse of all heads cancels: the target is normalised again."""
    given = inputs()
    lse = np.log(np.exp(np.einsum("qhd,kd->qhk", given["q"], given["k"]) * 5**-0.5).sum(axis=2))
    more = indexer_warmup_loss(**given, lse=lse + 0.5, causal=False)
    same = indexer_warmup_loss(**given, causal=False)
    np.testing.assert_allclose(more.kl, same.kl, rtol=1e-11)
    np.testing.assert_allclose(more.mass, same.mass * np.exp(-0.5), rtol=1e-11)


def test_rows_without_a_target() -> None:
    given = inputs()
    lse = np.full((4, 3), np.inf)
    lse[1], lse[2, 0] = -np.inf, 0.0
    got = indexer_warmup_loss(**given, lse=lse)
    assert (got.kl[[0, 1, 3]] == 0).all()
    assert got.kl[2] > 0
    assert (got.d_index_q[[0, 1, 3]] == 0).all()
    nothing = indexer_sparse_loss(**given, indices=np.full((4, 2), -1))
    assert (nothing.kl == 0).all()
    assert (nothing.d_index_k == 0).all()
    assert np.isneginf(nothing.index_lse).all()


def test_one_key_is_certain() -> None:
    got = indexer_warmup_loss(**inputs(s_q=1, s_kv=1))
    assert abs(got.kl[0]) < 1e-14
    assert np.abs(got.d_index_q).max() < 1e-14


def test_underflow_in_the_target() -> None:
    given = inputs()
    given["k"][0] *= 1e4
    got = indexer_warmup_loss(**given)
    assert np.isfinite(got.kl).all()
    assert (got.kl >= 0).all()


def test_all_keys_selected_is_the_dense_loss() -> None:
    given = inputs()
    dense = indexer_warmup_loss(**given, causal=False)
    sparse = indexer_sparse_loss(**given, indices=np.arange(6)[::-1][None].repeat(4, 0), causal=False)
    for x, y in zip(dense[:6], sparse, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-14)


def test_attention_of_the_keys_that_are_seen() -> None:
    """Out and log-sum-exps by the textbook, also where the target's lse are others."""
    given = inputs()
    v = np.random.default_rng(1).standard_normal((6, 7))
    got = indexer_warmup_loss(**given, v=v, lse=np.zeros((4, 3)), scale=0.3)
    assert got.out is not None
    assert got.attention_lse is not None
    for t in range(4):
        weights = np.exp(0.3 * given["q"][t] @ given["k"][: t + 3].T)
        np.testing.assert_allclose(got.attention_lse[t], np.log(weights.sum(axis=1)), rtol=1e-12)
        out = weights @ v[: t + 3] / weights.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(got.out[t], out, rtol=1e-12)


def test_what_is_not_asked_for() -> None:
    got = indexer_warmup_loss(**inputs(), gradients=False)
    assert got[3:] == (None,) * 5
