"""The textbook layer: its four forms agree, and each part equals a plain definition."""

from __future__ import annotations

import math
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from mla_cupy.reference import MlaConfig, MlaWeights, layer, mla_decode, mla_layer, random_weights

SMALL = MlaConfig(hidden=40, q_lora=24, kv_lora=16, heads=3, d_nope=12, d_rope=8, d_v=10)


def setup(config: MlaConfig, s_q: int, s_kv: int, seed: int = 0) -> tuple[MlaWeights, np.ndarray, np.ndarray]:
    """Weights, queries of the last s_q tokens and the latents of all s_kv."""
    rng = np.random.default_rng(seed)
    weights = random_weights(config, rng)
    hidden = 2 * rng.standard_normal((s_kv, config.hidden))
    positions = np.arange(s_kv)
    q = layer.project_queries(weights, hidden[s_kv - s_q :], positions[s_kv - s_q :])
    return weights, q, layer.project_latents(weights, hidden, positions)


def by_loops(weights: MlaWeights, q: np.ndarray, latents: np.ndarray) -> np.ndarray:
    """Un-absorbed attention from its definition, one score at a time."""
    c = weights.config
    s_q, s_kv = len(q), len(latents)
    out = np.zeros((s_q, c.heads, c.d_v))
    for i, h in np.ndindex(s_q, c.heads):
        visible = range(s_kv - s_q + i + 1)
        scores = []
        for j in visible:
            key = weights.k_up[h].T @ latents[j, : c.kv_lora]
            nope, rope = q[i, h, : c.d_nope] @ key, q[i, h, c.d_nope :] @ latents[j, c.kv_lora :]
            scores.append((nope + rope) / math.sqrt(c.d_nope + c.d_rope))
        weight = np.exp(np.array(scores) - max(scores))
        for j in visible:
            out[i, h] += weight[j] / weight.sum() * (weights.v_up[h].T @ latents[j, : c.kv_lora])
    return out


@pytest.mark.parametrize("form", layer.FORMS)
@pytest.mark.parametrize(("s_q", "s_kv"), [(1, 1), (1, 64), (3, 65), (20, 20), (4, 150)])
def test_every_form_equals_the_definition(form: str, s_q: int, s_kv: int) -> None:
    weights, q, latents = setup(SMALL, s_q, s_kv)
    np.testing.assert_allclose(
        layer.FORMS[form](weights, q, latents), by_loops(weights, q, latents), rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize(("s_q", "s_kv"), [(150, 150), (2, 333)])
def test_the_forms_agree_at_the_real_dimensions(s_q: int, s_kv: int) -> None:
    """DeepSeek-V3's attention; only the widths that attention does not see (hidden, q_lora) are small."""
    weights, q, latents = setup(MlaConfig(hidden=64, q_lora=96, heads=16), s_q, s_kv)
    outs = [form(weights, q, latents) for form in layer.FORMS.values()]
    assert len(outs) == 4
    for out in outs[1:]:
        np.testing.assert_allclose(out, outs[0], rtol=0, atol=1e-10 * np.abs(outs[0]).max())


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_the_chunk_does_not_matter(chunk: int) -> None:
    weights, q, latents = setup(SMALL, 5, 150)
    expected = layer.unabsorbed_naive(weights, q, latents)
    for form in (layer.unabsorbed_chunked, layer.absorbed_chunked):
        np.testing.assert_allclose(form(weights, q, latents, chunk), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["unabsorbed", "absorbed"])
def test_the_chunked_forms_hold_no_matrix_of_scores(name: str) -> None:
    weights, q, latents = setup(replace(SMALL, heads=2), 1024, 1024)
    matrix_bytes = 2 * 1024 * 1024 * 8

    def peak(form: str) -> int:
        tracemalloc.start()
        try:
            layer.FORMS[form](weights, q, latents)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(f"{name}_naive") > matrix_bytes
    assert peak(f"{name}_chunked") < matrix_bytes / 2


def test_the_paged_decode_is_the_absorbed_form() -> None:
    weights, q, latents = setup(SMALL, 3, 50)
    pool = np.full((9, 8, 24), np.nan)
    table = np.random.default_rng(1).permutation(9)[:7]
    for j, latent in enumerate(latents):
        pool[table[j // 8], j % 8] = latent
    out, _ = mla_decode(
        layer.absorb_queries(weights, q)[None], pool, table[None], np.array([50]), d_v=16, scale=SMALL.scale
    )
    np.testing.assert_allclose(
        layer.expand_values(weights, out[0]), layer.unabsorbed_chunked(weights, q, latents), rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize("form", layer.FORMS)
def test_the_layer_is_causal_and_decodes_token_by_token(form: str) -> None:
    rng = np.random.default_rng(2)
    weights = random_weights(SMALL, rng)
    hidden = rng.standard_normal((70, SMALL.hidden))
    whole = mla_layer(weights, hidden, form)
    assert whole.shape == hidden.shape
    np.testing.assert_allclose(mla_layer(weights, hidden[:66], form), whole[:66], rtol=1e-9, atol=1e-12)

    changed = hidden.copy()
    changed[66] += 1
    after = mla_layer(weights, changed, form)
    np.testing.assert_allclose(after[:66], whole[:66], rtol=1e-9, atol=1e-12)
    assert np.all(np.abs(after[66:] - whole[66:]).max(axis=1) > 1e-6)

    latents = layer.project_latents(weights, hidden, np.arange(70))
    for t in (0, 63, 64, 69):
        q = layer.project_queries(weights, hidden[t : t + 1], np.array([t]))
        step = layer.project_output(weights, layer.FORMS[form](weights, q, latents[: t + 1]))
        np.testing.assert_allclose(step[0], whole[t], rtol=1e-9, atol=1e-12)


def test_rope_turns_neighbouring_pairs() -> None:
    x = np.random.default_rng(3).standard_normal((5, 2, 8))
    positions = np.array([0, 1, 2, 100, 4095])
    turned = layer.rope(x, positions, 10000.0)
    for t, h, pair in np.ndindex(5, 2, 4):
        z = complex(*x[t, h, 2 * pair : 2 * pair + 2])
        z *= complex(math.cos(angle := positions[t] / 10000.0 ** (2 * pair / 8)), math.sin(angle))
        np.testing.assert_allclose(turned[t, h, 2 * pair : 2 * pair + 2], [z.real, z.imag], rtol=1e-12, atol=1e-13)
    assert np.array_equal(turned[0], x[0])


def test_rope_keys_and_queries_meet_by_distance() -> None:
    q, k = np.random.default_rng(4).standard_normal((2, 1, 64))

    def score(i: int, j: int) -> float:
        return float(layer.rope(q, np.array([i]), 1e4)[0] @ layer.rope(k, np.array([j]), 1e4)[0])

    assert score(12, 5) == pytest.approx(score(1007, 1000), rel=1e-9)
    assert score(12, 5) != pytest.approx(score(12, 6), rel=1e-3)


def test_rms_norm_by_hand() -> None:
    normed = layer.rms_norm(np.array([[3.0, 4.0]]), np.array([1.0, 10.0]), 0.5)
    np.testing.assert_allclose(normed, [[3 / math.sqrt(13), 40 / math.sqrt(13)]], rtol=1e-15)


def test_latents_are_normed_and_rope_keys_are_not() -> None:
    weights, _, latents = setup(SMALL, 1, 5)
    rng = np.random.default_rng(0)
    random_weights(SMALL, rng)
    hidden = 2 * rng.standard_normal((5, SMALL.hidden))
    down = hidden @ weights.kv_down
    np.testing.assert_allclose(np.mean((latents[:, :16] / weights.kv_norm) ** 2, axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(latents[:, 16:], axis=1), np.linalg.norm(down[:, 16:], axis=1))
    np.testing.assert_allclose(latents[0, 16:], down[0, 16:])


def test_queries_pass_through_a_normed_latent_and_rope() -> None:
    weights, _, _ = setup(SMALL, 1, 1)
    hidden = np.random.default_rng(5).standard_normal((2, SMALL.hidden))
    positions = np.array([0, 7])
    q = layer.project_queries(weights, hidden, positions)
    latent = layer.rms_norm(hidden @ weights.q_down, weights.q_norm, SMALL.norm_eps)
    unturned = (latent @ weights.q_up).reshape(2, 3, 20)
    np.testing.assert_allclose(q[..., :12], unturned[..., :12], rtol=1e-12)
    np.testing.assert_allclose(q[..., 12:], layer.rope(unturned[..., 12:], positions, 10000.0), rtol=1e-12)
    np.testing.assert_allclose(layer.project_queries(weights, 1000 * hidden, positions), q, rtol=1e-4)


def test_default_dimensions_are_deepseek_v3() -> None:
    config = MlaConfig()
    widths = (config.hidden, config.q_lora, config.kv_lora, config.heads, config.d_nope, config.d_rope, config.d_v)
    assert widths == (7168, 1536, 512, 128, 128, 64, 128)
    assert config.scale == pytest.approx(192**-0.5, rel=1e-15)


def test_float32_weights_keep_float32() -> None:
    weights = random_weights(SMALL, np.random.default_rng(0), np.float32)
    hidden = np.random.default_rng(1).standard_normal((9, SMALL.hidden), dtype=np.float32)
    for form in layer.FORMS:
        assert mla_layer(weights, hidden, form).dtype == np.float32
