"""Launcher of `sm100/sparse_backward_ws.cu`."""

from __future__ import annotations

from mla_cupy.launchers import sparse_problem
from mla_cupy.launchers.sparse_backward_sm100 import (
    HEADS_PER_ADDITION,
    TiledVariant,
    geometry,
    tensor_maps,
    tiled_variant,
    unsupported,
)
from mla_cupy.launchers.sparse_problem import SparseBackwardProblem
from mla_cupy.launchers.spec import KernelSpec, only_sm100a

__all__ = ["DKV_ORDER", "HEADS_PER_ADDITION", "ON_REQUEST", "SPEC", "geometry", "tensor_maps", "unsupported", "variant"]

TILE_KEYS = 32
ON_REQUEST = True
"""To be compared with ordinary products; see the kernel's page."""
DKV_ORDER = sparse_problem.DKV_ORDER_SM90
"""Rows of keys come out of tensor memory in Hopper's fragments."""

SPEC = KernelSpec(
    "sparse_backward_sm100_ws",
    "sm100/sparse_backward_ws.cu",
    variants=tuple(TiledVariant(v.dtype, v.head_dim_qk, v.deterministic, TILE_KEYS) for v in sparse_problem.VARIANTS),
    core=(),
    supports_arch=only_sm100a,
    params=sparse_problem.PARAMS,
)


def variant(problem: SparseBackwardProblem) -> TiledVariant:
    """The build that it takes."""
    return tiled_variant(problem, TILE_KEYS)
