"""What the indexer's losses and their sums of heads have in common: inputs, results, checks."""

from __future__ import annotations

from typing import Any

from mla_cupy.errors import ShapeError, explain
from mla_cupy.ops.checks import check_count
from mla_cupy.ops.operation import Input, Output, like_first_or_float32

BUFFER_BYTES = 512 << 20
"""Default limit of what a chunk of tokens holds of all keys."""
_MAX_BUFFER_BYTES = 1 << 40

SCORED_INPUTS = (
    Input("q", "s_q h d", ("bfloat16",), contiguous=True),
    Input("k", "s_kv d", ("=q",), contiguous=True),
    Input("index_q", "s_q h_i d_i", ("=q",), contiguous=True),
    Input("index_k", "s_kv d_i", ("=q",), contiguous=True),
    Input("weights", "s_q h_i", ("float32", "bfloat16")),
)
GRADIENTS = (
    Output("d_index_q", "s_q h_i d_i", like_first_or_float32, layout="rows", when="gradients"),
    Output("d_index_k", "s_kv d_i", like_first_or_float32, layout="rows", when="gradients"),
    Output("d_weights", "s_q h_i", when="gradients"),
)


def check_buffer_bytes(value: Any) -> int:
    """Check the limit of what a chunk of tokens holds."""
    return check_count("buffer_bytes", value, 1, _MAX_BUFFER_BYTES)


def check_sizes(**sizes: tuple[int, int]) -> None:
    """Check sizes against their limits.

    Raises
    ------
    ShapeError
    """
    for name, (size, limit) in sizes.items():
        if size > limit:
            raise ShapeError(explain(name, size, f"at most {limit}"))
