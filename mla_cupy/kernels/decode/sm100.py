"""Host side of dense decode on Blackwell: `decode/sm100.cu`, and `decode/sm100_joint.cu` for pairs of SMs."""

from __future__ import annotations

from mla_cupy.dtypes import HALF
from mla_cupy.kernels.attention.kernel import (
    KEY_VARIANTS,
    NO_TREE,
    READS_ROWS,
    SINK,
    AttentionKernel,
    key_variant,
    narrowest,
)
from mla_cupy.kernels.decode.problem import DecodeProblem
from mla_cupy.kernels.decode.sm90 import kv_maps
from mla_cupy.kernels.params import DecodeParams
from mla_cupy.kernels.spec import BLACKWELL, Reason, Variant, needs_alignment, needs_cc, variants
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.shapes import D_QK, D_V, TILE_TOKENS

BLOCK_ROWS = (16, 32, 48, 64)
NARROW_BLOCK_ROWS = (32, 64)
"""Rows of the builds for narrower keys; each takes seconds to compile. With a tree_mask there are 64."""


def unsupported(problem: DecodeProblem, device: DeviceInfo) -> Reason | None:
    """Reason why the kernel does not support the problem; None if it does."""
    if device.arch not in BLACKWELL:
        return needs_cc(device, "10.0", "10.3")
    if problem.record:
        return READS_ROWS
    return None if problem.aligned else needs_alignment("q and kv_cache")


def variant(problem: DecodeProblem, device: DeviceInfo) -> Variant:
    """The narrowest build that holds the rows; more rows than 64 are divided evenly among as few blocks as possible."""
    blocks = -(-problem.rows // BLOCK_ROWS[-1])
    rows = -(-problem.rows // blocks)
    if problem.tree_mask:
        return Variant(dtype=problem.dtype, block_rows=BLOCK_ROWS[-1], head_dim_qk=problem.d_qk, tree_mask=1)
    if problem.d_qk == D_QK:
        return Variant(dtype=problem.dtype, block_rows=narrowest(BLOCK_ROWS, rows))
    return Variant(dtype=problem.dtype, block_rows=narrowest(NARROW_BLOCK_ROWS, rows), head_dim_qk=problem.d_qk)


KERNEL: AttentionKernel[DecodeProblem] = AttentionKernel(
    "decode_sm100",
    "dense decode with tcgen05 and TMA, both sums in tensor memory; simulated, not yet run on hardware",
    "decode/sm100.cu",
    DecodeParams,
    BLACKWELL,
    (
        *variants(dtype=HALF, block_rows=BLOCK_ROWS),
        *variants(dtype=HALF, block_rows=NARROW_BLOCK_ROWS, head_dim_qk=(D_V,)),
        *variants(dtype=HALF, block_rows=BLOCK_ROWS[-1:], head_dim_qk=(D_QK, D_V), tree_mask=(1,)),
    ),
    facts={"tile_tokens": TILE_TOKENS},
    unsupported=unsupported,
    unproven=True,
    variant=variant,
    block_rows=BLOCK_ROWS[-1],
    kv_maps=kv_maps,
    forms=SINK,
)


PAIR_BLOCKS = 2
JOINT_ROWS = BLOCK_ROWS[-1]
"""Query rows of each block of a pair."""


def _not_by_a_pair(problem: DecodeProblem, device: DeviceInfo) -> Reason | None:
    """Reason why a pair does not support the problem; None if it does."""
    if reason := unsupported(problem, device):
        return reason
    if problem.tree_mask:
        return NO_TREE
    if -(-problem.rows // JOINT_ROWS) % PAIR_BLOCKS != 0:
        return Reason(f"takes an even number of blocks of {JOINT_ROWS} rows of a KV head, such as 65 to 128 rows")
    return None


JOINT: AttentionKernel[DecodeProblem] = AttentionKernel(
    "decode_sm100_joint",
    "dense decode with tcgen05 for 65 to 128 rows: two SMs multiply together; simulated, not yet run on hardware",
    "decode/sm100_joint.cu",
    DecodeParams,
    BLACKWELL,
    KEY_VARIANTS,
    facts={"tile_tokens": TILE_TOKENS, "block_rows": JOINT_ROWS, "cluster": PAIR_BLOCKS},
    unsupported=_not_by_a_pair,
    unproven=True,
    variant=key_variant,
    block_rows=JOINT_ROWS,
    kv_maps=kv_maps,
    forms=SINK,
)

KERNELS = (JOINT, KERNEL)
