"""The oracle of the backward of prefill against finite differences, itself in pieces, and poison."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mla_cupy.reference import mla_prefill, mla_prefill_backward
from tests.support.dense_cases import DenseCase, make
from tests.support.dense_gradients import NAMES, make_gradients

Array = np.ndarray[Any, Any]
CASES = [
    DenseCase(((3, 5),), h_q=2, starts=False),
    DenseCase(((4, 4), (0, 3), (2, 0), (3, 2)), h_q=4, h_kv=2, around=(1, 2), q_pair=True),
    DenseCase(((2, 7), (3, 1)), h_q=3, causal=False, k_rope="per_head", dtype="float16", scale=0.3),
    DenseCase(((5, 6),), d_qk=128, d_v=128, k_rope="within", starts=False),
]
STEP = 1e-6


def forward_and_loss(case: DenseCase) -> tuple[dict[str, Array], dict[str, Any], Array, Array]:
    """The arrays that have gradients, in float64, the other arguments, and what `out` and `lse` weigh in a loss."""
    inputs = make(case)
    wide = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
    wide |= {name: x for name, x in inputs.options.items() if name.endswith("rope")}
    rest = {name: x for name, x in inputs.options.items() if name not in wide}
    rng = np.random.default_rng(7)
    s_q, h_q, _ = inputs.q.shape
    of_out, of_lse = rng.standard_normal((s_q, h_q, case.d_v)), rng.standard_normal((s_q, h_q))
    return {name: np.nan_to_num(x.astype(np.float64)) for name, x in wide.items()}, rest, of_out, of_lse


def loss(arrays: dict[str, Array], rest: dict[str, Any], of_out: Array, of_lse: Array) -> float:
    out, lse = mla_prefill(**arrays, **rest)
    return float((out * of_out).sum() + np.where(np.isinf(lse), 0, lse * of_lse).sum())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_finite_differences(case: DenseCase) -> None:
    """Along random directions, for each array by itself."""
    arrays, rest, of_out, of_lse = forward_and_loss(case)
    out, lse = mla_prefill(**arrays, **rest)
    found = mla_prefill_backward(**arrays, out=out, dout=of_out, lse=lse, dlse=of_lse, **rest)
    gradients = dict(zip(NAMES, found, strict=True))
    rng = np.random.default_rng(8)
    for name, x in arrays.items():
        gradient = gradients[f"d{name}"]
        assert gradient is not None
        assert gradient.shape == x.shape
        for _ in range(3):
            step = STEP * rng.standard_normal(x.shape)
            ahead, behind = (loss({**arrays, name: x + sign * step}, rest, of_out, of_lse) for sign in (1, -1))
            np.testing.assert_allclose((ahead - behind) / 2, (gradient * step).sum(), rtol=1e-6, atol=1e-14)
    assert {name for name, x in gradients.items() if x is not None} == {f"d{name}" for name in arrays}


def test_one_number_at_a_time() -> None:
    """The directions see each element with a weight of its own; here are a few elements by themselves."""
    arrays, rest, of_out, of_lse = forward_and_loss(CASES[0])
    out, lse = mla_prefill(**arrays, **rest)
    found = mla_prefill_backward(**arrays, out=out, dout=of_out, lse=lse, dlse=of_lse, **rest)
    for name, at in (("q", (2, 1, 5)), ("k", (0, 1, 9)), ("v", (3, 0, 1)), ("k_rope", (1, 3))):
        moved = [{**arrays, name: arrays[name].copy()} for _ in range(2)]
        for one, sign in zip(moved, (1, -1), strict=True):
            one[name][at] += sign * STEP
        ahead, behind = (loss(one, rest, of_out, of_lse) for one in moved)
        gradient = dict(zip(NAMES, found, strict=True))[f"d{name}"]
        assert gradient is not None
        np.testing.assert_allclose((ahead - behind) / (2 * STEP), gradient[at], rtol=1e-5, atol=1e-9)


def test_merged_state() -> None:
    """With the results of attention to all keys, a chunk's gradients are its part of the gradients of all keys."""
    inputs = make_gradients(DenseCase(((3, 8),), h_q=2, starts=False, causal=False), dlse=True)
    whole = inputs.exact
    q, k, v, out, dout, lse = inputs.arguments
    k_rope, dlse = inputs.options["k_rope"], inputs.options["dlse"]
    parts = [
        mla_prefill_backward(*(q, k[part], v[part], out, dout, lse), k_rope=k_rope[part], dlse=dlse, causal=False)
        for part in (slice(0, 5), slice(5, 8))
    ]
    first, second = ([x for x in one if x is not None] for one in parts)
    dq, dk, dv, dk_rope = (x for x in whole if x is not None)
    np.testing.assert_allclose(first[0] + second[0], dq, rtol=1e-9, atol=1e-12)
    for gradient, one, other in zip((dk, dv, dk_rope), first[1:], second[1:], strict=True):
        np.testing.assert_allclose(np.concatenate([one, other]), gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("empty", [-np.inf, np.inf])
def test_infinite_lse(empty: float) -> None:
    """Such a query has no gradient and gives none."""
    inputs = make_gradients(DenseCase(((4, 6),), h_q=2, starts=False))
    q, k, v, out, dout, lse = (x.copy() for x in inputs.arguments)
    out[1, 0], dout[1, 0], lse[1, 0] = np.nan, np.nan, empty
    dq, *others = mla_prefill_backward(q, k, v, out, dout, lse, **inputs.options)
    dout[1, 0], out[1, 0] = 0, 0
    lse[1, 0] = inputs.lse[1, 0]
    wanted_dq, *wanted = mla_prefill_backward(q, k, v, out, dout, lse, **inputs.options)
    assert not dq[1, 0].any()
    wanted_dq[1, 0] = 0
    for got, expected in zip((dq, *others), (wanted_dq, *wanted), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_unseen_pairs_do_not_matter() -> None:
    """A key that is not a number leaves the queries before it alone, and a query the keys after it."""
    case = DenseCase(((4, 4),), starts=False)
    inputs, poisoned = make_gradients(case), make_gradients(case)
    poisoned.forward.k[3], poisoned.forward.v[3] = np.nan, np.inf
    poisoned.forward.q[1], poisoned.dout[1] = np.nan, np.nan
    for name, got, wanted in zip(NAMES, poisoned.exact, inputs.exact, strict=True):
        if got is None or wanted is None:
            continue
        clean, dirty = (0, 3) if name == "dq" else (2, 0)
        np.testing.assert_array_equal(got[clean], wanted[clean])
        assert np.isnan(got[dirty]).any()


def test_rounding_errs_by_little() -> None:
    """The mode that makes the kernels' roundings is near the exact one, and not equal to it."""
    inputs = make_gradients(DenseCase(((20, 30),), h_q=4, h_kv=2))
    for exact, rounded in zip(inputs.exact, inputs.rounded, strict=True):
        if exact is None or rounded is None:
            continue
        error = np.linalg.norm(exact - rounded) / np.linalg.norm(exact)
        assert 1e-4 < error < 1e-2
