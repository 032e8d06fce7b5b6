"""Host side of `attention/mma_small.cu` for values of 256 columns: dense decode alone, for all numbers of rows.

Models with such latents are few, and have up to 40 heads: a block of 32 rows, or two. A GPU with more shared memory has
as much in flight as it needs in 99 KB, since a row is 640 bytes.
"""

from __future__ import annotations

from typing import Any

from mla_cupy.dtypes import HALF
from mla_cupy.kernels.attention import mma
from mla_cupy.kernels.attention.kernel import NARROW_VALUES, NARROW_WIDTHS, SINK, AttentionKernel
from mla_cupy.kernels.params import DecodeParams
from mla_cupy.kernels.spec import Variant, variants
from mla_cupy.runtime.device import DeviceInfo

(D_VALUES,) = NARROW_VALUES
BLOCK_ROWS = mma.SMALL_ROWS[-1]
"""Query rows of a block; more of them are several blocks."""


def _variant(problem: Any, device: DeviceInfo) -> Variant:
    """The build for a problem's `dtype` and `d_qk`."""
    return Variant(dtype=problem.dtype, smem_kb=mma.LEAST_KB, block_rows=BLOCK_ROWS, head_dim_qk=problem.d_qk)


KERNEL: AttentionKernel[Any] = AttentionKernel(
    "attention_mma_small_narrow",
    f"dense decode as attention_mma_small, for values of {D_VALUES} columns, in blocks of up to {BLOCK_ROWS} rows",
    mma.SMALL.source,
    DecodeParams,
    mma.SMALL.archs,
    variants(dtype=HALF, smem_kb=(mma.LEAST_KB,), block_rows=(BLOCK_ROWS,), head_dim_qk=NARROW_WIDTHS),
    facts={**mma.SMALL.facts, "block_rows": BLOCK_ROWS},
    unsupported=mma.SMALL.unsupported,
    variant=_variant,
    block_rows=BLOCK_ROWS,
    value_widths=NARROW_VALUES,
    forms=SINK,
    base=mma.SMALL.name,
)
