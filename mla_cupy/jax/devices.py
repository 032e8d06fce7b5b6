"""The GPUs that JAX uses, and calls made ready on them."""

from __future__ import annotations

import functools

import jax

from mla_cupy.ops.bind import Launcher, Signature


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
