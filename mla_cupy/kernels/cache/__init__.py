"""The paged cache: append, gather, copies of pages, and the update of block tables."""

from mla_cupy.kernels.cache.pipeline import APPEND, COPY_PAGES, GATHER, UPDATE

__all__ = ["APPEND", "COPY_PAGES", "GATHER", "KERNELS", "UPDATE"]

KERNELS = (*APPEND.kernels, *GATHER.kernels, *COPY_PAGES.kernels, *UPDATE.kernels)
