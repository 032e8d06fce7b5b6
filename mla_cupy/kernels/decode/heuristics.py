"""Measured preferences among the kernels of dense decode, and limits of clusters."""

from __future__ import annotations

MAX_SHARED_TILES = {2: 16}
"""Largest number of tiles per split, by the number of blocks of few rows that share them: with more the seesaw is
faster."""
MOST_SHARED_TILES = 8
"""Most tiles for all other numbers of blocks: of four, from about 12 on."""
SMALL_BLOCK_TILES = 5
"""Tiles of records per split of blocks of 32 rows up to which these are faster than the seesaw."""
SMALL_FP8_TILES = 8
"""Tiles per split of blocks of 32 rows up to which these are faster than 64, in FP8: with 8 they are, with 15 not."""
MAX_CLUSTERS = 32
"""Most clusters that may share requests."""
MIN_TILES_PER_BLOCK = 2
"""A share of less is not worth a merge in the workspace."""
USABLE_SMS = 120, 132
"""Clusters of 8 blocks fill 120 of an H200's 132 multiprocessors."""
PIECES_PER_COLUMN = 8
"""Most pieces of a batch-invariant schedule that a unit of its merge reads."""
