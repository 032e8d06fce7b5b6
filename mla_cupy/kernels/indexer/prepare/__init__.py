"""Index queries and keys: RoPE, Hadamard transform, quantisation, and the cache of keys."""
# Written by `python -m tools.generate`, but for the line above.

from typing import Any

from mla_cupy.kernels.indexer.prepare import pipeline, quantize
from mla_cupy.kernels.indexer.prepare.pipeline import APPEND_KEYS, GATHER_KEYS, PREPARE_BOTH, PREPARE_K, PREPARE_Q
from mla_cupy.kernels.spec import KernelSpec

__all__ = [
    "APPEND_KEYS",
    "GATHER_KEYS",
    "KERNELS",
    "PREPARE_BOTH",
    "PREPARE_K",
    "PREPARE_Q",
]

KERNELS: tuple[KernelSpec[Any], ...] = (
    pipeline.KERNEL,
    quantize.KERNEL,
)
