"""Launcher of `sm90/dense_decode_seesaw.cu`."""

from __future__ import annotations

from mla_cupy.launchers import decode_problem
from mla_cupy.launchers.decode_block_sm90 import geometry, kv_map, unsupported
from mla_cupy.launchers.spec import DTYPE_VARIANTS, KernelSpec, only_sm90a

__all__ = ["SPEC", "geometry", "kv_map", "unsupported"]

SPEC = KernelSpec(
    "dense_decode_sm90_seesaw",
    "sm90/dense_decode_seesaw.cu",
    variants=DTYPE_VARIANTS,
    core=DTYPE_VARIANTS,
    supports_arch=only_sm90a,
    params=decode_problem.PARAMS,
)
