"""Inputs, results and checks that the indexer's losses and their sums of heads share."""

from __future__ import annotations

from typing import Any, NamedTuple

from mla_cupy.errors import ShapeError, explain
from mla_cupy.kernels.indexer.logits.problem import CODES
from mla_cupy.kernels.indexer.loss.problem import MAX_HEAD_DIM
from mla_cupy.ops.checks import check_count, check_kv_heads, pair_width
from mla_cupy.ops.operation import Input, Output, Views, like_first_or_float32, present
from mla_cupy.ops.schema import steps_by_16_bytes
from mla_cupy.shapes import D_ROPE

__all__ = ["SparseLoss", "WarmupLoss"]

BUFFER_BYTES = 512 << 20
"""Default size of a chunk's buffer, in bytes."""
_MAX_BUFFER_BYTES = 1 << 40

QUERIES = Input("q", "s_q h d", ("bfloat16",), contiguous=True)
SHARED_KEYS = Input("k", "s_kv d", ("=q",), contiguous=True)
"""Keys that all heads share; then those that a KV head may have."""
KEYS = Input("k", "s_kv h_kv? d_k", ("=q",), contiguous=True)
LAST_COLUMNS = (
    Input("q_rope", "s_q h d_rope", ("=q",), optional=True, contiguous=True),
    Input("k_rope", "s_kv h_rope? d_rope", ("=q",), optional=True, contiguous=True),
)
"""Last columns of queries and keys, as optional separate arrays."""
INDEX_INPUTS = (
    Input("index_q", "s_q h_i d_i", ("=q", *CODES), contiguous=True),
    Input("index_k", "s_kv d_i", ("=index_q",), contiguous=True),
    Input("weights", "s_q h_i", ("float32", "bfloat16")),
)
SCALES = (
    Input("k_scale", "s_kv", ("float32",), optional=True),
    Input("q_scale", "s_q h_i", ("float32",), optional=True),
)
"""Scales of index keys and queries, such as scales of e4m3 codes."""
GRADIENTS = (
    Output("d_index_q", "s_q h_i d_i", like_first_or_float32, layout="rows", when="gradients"),
    Output("d_index_k", "s_kv d_i", like_first_or_float32, layout="rows", when="gradients"),
    Output("d_weights", "s_q h_i", when="gradients"),
)


class SparseLoss(NamedTuple):
    """Results of `indexer_sparse_loss`; gradients are None with `gradients=False`."""

    kl: Any
    mass: Any
    index_lse: Any
    d_index_q: Any
    d_index_k: Any
    d_weights: Any


class WarmupLoss(NamedTuple):
    """Results of `indexer_warmup_loss`; gradients are None with `gradients=False`, the last two results without `v`."""

    kl: Any
    mass: Any
    index_lse: Any
    d_index_q: Any
    d_index_k: Any
    d_weights: Any
    out: Any
    attention_lse: Any


def check_buffer_bytes(value: Any) -> int:
    """Check the size of a chunk's buffer."""
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


def holds_codes(dtype: str) -> bool:
    """True if index queries or keys of that dtype are e4m3 codes."""
    return dtype in CODES


def weight_factor(dtype: str, heads: int, width: int) -> float:
    """Factor that the scores have beside the weights; those for codes contain it."""
    return 1.0 if holds_codes(dtype) else (heads * width) ** -0.5


def check_scored(views: Views) -> dict[str, bool]:
    """Fields of a `LossProblem` about the index queries and keys."""
    scaled = any(views[scales.name] is not None for scales in SCALES)
    return {"codes": holds_codes(present(views, "index_q").dtype), "scaled": scaled}


def check_main(views: Views) -> dict[str, Any]:
    """Check the attention's queries and keys, whole or in pairs, of all heads or of each KV head.

    Returns
    -------
    dict
        Members of a `LossProblem`.

    Raises
    ------
    ShapeError
    """
    k, width = present(views, "k"), pair_width(views)
    check_sizes(d=(width, MAX_HEAD_DIM))
    check_kv_heads(views, present(views, "q").shape[1], k.shape[1])
    pairs = any(views[array.name] is not None for array in LAST_COLUMNS)
    if pairs and width <= D_ROPE:
        raise ShapeError(explain("the width of q", width, f"more than {D_ROPE}, if q_rope or k_rope is separate"))
    return {"head_dim": width, "kv_heads": k.shape[1], "pairs": pairs}


def are_aligned(views: Views, *names: str) -> bool:
    """True if all of these arrays, except absent ones, start at, and step by, multiples of 16 bytes."""
    return all(steps_by_16_bytes(view) for name in names if (view := views[name]) is not None)
