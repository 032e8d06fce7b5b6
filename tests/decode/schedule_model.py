"""The device schedule, stated again in Python: `attention/split_schedule.cuh`, `attention/split_work.cuh` and the list
of split requests of `attention/combine.cu`.

What is proved about this model holds for the algorithm. The simulator and the GPU show that the kernel computes the
same cuts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from mla_cupy.kernels.attention.split_schedule import PRICE_SCALE
from mla_cupy.runtime.sources import source_root

TILE_TOKENS = 64
NOT_SPLIT = -1
MAX_TOTAL = 1 << 30


def _constant(name: str) -> int:
    text = (source_root() / "attention" / "split_schedule.cuh").read_text()
    found = re.search(rf"{name} = (\d+);", text)
    assert found is not None
    return int(found[1])


ITEM_COST = _constant("kItemCost")
SHORT_SPLIT = _constant("kShortSplit")
SERVED_BLOCKS = _constant("kServedBlocks")
SECOND_ROUND = _constant("kSecondRound")
MERGE_COST_OF_64_ROWS = _constant("kMergeCostOf64Rows")
TRIED_LIMITS = 32

Point = tuple[int, int]
"""A request and one of its tiles (or units), before which a split begins."""


class WorkItem(NamedTuple):
    """A piece of a request: tiles [begin, end)."""

    request: int
    begin: int
    end: int
    partial_index: int


def tiles_of(seqlen: int, max_tokens: int) -> int:
    return -(-max(0, min(seqlen, max_tokens)) // TILE_TOKENS)


# ---- The four ways to cut --------------------------------------------------------------------------------------


def snapped(units: Sequence[int], num_splits: int, reach: int) -> list[Point]:
    """Cuts at equal distances in cost, moved to a request boundary that is no further than `reach`."""
    total = sum(units) + ITEM_COST * len(units)
    cuts = []
    request, before = 0, 0
    for i in range(num_splits):
        place = i * total // num_splits
        while place >= before + units[request] + ITEM_COST:
            before += units[request] + ITEM_COST
            request += 1
        unit = max(0, place - before - ITEM_COST)
        left = units[request] - unit
        if min(unit, left) > reach:
            cuts.append((request, unit))
        else:
            cuts.append((request, 0) if unit <= left else (request + 1, 0))
    return [*cuts, (len(units), 0)]


def min_limit(units: Sequence[int], num_splits: int) -> int:
    """The least length of pieces that leaves no more of them than splits."""
    low, high = max(1, -(-sum(units) // num_splits)), max(1, *units)
    while low < high:
        middle = (low + high) // 2
        if sum(-(-n // middle) for n in units) <= num_splits:
            high = middle
        else:
            low = middle + 1
    return low


def tiles_price(tiles: int, units: Sequence[int]) -> int:
    """Price in tiles / PRICE_SCALE: memory serves a limited number of blocks."""
    return max(tiles * PRICE_SCALE, sum(units) * PRICE_SCALE // SERVED_BLOCKS)


def counts_partials(units: Sequence[int], num_splits: int, piece_cost: int) -> bool:
    """True if splits are short, and each may hold one piece."""
    return piece_cost > 0 and 2 * len(units) <= num_splits and min_limit(units, num_splits) <= SHORT_SPLIT


def cheapest_limit(units: Sequence[int], num_splits: int, piece_cost: int) -> int:
    """The length of pieces of the least price; of several the shortest."""

    def price(limit: int) -> int:
        counts = [-(-n // limit) for n in units]
        return tiles_price(limit, units) + piece_cost * sum(count for count in counts if count > 1)

    least = min_limit(units, num_splits)
    return min(range(least, least + TRIED_LIMITS), key=price)


def second_round(units: Sequence[int], num_splits: int, merge_cost: int, piece_cost: int) -> int:
    """Tiles by which the pieces of a lone request become longer, so that there are a power of two at most."""
    if len(units) != 1 or num_splits < 2 or not piece_cost or counts_partials(units, num_splits, piece_cost):
        return 0
    limit, most = min_limit(units, num_splits), 1 << (num_splits.bit_length() - 1)
    more = -(-units[0] // most) - limit
    pays = more <= SECOND_ROUND and merge_cost >= MERGE_COST_OF_64_ROWS
    return more if -(-units[0] // limit) > most and pays else 0


def pieces(units: Sequence[int], num_splits: int, piece_cost: int = 0, merge_cost: int = 0) -> list[Point]:
    """A piece per split, for at most one request per split."""
    counted = counts_partials(units, num_splits, piece_cost)
    limit = cheapest_limit(units, num_splits, piece_cost) if counted else min_limit(units, num_splits)
    limit += second_round(units, num_splits, merge_cost, piece_cost)
    cuts = []
    for request, n in enumerate(units):
        count = -(-n // limit)
        cuts += [(request, j * (n // count) + min(j, n % count)) for j in range(count)]
    cuts[:1] = [(0, 0)]
    return [*cuts, *[(len(units), 0)] * (num_splits + 1 - len(cuts))]


def makespan(cuts: Sequence[Point], units: Sequence[int], merge_cost: int) -> int:
    """Cost of the longest split, and of the merge if there is one."""
    before = [0, *accumulate(units)]
    places = [before[request] + unit for request, unit in cuts]
    longest = max(
        places[i + 1] - places[i] + ITEM_COST * (cuts[i + 1][0] - cuts[i][0] + (cuts[i + 1][1] > 0))
        for i in range(len(cuts) - 1)
    )
    return longest + merge_cost * any(unit > 0 for _, unit in cuts)


def price(cuts: Sequence[Point], units: Sequence[int], merge_cost: int, piece_cost: int) -> int:
    """Price with partial results."""
    merge = merge_cost * any(unit > 0 for _, unit in cuts)
    partials = sum(map(len, split_requests(list(cuts)).values()))
    longest = makespan(cuts, units, 0) - ITEM_COST
    return tiles_price(longest, units) + (ITEM_COST + merge) * PRICE_SCALE + piece_cost * partials


def candidates(units: Sequence[int], num_splits: int, piece_cost: int = 0, merge_cost: int = 0) -> list[list[Point]]:
    """The ways that are possible, in the order in which the first of the best is taken."""
    step = (sum(units) + ITEM_COST * len(units)) // num_splits
    ways = [snapped(units, num_splits, MAX_TOTAL)]
    if 2 * len(units) <= num_splits:
        ways.append(pieces(units, num_splits, piece_cost, merge_cost))
    if step > 0:
        ways += [snapped(units, num_splits, step // 4), snapped(units, num_splits, ITEM_COST)]
    return ways


def unit_shift(b: int, max_tokens: int) -> int:
    """A unit is 2^shift tiles."""
    tiles, shift = max(0, -(-max_tokens // TILE_TOKENS)), 0
    while b * ((tiles >> shift) + 1 + ITEM_COST) > MAX_TOTAL:
        shift += 1
    return shift


def points(
    seqlens: Sequence[int], max_tokens: int, num_splits: int, merge_cost: int = 8, piece_cost: int = 0
) -> list[Point]:
    """Starts of the splits, and the end."""
    shift = unit_shift(len(seqlens), max_tokens)
    units = [-(-tiles_of(seqlen, max_tokens) // (1 << shift)) for seqlen in seqlens]
    piece_cost = 0 if shift else piece_cost
    ways = candidates(units, num_splits, piece_cost, merge_cost)
    if counts_partials(units, num_splits, piece_cost):
        best = min(ways, key=lambda cuts: price(cuts, units, merge_cost, piece_cost))
    else:
        more = second_round(units, num_splits, merge_cost, piece_cost)
        spans = [makespan(cuts, units, (merge_cost >> shift) + more * (i != 1)) for i, cuts in enumerate(ways)]
        best = ways[spans.index(min(spans))]
    return [(request, unit << shift) for request, unit in best]


# ---- What the other kernels make of them -----------------------------------------------------------------------


def work_items(cuts: list[Point], split: int, seqlens: Sequence[int], max_tokens: int) -> list[WorkItem]:
    """Work items of a split. The lengths may differ from the lengths at the time of the cuts."""
    num_splits = len(cuts) - 1
    begin, end = cuts[split], cuts[split + 1]
    found = []
    request = begin[0]
    while not (request >= len(seqlens) or request > end[0] or (request == end[0] and end[1] == 0)):
        continues, continued = request == begin[0] and begin[1] > 0, request == end[0]
        tiles = tiles_of(seqlens[request], max_tokens)
        first = begin[1] if request == begin[0] else 0
        last = min(end[1], tiles) if continued else tiles
        partial_index = split if continues else num_splits + split if continued else NOT_SPLIT
        found.append(WorkItem(request, first, last, partial_index))
        request += 1
    return found


def split_requests(cuts: list[Point]) -> dict[int, list[int]]:
    """The partial indices of each split request, in order, as the combine kernel finds them."""
    num_splits = len(cuts) - 1
    found: dict[int, list[int]] = {}
    for split in range(num_splits):
        begin, end = cuts[split], cuts[split + 1]
        if end[1] > 0 and not (begin[0] == end[0] and begin[1] > 0):
            last = next((i for i in range(split + 1, num_splits) if cuts[i][0] > end[0]), num_splits)
            assert end[0] not in found
            found[end[0]] = [num_splits + split, *range(split + 1, last)]
    return found
