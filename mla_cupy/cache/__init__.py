"""The paged cache as an object: the owners of pages, on the host, and the arrays for calls."""

from mla_cupy.cache.paged import PagedKVCache
from mla_cupy.cache.reports import CacheStats, CacheStep

__all__ = ["CacheStats", "CacheStep", "PagedKVCache"]


def __dir__() -> list[str]:
    return __all__
