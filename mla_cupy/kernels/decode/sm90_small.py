"""Host side of `decode/sm90_small.cu`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from mla_cupy.dtypes import HALF
from mla_cupy.kernels.decode import sm90
from mla_cupy.kernels.decode.problem import PARAMS, AttentionKernel, DecodeProblem
from mla_cupy.kernels.spec import HOPPER, Reason, Variant
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.shapes import D_QK, D_V, TILE_TOKENS

BLOCK_ROWS = (8, 16, 24, 32)
NARROW_BLOCK_ROWS = (16, 32)
"""Of builds for narrower keys, and of others that are seldom asked for: each build takes seconds to compile."""


@dataclass(frozen=True)
class SmallVariant(Variant):
    """`block_rows` is how many query rows a block computes, whether they are there or not."""

    dtype: str
    block_rows: int


@dataclass(frozen=True)
class NarrowVariant(SmallVariant):
    """The same for keys of another width than 576."""

    head_dim_qk: int


def unsupported(problem: DecodeProblem, device: DeviceInfo) -> Reason | None:
    """Why the kernel cannot take the problem; None if it can."""
    if reason := sm90.unsupported(problem, device):
        return reason
    return Reason(f"takes at most {BLOCK_ROWS[-1]} rows per KV head") if problem.rows > BLOCK_ROWS[-1] else None


def variant(problem: DecodeProblem) -> SmallVariant:
    """The build that it takes."""
    wide = problem.d_qk == D_QK
    rows = next(rows for rows in (BLOCK_ROWS if wide else NARROW_BLOCK_ROWS) if problem.rows <= rows)
    return SmallVariant(problem.dtype, rows) if wide else NarrowVariant(problem.dtype, rows, problem.d_qk)


WIDE = tuple(SmallVariant(dtype, rows) for dtype in HALF for rows in BLOCK_ROWS)
NARROW = tuple(NarrowVariant(dtype, rows, D_V) for dtype in HALF for rows in NARROW_BLOCK_ROWS)

KERNEL: AttentionKernel[DecodeProblem] = AttentionKernel(
    "decode_sm90_small",
    "dense decode with WGMMA and TMA for up to 32 query rows per KV head, with swapped operands",
    "decode/sm90_small.cu",
    PARAMS,
    HOPPER,
    (*WIDE, *NARROW),
    core=tuple(variant for variant in WIDE if variant.block_rows == 16),
    facts={"tile_tokens": TILE_TOKENS},
    unsupported=unsupported,
    variant=variant,
    block_rows=BLOCK_ROWS[-1],
    kv_map=partial(sm90.kv_map, l2="none"),
)
