"""The kernels as the host sees them: one folder per family of operations, one file per kernel.

Code that several families share is in `attention`, which treats sparse attention as decode over pages of one token, and
in `exact_sums`.
"""

from typing import Any

# ---- Written by `python -m tools.generate`: families
from mla_cupy.kernels import (
    attention,
    cache,
    decode,
    dense,
    exact_sums,
    indexer,
    merge,
    projection,
    sparse_backward,
    sparse_decode,
    sparse_forward,
)
from mla_cupy.kernels.spec import KernelSpec

FAMILIES = (
    attention,
    cache,
    decode,
    dense,
    exact_sums,
    indexer,
    merge,
    projection,
    sparse_backward,
    sparse_decode,
    sparse_forward,
)
# ---- End of the generated part

#: Every kernel of the package, by name.
KERNELS: dict[str, KernelSpec[Any]] = {kernel.name: kernel for family in FAMILIES for kernel in family.KERNELS}
