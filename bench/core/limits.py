"""The machine's limits, measured in the same run as the kernels: copy bandwidth and GEMM rate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from .device import CudaDevice
from .recorders import Eager, Recorder
from .timer import sample, summarise

COPY_BYTES = 2 << 30
GEMM_SIZE = 8192
REPLAYS = 20


@dataclass(frozen=True)
class Limits:
    """Measured limits; None if one could not be measured. The notes say how, or why not."""

    copy_tbps: float | None
    gemm_tflops: float | None
    copy_note: str
    gemm_note: str

    def record(self) -> dict[str, Any]:
        """Plain data for a row."""
        return asdict(self)


NOT_MEASURED = Limits(None, None, "not measured", "not measured")


def measure(device: CudaDevice) -> Limits:
    """Both limits of the device."""
    copy_tbps, copy_note = _copy(device)
    gemm_tflops, gemm_note = _gemm(device)
    device.release()
    return Limits(copy_tbps, gemm_tflops, copy_note, gemm_note)


def _median_us(device: CudaDevice, recorder: Recorder, calls: list[Callable[[], object]]) -> float:
    replay = recorder.record(calls)
    return summarise(sample(device.clock(), replay, len(calls), REPLAYS, warmup=3), len(calls)).us_median


def _copy(device: CudaDevice) -> tuple[float, str]:
    """Bytes read plus bytes written per second: the better of the driver's copy and a kernel of 16-byte elements."""
    import cupy

    source = device.normal((COPY_BYTES // 2,), "bfloat16", seed=1).view("complex128")
    target = cupy.empty_like(source)
    ways: dict[str, Callable[[], object]] = {
        "driver copy": lambda: target.data.copy_from_device_async(source.data, source.nbytes),
        "elementwise kernel": lambda: cupy.negative(source, out=target),
    }
    rates = {
        name: 2 * COPY_BYTES / _median_us(device, device.recorder(), [way] * 2) / 1e6 for name, way in ways.items()
    }
    best = max(rates, key=lambda name: rates[name])
    return rates[best], f"{best} of {COPY_BYTES >> 30} GiB, bytes read and written"


def _gemm(device: CudaDevice) -> tuple[float | None, str]:
    """The rate of a large square product of random matrices in bfloat16, or float16 where CuPy has no bfloat16."""
    import cupy

    failures = []
    for dtype in ("bfloat16", "float16"):
        try:
            left, right = (device.normal((GEMM_SIZE, GEMM_SIZE), dtype, seed=seed) for seed in (2, 3))
            product = cupy.empty_like(left)
            # CuPy refuses cuBLAS in a graph capture; a call of 1.6 ms hides the host time.
            us = _median_us(device, Eager(), [partial(cupy.matmul, left, right, out=product)] * 4)
            return 2 * GEMM_SIZE**3 / us / 1e6, f"cuBLAS {dtype} GEMM of {GEMM_SIZE}^3 through CuPy"
        except Exception as error:  # whatever CuPy or cuBLAS raises: the limit is then reported as unknown
            failures.append(f"{dtype}: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
    return None, "no GEMM: " + "; ".join(failures)
