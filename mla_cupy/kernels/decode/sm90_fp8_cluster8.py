"""Host side of `decode/sm90_fp8_cluster8.cu`: small batches in FP8, in one launch."""

from __future__ import annotations

from mla_cupy.kernels.attention.kernel import NO_TREE
from mla_cupy.kernels.decode import sm90_fp8
from mla_cupy.kernels.decode.clusters import ClusterKernel
from mla_cupy.kernels.decode.heuristics import MAX_CLUSTERS, MIN_TILES_PER_BLOCK
from mla_cupy.kernels.decode.problem import DecodeProblem
from mla_cupy.kernels.spec import Reason, variants
from mla_cupy.runtime.device import DeviceInfo

BLOCKS = 8
"""Thread blocks per cluster."""


def unsupported(problem: DecodeProblem, device: DeviceInfo) -> Reason | None:
    """Reason that the kernel cannot take the problem; None if it can."""
    return NO_TREE if problem.tree_mask else sm90_fp8.unsupported(problem, device)


KERNEL = ClusterKernel(
    "decode_sm90_fp8_cluster8",
    f"dense decode in FP8 of small batches in one launch: clusters of {BLOCKS} blocks share a request and merge",
    "decode/sm90_fp8_cluster8.cu",
    sm90_fp8.KERNEL.params,
    sm90_fp8.KERNEL.archs,
    variants(dtype=sm90_fp8.QUERIES, block_rows=sm90_fp8.BLOCK_ROWS),
    facts={
        **sm90_fp8.KERNEL.facts,
        "cluster": BLOCKS,
        "max_clusters": MAX_CLUSTERS,
        "min_tiles_per_block": MIN_TILES_PER_BLOCK,
    },
    facts_of=sm90_fp8.KERNEL.facts_of,
    unsupported=unsupported,
    preferred=lambda problem, device: False,
    variant=sm90_fp8.variant,
    block_rows=sm90_fp8.BLOCK_ROWS[-1],
    kv_maps=sm90_fp8.kv_maps,
    cluster_blocks=BLOCKS,
    math="fp8",
)
