"""Host side of `decode/sm90_small.cu` for values of 256 columns, for all numbers of rows."""

from __future__ import annotations

from mla_cupy.dtypes import HALF
from mla_cupy.kernels.attention.kernel import NARROW_VALUES, NARROW_WIDTHS, NO_TREE, SINK, AttentionKernel, narrowest
from mla_cupy.kernels.decode import sm90, sm90_small
from mla_cupy.kernels.decode.problem import DecodeProblem
from mla_cupy.kernels.params import DecodeParams
from mla_cupy.kernels.spec import HOPPER, Reason, Variant, variants
from mla_cupy.runtime.device import DeviceInfo

BLOCK_ROWS = (32, 64)
"""Rows of a block: accumulators of as many rows take half the registers of those of 512 columns."""
MINICPM3 = 288, 40
"""Keys and heads of MiniCPM3, which has blocks of its own."""


def unsupported(problem: DecodeProblem, device: DeviceInfo) -> Reason | None:
    """Reason that the kernel cannot take the problem; None if it can."""
    return NO_TREE if problem.tree_mask else sm90.unsupported(problem, device)


def _variant(problem: DecodeProblem, device: DeviceInfo) -> Variant:
    builds = (32, 40, 64) if problem.d_qk == MINICPM3[0] else BLOCK_ROWS
    return Variant(dtype=problem.dtype, block_rows=narrowest(builds, problem.rows), head_dim_qk=problem.d_qk)


KERNEL: AttentionKernel[DecodeProblem] = AttentionKernel(
    "decode_sm90_small_narrow",
    f"dense decode as decode_sm90_small, for values of 256 columns, in blocks of up to {BLOCK_ROWS[-1]} query rows",
    sm90_small.KERNEL.source,
    DecodeParams,
    HOPPER,
    (
        *variants(dtype=HALF, block_rows=BLOCK_ROWS, head_dim_qk=NARROW_WIDTHS),
        *variants(dtype=HALF, block_rows=(MINICPM3[1],), head_dim_qk=(MINICPM3[0],)),
    ),
    facts=sm90_small.KERNEL.facts,
    unsupported=unsupported,
    variant=_variant,
    block_rows=BLOCK_ROWS[-1],
    kv_maps=sm90_small.KERNEL.kv_maps,
    value_widths=NARROW_VALUES,
    forms=SINK,
    base=sm90_small.KERNEL.name,
)
