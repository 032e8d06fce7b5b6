"""Host side of `decode/sm90_small.cu`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from mla_cupy.dtypes import HALF
from mla_cupy.kernels.attention.kernel import (
    FORM_PARAMS,
    FORMS,
    IN_PARTS,
    NARROW_VALUES,
    AttentionKernel,
    form_variant,
    narrow_or_forms,
    narrowest,
    tree_or_forms,
    wants_forms,
    with_forms,
)
from mla_cupy.kernels.decode import sm90
from mla_cupy.kernels.decode.heuristics import MAX_SHARED_TILES, MOST_SHARED_TILES
from mla_cupy.kernels.decode.problem import DecodeProblem
from mla_cupy.kernels.params import DecodeParams, DecodeRopeParams
from mla_cupy.kernels.spec import HOPPER, Reason, Variant, variants
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.shapes import D_QK, D_V, TILE_TOKENS

BLOCK_ROWS = (8, 16, 24, 32)
OTHER_BLOCK_ROWS = (16, 32)
"""Rows of the builds for keys of 512, a tree or optional inputs: fewer, as each takes seconds to compile."""
NARROW_BLOCK_ROWS = {320: (32, 64), 288: (32, 40, 64)}
"""Rows of the builds for values of 256 columns, by the width of keys: accumulators for the same rows take half the
registers. MiniCPM3, with keys of 288, has 40 heads.
"""


def unsupported(problem: DecodeProblem, device: DeviceInfo) -> Reason | None:
    """Reason why the kernel does not support the problem; None if it does."""
    if problem.tree_mask and problem.d_qk != D_QK:
        return Reason(f"takes a tree_mask with keys of {D_QK} only")
    return sm90.unsupported(problem, device) or tree_or_forms(problem) or narrow_or_forms(problem)


def preferred(problem: DecodeProblem, device: DeviceInfo) -> bool:
    """Prefer it for the rows of one block, for more rows in small batches, and for all rows of narrow values.

    Several blocks then work on each tile, which takes longer than in one block of the seesaw; but their first tile
    arrives earlier, and half the splits leave half as much to merge.
    """
    if problem.rows <= BLOCK_ROWS[-1] or problem.d_qk in NARROW_BLOCK_ROWS:
        return True
    if problem.batch is None:
        return False
    blocks = -(-problem.rows // BLOCK_ROWS[-1])
    most = MAX_SHARED_TILES.get(blocks, MOST_SHARED_TILES)
    return problem.batch.tiles * blocks <= most * device.sm_count


def variant(problem: DecodeProblem, device: DeviceInfo) -> Variant:
    """The narrowest build that holds the rows; more rows than the widest has are divided among blocks."""
    plain = problem.d_qk == D_QK and not problem.tree_mask and not wants_forms(problem, IN_PARTS)
    builds = NARROW_BLOCK_ROWS.get(problem.d_qk, BLOCK_ROWS if plain else OTHER_BLOCK_ROWS)
    build = Variant(dtype=problem.dtype, block_rows=narrowest(builds, problem.rows))
    if problem.tree_mask:
        return build.extended(tree_mask=1)
    return form_variant(build if problem.d_qk == D_QK else build.extended(head_dim_qk=problem.d_qk), problem, IN_PARTS)


_OTHER = variants(dtype=HALF, block_rows=OTHER_BLOCK_ROWS)
_OF_512 = variants(dtype=HALF, block_rows=OTHER_BLOCK_ROWS, head_dim_qk=(D_V,))
KERNEL: AttentionKernel[DecodeProblem] = AttentionKernel(
    "decode_sm90_small",
    "dense decode with WGMMA and TMA for up to 32 query rows, or small batches, with swapped operands",
    "decode/sm90_small.cu",
    DecodeRopeParams,
    HOPPER,
    (
        *variants(dtype=HALF, block_rows=BLOCK_ROWS),
        *_OF_512,
        *(build.extended(tree_mask=1) for build in _OTHER),
        *with_forms(*_OTHER, *_OF_512),
        *(
            build
            for d_qk, rows in NARROW_BLOCK_ROWS.items()
            for build in variants(dtype=HALF, block_rows=rows, head_dim_qk=(d_qk,))
        ),
    ),
    core=variants(dtype=HALF, block_rows=(16,)),
    facts={"tile_tokens": TILE_TOKENS},
    params_with={**FORM_PARAMS, "tree_mask": DecodeParams},
    unsupported=unsupported,
    preferred=preferred,
    variant=variant,
    block_rows=BLOCK_ROWS[-1],
    kv_maps=partial(sm90.kv_maps, l2="none"),
    counts_partials=True,
    sized=lambda problem, device: _NARROW if problem.d_qk in NARROW_BLOCK_ROWS else None,
    value_widths=(D_V, *NARROW_VALUES),
    forms=FORMS,
)
_NARROW: AttentionKernel[DecodeProblem] = replace(KERNEL, block_rows=64, counts_partials=False)
