"""`mla_cupy.jax.segment_starts`: packed sequences by the ids of their tokens."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from mla_cupy import ArgumentError, DTypeError, ShapeError, reference
from tests.support import dense_cases

pytestmark = pytest.mark.usefixtures("_numpy_backend")


def sequences(ids: np.ndarray[Any, Any]) -> list[tuple[int, int]]:
    """Runs of equal ids within a row, as (start, end), without padding at both ends."""
    runs, at = [], 0
    for row in np.atleast_2d(ids):
        for key, group in itertools.groupby(row):
            length = len(list(group))
            runs.append((at, at + length, key > 0))
            at += length
    real = [index for index, (*_, is_real) in enumerate(runs) if is_real]
    return [run[:2] for run in runs[real[0] : real[-1] + 1]] if real else []


IDS = {
    "packed": [1, 1, 1, 2, 2, 3],
    "padded": [5, 5, 2, 2, 2, 0, 0],
    "padding in front": [0, 0, 1, 1, 2],
    "padding between": [1, 0, 0, 2, 2, -1, 3],
    "an id comes again": [1, 1, 2, 1, 1],
    "one": [7] * 6,
    "only padding": [0, 0, -3],
    "none": [],
    "rows": [[1, 1, 0], [1, 1, 1], [0, 0, 0], [1, 2, 0]],
}


@pytest.mark.parametrize("case", IDS)
@pytest.mark.parametrize("spare", [0, 3])
def test_starts(jax: Any, of_jax: Any, case: str, spare: int) -> None:
    ids = np.array(IDS[case], np.int32)
    wanted = sequences(ids)
    count = max(1, len(wanted) + spare)
    end = wanted[-1][1] if wanted else 0
    starts = [start for start, _ in wanted]
    got = jax.jit(of_jax.segment_starts, static_argnums=1)(ids, count)
    assert (got.dtype, got.tolist()) == (np.int32, starts + [end] * (count + 1 - len(starts)))
    assert of_jax.segment_starts(ids, count).tolist() == got.tolist()


def test_random_ids(jax: Any, of_jax: Any) -> None:
    """The first sequences where there are more; the end of the last one is the start of the first that is left out."""
    rng, run = np.random.default_rng(0), jax.jit(of_jax.segment_starts, static_argnums=1)
    for _ in range(100):
        ids = rng.integers(-1, 4, (2, 9)).astype(rng.choice(["int8", "uint8", "int32"]))
        wanted = sequences(ids.astype(np.int64) if ids.dtype != np.uint8 else ids)
        count = int(rng.choice([2, 5, 18]))
        end = wanted[-1][1] if wanted else 0
        starts = [start for start, _ in wanted][: count + 1]
        assert run(ids, count).tolist() == starts + [end] * (count + 1 - len(starts))


def test_attention(jax: Any, of_jax: Any) -> None:
    """Packed tokens, their padding poisoned, against a call of the oracle for each sequence; with gradients."""
    jnp, sizes = jax.numpy, ((3, 3), (2, 2), (4, 4))
    inputs = dense_cases.make(dense_cases.DenseCase(sequences=sizes, h_q=2, h_kv=2, k_rope="within", starts=False))
    q, k, v = (np.ascontiguousarray(x) for x in (inputs.q, inputs.k, inputs.v))
    ids = np.array([1] * 3 + [2] * 2 + [3] * 4 + [0] * 2, np.int32)
    padded = [np.concatenate([x, np.full((2, *x.shape[1:]), np.nan, x.dtype)]) for x in (q, k, v)]

    @jax.jit
    def run(ids: Any, *qkv: Any) -> Any:
        starts = of_jax.segment_starts(ids, 5)
        return of_jax.mla_prefill(*qkv, cu_seqlens_q=starts, cu_seqlens_kv=starts)

    out, lse = map(np.asarray, run(ids, *padded))
    exact = [reference.mla_prefill(*(x[a:b].astype(np.float64) for x in (q, k, v))) for a, b in sequences(ids)]
    wanted, wanted_lse = (np.concatenate(parts) for parts in zip(*exact, strict=True))
    np.testing.assert_allclose(out[:9].astype(np.float64), wanted, rtol=2e-2, atol=2e-2)
    np.testing.assert_allclose(lse[:9], wanted_lse, rtol=1e-3, atol=1e-3)
    assert (out[9:] == 0).all()
    assert np.isneginf(lse[9:]).all()
    gradient = jax.grad(lambda v: run(ids, *padded[:2], v)[0].astype(jnp.float32).sum())(jnp.asarray(padded[2]))
    assert (np.asarray(gradient)[9:] == 0).all()
    assert np.isfinite(np.asarray(gradient)[:9].astype(np.float32)).all()


def test_what_does_not_fit(jax: Any, of_jax: Any) -> None:
    ids = np.array([1, 1, 2], np.int32)
    for given, count, error, text in (
        (ids.astype(np.float32), 2, DTypeError, "segment_ids.dtype: got float32, expected an array of integers"),
        (ids > 1, 2, DTypeError, "segment_ids.dtype: got bool"),
        (None, 2, DTypeError, "segment_ids: got None"),
        ([1, 1], 2, DTypeError, "segment_ids: got "),
        (ids.reshape(1, 1, 3), 2, ShapeError, "segment_ids.ndim: got 3, expected 1 or 2"),
        (ids[0], 2, (ShapeError, DTypeError), "segment_ids"),
        (ids, 0, ArgumentError, "max_sequences: got 0, expected an integer from 1"),
        (ids, 1.5, ArgumentError, "max_sequences: got 1.5"),
        (ids, True, ArgumentError, "max_sequences: got True"),
    ):
        with pytest.raises(error) as refused:
            of_jax.segment_starts(given, count)
        assert text in str(refused.value)
