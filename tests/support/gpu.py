"""Host inputs on the GPU, gaps and strides included."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support.cases import DecodeCase, DecodeInputs, make
from tests.support.flat import mla_decode
from tests.support.tolerance import check

Array = npt.NDArray[Any]


def upload(x: Array) -> Any:
    """A CuPy array with the same strides, and the same poison between its rows."""
    import cupy

    if x.dtype.name.startswith("float8"):  # which CuPy does not have
        x = x.view(np.uint8)
    root = x
    while isinstance(root.base, np.ndarray):
        root = root.base
    if not root.flags.c_contiguous or root.itemsize != x.itemsize:
        root = x = np.ascontiguousarray(x)
    root = root.view(x.dtype)
    memory = cupy.asarray(root)
    offset = x.__array_interface__["data"][0] - root.__array_interface__["data"][0]
    return cupy.ndarray(x.shape, x.dtype, memory.data + offset, strides=x.strides)


def fetch(x: Any) -> Array:
    """A CuPy array on the host, with the same strides and whatever lies between its rows."""
    import cupy

    if x.flags.c_contiguous or x.size == 0:
        return np.asarray(cupy.asnumpy(x))
    reach = sum(step * (size - 1) for step, size in zip(x.strides, x.shape, strict=True)) + x.itemsize
    raw = cupy.ndarray((reach,), cupy.uint8, x.data)
    view: Array = np.ndarray(x.shape, x.dtype, cupy.asnumpy(raw), 0, x.strides)
    return view


def uploaded(inputs: DecodeInputs) -> tuple[Any, ...]:
    """The positional arguments of `mla_decode` on the GPU."""
    return tuple(upload(x) for x in inputs.arguments)


def run_and_check(case: DecodeCase, **options: Any) -> None:
    """The public call on the GPU against the oracle."""
    import cupy

    inputs = make(case)
    q, kv_cache, block_table, seqlens = uploaded(inputs)
    out, lse = mla_decode(q, kv_cache, block_table, seqlens, **case.options, **options)
    check((cupy.asnumpy(out), cupy.asnumpy(lse)), inputs.exact, inputs.rounded, case.dtype)


EMPTY_LAUNCH = 4.0
"""Microseconds of CuPy's launch of an empty kernel on the host that limits of host time are for."""


def empty_launch() -> Any:
    """A call that launches an empty kernel with CuPy."""
    import cupy

    kernel = cupy.RawKernel('extern "C" __global__ void empty() {}', "empty")
    return lambda: kernel((1,), (32,), ())


def slowness_of_host(launch: float | None = None) -> float:
    """Slowness of this host relative to the host of `EMPTY_LAUNCH`, by its median launch; at least 1."""
    if launch is None:
        launch = float(np.median(microseconds_of(empty_launch(), 400)[200:]))
    return max(1.0, launch / EMPTY_LAUNCH)


def microseconds_of(call: Any, repeats: int) -> list[float]:
    """Host time of each call, with an idle queue."""
    import cupy

    times = []
    for _ in range(repeats):
        cupy.cuda.runtime.deviceSynchronize()
        begin = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - begin) / 1e3)
    return times
