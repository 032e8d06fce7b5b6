"""The seesaw of dense decode, and the host code that all of Hopper's decode kernels over 16-bit rows share."""

from __future__ import annotations

from mla_cupy.arrays.view import View
from mla_cupy.dtypes import TABLE
from mla_cupy.kernels.attention.kernel import (
    FORM_PARAMS,
    FORMS,
    IN_PARTS,
    KEY_VARIANTS,
    READS_ROWS,
    TREE_VARIANTS,
    AttentionKernel,
    form_variant,
    tree_or_forms,
    with_forms,
)
from mla_cupy.kernels.decode.problem import DecodeProblem, tree_variant
from mla_cupy.kernels.params import DecodeParams, DecodeRopeParams
from mla_cupy.kernels.spec import DTYPE_VARIANTS, HOPPER, Reason, Variant, needs_alignment, needs_cc
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.runtime.tensormap import TensorMapSpec
from mla_cupy.shapes import D_V, TILE_TOKENS

BLOCK_M = 64
BOX_COLUMNS = 64
"""Columns of one TMA box: 128 bytes, the span of the swizzle."""
BOX_ROWS = 8
"""Period of the swizzle in rows: rows of several boxes of columns alternate, see `box_maps`."""


def unsupported(problem: DecodeProblem, device: DeviceInfo) -> Reason | None:
    """Reason why the kernel does not support the problem; None if it does."""
    if device.arch not in HOPPER:
        return needs_cc(device, "9.0")
    if problem.record:
        return READS_ROWS
    return None if problem.aligned else needs_alignment("q and kv_cache")


def kv_map(kv_cache: View, l2: str = "128B") -> TensorMapSpec:
    """The cache as (pages, 1, tokens, d_qk), fetched in boxes of 64 columns and gcd(page_size, 64) tokens.

    `l2` is the L2 promotion of the fetches, which pays or costs depending on what binds the kernel.

    Strides of dimensions of size 1 are meaningless, and the driver may reject them: they are replaced.
    """
    num_pages, page_size, d_qk = kv_cache.shape
    page, token, _ = kv_cache.strides
    nbytes = TABLE[kv_cache.dtype].nbytes
    row_bytes = nbytes * d_qk
    return TensorMapSpec(
        kv_cache.dtype,
        kv_cache.ptr,
        dims=(d_qk, page_size, 1, num_pages),
        strides_bytes=(
            nbytes * token if page_size > 1 else row_bytes,
            row_bytes,
            nbytes * page if num_pages > 1 else row_bytes,
        ),
        box=(BOX_COLUMNS, min(TILE_TOKENS, page_size & -page_size), 1, 1),
        l2=l2,
    )


def kv_maps(kv_cache: View, variant: Variant, l2: str = "128B") -> tuple[TensorMapSpec]:
    """The one map of 16-bit rows."""
    return (kv_map(kv_cache, l2),)


def _seesaw_maps(kv_cache: View, variant: Variant) -> tuple[TensorMapSpec, TensorMapSpec]:
    """The maps of plain builds; those with a tree or optional inputs fetch all columns through one map."""
    plain = not hasattr(variant, "tree_mask") and not hasattr(variant, "forms")
    return box_maps(kv_cache) if plain else (kv_map(kv_cache), kv_map(kv_cache))


def box_maps(kv_cache: View) -> tuple[TensorMapSpec, TensorMapSpec]:
    """The cache as (pages, groups of 8 tokens, columns / 64, 8, 64): boxes of half the values, and of RoPE.

    If its pages are no groups of 8, twice the map of 16-bit rows.
    """
    num_pages, page_size, d_qk = kv_cache.shape
    page, token, _ = kv_cache.strides
    if page_size % BOX_ROWS:
        return kv_map(kv_cache), kv_map(kv_cache)
    nbytes = TABLE[kv_cache.dtype].nbytes
    groups = page_size // BOX_ROWS

    def boxes(halves: int) -> TensorMapSpec:
        return TensorMapSpec(
            kv_cache.dtype,
            kv_cache.ptr,
            dims=(BOX_COLUMNS, BOX_ROWS, d_qk // BOX_COLUMNS, groups, num_pages),
            strides_bytes=(
                nbytes * token,
                nbytes * BOX_COLUMNS,
                nbytes * token * BOX_ROWS,
                nbytes * (page if num_pages > 1 else token * page_size),
            ),
            box=(BOX_COLUMNS, BOX_ROWS, halves, min(TILE_TOKENS, page_size & -page_size) // BOX_ROWS, 1),
            l2="128B",
        )

    return boxes(D_V // 2 // BOX_COLUMNS), boxes(1)


def _unsupported(problem: DecodeProblem, device: DeviceInfo) -> Reason | None:
    return unsupported(problem, device) or tree_or_forms(problem)


KERNEL: AttentionKernel[DecodeProblem] = AttentionKernel(
    "decode_sm90_seesaw",
    "dense decode with WGMMA and TMA: two warpgroups that take turns on the tensor cores",
    "decode/sm90_seesaw.cu",
    DecodeRopeParams,
    HOPPER,
    (*KEY_VARIANTS, *TREE_VARIANTS, *with_forms(*KEY_VARIANTS)),
    core=DTYPE_VARIANTS,
    facts={"block_m": BLOCK_M, "tile_tokens": TILE_TOKENS},
    params_with={**FORM_PARAMS, "tree_mask": DecodeParams},
    unsupported=_unsupported,
    variant=lambda problem, device: form_variant(tree_variant(problem, device), problem, IN_PARTS),
    block_rows=BLOCK_M,
    kv_maps=_seesaw_maps,
    counts_partials=True,
    forms=FORMS,
)
