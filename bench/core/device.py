"""The GPU as the benchmark sees it: arrays, random inputs, a clock. `Device` is what the tests replace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

from mla_cupy.runtime.device import describe, gpu_count

from .errors import BenchError
from .recorders import EVENTS, GRAPH, Call, CupyGraph, Eager, Recorder
from .timer import Clock, CudaClock

Array = npt.NDArray[Any]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = ("bfloat16", "float16")  # of the inputs

# One splitmix64 step per value and a Box-Muller normal from its two halves: no cuRAND, and any seed is reproducible.
_NORMAL = """
unsigned long long z = seed + (unsigned long long)(i + 1) * 0x9E3779B97F4A7C15ULL;
z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
z ^= z >> 31;
const float uniform = ((unsigned int)z + 1.0f) * 2.3283064e-10f;  // in (0, 1]
const float angle = (unsigned int)(z >> 32) * 4.6566129e-10f;     // in [0, 2), in units of pi
const float x = scale * sqrtf(-2.0f * logf(uniform)) * cospif(angle) + mean;
"""
# Round to nearest even by hand: CuPy's own bfloat16 arithmetic is experimental.
ROUND_TO_BFLOAT16 = "bits = (unsigned short)((__float_as_uint(x) + 0x7FFF + ((__float_as_uint(x) >> 16) & 1)) >> 16);"


class Device(Protocol):
    """Device as the benchmark needs it. Everything is queued on the device's one stream."""

    name: str
    arch: str
    l2_bytes: int
    stream: Any
    method: str  # how calls become replays: one of `recorders.METHODS`

    def current(self) -> AbstractContextManager[object]:
        """Makes the device's stream the current one of its array library."""

    def recorder(self) -> Recorder:
        """The way to record calls that take this device's arrays."""

    def clock(self) -> Clock: ...

    def synchronize(self) -> None: ...

    def normal(self, shape: Sequence[int], dtype: str, seed: int, scale: float = 1.0, mean: float = 0.0) -> Any:
        """Normal random values of this deviation and mean."""

    def upload(self, array: Array) -> Any: ...

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        """A poisoned array, so that a result that was never written cannot pass."""

    def poison(self, array: Any) -> None:
        """Sets every bit: NaN in floats and in bytes that are e4m3 codes, -1 in integers."""

    def to_host(self, array: Any) -> Array: ...

    def take(self, array: Any, rows: npt.NDArray[np.integer[Any]]) -> Array:
        """The selected rows (along the first axis), on the host."""

    def count_not_finite(self, array: Any) -> int:
        """Number of NaNs and infinities of a 16-bit or float32 array."""

    def allocated_by(self, call: Call) -> int:
        """Peak bytes that a call takes from the allocator, fragmentation included."""

    def launch_empty(self) -> None:
        """Launches a kernel without parameters or work: the yardstick of host times."""

    def release(self) -> None:
        """Returns unused memory to the system."""


def _bits(kind: np.dtype[Any]) -> np.dtype[Any]:
    """Unsigned integers of the same size: CuPy's arithmetic of bfloat16 is experimental."""
    return np.dtype(f"uint{8 * kind.itemsize}")


class CudaDevice:
    """The current CUDA device, through CuPy."""

    def __init__(self, method: str = GRAPH) -> None:
        self.method = method
        try:
            import cupy
        except ImportError as error:
            raise BenchError(
                f"the benchmark needs CuPy ({error}); in a checkout: pip install -e '.[cu12,bench]' or '.[cu13,bench]'"
            ) from error
        if gpu_count() == 0:
            raise BenchError("no CUDA GPU here; `list`, `compare`, `plot` and `model` need none")
        self._cupy: Any = cupy
        info = describe(cupy.cuda.Device().id)
        self.name, self.arch, self.l2_bytes = info.name, info.arch, info.l2_bytes
        self.stream: Any = cupy.cuda.Stream(non_blocking=True)
        self._empty: Any = cupy.RawKernel('extern "C" __global__ void bench_empty() {}', "bench_empty")
        self._clock: CudaClock | None = None
        self._normal: dict[str, Callable[..., Any]] = {
            "bfloat16": cupy.ElementwiseKernel(
                "uint64 seed, float32 scale, float32 mean",
                "uint16 bits",
                _NORMAL + ROUND_TO_BFLOAT16,
                "bench_normal_bfloat16",
            ),
            "float16": cupy.ElementwiseKernel(
                "uint64 seed, float32 scale, float32 mean",
                "float16 value",
                _NORMAL + "value = x;",
                "bench_normal_float16",
            ),
        }

    def current(self) -> AbstractContextManager[object]:
        stream: AbstractContextManager[object] = self.stream
        return stream

    def recorder(self) -> Recorder:
        return Eager(EVENTS) if self.method == EVENTS else CupyGraph(self.stream)

    def clock(self) -> Clock:
        if self._clock is None:
            self._clock = CudaClock(self.stream)
        return self._clock

    def synchronize(self) -> None:
        self._cupy.cuda.Device().synchronize()

    def normal(self, shape: Sequence[int], dtype: str, seed: int, scale: float = 1.0, mean: float = 0.0) -> Any:
        raw = self._cupy.empty(tuple(shape), dtype="uint16" if dtype == "bfloat16" else "float16")
        self._normal[dtype](np.uint64(seed * 0x5851F42D4C957F2D % 2**64), np.float32(scale), np.float32(mean), raw)
        return raw.view(np.dtype(dtype))

    def upload(self, array: Array) -> Any:
        return self._cupy.asarray(array)

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        kind = np.dtype(dtype)
        array = self._cupy.empty(tuple(shape), dtype=_bits(kind)).view(kind)
        self.poison(array)
        return array

    def poison(self, array: Any) -> None:
        bits = _bits(array.dtype)
        array.view(bits).fill(np.iinfo(bits).max)

    def to_host(self, array: Any) -> Array:
        if array.dtype == BFLOAT16:
            host: Array = self._cupy.asnumpy(array.view("uint16")).view(BFLOAT16)
        else:
            host = self._cupy.asnumpy(array)
        return host

    def take(self, array: Any, rows: npt.NDArray[np.integer[Any]]) -> Array:
        return self.to_host(array.view(_bits(array.dtype))[self.upload(rows)]).view(array.dtype)

    def count_not_finite(self, array: Any) -> int:
        if array.dtype == np.float32:
            return int((~self._cupy.isfinite(array)).sum())
        exponent = 0x7F80 if array.dtype == BFLOAT16 else 0x7C00
        return int(((array.view("uint16") & exponent) == exponent).sum())

    def allocated_by(self, call: Call) -> int:
        pool = self._cupy.cuda.MemoryPool()
        with self._cupy.cuda.using_allocator(pool.malloc):
            call()
        self.synchronize()
        return int(pool.total_bytes())

    def launch_empty(self) -> None:
        self._empty((1,), (32,), ())

    def release(self) -> None:
        self.synchronize()
        self._cupy.get_default_memory_pool().free_all_blocks()
