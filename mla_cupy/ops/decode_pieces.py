"""The pieces into which a batch-invariant plan cuts each sequence."""

from __future__ import annotations

from typing import Any

from mla_cupy.errors import ArgumentError, explain
from mla_cupy.kernels.decode.combine_pieces import MAX_PIECES
from mla_cupy.kernels.decode.schedule_pieces import Pieces
from mla_cupy.ops.checks import check_flag, is_integer
from mla_cupy.shapes import TILE_TOKENS

_MAX_GRID_Y = 65535


def check_pieces(batch_invariant: Any, split_tokens: Any, max_b: int, max_tokens: int) -> Pieces | None:
    """The pieces of a plan for up to `max_b` sequences of up to `max_tokens`; None if it is not batch-invariant."""
    if not is_integer(split_tokens) or split_tokens < TILE_TOKENS or split_tokens % TILE_TOKENS:
        raise ArgumentError(explain("split_tokens", repr(split_tokens), f"a multiple of {TILE_TOKENS}"))
    if not check_flag("batch_invariant", batch_invariant):
        return None
    pieces = Pieces(int(split_tokens) // TILE_TOKENS, -(-max_tokens // int(split_tokens)), max_b)
    if pieces.max_pieces > MAX_PIECES:
        expected = f"at least 1/{MAX_PIECES} of max_pages * page_size = {max_tokens}"
        raise ArgumentError(explain("split_tokens", split_tokens, expected, "longer pieces"))
    if max_b * pieces.max_pieces > _MAX_GRID_Y:
        got = f"max_b={max_b} sequences of up to {pieces.max_pieces} pieces"
        raise ArgumentError(explain("split_tokens", got, f"at most {_MAX_GRID_Y} pieces", "longer pieces"))
    return pieces
