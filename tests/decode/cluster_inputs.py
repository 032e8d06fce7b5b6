"""Inputs for kernels that merge: what each tile holds differs in size, so that a merge with wrong weights shows."""

from __future__ import annotations

from itertools import cycle

import numpy as np

from mla_cupy.shapes import TILE_TOKENS
from tests.support.cases import DecodeCase, DecodeInputs, make

#: Scales of the keys, tile by tile.
LOUDNESS = (1.0, 0.3, 1.7, 0.6, 1.4)


def uneven(case: DecodeCase) -> DecodeInputs:
    """The inputs of a case, with louder and quieter tiles; for pages that divide a tile."""
    inputs = make(case)
    assert TILE_TOKENS % case.page_size == 0
    pages_per_tile = TILE_TOKENS // case.page_size
    for line, length in zip(inputs.block_table, case.lengths(), strict=True):
        used = line[: -(-int(length) // case.page_size)]
        for first, loudness in zip(range(0, len(used), pages_per_tile), cycle(LOUDNESS), strict=False):
            pages = used[first : first + pages_per_tile]
            pages = pages[(pages >= 0) & (pages < len(inputs.kv_cache))]
            inputs.kv_cache[pages] *= np.asarray(loudness, inputs.kv_cache.dtype)
    return inputs


def maxima_of_tiles(inputs: DecodeInputs, request: int) -> np.ndarray:  # type: ignore[type-arg]
    """The largest score of each tile of a request for each row, in base 2, (tiles, rows); all pages are there."""
    case, length = inputs.case, int(inputs.case.lengths()[request])
    tokens = np.arange(length)
    pages = inputs.block_table[request, tokens // case.page_size]
    keys = inputs.kv_cache[pages, tokens % case.page_size, 0].astype(np.float64)
    q = inputs.q[request].reshape(-1, case.d_qk).astype(np.float64)
    scores = keys @ q.T * (case.d_qk**-0.5 / np.log(2))
    return np.stack([scores[first : first + TILE_TOKENS].max(0) for first in range(0, length, TILE_TOKENS)])
