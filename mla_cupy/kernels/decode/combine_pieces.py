"""Host side of `decode/combine_pieces.cu`."""

from __future__ import annotations

from mla_cupy.kernels.attention.combine import build_of_groups
from mla_cupy.kernels.attention.heuristics import COMBINE_UNITS_PER_BLOCK
from mla_cupy.kernels.attention.kernel import FORM_PARAMS, with_forms
from mla_cupy.kernels.decode.heuristics import PIECES_PER_COLUMN
from mla_cupy.kernels.params import DecodeParams
from mla_cupy.kernels.pipeline import Launch, LaunchArgs
from mla_cupy.kernels.spec import DTYPE_VARIANTS, KernelSpec, Variant
from mla_cupy.shapes import TILE_TOKENS

MAX_PIECES = 256
"""Pieces of a request."""

KERNEL: KernelSpec[object] = KernelSpec(
    "decode_combine_pieces",
    "merges the pieces of the requests of a batch-invariant schedule",
    "decode/combine_pieces.cu",
    DecodeParams,
    variants=(*DTYPE_VARIANTS, *with_forms(*DTYPE_VARIANTS)),
    core=DTYPE_VARIANTS,
    params_with=FORM_PARAMS,
    facts={"max_pieces": MAX_PIECES, "tile_tokens": TILE_TOKENS},
)


def columns(max_pieces: int) -> int:
    """Units of work per row: the least power of two with at most 8 pieces each."""
    units = 1
    while max_pieces > PIECES_PER_COLUMN * units:
        units *= 2
    return units


def launch(
    dtype: str, resident: int, rows: int, max_pieces: int, args: LaunchArgs, *, of_groups: bool = False
) -> Launch:
    """Merge the `rows` rows of all requests or groups, with at most `resident` blocks per column."""
    blocks = min(resident, -(-rows // COMBINE_UNITS_PER_BLOCK))
    variant = build_of_groups(dtype) if of_groups else Variant(dtype=dtype)
    return Launch(KERNEL, variant, (blocks, columns(max_pieces), 1), args)
