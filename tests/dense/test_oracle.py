"""The oracle of prefill against loops over numbers, the textbook layer, itself in pieces, and poison."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from mla_cupy.reference import layer, mla_prefill
from tests.support.dense_cases import DenseCase, DenseInputs, make

CASES = [
    DenseCase(((3, 5),), h_q=2, starts=False),
    DenseCase(((4, 4), (0, 3), (2, 0), (3, 2)), h_q=4, h_kv=2, around=(1, 2), q_pair=True),
    DenseCase(((2, 7), (3, 1)), h_q=3, causal=False, k_rope="per_head", dtype="float16"),
    DenseCase(((5, 6),), d_qk=128, d_v=128, k_rope="within", starts=False),
]


def by_loops(inputs: DenseInputs) -> tuple[np.ndarray, np.ndarray]:
    """The definition, one number at a time."""
    case, options = inputs.case, inputs.options
    s_q, h_q, _ = inputs.q.shape
    out, lse = np.zeros((s_q, h_q, case.d_v)), np.full((s_q, h_q), -np.inf)
    begin_q, begin_kv = case.around[0], case.around[0]
    for queries, keys in case.sequences:
        for i, h in np.ndindex(queries, h_q):
            query, g = begin_q + i, h * case.heads_kv // h_q
            left = list(inputs.q[query, h].astype(float))
            if "q_rope" in options:
                left += list(options["q_rope"][query, h].astype(float))
            scores, values = [], []
            for j in range(keys):
                if case.causal and j > keys - queries + i:
                    continue
                right = list(inputs.k[begin_kv + j, g].astype(float))
                if "k_rope" in options:
                    rope = options["k_rope"][begin_kv + j]
                    right += list((rope if rope.ndim == 1 else rope[g]).astype(float))
                products = (a * b for a, b in zip(left, right, strict=True))
                scores.append(math.fsum(products) / math.sqrt(case.d_qk))
                values.append(inputs.v[begin_kv + j, g].astype(float))
            if scores:
                top = max(scores)
                weights = [math.exp(score - top) for score in scores]
                total = math.fsum(weights)
                lse[query, h] = top + math.log(total)
                out[query, h] = sum(w / total * x for w, x in zip(weights, values, strict=True))
        begin_q, begin_kv = begin_q + queries, begin_kv + keys
    return out, lse


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_definition(case: DenseCase) -> None:
    inputs = make(case)
    out, lse = by_loops(inputs)
    np.testing.assert_allclose(inputs.exact[0], out, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(inputs.exact[1], lse, rtol=1e-12, atol=1e-12)


def test_textbook_layer() -> None:
    """The attention of DeepSeek's layer, from its projections, in each form that the layer has."""
    config = layer.MlaConfig(hidden=64, q_lora=32, kv_lora=48, heads=3, d_nope=16, d_rope=8, d_v=16)
    rng = np.random.default_rng(1)
    weights = layer.random_weights(config, rng)
    hidden = rng.standard_normal((9, config.hidden))
    positions = np.arange(9)
    q = layer.project_queries(weights, hidden, positions)[4:]  # the last of the sequence
    latents = layer.project_latents(weights, hidden, positions)
    keys, values = layer.expand_keys_values(weights, latents)
    nope = config.d_nope
    out, _ = mla_prefill(
        q[..., :nope],
        keys[..., :nope],
        values,
        q_rope=q[..., nope:],
        k_rope=latents[:, config.kv_lora :],
        scale=config.scale,
    )
    for form in layer.FORMS.values():
        np.testing.assert_allclose(out, form(weights, q, latents), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_state(dtype: str) -> None:
    """The attention to all keys, from that to the first of them and the rest."""
    inputs = make(DenseCase(((3, 8),), h_q=2, starts=False, causal=False))
    k_rope = inputs.options["k_rope"]
    first = mla_prefill(inputs.q, inputs.k[:5], inputs.v[:5], k_rope=k_rope[:5], causal=False)
    out, lse = mla_prefill(
        *(inputs.q, inputs.k[5:], inputs.v[5:]),
        k_rope=k_rope[5:],
        causal=False,
        state_out=first[0],
        state_lse=first[1],
    )
    np.testing.assert_allclose(out, inputs.exact[0], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(lse, inputs.exact[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("empty", [-np.inf, np.inf])
def test_empty_state(empty: float) -> None:
    """Its values are not read; without keys, either, nothing is left."""
    inputs = make(DenseCase(((3, 2),), starts=False))
    state = {"state_out": np.full((3, 1, 128), np.nan), "state_lse": np.full((3, 1), empty)}
    out, lse = mla_prefill(*inputs.arguments, **inputs.options, **state)
    np.testing.assert_allclose(out, inputs.exact[0], rtol=1e-15)
    np.testing.assert_array_equal(lse, inputs.exact[1])
    assert not out[0].any()
    assert lse[0, 0] == -np.inf


def test_hostile_starts() -> None:
    """They are clamped, and never go down."""
    inputs = make(DenseCase(((4, 6),), starts=False))
    options = {
        **inputs.options,
        "cu_seqlens_q": np.array([-5, 2, 1, 99]),
        "cu_seqlens_kv": np.array([0, 4, 2, 2**31 - 1]),
    }
    good = {**inputs.options, "cu_seqlens_q": np.array([0, 2, 2, 4]), "cu_seqlens_kv": np.array([0, 4, 4, 6])}
    for got, wanted in zip(
        mla_prefill(*inputs.arguments, **options), mla_prefill(*inputs.arguments, **good), strict=True
    ):
        np.testing.assert_array_equal(got, wanted)


def test_unseen_values_do_not_matter() -> None:
    """A later key that is not a number, in the values and in the keys."""
    case = DenseCase(((4, 4),), starts=False)
    inputs, poisoned = make(case), make(replace(case))
    poisoned.k[3], poisoned.v[3] = np.nan, np.inf
    np.testing.assert_array_equal(poisoned.exact[0][:3], inputs.exact[0][:3])
    assert np.isnan(poisoned.exact[0][3]).all()
