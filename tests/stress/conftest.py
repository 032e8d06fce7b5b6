"""Shared by the stress tests: a kernel that keeps a stream busy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mla_cupy.runtime.device import DeviceInfo

_SPIN = r"""
extern "C" __global__ void spin(long long nanoseconds) {
    long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - start < nanoseconds);
}
"""


@pytest.fixture(scope="session")
def block_stream(gpu: DeviceInfo) -> Callable[[Any, float], None]:
    """Call it with a stream of CuPy and seconds: everything that is enqueued after it waits so long."""
    import cupy

    spin = cupy.RawKernel(_SPIN, "spin")

    def block(stream: Any, seconds: float) -> None:
        with stream:
            spin((1,), (1,), (cupy.int64(seconds * 1e9),))

    block(cupy.cuda.Stream.null, 0.0)
    cupy.cuda.Stream.null.synchronize()
    return block
