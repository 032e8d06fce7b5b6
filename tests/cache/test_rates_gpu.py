"""Speed of the cache's kernels relative to a copy of equally many bytes, timed alike: graphs of 20, the best of
several.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy.cache_formats import V32
from tests.cache.inputs import tokens

pytestmark = [pytest.mark.gpu, pytest.mark.perf]

CALLS, REPEATS = 20, 15


def microseconds(enqueue: Callable[[Any], object]) -> float:
    """Time of one call, by replays of a graph."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        enqueue(stream)  # what has to be built is built
        stream.synchronize()
        stream.begin_capture()
        for _ in range(CALLS):
            enqueue(stream)
        graph = stream.end_capture()
        times = []
        for _ in range(REPEATS):
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            begin.record(stream)
            graph.launch(stream)
            end.record(stream)
            end.synchronize()
            times.append(1e3 * cupy.cuda.get_elapsed_time(begin, end) / CALLS)
    return min(times)


def copy_microseconds(moved: int) -> float:
    """A copy within the GPU's memory that reads and writes `moved` bytes together."""
    import cupy

    source, target = cupy.zeros((2, moved // 2), cupy.uint8)
    return microseconds(lambda stream: target.data.copy_from_device_async(source.data, moved // 2, stream))


# Share of a copy's rate, H200: append 0.69 and 0.88, gather 0.70 and 0.92. Less than the limits is not noise.
@pytest.mark.parametrize(("n", "share"), [(8192, 0.65), (65536, 0.85)])
@pytest.mark.parametrize("kernel", ["append", "gather"])
def test_share_of_the_copy_rate(kernel: str, n: int, share: float, gpu: object) -> None:
    import cupy

    latent, rope = (cupy.asarray(np.tile(x, (n // 64, 1))) for x in tokens(V32, 64))  # type: ignore[arg-type]
    cache = cupy.zeros((2 * n // 64, 64, V32.token_bytes), cupy.uint8)
    pages = np.random.default_rng(0).permutation(2 * n // 64)[: n // 64]
    slots = cupy.asarray((pages[:, None] * 64 + np.arange(64)).reshape(-1).astype(np.int32))
    rows = cupy.empty((n, V32.d_qk), latent.dtype)
    if kernel == "append":
        took = microseconds(lambda stream: mla_cupy.cache_append(latent, rope, cache, slots, stream=stream))
    else:
        took = microseconds(lambda stream: mla_cupy.cache_gather(cache, slots, out=rows, stream=stream))
    moved = n * (V32.token_bytes + 2 * V32.d_qk + slots.itemsize)
    copied = copy_microseconds(moved)
    print(f"{kernel} of {n}: {took:.1f} us, {moved / took / 1e6:.2f} TB/s; a copy of as much {copied:.1f} us")
    assert copied / took >= share
