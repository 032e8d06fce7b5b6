"""The oracle of the indexer's logits: by loops, at the edges of ranges, and paged against flat."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from mla_cupy.reference import indexer_logits, indexer_logits_paged
from mla_cupy.reference.indexer_records import append_records

E4M3 = ml_dtypes.float8_e4m3fn


def inputs(s_q: int = 4, s_kv: int = 9, h: int = 3, d: int = 8) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((s_q, h, d)).astype(E4M3), rng.standard_normal((s_kv, d)).astype(E4M3)
    return q, k, rng.standard_normal((s_q, h)).astype(np.float32), rng.random(s_kv).astype(np.float32)


def test_by_loops() -> None:
    q, k, weights, scales = inputs()
    got = indexer_logits(q, k, weights, k_scale=scales)
    for t, s in np.ndindex(4, 9):
        total = 0.0
        for h in range(3):
            total += float(weights[t, h]) * max(0.0, float(q[t, h].astype(float) @ k[s].astype(float)))
        assert got[t, s] == pytest.approx(total * float(scales[s]), rel=1e-12, abs=1e-15)


def test_ranges() -> None:
    q, k, weights, scales = inputs()
    ks, ke = np.array([2, -5, 7, 3], np.int32), np.array([6, 2**31 - 1, 7, 1], np.int32)
    got, whole = indexer_logits(q, k, weights, ks, ke, k_scale=scales), indexer_logits(q, k, weights, k_scale=scales)
    for t, (a, b) in enumerate([(2, 6), (0, 9), (7, 7), (3, 3)]):
        assert (got[t, a:b] == whole[t, a:b]).all()
        assert np.isneginf(np.delete(got[t], np.s_[a:b])).all()


def test_what_is_no_number() -> None:
    q, k, weights, scales = (x.astype(np.float64) for x in inputs())
    clean = indexer_logits(q, k, weights, k_scale=scales)
    k[4, 1] = np.nan
    got = indexer_logits(q, k, weights, k_scale=scales)
    assert (got[:, 4] == 0).all()
    assert (np.delete(got, 4, 1) == np.delete(clean, 4, 1)).all()
    hidden = indexer_logits(q, k, weights, ke=np.full(4, 4), k_scale=scales)
    assert (hidden[:, :4] == clean[:, :4]).all()
    weights[1, 0] = np.nan
    assert np.isnan(indexer_logits(q, k, weights)[1]).all()


@pytest.mark.parametrize("page_size", [1, 4])
def test_paged_equals_flat(page_size: int) -> None:
    q, k, weights, scales = inputs(s_q=4, s_kv=12, d=32)
    pages = -(-12 // page_size)
    order = np.random.default_rng(1).permutation(pages)
    cache = np.full((pages + 1, page_size, 36), 0x7F, np.uint8)
    slots = [order[s // page_size] * page_size + s % page_size for s in range(12)]
    append_records(cache, k, scales, slots)
    table = np.stack([order, np.full(pages, 10**9)]).astype(np.int32)
    batch = q.reshape(2, 2, 3, 32), weights.reshape(2, 2, 3)
    got = indexer_logits_paged(batch[0], cache[:, :, None], batch[1], np.array([11, 0]), table)
    wanted = indexer_logits(q, k, weights, ke=np.array([10, 11, 0, 0]), k_scale=scales)
    np.testing.assert_allclose(got.reshape(4, -1), wanted, rtol=1e-13)
    each = indexer_logits_paged(batch[0], cache, batch[1], np.array([[3, 12], [0, -1]]), table)
    wanted = indexer_logits(q, k, weights, ke=np.array([3, 12, 0, 0]), k_scale=scales)
    np.testing.assert_allclose(each.reshape(4, -1), wanted, rtol=1e-13)
