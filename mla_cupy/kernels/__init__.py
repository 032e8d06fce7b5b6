"""The kernels as the host sees them: one folder per family of operations, one file per kernel.

A family knows those before it: sparse attention is decode over pages of one token, its backward takes its lists.
"""

from typing import Any

from mla_cupy.kernels import cache, decode, indexer, merge, sparse, sparse_backward, sparse_decode
from mla_cupy.kernels.spec import Kernel

#: Every kernel of the package, by name.
KERNELS: dict[str, Kernel[Any]] = {
    kernel.name: kernel
    for family in (decode, merge, sparse, sparse_backward, indexer, cache, sparse_decode)
    for kernel in family.KERNELS
}
