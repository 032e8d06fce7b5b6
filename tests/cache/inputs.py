"""Caches and tokens for the tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mla_cupy.cache_formats import LATENT_FORMATS, CacheFormat
from mla_cupy.dtypes import numpy_dtype

Array = npt.NDArray[Any]

POISON = 0xA5


def records_with(scales: str) -> list[CacheFormat]:
    """The latent records whose scales follow a rule."""
    return [record for record in LATENT_FORMATS if scales in record.scales]


def empty_cache(record: CacheFormat, num_pages: int, page_size: int, gap: int = 0) -> Array:
    """A cache of poison, pages the record's stride and `gap` times 16 bytes apart."""
    stride = -(-record.page_bytes(page_size) // 16) * 16 + 16 * gap
    memory = np.full(num_pages * stride + 64, POISON, np.uint8)
    begin = -memory.ctypes.data % 64
    dtype = numpy_dtype(record.dtype)
    token = record.token_bytes
    return np.ndarray((num_pages, page_size, record.width), dtype, memory, begin, (stride, token, dtype.itemsize))


def tokens(record: CacheFormat, n: int, dtype: str = "bfloat16", seed: int = 0) -> tuple[Array, Array | None]:
    """Latent and RoPE parts of n tokens, every 64 elements of another size."""
    rng = np.random.default_rng(seed)
    size = np.repeat(10.0 ** rng.integers(-3, 3, (n, record.d_latent // 64)), 64, axis=1)
    latent = (rng.standard_normal((n, record.d_latent)) * size).astype(numpy_dtype(dtype))
    rope = rng.standard_normal((n, record.d_rope)).astype(numpy_dtype(dtype)) if record.d_rope else None
    return latent, rope
