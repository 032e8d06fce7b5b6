"""The kernels of dense decode for forms that most calls do without, so that other calls pay nothing for these.

They are `seesaw` and `small` once more, each with a further word; `attention_generic_forms` is the plain one.
"""

from __future__ import annotations

from mla_cupy.dtypes import HALF
from mla_cupy.kernels.attention.generic_forms import BUILDS, FORMS, WITH_FORMS, wide_variant
from mla_cupy.kernels.attention.kernel import NO_TREE, AttentionKernel, narrowest
from mla_cupy.kernels.decode import sm90, sm90_small
from mla_cupy.kernels.decode.problem import DecodeProblem
from mla_cupy.kernels.params import DecodeFormParams
from mla_cupy.kernels.spec import HOPPER, Reason, Variant, variants
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.shapes import D_QK, D_V, TILE_TOKENS

SMALL_ROWS = (16, 32)
"""Rows of the builds for few rows."""


def _fast(problem: DecodeProblem, device: DeviceInfo) -> Reason | None:
    """Reason that a kernel with WGMMA cannot take the problem; None if it can."""
    return NO_TREE if problem.tree_mask else sm90.unsupported(problem, device)


def _few(problem: DecodeProblem, device: DeviceInfo) -> Variant:
    return Variant(dtype=problem.dtype, block_rows=narrowest(SMALL_ROWS, problem.rows), head_dim_qk=problem.d_qk)


SMALL: AttentionKernel[DecodeProblem] = AttentionKernel(
    "decode_sm90_small_forms",
    "dense decode as decode_sm90_small, for lengths that vary, windows, queries in two arrays, turned results",
    "decode/sm90_small_forms.cu",
    DecodeFormParams,
    HOPPER,
    variants(dtype=HALF, block_rows=SMALL_ROWS, head_dim_qk=(D_QK, D_V)),
    facts={"tile_tokens": TILE_TOKENS},
    unsupported=_fast,
    preferred=sm90_small.preferred,
    variant=_few,
    block_rows=SMALL_ROWS[-1],
    kv_maps=sm90_small.KERNEL.kv_maps,
    counts_partials=True,
    forms=FORMS,
)

SEESAW: AttentionKernel[DecodeProblem] = AttentionKernel(
    "decode_sm90_seesaw_forms",
    "dense decode as decode_sm90_seesaw, for lengths that vary, windows, queries in two arrays, turned results",
    sm90.KERNEL.source,
    DecodeFormParams,
    HOPPER,
    tuple(variant.extended(forms=WITH_FORMS) for variant in BUILDS),
    facts={"block_m": sm90.BLOCK_M, "tile_tokens": TILE_TOKENS},
    unsupported=_fast,
    variant=lambda problem, device: wide_variant(problem, device).extended(forms=WITH_FORMS),
    block_rows=sm90.BLOCK_M,
    kv_maps=sm90.same_maps,
    counts_partials=True,
    forms=FORMS,
    base=sm90.KERNEL.name,
)

KERNELS = (SMALL, SEESAW)
