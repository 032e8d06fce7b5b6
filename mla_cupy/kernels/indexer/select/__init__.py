"""The selection of a few tokens' keys in one launch."""
# Written by `python -m tools.generate`, but for the line above.

from typing import Any

from mla_cupy.kernels.indexer.select import sm90_paged
from mla_cupy.kernels.indexer.select.pipeline import SELECT
from mla_cupy.kernels.spec import KernelSpec

__all__ = [
    "KERNELS",
    "SELECT",
]

KERNELS: tuple[KernelSpec[Any], ...] = (sm90_paged.KERNEL,)
