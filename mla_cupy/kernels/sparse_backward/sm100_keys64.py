"""Host side of `sparse_backward/sm100.cu` with tiles of 64 keys."""

from __future__ import annotations

from dataclasses import replace

from mla_cupy.kernels.sparse_backward import sm100
from mla_cupy.kernels.sparse_backward.problem import VARIANTS

TILE_KEYS = 64

KERNEL = replace(
    sm100.KERNEL,
    name="sparse_backward_sm100_keys64",
    about="the same with tiles of 64 keys, for comparison with those of 32",
    variants=sm100.tiled(VARIANTS, TILE_KEYS),
    core=(),
    on_request=True,
    variant=lambda problem: sm100.tiled_variant(problem, TILE_KEYS),
)
