"""The list of groups of queries that a schedule is made of: each query once, and who reads the same keys when."""

from __future__ import annotations

from functools import partial
from itertools import combinations
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from mla_cupy.kernels.decode import schedule_groups
from mla_cupy.kernels.decode.problem import BatchStep
from mla_cupy.kernels.decode.schedule_groups import GROUP_BYTES, Groups
from mla_cupy.kernels.pipeline import Layout, Prepared
from tests.decode.schedule_model import ITEM_COST, TILE_TOKENS, WorkItem, points, work_items
from tests.support.mutant_suite import mutant_suite
from tests.support.mutants import Mutant
from tests.support.sim_driver import fake_gpu, simulated

MAX_TOKENS = 1 << 20
Array = npt.NDArray[np.int32]


class Group(NamedTuple):
    """A group as the device writes it: see `QueryGroup` of `attention/query_groups.cuh`."""

    request: int
    first_query: int
    queries: int
    later_queries: int
    tokens: int
    first_token: int


def listed(
    counts: list[int], tokens: list[int], of_group: int, num_splits: int, around: tuple[int, int] = (0, 0)
) -> tuple[list[Group], list[tuple[int, int]]]:
    """The groups of packed queries, and the cuts: by the kernel in the simulator, with room for more than there are."""
    starts = np.cumsum([around[0], *counts]).astype(np.int32)
    total, b = int(starts[-1]) + around[1], len(counts)
    groups = Groups(of_group, packed=True, window=0)
    launch = schedule_groups.launch(groups, BatchStep(b, total, MAX_TOKENS, 1, 1), num_splits, 8, 0)
    most = groups.most(b, total)
    sizes = {"groups": GROUP_BYTES * most, "schedule": 8 * (num_splits + 1)}
    with simulated(132) as target:
        step = Prepared([launch], ("seqlens", "cu_seqlens_q"), Layout(sizes), fake_gpu(132), 0)
        memory = np.full(Layout(sizes).nbytes // 4, -77, np.int32)
        lengths = np.array(tokens, np.int32)
        step.enqueue([0, target.memory.map(lengths), target.memory.map(starts)], target.memory.map(memory), 0)
    offsets = Layout(sizes).offsets
    at, cuts_at = offsets["groups"] // 4, offsets["schedule"] // 4
    rows = memory[at : at + 6 * most].reshape(most, 6)
    written = [Group(*map(int, row)) for row in rows if row[0] != -77]
    cuts = [(int(a), int(b)) for a, b in memory[cuts_at : cuts_at + 2 * (num_splits + 1)].reshape(-1, 2)]
    return written, cuts


def assert_all_listed(
    groups: list[Group], counts: list[int], tokens: list[int], of_group: int, around: tuple[int, int] = (0, 0)
) -> None:
    """Each query is in one group of its sequence; queries outside all sequences see no token."""
    first, expected = around[0], []
    for begin, end in ((0, around[0]), (first + sum(counts), first + sum(counts) + around[1])):
        expected += [
            Group(0, query, min(of_group, end - query), max(0, end - query - of_group), 0, 0)
            for query in range(begin, end, of_group)
        ]
    for request, (count, length) in enumerate(zip(counts, tokens, strict=True)):
        for query in range(0, count, of_group):
            here = min(of_group, count - query)
            expected.append(Group(request, first + query, here, count - query - here, length, 0))
        first += count
    assert sorted(groups) == sorted(expected)


def lags(groups: list[Group], cuts: list[tuple[int, int]]) -> list[int]:
    """Tiles between the times at which two groups of a sequence reach the same tile, for each pair: everything earlier
    in a split takes its tiles' time. Pairs that no two splits hold whole are left out.
    """
    lengths = [group.tokens for group in groups]
    begins: dict[int, tuple[int, int]] = {}
    for split in range(len(cuts) - 1):
        before = 0
        for item in work_items(cuts, split, lengths, MAX_TOKENS):
            if whole(item, lengths[item.request]):
                begins[item.request] = split, before
            before += item.end - item.begin
    found = []
    for i, j in combinations(sorted(begins), 2):
        if groups[i].request == groups[j].request:
            (one, here), (other, there) = begins[i], begins[j]
            found.append(abs(here - there) if one != other else lengths[i] // TILE_TOKENS)
    return found


def whole(item: WorkItem, tokens: int) -> bool:
    return (item.begin, item.end) == (0, -(-tokens // TILE_TOKENS))


@pytest.mark.parametrize(
    ("b", "pattern", "of_group", "num_splits"),
    [
        (128, (2,), 1, 66),  # two queries of 128 heads
        (128, (3, 1), 1, 66),  # an equal total: a row of 64 groups is not a whole number of splits
        (128, (4,), 1, 66),
        (100, (2, 1, 2), 1, 66),
        (128, (7, 1), 4, 132),  # of 16 heads
    ],
)
def test_groups_of_a_sequence_are_read_at_the_same_time(
    b: int, pattern: tuple[int, ...], of_group: int, num_splits: int
) -> None:
    """Most are at most half a group and a snapped cut apart; one after another they would be a whole one."""
    counts = [pattern[i % len(pattern)] for i in range(b)]
    tokens = [4096] * b
    groups, cuts = listed(counts, tokens, of_group, num_splits)
    assert_all_listed(groups, counts, tokens, of_group)
    found = np.array(lags(groups, cuts))
    tiles = 4096 // TILE_TOKENS
    assert len(found) > b // 8, "hardly a group is whole: the case shows nothing"
    assert np.median(found) <= tiles // 2 + 3


@pytest.mark.parametrize("pattern", [(2,), (3, 1)])
def test_as_many_queries_take_no_longer_in_groups(pattern: tuple[int, ...]) -> None:
    """Two queries of 128 heads on 132 multiprocessors: groups are half as long as requests, on twice as many splits."""
    counts = [pattern[i % len(pattern)] for i in range(128)]
    groups, cuts = listed(counts, [4096] * 128, 1, 66)
    grouped = longest_split(cuts, [group.tokens for group in groups])
    assert grouped == longest_split(points([4096] * 128, 4096, 33), [4096] * 128)


def longest_split(cuts: list[tuple[int, int]], lengths: list[int]) -> tuple[int, int]:
    """Tiles and work items of the split that takes longest, by the schedule's cost."""
    splits = [work_items(cuts, split, lengths, MAX_TOKENS) for split in range(len(cuts) - 1)]
    sizes = [(sum(item.end - item.begin for item in items), len(items)) for items in splits]
    return max(sizes, key=lambda size: size[0] + ITEM_COST * size[1])


def test_alike_sequences_share_a_row() -> None:
    """The order of the list, which is the sequences' own but for that."""
    groups, _ = listed([1, 2, 9, 3, 0, 2, 1], [70 * i for i in range(7)], 1, 1)
    rows = [group.request for group in groups]
    assert rows == [1, 5, 1, 5, 3, 3, 3, 0, *[2] * 9, 6]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", range(6))
def test_each_query_is_in_one_group(seed: int) -> None:
    """Whatever the lengths are, with queries of no sequence at both ends, and more sequences than threads."""
    rng = np.random.default_rng(seed)
    b = (1, 2, 7, 40, 300, 1500)[seed]
    counts = rng.choice([0, 1, 1, 2, 3, 4, 5, 17], b).tolist()
    tokens = rng.integers(0, 500, b).tolist()
    of_group, around = int(rng.integers(1, 4)), (seed % 3, (3 * seed) % 4)
    groups, _ = listed(counts, tokens, of_group, 66, around)
    assert_all_listed(groups, counts, tokens, of_group, around)


test_is_caught, test_as_it_is = mutant_suite(
    "decode_schedule_groups",
    [
        partial(test_each_query_is_in_one_group, 1),
        partial(test_groups_of_a_sequence_are_read_at_the_same_time, 128, (3, 1, 2, 1), 1, 66),
    ],
    {
        "bar.sync": (23, [5, 11, 22]),
    },
    [
        Mutant("rows are not turned", "decode_schedule_groups", "+ turned_by(p, s.num_groups, i, size)", ""),
    ],
)
