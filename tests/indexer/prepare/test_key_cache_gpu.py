"""Index keys in pages on a GPU: every byte, offsets beyond 4 GiB, graphs."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import mla_cupy
from mla_cupy import reference
from tests.indexer.prepare.key_cache_cases import CASES, KeyCase, check
from tests.support.calls import assert_same
from tests.support.gpu import fetch, upload

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_oracle(case: KeyCase, gpu: object) -> None:
    check(case, upload, fetch)


def test_pools_beyond_4_gib(gpu: object) -> None:
    import cupy

    num_pages = (5 << 30) // 8448
    if cupy.cuda.runtime.memGetInfo()[0] < 6 << 30:
        pytest.skip("needs 6 GiB")
    cache = cupy.zeros((num_pages, 64, 132), cupy.uint8)
    k = np.random.default_rng(0).standard_normal((64, 128)).astype(ml_dtypes.bfloat16)
    slots = np.arange(num_pages * 64 - 64, num_pages * 64)
    mla_cupy.indexer_cache_append(upload(k), cache, upload(slots))
    last = np.zeros((1, 64, 132), np.uint8)
    reference.indexer_cache_append(k, last, np.arange(64))
    assert_same(cupy.asnumpy(cache[-1]), last[0])
    assert not bool(cache[:-1].any())
    codes, k_scale = mla_cupy.indexer_cache_gather(cache, upload(slots))
    assert_same(cupy.asnumpy(codes), last.reshape(-1)[: 64 * 128].reshape(64, 128))
    assert_same(cupy.asnumpy(k_scale), last.reshape(-1)[64 * 128 :].view(np.float32))


def test_a_captured_append_follows_its_slots(gpu: object) -> None:
    import cupy

    k = np.random.default_rng(0).standard_normal((8, 128)).astype(ml_dtypes.bfloat16)
    there, cache, slots = upload(k), cupy.zeros((4, 4, 132), cupy.uint8), cupy.full((8,), -1, cupy.int64)
    mla_cupy.indexer_cache_append(there, cache, slots)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        mla_cupy.indexer_cache_append(there, cache, slots)
        graph = stream.end_capture()
    slots[:] = cupy.arange(8)[::-1]
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    expected = np.zeros((4, 4, 132), np.uint8)
    reference.indexer_cache_append(k, expected, np.arange(8)[::-1])
    assert_same(cupy.asnumpy(cache), expected)
