"""Launcher of `sm100/sparse_backward.cu`, with tiles of 64 keys."""

from __future__ import annotations

from mla_cupy.launchers.sparse_backward_sm100 import (
    DKV_ORDER,
    HEADS_PER_ADDITION,
    SPEC,
    TiledVariant,
    geometry,
    tensor_maps,
    tiled_variant,
    unsupported,
)
from mla_cupy.launchers.sparse_problem import SparseBackwardProblem

__all__ = ["DKV_ORDER", "HEADS_PER_ADDITION", "ON_REQUEST", "SPEC", "geometry", "tensor_maps", "unsupported", "variant"]

TILE_KEYS = 64
ON_REQUEST = True
"""To be compared with tiles of 32 keys; see the kernel's page."""


def variant(problem: SparseBackwardProblem) -> TiledVariant:
    """The build that it takes."""
    return tiled_variant(problem, TILE_KEYS)
