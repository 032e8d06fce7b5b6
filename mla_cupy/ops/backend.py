"""Computation on arrays in the host's memory: on a GPU and back, or by the oracle. The one file that knows both."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from mla_cupy import arrays, dtypes, reference
from mla_cupy.errors import UnsupportedDeviceError, explain
from mla_cupy.runtime import device, env

logger = logging.getLogger("mla_cupy")

_seen_gpu = False


def use_gpu() -> bool:
    """True if NumPy arrays go to the GPU: by MLA_CUPY_BACKEND, or if there is one."""
    choice = env.get("BACKEND")
    if choice == "numpy":
        return False
    if _has_gpu():
        return True
    if choice == "cuda":
        remedy = "set MLA_CUPY_BACKEND=numpy or auto; `mla-cupy info` says what is missing"
        raise UnsupportedDeviceError(explain("MLA_CUPY_BACKEND", "cuda", "a GPU that CuPy can use", remedy))
    _say_no_gpu()
    return False


def _has_gpu() -> bool:
    """True if CUDA shows a GPU. Only True is remembered: otherwise the next call asks again."""
    global _seen_gpu
    _seen_gpu = _seen_gpu or device.gpu_count() > 0
    return _seen_gpu


@functools.cache
def _say_no_gpu() -> None:
    logger.info("no GPU is visible: NumPy arrays are computed by the NumPy backend, in float64")


def oracle(operation: str, options: Mapping[str, Any]) -> Callable[..., tuple[Any, ...]]:
    """The function of that name that computes in float64, with the options that it accepts.

    A single result becomes a tuple, too.
    """
    function: Callable[..., Any] = getattr(reference, operation)
    known = inspect.signature(function).parameters
    numbers = {name: value for name, value in options.items() if name in known}

    def answers(**inputs: Any) -> tuple[Any, ...]:
        results = function(**inputs, **numbers)
        return results if isinstance(results, tuple) else (results,)

    return answers


def rounded(results: Iterable[Any], names: Iterable[str]) -> list[Any]:
    """The oracle's results in the dtypes that a GPU would return; None stays None."""
    with np.errstate(over="ignore", invalid="ignore"):
        return [
            None if x is None else _rounded(x, dtypes.numpy_dtype(name), name)
            for x, name in zip(results, names, strict=True)
        ]


def _rounded(x: Any, dtype: np.dtype[Any], name: str) -> Any:
    if name == "uint8" and x.dtype.kind == "f":  # the bytes are e4m3 codes; a GPU writes a single NaN
        codes = dtypes.round_to(x, "float8_e4m3fn").astype(dtypes.numpy_dtype("float8_e4m3fn")).view(np.uint8)
        return np.where(np.isnan(x), np.uint8(0x7F), codes)
    return x.astype(dtype) if dtype.kind in "iu" else dtypes.round_to(x, name).astype(dtype)


def sent(inputs: Mapping[str, Any], device: int | None, stream: Any) -> dict[str, Any]:
    """NumPy arrays as CuPy arrays on a device (None: the current one), made on the stream that will read them.

    None stays None; 8-bit floats, which CuPy does not have, become bytes.
    """
    cupy = arrays.cupy_family()
    device = cupy.current_device() if device is None else device
    handle = _handle(device, stream)
    return {name: None if x is None else cupy.from_numpy(_known(x), device, handle) for name, x in inputs.items()}


def _known(x: Any) -> Any:
    return x.view(np.uint8) if dtypes.name_of(x.dtype).startswith("float8") else x


def fetched(results: Iterable[Any], stream: Any) -> list[Any]:
    """CuPy results as NumPy arrays, once `stream` has made them; None stays None."""
    return [None if x is None else arrays.cupy_family().to_numpy(x, _handle(x.device.id, stream)) for x in results]


def with_codes(results: Iterable[Any], names: Iterable[str]) -> list[Any]:
    """CuPy's bytes as the 8-bit floats that they are, by the dtypes of the results; None stays None."""
    return [
        x.view(dtypes.numpy_dtype(name)) if name.startswith("float8") else x
        for x, name in zip(results, names, strict=True)
    ]


def _handle(device: int, stream: Any) -> int:
    return arrays.cupy_family().current_stream(device) if stream is None else arrays.stream_handle(stream)


def deliver(results: Iterable[Any], given: Iterable[Any]) -> tuple[Any, ...]:
    """Write results to the caller's arrays, if any; returns the caller's results."""
    delivered = []
    for result, target in zip(results, given, strict=True):
        if target is not None:
            np.copyto(target, result)
        delivered.append(result if target is None else target)
    return tuple(delivered)
