"""The paged cache as an object: who has which page, on the host, and the arrays that the calls take."""

from mla_cupy.cache.paged import PagedKVCache
from mla_cupy.cache.reports import CacheStats, CacheStep

__all__ = ["CacheStats", "CacheStep", "PagedKVCache"]
