"""The kernels as the host sees them: one folder per family of operations, one file per kernel.

What several families share is in `attention`, which sees sparse attention as decode over pages of one token, and in
`exact_sums`.
"""

from typing import Any

from mla_cupy.kernels import (
    attention,
    cache,
    decode,
    exact_sums,
    indexer,
    merge,
    sparse_backward,
    sparse_decode,
    sparse_forward,
)
from mla_cupy.kernels.spec import KernelSpec

#: Every kernel of the package, by name.
KERNELS: dict[str, KernelSpec[Any]] = {
    kernel.name: kernel
    for family in (
        attention,
        decode,
        sparse_forward,
        sparse_decode,
        exact_sums,
        sparse_backward,
        merge,
        indexer,
        cache,
    )
    for kernel in family.KERNELS
}
