"""Division of the work of the indexer's losses: measured numbers, and what follows from them."""

from __future__ import annotations

from mla_cupy.kernels.indexer.loss.problem import TILE_KEYS, TILE_TOKENS, LossProblem

MIN_SPLIT_TOKENS = 32
"""Fewest tokens of a split of those that see a tile of keys: with fewer, starting and storing outweigh the products."""
ENOUGH_BLOCKS = 1056
"""Blocks of the gradient by keys: eight for each of an H200's multiprocessors."""
MAX_KEY_SPLITS = 16
MAX_SUM_BYTES = 64 << 20
"""Limit of the sums of all splits."""
MAX_QUERY_BLOCKS = 528
"""Blocks of a group of heads of the gradient by queries: beyond them a block processes several pairs of tokens, and
loads the next while it stores the last.
"""


def key_splits(problem: LossProblem) -> int:
    """Into how many parts the tokens that see a tile of keys are divided for the gradient by them: enough to fill a GPU
    with blocks, while the sums of all parts stay small. By shapes alone, so that bits do not depend on the GPU.
    """
    filling = ENOUGH_BLOCKS // max(1, -(-problem.s_kv // TILE_KEYS))
    fitting = MAX_SUM_BYTES // max(1, 4 * problem.s_kv * problem.index_dim)
    head_tiles = -(-problem.s_q // TILE_TOKENS) * problem.heads
    parts = head_tiles if problem.per_head else problem.s_q // MIN_SPLIT_TOKENS
    return max(1, min(filling, fitting, MAX_KEY_SPLITS, parts))
