"""The oracle of projections against plain loops, and against the textbook layer."""

from __future__ import annotations

import numpy as np
import pytest

import mla_cupy
from mla_cupy import reference
from mla_cupy.reference import layer
from tests.projection.inputs import kv_b_proj, states
from tests.support.cases import DecodeCase, make


def test_absorb_by_loops() -> None:
    rng = np.random.default_rng(0)
    q, rope = rng.standard_normal((3, 2, 5)), rng.standard_normal((3, 2, 4))
    w = rng.standard_normal((2, 5, 7))
    (got,) = reference.absorb(q, w, rope)
    for t, h in np.ndindex(3, 2):
        expected = [sum(q[t, h, d] * w[h, d, c] for d in range(5)) for c in range(7)]
        np.testing.assert_allclose(got[t, h], [*expected, *rope[t, h]], rtol=1e-12)
    assert np.array_equal(reference.absorb(q, w)[0], got[..., :7])


def test_merge_project_by_loops() -> None:
    rng = np.random.default_rng(1)
    outs, lses = rng.standard_normal((2, 1, 2, 3, 6)), rng.standard_normal((2, 1, 3, 2))
    w, gate = rng.standard_normal((3, 4, 6)), rng.standard_normal((1, 2, 3, 4))
    got, lse = reference.merge_project(outs, w, lses, gate)
    for s, h, d in np.ndindex(2, 3, 4):
        weights = np.exp(lses[:, 0, h, s])
        latent = (weights[:, None] * outs[:, 0, s, h]).sum(0) / weights.sum()
        expected = float(latent @ w[h, d]) / (1 + np.exp(-gate[0, s, h, d]))
        assert got[0, s, h, d] == pytest.approx(expected, rel=1e-12)
        assert lse is not None
        assert lse[0, h, s] == pytest.approx(np.log(weights.sum()), rel=1e-12)


def test_one_state_needs_no_lse() -> None:
    rng = np.random.default_rng(2)
    outs, w = rng.standard_normal((1, 2, 1, 3, 6)), rng.standard_normal((3, 4, 6))
    got, lse = reference.merge_project(outs, w)
    assert lse is None
    assert np.array_equal(got, reference.merge_project(outs, w, np.zeros((1, 2, 3, 1)))[0])


def test_they_are_the_textbook_layers_steps() -> None:
    config = layer.MlaConfig(hidden=16, q_lora=8, kv_lora=12, heads=3, d_nope=4, d_rope=2, d_v=5)
    rng = np.random.default_rng(3)
    weights = layer.random_weights(config, rng)
    q, out = rng.standard_normal((7, 3, 6)), rng.standard_normal((7, 3, 12))
    (absorbed,) = reference.absorb(q[..., :4], weights.k_up.transpose(0, 2, 1), q[..., 4:])
    np.testing.assert_allclose(absorbed, layer.absorb_queries(weights, q), rtol=1e-12)
    projected, _ = reference.merge_project(out[None, :, None], weights.v_up.transpose(0, 2, 1))
    np.testing.assert_allclose(projected[:, 0], layer.expand_values(weights, out), rtol=1e-12)


def test_decode_projects_its_own_results() -> None:
    inputs = make(DecodeCase(b=2, seqlens=(100, 3), h_q=4))
    _, w_uv = kv_b_proj(np.random.default_rng(4), 4, 128, 64, "bfloat16")
    gate = np.random.default_rng(5).standard_normal((2, 1, 4, 64))
    latents, lse = reference.mla_decode(*inputs.arguments)
    out, lse_too = reference.mla_decode(*inputs.arguments, w_uv=w_uv, gate=gate)
    assert np.array_equal(lse, lse_too)
    np.testing.assert_allclose(out, reference.merge_project(latents[None], w_uv, gate=gate)[0], rtol=1e-12)


def test_results_of_ranks_may_be_merged_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is linear, gate and all."""
    given = states(3, h=2)
    parts = [reference.merge_project(given.outs[i : i + 1], *given[1:2], given.lses[i : i + 1], given.gate)
             for i in range(3)]  # fmt: skip
    merged = reference.merge_states(np.stack([out for out, _ in parts]), np.stack([lse for _, lse in parts]))
    whole = reference.merge_project(*given)
    np.testing.assert_allclose(merged[0], whole[0], rtol=1e-10, atol=1e-12)


def test_numpy_arrays_are_rounded_oracles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    given = states(2)
    out, lse = mla_cupy.merge_project(**given.arrays)
    exact = reference.merge_project(*given)
    assert out.dtype == given.w_uv.dtype
    assert np.array_equal(out, exact[0].astype(np.float32).astype(out.dtype))
    assert np.array_equal(lse, exact[1].astype(np.float32))  # type: ignore[union-attr]
