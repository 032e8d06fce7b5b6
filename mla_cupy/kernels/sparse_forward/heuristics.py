"""Conditions on which the sparse forward walks kv in order, or converts records first: numbers that were measured."""

from __future__ import annotations

ORDERED_FROM = 0.25
"""Share of the L2 from which on kv is walked in order, so that queries that run side by side share its lines."""
ORDERED_BY_WIDE_MMA_FROM = 1.0
"""The share for `attention_mma`, which hides loads behind matmuls: while all of kv fits in the L2, sorting costs more
than it saves. On an H200, where 32768 rows are 0.75 of it, lists in the order of the indices take 4305.5 us and sorted
ones 4361.2 (64 heads), or 8473.1 and 8530.0 us (128 heads).
"""
GATHERS_OF_ONE_BLOCK = 16
GATHERS_OF_MORE = 4
"""Least gathered rows per token of the cache for which converting it first is faster: for the heads of one block of the
kernel that reads FP8 tokens, and for more, where each block converts for itself.

Fitted to measurements on an H200, 4096 queries, topk 2048, 32768 tokens: converting takes about 1 ns per token (33 us;
1.8 KB are read and written), and the kernel for FP8 tokens takes longer per gathered row than the kernel over rows: by
0.054 ns with 16 and 32 heads, 0.36 ns with 64 and 0.65 ns with 128. They are equal at 19, 2.8 and 1.5 gathers per
token.
"""
