"""Where NumPy arrays are computed: the one place that knows both the GPU and the oracle."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from mla_cupy import arrays, formats, reference
from mla_cupy.errors import ArgumentError, UnsupportedDeviceError, explain
from mla_cupy.runtime import device, env

logger = logging.getLogger("mla_cupy")


def use_gpu() -> bool:
    """Whether NumPy arrays go to the GPU: MLA_CUPY_BACKEND, or whether there is one."""
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


@functools.cache
def _has_gpu() -> bool:
    return device.gpu_count() > 0


@functools.cache
def _say_no_gpu() -> None:
    logger.info("no GPU is visible: NumPy arrays are computed by the NumPy backend, in float64")


def reference_decode(*inputs: Any, **options: Any) -> tuple[Any, Any]:
    """The oracle's answer, in float64."""
    return reference.mla_decode(*inputs, **options)


def reference_merge(*inputs: Any, **options: Any) -> tuple[Any, Any]:
    """The oracle's answer, in float64."""
    return reference.merge_states(*inputs, **options)


def reference_sparse_forward(*inputs: Any, **options: Any) -> tuple[Any, Any, Any]:
    """The oracle's answer, in float64."""
    return reference.sparse_mla_forward(*inputs, **options)


def reference_sparse_backward(*inputs: Any, **options: Any) -> tuple[Any, Any, Any]:
    """The oracle's answer, in float64."""
    return reference.sparse_mla_backward(*inputs, **options)


def rounded(results: Iterable[Any], dtypes: Iterable[str]) -> list[Any]:
    """The oracle's results in the dtypes that a GPU would return; None stays None."""
    with np.errstate(over="ignore", invalid="ignore"):
        return [
            None if x is None else formats.round_to(x, name).astype(formats.numpy_dtype(name))
            for x, name in zip(results, dtypes, strict=True)
        ]


def sent(inputs: Iterable[Any], device: int | None, stream: Any) -> list[Any]:
    """NumPy arrays as CuPy arrays on a device (None: the current one), made on the stream that will read them.

    None stays None.
    """
    cupy = arrays.cupy_family()
    device = cupy.current_device() if device is None else device
    handle = _handle(device, stream)
    return [None if x is None else cupy.from_numpy(x, device, handle) for x in inputs]


def fetched(results: Iterable[Any], stream: Any) -> list[Any]:
    """CuPy results as NumPy arrays, once `stream` has made them; None stays None."""
    return [None if x is None else arrays.cupy_family().to_numpy(x, _handle(x.device.id, stream)) for x in results]


def _handle(device: int, stream: Any) -> int:
    return arrays.cupy_family().current_stream(device) if stream is None else arrays.stream_handle(stream)


def deliver(
    results: Sequence[np.ndarray[Any, Any]], given: Sequence[Any], names: Sequence[str] = ("out", "lse")
) -> tuple[Any, ...]:
    """Write results to the caller's arrays where there are any; returns what the caller gets."""
    for argument, target in zip(names, given, strict=True):
        if target is not None and not target.flags.writeable:
            raise ArgumentError(explain(argument, "a read-only array", "a writable one"))
    for result, target in zip(results, given, strict=True):
        if target is not None:
            np.copyto(target, result)
    return tuple(result if target is None else target for result, target in zip(results, given, strict=True))
