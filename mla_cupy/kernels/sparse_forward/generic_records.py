"""Host side of `sparse_forward/generic_records.cu`."""

from __future__ import annotations

from mla_cupy.dtypes import HALF
from mla_cupy.kernels.attention.generic import BLOCK_M, unsupported_records
from mla_cupy.kernels.attention.kernel import AttentionKernel
from mla_cupy.kernels.attention.records import SPARSE_RECORDS, record_variant
from mla_cupy.kernels.params import DecodeParams
from mla_cupy.kernels.sparse_forward.problem import SparseForwardProblem
from mla_cupy.kernels.spec import variants
from mla_cupy.shapes import TILE_TOKENS

KERNEL: AttentionKernel[SparseForwardProblem] = AttentionKernel(
    "sparse_forward_generic_records",
    "sparse forward from FP8 records on CUDA cores, for any GPU from sm_75 on",
    "sparse_forward/generic_records.cu",
    DecodeParams,
    variants=variants(dtype=HALF, record=SPARSE_RECORDS),
    facts={"block_m": BLOCK_M, "tile_tokens": TILE_TOKENS},
    unsupported=unsupported_records,
    variant=record_variant,
    block_rows=BLOCK_M,
    blocks_per_sm=2,
    fallback=True,
)
