"""Host side of `decode/sm100.cu`."""

from __future__ import annotations

from mla_cupy.dtypes import HALF
from mla_cupy.kernels.attention.kernel import READS_ROWS, SINK, AttentionKernel, narrowest
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
    """Reason that the kernel cannot take the problem; None if it can."""
    if device.arch not in BLACKWELL:
        return needs_cc(device, "10.0", "10.3")
    if problem.record:
        return READS_ROWS
    return None if problem.aligned else needs_alignment("q and kv_cache")


def variant(problem: DecodeProblem) -> Variant:
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
