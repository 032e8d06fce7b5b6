"""What the kernels of `decode/sm90_small_cluster.cuh` share on the host: one launch for small batches."""

from __future__ import annotations

from mla_cupy.dtypes import HALF
from mla_cupy.kernels.decode import sm90, sm90_small
from mla_cupy.kernels.decode.clusters import MAX_CLUSTERS, MIN_TILES_PER_BLOCK, ClusterKernel
from mla_cupy.kernels.decode.problem import DecodeProblem
from mla_cupy.kernels.decode.sm90_small import NarrowVariant
from mla_cupy.shapes import D_QK, D_V

BLOCK_ROWS = 32
_BUILDS = ((D_QK, 16), (D_QK, 32), (D_V, 32))


def variant(problem: DecodeProblem) -> NarrowVariant:
    """The build that it takes, the narrowest; more rows than it has are divided among blocks."""
    fitting = [rows for d_qk, rows in _BUILDS if d_qk == problem.d_qk and problem.rows <= rows]
    return NarrowVariant(problem.dtype, min(fitting, default=BLOCK_ROWS), problem.d_qk)


def kernel(blocks: int) -> ClusterKernel:
    """The kernel with clusters of that many blocks."""
    name = f"decode_sm90_small_cluster{blocks}"
    return ClusterKernel(
        name,
        f"dense decode of small batches in one launch: clusters of {blocks} blocks share a request and merge",
        f"decode/sm90_small_cluster{blocks}.cu",
        sm90_small.KERNEL.params,
        sm90_small.KERNEL.archs,
        tuple(NarrowVariant(dtype, rows, d_qk) for dtype in HALF for d_qk, rows in _BUILDS),
        facts={
            **sm90_small.KERNEL.facts,
            "cluster": blocks,
            "max_clusters": MAX_CLUSTERS,
            "min_tiles_per_block": MIN_TILES_PER_BLOCK,
        },
        unsupported=sm90.unsupported,
        on_request=True,
        variant=variant,
        block_rows=BLOCK_ROWS,
        kv_map=sm90_small.KERNEL.kv_map,
        cluster_blocks=blocks,
    )
