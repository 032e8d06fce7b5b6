"""Preferences of sparse decode among its kernels, and its cuts of queries: numbers that were measured."""

from __future__ import annotations

SMALL_BLOCK_TILES = 4
"""Tiles per split of blocks of 32 heads up to which these are faster than the seesaw."""
NARROW_ROWS, NARROW_BLOCKS, NARROW_COST = 16, 3, 2
"""Least rows and blocks for which a partial result costs NARROW_COST times as much. Measured on an H200, b = 1 and 64
heads, where 16 pieces of a query take 13.6 us and 32 take 14.9; with 32 heads, in two such blocks, 32 are faster.
"""
