"""The device schedule, stated again in Python: `generic/decode_schedule.cu`, `attention/split_work.cuh` and the list
of split requests of `generic/split_combine.cu`.

What is proved about this model holds for the algorithm. That the kernel computes the same points is checked on a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from mla_cupy.runtime.sources import source_root

TILE_TOKENS = 64
WHOLE = -1


def _request_cost() -> int:
    text = (source_root() / "generic" / "decode_schedule.cu").read_text()
    found = re.search(r"kRequestCost = (\d+);", text)
    assert found is not None
    return int(found[1])


REQUEST_COST = _request_cost()

Point = tuple[int, int]


class Fragment(NamedTuple):
    """A piece of a request: tiles [begin, end)."""

    request: int
    begin: int
    end: int
    slot: int


def tiles_of(seqlen: int, most_tokens: int) -> int:
    return -(-max(0, min(seqlen, most_tokens)) // TILE_TOKENS)


def points(seqlens: Sequence[int], most_tokens: int, num_parts: int) -> list[Point]:
    """Where the parts begin, and the end."""
    tiles = [tiles_of(seqlen, most_tokens) for seqlen in seqlens]
    total = sum(tiles) + REQUEST_COST * len(tiles)
    cuts = []
    request, before = 0, 0
    for i in range(num_parts):
        place = i * total // num_parts
        while place >= before + tiles[request] + REQUEST_COST:
            before += tiles[request] + REQUEST_COST
            request += 1
        cuts.append((request, max(0, place - before - REQUEST_COST)))
    return [*cuts, (len(tiles), 0)]


def fragments(cuts: list[Point], part: int, seqlens: Sequence[int], most_tokens: int) -> list[Fragment]:
    """What a part works on. The lengths may be other ones than those that the points were made for."""
    num_parts = len(cuts) - 1
    begin, end = cuts[part], cuts[part + 1]
    found = []
    request = begin[0]
    while not (request >= len(seqlens) or request > end[0] or (request == end[0] and end[1] == 0)):
        continues, continued = request == begin[0] and begin[1] > 0, request == end[0]
        tiles = tiles_of(seqlens[request], most_tokens)
        first = begin[1] if request == begin[0] else 0
        last = min(end[1], tiles) if continued else tiles
        slot = part if continues else num_parts + part if continued else WHOLE
        found.append(Fragment(request, first, last, slot))
        request += 1
    return found


def splits(cuts: list[Point]) -> dict[int, list[int]]:
    """The slots of each split request, in order, as the combine kernel finds them."""
    num_parts = len(cuts) - 1
    found: dict[int, list[int]] = {}
    for part in range(num_parts):
        begin, end = cuts[part], cuts[part + 1]
        if end[1] > 0 and not (begin[0] == end[0] and begin[1] > 0):
            last = next((i for i in range(part + 1, num_parts) if cuts[i][0] > end[0]), num_parts)
            assert end[0] not in found
            found[end[0]] = [num_parts + part, *range(part + 1, last)]
    return found
