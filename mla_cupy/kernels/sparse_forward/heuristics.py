"""Conditions on which the sparse forward walks kv in order, or converts records first: numbers that were measured."""

from __future__ import annotations

ORDERED_FROM = 0.25
"""Share of the L2 from which on kv is walked in order, so that queries that run side by side share its lines."""
ORDERED_BY_WIDE_MMA_FROM = 1.0
"""Such a share for `attention_mma`, whose loads hide behind products: while all of kv fits in the L2, sorting costs
more than it saves. On an H200, where 32768 rows are 0.75 of it, lists in the order of the indices take 4305.5 us where
sorted ones take 4361.2 (64 heads), and 8473.1 where they take 8530.0 (128).
"""
GATHERS_OF_ONE_BLOCK = 16
GATHERS_OF_MORE = 4
"""Gathered rows per token of the cache from which on converting it first is faster: for heads of one block of the
kernel that reads records, and of more, each of which converts for itself.

Fitted to readings of an H200, 4096 queries, topk 2048, 32768 tokens: converting takes about 1 ns per token (33 us;
1.8 KB are read and written), and the kernel from records takes per gathered row 0.054 ns longer than that over rows
with 16 and 32 heads, 0.36 ns with 64 and 0.65 ns with 128. They are equal at 19, 2.8 and 1.5 gathers per token.
"""
