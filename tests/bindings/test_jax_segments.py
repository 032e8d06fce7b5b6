"""Packed sequences by the ids of their tokens: `mla_cupy.jax.segment_starts`, and the ids as arguments of attention."""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import numpy as np
import pytest

from mla_cupy import ArgumentError, DTypeError, Packed, ShapeError, reference
from tests.bindings import test_jax_sharding
from tests.support import dense_cases
from tests.support.flat import flat

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


@pytest.mark.one_in(16)
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
        return of_jax.mla_prefill(*qkv, packed=Packed(starts, starts))

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


# ---- Ids as arguments of mla_prefill -------------------------------------------------------------------------------


PACKED: dict[str, tuple[list[int], list[int] | None]] = {
    "itself": ([1, 1, 1, 2, 2, 3], None),
    "padding everywhere": ([0, 4, 4, 0, -1, 2, 2, 0], None),
    "other keys": ([1, 1, 3, 3, 3], [1, 1, 1, 3]),
    "segments of one side": ([1, 2, 2, 5, 7], [1, 3, 3, 0, 5, 5, 6]),
    "no key": ([2, 2, 1], [0, 0]),
    "only padding": ([0, 0], [1, 1]),
}
CASE_OF_IDS = dense_cases.DenseCase(sequences=((9, 9),), h_q=2, h_kv=2, k_rope="within", starts=False)


def visible(ids_q: np.ndarray[Any, Any], ids_kv: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Visibility as documented, pair by pair: equal ids that are no padding, and the queries the last of their
    segment.
    """
    seen = np.zeros((len(ids_q), len(ids_kv)), bool)
    for i, x in enumerate(ids_q):
        keys = np.flatnonzero(ids_kv == x)
        left = int((ids_q[i + 1 :] == x).sum())  # queries behind this one
        if x > 0:
            seen[i, keys[: len(keys) - left]] = True
    return seen


def by_hand(q: Any, k: Any, v: Any, seen: Any) -> tuple[Any, Any]:
    """Attention in float64, pair by pair."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    scores = np.einsum("ihd,jhd->hij", q, k) * q.shape[-1] ** -0.5
    weights = np.where(seen, np.exp(scores), 0)
    total = weights.sum(-1)
    with np.errstate(divide="ignore"):
        out = np.einsum("hij,jhd->ihd", weights, v) / np.where(total, total, 1).T[..., None]
        return out, np.log(total).T


def of_sizes(ids_q: Any, ids_kv: Any) -> tuple[Any, Any, Any]:
    """Queries, keys and values; whatever is padding is NaN."""
    inputs = dense_cases.make(CASE_OF_IDS)
    q, k, v = (np.ascontiguousarray(x) for x in (inputs.q[: len(ids_q)], inputs.k[: len(ids_kv)], inputs.v))
    v = v[: len(ids_kv)].copy()
    q[ids_q <= 0] = np.nan
    for x in (k, v):
        x[~np.isin(ids_kv, ids_q[ids_q > 0])] = np.nan
    return q, k, v


@pytest.mark.parametrize(("case", "spare"), [*zip(PACKED, itertools.cycle((0, 2)), strict=False)])
def test_ids(jax: Any, of_jax: Any, case: str, spare: int) -> None:
    """Pair by pair, with gradients; nothing of the padding gets in, and its results are 0."""
    ids_q, given = np.array(PACKED[case][0], np.int32), PACKED[case][1]
    ids_kv = ids_q if given is None else np.array(given, np.int32)
    most = max(1, *(len({int(x) for x in ids if x > 0}) for ids in (ids_q, ids_kv))) + spare
    arrays = of_sizes(ids_q, ids_kv)
    seen = visible(ids_q, ids_kv)
    wanted, wanted_lse = by_hand(*(np.nan_to_num(x.astype(np.float32)) for x in arrays), seen)

    def run(*arrays: Any) -> Any:
        ids = {"segment_ids_q": jax.numpy.asarray(ids_q), "max_segments": most}
        ids |= {} if given is None else {"segment_ids_kv": jax.numpy.asarray(ids_kv)}
        return flat(of_jax.mla_prefill)(*arrays, **ids)

    def loss(arrays: Any) -> Any:
        out, lse = run(*arrays)
        square = (out.astype(jax.numpy.float32) ** 2).sum()
        return square + jax.numpy.where(jax.numpy.isinf(lse), 0, lse).sum(), (out, lse)

    gradients, results = jax.jit(jax.grad(loss, has_aux=True))(arrays)
    out, lse = map(np.asarray, results)
    np.testing.assert_allclose(out.astype(np.float64), wanted, rtol=2e-2, atol=2e-2)
    np.testing.assert_allclose(lse, wanted_lse, rtol=1e-3, atol=1e-3)
    assert (out[~seen.any(1)] == 0).all()
    for got, used in zip(gradients, (seen.any(1), seen.any(0), seen.any(0)), strict=True):
        of_all = np.asarray(got).astype(np.float32)
        assert np.isfinite(of_all).all()
        assert (of_all[~used] == 0).all()
        assert (np.abs(of_all[used]).max((1, 2), initial=0) > 0).all()


def test_ids_of_further_segments_are_padding(jax: Any, of_jax: Any) -> None:
    ids = np.array([1, 1, 2, 2, 3], np.int32)
    arrays = of_sizes(ids, ids)
    run = jax.jit(lambda ids, *x: of_jax.mla_prefill(*x, segment_ids_q=ids, max_segments=2))
    out, lse = run(ids, *arrays)
    wanted, wanted_lse = run(ids[:4], *(x[:4] for x in arrays))
    assert (np.asarray(out)[:4] == np.asarray(wanted)).all()
    assert (np.asarray(lse)[:4] == np.asarray(wanted_lse)).all()
    assert (np.asarray(out)[4] == 0).all()
    assert np.isneginf(np.asarray(lse)[4]).all()


def test_random_ids_of_two_sides(jax: Any, of_jax: Any) -> None:
    """The starts name each pair of runs, in one order; the rest has no key, or no query."""
    segments = importlib.import_module("mla_cupy.jax.segments")
    rng, run = np.random.default_rng(1), jax.jit(segments.packed_starts, static_argnums=2)
    for _ in range(40):
        names = rng.permutation(np.arange(1, 9))
        sides = []
        for size, kind in ((11, "int32"), (14, "uint8")):
            kept = np.where(rng.random(8) < 0.7, names, 0)
            parts = [np.full(rng.integers(0, 3), name) for name in kept]
            ids = np.concatenate(parts)[:size]
            sides.append(np.pad(ids, (0, size - len(ids))).astype(kind))
        starts_q, starts_kv = (np.asarray(x) for x in run(*sides, 8))
        assert (np.diff(starts_q) >= 0).all()
        assert (np.diff(starts_kv) >= 0).all()
        seen = np.zeros((11, 14), bool)
        for n in range(len(starts_q) - 1):
            seen[starts_q[n] : starts_q[n + 1], starts_kv[n] : starts_kv[n + 1]] = True
        ids_q, ids_kv = (x.astype(np.int64) for x in sides)
        wanted = reference.prefill_segments(ids_q, 8, segment_ids_kv=ids_kv)
        np.testing.assert_array_equal(wanted, (starts_q, starts_kv))
        np.testing.assert_array_equal(seen, (ids_q[:, None] == ids_kv) & (ids_q > 0)[:, None])


def test_ids_under_vmap(jax: Any, of_jax: Any) -> None:
    """One call after the other, each with its ids."""
    ids = np.array([[1, 1, 2, 2, 0], [1, 2, 2, 2, 2]], np.int32)
    q, k, v = of_sizes(np.ones(5), np.ones(5))
    run = jax.jit(lambda ids: of_jax.mla_prefill(q, k, v, segment_ids_q=ids, max_segments=2)[0])
    for row, of_row in zip(ids, jax.jit(jax.vmap(run))(ids), strict=True):
        assert (np.asarray(of_row) == np.asarray(run(row))).all()


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_ids_with_heads_over_devices(jax: Any, of_jax: Any, kind: str) -> None:
    """Ids are whole on every device: nothing is exchanged."""
    if len(jax.devices("cpu")) < 2 or not hasattr(jax.sharding, "AxisType"):
        pytest.skip("JAX has one CPU device, or no kinds of axes")
    ids = np.array([1, 1, 2, 0, 2], np.int32)[[0, 1, 3, 2, 4]]
    arrays = of_sizes(ids, ids)
    mesh, spec = test_jax_sharding.mesh_of(jax, kind, h=2), (None, "h")
    given = test_jax_sharding.put(jax, mesh, dict(zip("qkv", arrays, strict=True)), dict.fromkeys("qkv", spec))
    run = jax.jit(lambda x: flat(of_jax.mla_prefill)(**x, segment_ids_q=ids, max_segments=2))
    assert test_jax_sharding.moves(jax, run, given) == set()
    for got, wanted in zip(run(given), run(dict(zip("qkv", arrays, strict=True))), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(wanted))


def test_ids_that_do_not_fit(jax: Any, of_jax: Any) -> None:
    ids = np.array([1, 1, 2], np.int32)
    q, k, v = of_sizes(ids, ids)
    both, starts = {"segment_ids_q": ids, "max_segments": 2}, np.array([0, 3], np.int32)
    for given, error, text in (
        ({"segment_ids_q": ids}, ArgumentError, "max_segments: got None, expected an integer with segment_ids_q"),
        ({"max_segments": 2}, ArgumentError, "max_segments: got 2, expected None without segment_ids_q"),
        ({"segment_ids_kv": ids}, ArgumentError, "segment_ids_kv: got an array, expected None without segment_ids_q"),
        ({**both, "max_segments": 0}, ArgumentError, "max_segments: got 0, expected an integer from 1"),
        ({**both, "max_segments": True}, ArgumentError, "max_segments: got True"),
        ({**both, "cu_seqlens_q": starts}, ArgumentError, "cu_seqlens_q: got an array, with segment_ids_q, expected"),
        ({**both, "segment_ids_q": ids[:2]}, ShapeError, "segment_ids_q.shape: got (2,), expected (3,), as q has"),
        ({**both, "segment_ids_q": ids[None]}, ShapeError, "pass rows of ids to segment_starts"),
        ({**both, "segment_ids_kv": ids[:1]}, ShapeError, "segment_ids_kv.shape: got (1,), expected (3,), as k has"),
        ({**both, "segment_ids_q": ids > 1}, DTypeError, "segment_ids_q.dtype: got bool"),
        ({**both, "segment_ids_kv": [1, 1, 2]}, DTypeError, "segment_ids_kv: got "),
    ):
        with pytest.raises(error) as refused:
            flat(of_jax.mla_prefill)(q, k, v, **given)
        assert text in str(refused.value)
    with pytest.raises(ShapeError, match=r"segment_ids_kv: got None, expected an array of s_kv=2 ids"):
        flat(of_jax.mla_prefill)(q, k[:2], v[:2], **both)
    with pytest.raises(DTypeError, match="q: "):
        flat(of_jax.mla_prefill)(None, k, v, **both)
