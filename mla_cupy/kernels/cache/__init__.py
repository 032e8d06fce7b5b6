"""The paged cache: append, gather, copies of pages, and the update of block tables."""
# Written by `python -m tools.generate`, but for the line above.

from typing import Any

from mla_cupy.kernels.cache import table
from mla_cupy.kernels.cache.pipeline import APPEND, COPY_PAGES, GATHER, SLOTS, UPDATE
from mla_cupy.kernels.cache.prepare import MLA_PREPARE
from mla_cupy.kernels.spec import KernelSpec

__all__ = [
    "APPEND",
    "COPY_PAGES",
    "GATHER",
    "KERNELS",
    "MLA_PREPARE",
    "SLOTS",
    "UPDATE",
]

KERNELS: tuple[KernelSpec[Any], ...] = (*table.KERNELS,)
