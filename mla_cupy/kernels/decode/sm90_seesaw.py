"""Host side of `decode/sm90_seesaw.cu`."""

from __future__ import annotations

from mla_cupy.kernels.attention.kernel import KEY_VARIANTS, TREE_VARIANTS, AttentionKernel
from mla_cupy.kernels.decode.problem import DecodeProblem, tree_variant
from mla_cupy.kernels.decode.sm90 import BLOCK_M, kv_map, unsupported
from mla_cupy.kernels.params import DecodeParams
from mla_cupy.kernels.spec import DTYPE_VARIANTS, HOPPER
from mla_cupy.shapes import TILE_TOKENS

KERNEL: AttentionKernel[DecodeProblem] = AttentionKernel(
    "decode_sm90_seesaw",
    "dense decode with WGMMA and TMA: two warpgroups that take turns on the tensor cores",
    "decode/sm90_seesaw.cu",
    DecodeParams,
    HOPPER,
    (*KEY_VARIANTS, *TREE_VARIANTS),
    core=DTYPE_VARIANTS,
    facts={"block_m": BLOCK_M, "tile_tokens": TILE_TOKENS},
    unsupported=unsupported,
    variant=tree_variant,
    block_rows=BLOCK_M,
    kv_map=kv_map,
    counts_partials=True,
)
