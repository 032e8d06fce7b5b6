"""`PagedKVCache` on a GPU: the same model, host time, and a graph that follows the steps."""

from __future__ import annotations

import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mla_cupy
from tests.cache.inputs import tokens
from tests.support.gpu import slowness_of_host

pytestmark = pytest.mark.gpu


def test_against_the_cache_on_the_host(gpu: object) -> None:
    """Equal calls on both give equal tables, lengths, slots and bytes."""
    import cupy

    sizes: dict[str, Any] = {"num_pages": 24, "page_size": 16, "max_seqs": 6, "max_pages": 4, "num_layers": 2}
    pools = {"kv": "v32", "indexer": "indexer"}
    caches = [mla_cupy.PagedKVCache(pools, **sizes, device=place) for place in (0, "cpu")]
    rng = np.random.default_rng(0)
    held = [[cache.allocate()[0] for _ in range(3)] for cache in caches]
    assert held[0] == held[1]
    sequences = held[0]
    for _ in range(12):
        if rng.random() < 0.4 and len(sequences) < 6:
            sequences = [*sequences, *(cache.fork(sequences[0])[0] for cache in caches)][: len(sequences) + 1]
        counts = [min(int(rng.integers(0, 5)), 64 - caches[0].length(s)) for s in sequences]
        latent, rope = tokens(caches[0].formats["kv"], sum(counts), seed=int(rng.integers(99)))
        steps = [cache.extend(sequences, counts) for cache in caches]
        caches[0].append(steps[0], 1, cupy.asarray(latent), cupy.asarray(rope))
        mla_cupy.reference.cache_append(latent, rope, caches[1].layer(1), steps[1].slots)
        keys = rng.standard_normal((sum(counts), 128)).astype(ml_dtypes.bfloat16)
        caches[0].append_keys(steps[0], 1, cupy.asarray(keys))
        mla_cupy.reference.indexer_cache_append(keys, caches[1].layer(1, "indexer"), steps[1].slots)
        for name in ("slots", "positions", "seqlens"):
            np.testing.assert_array_equal(cupy.asnumpy(getattr(steps[0], name)), getattr(steps[1], name))
        for at, sequence in enumerate(sequences):
            pages = caches[1].pages(sequence)
            np.testing.assert_array_equal(cupy.asnumpy(steps[0].block_table[at, : len(pages)]), pages)
    for index in range(2):
        for pool in pools:
            np.testing.assert_array_equal(cupy.asnumpy(caches[0].layer(index, pool)), caches[1].layer(index, pool))


@pytest.mark.perf
@pytest.mark.parametrize(("growing", "limit_us"), [(4, 50), (256, 100)])
def test_host_time(gpu: object, growing: int, limit_us: float) -> None:
    """Host time of the upload and the launch. The limits are for a host with launches of 4 us."""
    import cupy

    made = mla_cupy.PagedKVCache(
        "v32", num_pages=2000, page_size=64, max_seqs=256, max_pages=256, max_tokens=1 << 15, device=0
    )
    held = [made.allocate()[0] for _ in range(256)]
    times = []
    for _ in range(200):
        made.truncate(held, 0)
        made.extend(held, np.arange(256) // 4 + 1 if growing == 4 else 64)
        cupy.cuda.Device().synchronize()
        begin = time.perf_counter()
        made.extend(held, 1)
        times.append(1e6 * (time.perf_counter() - begin))
    took, limit = float(np.median(times)), limit_us * slowness_of_host()
    print(f"{growing} sequences take a page: {took:.0f} us of the host, limit {limit:.0f}")
    assert took <= limit
