"""The kernels of the indexer's losses for any GPU, one build each: those without products, and the fallbacks."""

from __future__ import annotations

from collections.abc import Callable

from mla_cupy.kernels.indexer.loss.problem import (
    MAX_GRID_Y,
    MAX_HEAD_DIM,
    MAX_INDEX_DIM,
    MAX_VALUE_DIM,
    TILE_KEYS,
    LossKernel,
    LossProblem,
    source,
)
from mla_cupy.kernels.params import LossParams
from mla_cupy.runtime.launching import Dim3

WARPS = 4
"""Warps of a block in which each has a token, a key or a head."""
THREADS = 256
"""Threads of a block in which each has an element."""
CODES_AT_ONCE = 16
"""Codes that a thread decodes at once."""
_MAX_BLOCKS = 1 << 20


def _kernel(name: str, about: str, grid: Callable[[LossProblem, int], Dim3], **facts: int) -> LossKernel:
    return LossKernel(name, about, source(name), LossParams, facts=facts, grid=grid)


def _in_turns(tokens: int) -> int:
    """Blocks for that many tokens, which wrap around beyond the limit of the grid."""
    return min(tokens, MAX_GRID_Y)


def _blocks(work: int, of_block: int) -> int:
    return -(-work // of_block)


def _elements(problem: LossProblem, tokens: int) -> Dim3:
    """A thread for each element of the index keys, in turns."""
    return min(_blocks(problem.s_kv * problem.index_dim, THREADS), _MAX_BLOCKS), 1, 1


def _codes(problem: LossProblem, tokens: int) -> Dim3:
    """A thread for several codes of the index queries, in turns."""
    elements = tokens * problem.index_heads * problem.index_dim
    return min(_blocks(elements, THREADS * CODES_AT_ONCE), _MAX_BLOCKS), 1, 1


def _warp_per_token(problem: LossProblem, tokens: int) -> Dim3:
    return _blocks(tokens, WARPS), 1, 1


def _warp_per_token_and_key(problem: LossProblem, tokens: int) -> Dim3:
    """A warp for each token and key, or place of its list."""
    return _blocks(problem.keys, WARPS), _in_turns(tokens), 1


RANGES = _kernel(
    "indexer_loss_ranges",
    "the keys that each token of the indexer's loss sees",
    _warp_per_token,
    block_tokens=WARPS,
)
ROWS = _kernel(
    "indexer_loss_rows",
    "divergence of each row, and the gradient of its scores",
    lambda problem, tokens: (problem.rows_per_token, _in_turns(tokens), 1),
    padded_keys=TILE_KEYS,
)
BOUNDS = _kernel(
    "indexer_loss_bounds",
    "for deterministic sums: an upper bound of what a token adds to the gradient of the index keys",
    _warp_per_token,
    block_tokens=WARPS,
)
FINITE_KEYS = _kernel(
    "indexer_loss_finite_keys",
    "a copy of the index keys with zeros in place of NaN and infinity",
    _elements,
    block_elems=THREADS,
)
DECODED_QUERIES = _kernel(
    "indexer_loss_decoded_queries",
    "a bf16 copy of index queries that are e4m3 codes",
    _codes,
    block_elems=THREADS * CODES_AT_ONCE,
)
FINITE_VALUES = _kernel(
    "indexer_loss_finite_values",
    "a copy of the attention's values with zeros in place of NaN and infinity",
    lambda problem, tokens: (_blocks(problem.s_kv, TILE_KEYS), 1, 1),
    block_keys=TILE_KEYS,
)
KEYS_SUM = _kernel(
    "indexer_loss_keys_sum",
    "gradient of the index keys from the sums of all splits",
    _elements,
    block_elems=THREADS,
)
HEAD_SUMS = _kernel(
    "indexer_loss_head_sums",
    "sums over heads for the indexer's losses, to be added up over ranks",
    lambda problem, tokens: (_blocks(problem.keys, THREADS), _in_turns(tokens), 1),
    block_keys=THREADS,
)
SCORES = _kernel(
    "indexer_loss_generic_scores",
    "targets and scores of the indexer's loss on any GPU, in fp32",
    _warp_per_token_and_key,
    block_keys=WARPS,
    max_head_dim=MAX_HEAD_DIM,
    max_index_dim=MAX_INDEX_DIM,
)
ATTENTION = _kernel(
    "indexer_loss_generic_attention",
    "attention beside the indexer's loss on any GPU, in fp32",
    lambda problem, tokens: (_blocks(problem.heads, WARPS), _in_turns(tokens), 1),
    block_heads=WARPS,
    max_head_dim=MAX_HEAD_DIM,
    max_value_dim=MAX_VALUE_DIM,
)
QUERIES = _kernel(
    "indexer_loss_generic_queries",
    "gradients of index queries and weights on any GPU, in fp32",
    lambda problem, tokens: (_blocks(problem.index_heads, WARPS), _in_turns(tokens), 1),
    block_heads=WARPS,
    max_index_dim=MAX_INDEX_DIM,
)
KEYS = _kernel(
    "indexer_loss_generic_keys",
    "gradient of the index keys on any GPU, in fp32",
    lambda problem, tokens: (_blocks(problem.s_kv, WARPS), 1, 1),
    block_keys=WARPS,
    max_index_dim=MAX_INDEX_DIM,
)
SCATTER = _kernel(
    "indexer_loss_generic_scatter",
    "gradient of the index keys in lists on any GPU, in fp32",
    _warp_per_token_and_key,
    block_keys=WARPS,
    max_index_dim=MAX_INDEX_DIM,
)

KERNELS = (
    *(RANGES, ROWS, BOUNDS, FINITE_KEYS, FINITE_VALUES, DECODED_QUERIES, KEYS_SUM, HEAD_SUMS),
    *(SCORES, ATTENTION, QUERIES, KEYS, SCATTER),
)
