"""Host side of `decode/sm90_small.cu`."""

from __future__ import annotations

from functools import partial

from mla_cupy.dtypes import HALF
from mla_cupy.kernels.attention.kernel import SINK, AttentionKernel, narrowest
from mla_cupy.kernels.decode import sm90
from mla_cupy.kernels.decode.heuristics import MAX_SHARED_TILES, MOST_SHARED_TILES
from mla_cupy.kernels.decode.problem import DecodeProblem
from mla_cupy.kernels.params import DecodeParams
from mla_cupy.kernels.spec import HOPPER, Reason, Variant, variants
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.shapes import D_QK, D_V, TILE_TOKENS

BLOCK_ROWS = (8, 16, 24, 32)
NARROW_BLOCK_ROWS = (16, 32)
"""Rows of the builds for narrower keys, and of others that are seldom asked for: each takes seconds to compile."""


def unsupported(problem: DecodeProblem, device: DeviceInfo) -> Reason | None:
    """Reason that the kernel cannot take the problem; None if it can."""
    if problem.tree_mask and problem.d_qk != D_QK:
        return Reason(f"takes a tree_mask with keys of {D_QK} only")
    return sm90.unsupported(problem, device)


def preferred(problem: DecodeProblem, device: DeviceInfo) -> bool:
    """Prefer it for the rows of one block, and for more rows in small batches.

    Several blocks then work at each tile, which takes longer than in one block of the seesaw; but their first tile
    comes earlier, and with half as many splits there is half as much to merge.
    """
    if problem.rows <= BLOCK_ROWS[-1]:
        return True
    if problem.batch is None:
        return False
    blocks = -(-problem.rows // BLOCK_ROWS[-1])
    most = MAX_SHARED_TILES.get(blocks, MOST_SHARED_TILES)
    return problem.batch.tiles * blocks <= most * device.sm_count


def variant(problem: DecodeProblem, device: DeviceInfo) -> Variant:
    """The narrowest build that holds the rows; more rows than the widest has are divided among blocks."""
    wide = problem.d_qk == D_QK
    builds = BLOCK_ROWS if wide and not problem.tree_mask else NARROW_BLOCK_ROWS
    rows = narrowest(builds, problem.rows)
    if problem.tree_mask:
        return Variant(dtype=problem.dtype, block_rows=rows, tree_mask=1)
    if wide:
        return Variant(dtype=problem.dtype, block_rows=rows)
    return Variant(dtype=problem.dtype, block_rows=rows, head_dim_qk=problem.d_qk)


KERNEL: AttentionKernel[DecodeProblem] = AttentionKernel(
    "decode_sm90_small",
    "dense decode with WGMMA and TMA for up to 32 query rows, or small batches, with swapped operands",
    "decode/sm90_small.cu",
    DecodeParams,
    HOPPER,
    (
        *variants(dtype=HALF, block_rows=BLOCK_ROWS),
        *variants(dtype=HALF, block_rows=NARROW_BLOCK_ROWS, head_dim_qk=(D_V,)),
        *variants(dtype=HALF, block_rows=NARROW_BLOCK_ROWS, tree_mask=(1,)),
    ),
    core=variants(dtype=HALF, block_rows=(16,)),
    facts={"tile_tokens": TILE_TOKENS},
    unsupported=unsupported,
    preferred=preferred,
    variant=variant,
    block_rows=BLOCK_ROWS[-1],
    kv_maps=partial(sm90.kv_maps, l2="none"),
    counts_partials=True,
    forms=SINK,
)
