"""The kernels of the cache on a GPU: every byte, offsets beyond 4 GiB, graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import reference
from mla_cupy.cache_formats import FORMATS
from tests.cache.inputs import tokens
from tests.cache.runs import (
    CASES,
    COPIES,
    SLOTS_CASES,
    CacheCase,
    SlotsCase,
    check_append_and_gather,
    check_copy,
    check_slots,
    check_update,
    slots_case,
)
from tests.support.gpu import fetch, upload

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", CASES, ids=str)
def test_append_and_gather(case: CacheCase, gpu: object) -> None:
    check_append_and_gather(case, upload, fetch)


@pytest.mark.parametrize("shape", COPIES, ids=str)
def test_copy(shape: tuple[int, int, int, int], gpu: object) -> None:
    import cupy

    check_copy(shape, upload, cupy.asnumpy)


@pytest.mark.parametrize("sizes", [(6, 5, 3), (256, 512, 64)], ids=str)
def test_update(sizes: tuple[int, int, int], gpu: object) -> None:
    import cupy

    check_update(upload, cupy.asnumpy, sizes)


@pytest.mark.parametrize("case", SLOTS_CASES, ids=str)
def test_slots(case: SlotsCase, gpu: object) -> None:
    import cupy

    check_slots(case, upload, cupy.asnumpy)


def test_captured_slots_follow_the_chunk(gpu: object) -> None:
    import cupy

    case = SlotsCase()
    arrays, sizes = slots_case(case), {"page_size": case.page_size, "max_tokens": case.max_tokens}
    there = {name: upload(x) for name, x in arrays.items()}
    slots, cu_seqlens = mla_cupy.cache_slots(**there, **sizes)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        mla_cupy.cache_slots(**there, **sizes, slots=slots, cu_seqlens=cu_seqlens)
        graph = stream.end_capture()
    for start in (0, 7, 21):
        arrays["starts"][:] = start
        there["starts"][:] = start
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        for got, wanted in zip((slots, cu_seqlens), reference.cache_slots(**arrays, **sizes), strict=True):
            np.testing.assert_array_equal(cupy.asnumpy(got), wanted)


@pytest.mark.parametrize("name", ["v32", "v4", "bf16"])
def test_pools_beyond_4_gib(name: str, gpu: object) -> None:
    """The last page of a pool of 5 GiB."""
    import cupy

    record, page_size = FORMATS[name], 64
    num_pages = (5 << 30) // record.page_bytes(page_size)
    if cupy.cuda.runtime.memGetInfo()[0] < 6 << 30:
        pytest.skip("needs 6 GiB")
    memory = cupy.zeros((num_pages, record.page_bytes(page_size)), cupy.uint8)
    strides = (record.page_bytes(page_size), record.token_bytes, 1)
    dtype = np.dtype("uint8") if record.dtype == "uint8" else memory.view(_numpy(record.dtype)).dtype
    cache = cupy.ndarray((num_pages, page_size, record.width), dtype, memory.data, (*strides[:2], dtype.itemsize))
    latent, rope = tokens(record, 64)
    slots = np.arange(num_pages * page_size - 64, num_pages * page_size)
    mla_cupy.cache_append(upload(latent), upload(rope), cache, upload(slots))
    small = np.zeros((1, record.page_bytes(page_size)), np.uint8)
    last = np.ndarray((1, page_size, record.width), dtype, small, 0, (*strides[:2], dtype.itemsize))
    reference.cache_append(latent, rope, last, np.arange(64))
    np.testing.assert_array_equal(cupy.asnumpy(memory[-1]), small[0])
    assert not bool(memory[:-1].any())
    pairs = cupy.asarray([[num_pages - 1, num_pages - 3]], cupy.int32)
    mla_cupy.cache_copy_pages(memory[None], pairs)
    np.testing.assert_array_equal(cupy.asnumpy(memory[-3]), small[0])
    rows = mla_cupy.cache_gather(cache, upload(slots - 128), out_dtype="float32")
    np.testing.assert_array_equal(cupy.asnumpy(rows), reference.cache_gather(last, np.arange(64))[0])


def _numpy(name: str) -> Any:
    from mla_cupy.dtypes import numpy_dtype

    return numpy_dtype(name)


def test_a_captured_append_follows_its_slots(gpu: object) -> None:
    import cupy

    record = FORMATS["v32"]
    latent, rope = (upload(x) for x in tokens(record, 8))
    cache, slots = cupy.zeros((4, 4, 656), cupy.uint8), cupy.full((8,), -1, cupy.int64)
    mla_cupy.cache_append(latent, rope, cache, slots)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        mla_cupy.cache_append(latent, rope, cache, slots)
        graph = stream.end_capture()
    slots[:] = cupy.arange(8)[::-1]
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    expected = np.zeros((4, 4, 656), np.uint8)
    reference.cache_append(*tokens(record, 8), expected, np.arange(8)[::-1])
    np.testing.assert_array_equal(cupy.asnumpy(cache), expected)
