"""Host side of `decode/sm90_small_cluster8.cu`: small batches of short sequences, in one launch."""

from __future__ import annotations

from mla_cupy.dtypes import HALF
from mla_cupy.kernels.attention.kernel import NO_TREE
from mla_cupy.kernels.decode import sm90, sm90_small
from mla_cupy.kernels.decode.clusters import ClusterKernel
from mla_cupy.kernels.decode.heuristics import MAX_CLUSTERS, MIN_TILES_PER_BLOCK
from mla_cupy.kernels.decode.problem import DecodeProblem
from mla_cupy.kernels.params import DecodeParams
from mla_cupy.kernels.spec import Reason, Variant, variants
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.shapes import D_QK, D_V, TILE_TOKENS

BLOCKS = 8
"""Thread blocks per cluster."""
BLOCK_ROWS = 16
MAX_TOKENS = BLOCKS * MIN_TILES_PER_BLOCK * TILE_TOKENS
"""Largest sequence length for which it is preferred."""


def unsupported(problem: DecodeProblem, device: DeviceInfo) -> Reason | None:
    """Reason why the kernel does not support the problem; None if it does."""
    return NO_TREE if problem.tree_mask else sm90.unsupported(problem, device)


def preferred(problem: DecodeProblem, device: DeviceInfo) -> bool:
    """Prefer it for short sequences, where every cluster is resident at once."""
    batch = problem.batch
    if batch is None or batch.tokens > MAX_TOKENS:
        return False
    row_blocks = -(-problem.rows // BLOCK_ROWS)
    return batch.b * row_blocks <= KERNEL.resident(device)


def variant(problem: DecodeProblem, device: DeviceInfo) -> Variant:
    """The build of a problem; more rows than it has are divided among blocks."""
    return Variant(dtype=problem.dtype, block_rows=BLOCK_ROWS, head_dim_qk=problem.d_qk)


_BUILDS = {d_qk: variants(dtype=HALF, block_rows=(BLOCK_ROWS,), head_dim_qk=(d_qk,)) for d_qk in (D_QK, D_V)}

KERNEL = ClusterKernel(
    "decode_sm90_small_cluster8",
    f"dense decode of small batches in one launch: clusters of {BLOCKS} blocks share a request and merge",
    "decode/sm90_small_cluster8.cu",
    DecodeParams,
    sm90_small.KERNEL.archs,
    (*_BUILDS[D_QK], *_BUILDS[D_V]),
    core=_BUILDS[D_QK],
    facts={
        **sm90_small.KERNEL.facts,
        "cluster": BLOCKS,
        "max_clusters": MAX_CLUSTERS,
        "min_tiles_per_block": MIN_TILES_PER_BLOCK,
    },
    unsupported=unsupported,
    preferred=preferred,
    variant=variant,
    block_rows=BLOCK_ROWS,
    kv_maps=sm90_small.KERNEL.kv_maps,
    cluster_blocks=BLOCKS,
)
