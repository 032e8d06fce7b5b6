"""The GPUs that JAX uses: calls made ready on them, and where the buffers are that XLA hands to a callback."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import jax

from mla_cupy.ops.bind import Launcher, Signature

_NAME = b"dltensor_versioned"
_VERSION = (1, 1)
#: Offsets in a DLManagedTensorVersioned.
_DATA, _ORDINAL, _OFFSET = 32, 44, 72

_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = (ctypes.py_object, ctypes.c_char_p)


def gpu_ordinals() -> tuple[int, ...]:
    """The CUDA ordinals of this process's GPUs as JAX sees them."""
    try:
        return tuple(device.local_hardware_id for device in jax.local_devices(backend="cuda"))
    except RuntimeError:
        return ()


@functools.lru_cache(maxsize=1024)
def launcher(signature: Signature, ordinals: tuple[int, ...]) -> Launcher:
    """A call, ready on these GPUs; not while a stream is being captured, unless it is in the cache."""
    return Launcher(signature, ordinals)


def locate(buffers: Sequence[Any]) -> tuple[int, list[int]]:
    """The ordinal of the device that buffers are on, and their addresses; at least one buffer.

    Uses DLPack, since `__cuda_array_interface__` has no bfloat16. The capsule is only read, and releases its memory
    itself.
    """
    addresses = []
    ordinal = 0
    for buffer in buffers:
        capsule = buffer.__dlpack__(max_version=_VERSION)
        base = _pointer_of(capsule, _NAME)
        data = ctypes.c_uint64.from_address(base + _DATA).value
        addresses.append(data + ctypes.c_uint64.from_address(base + _OFFSET).value)
        ordinal = ctypes.c_int32.from_address(base + _ORDINAL).value
    return ordinal, addresses
