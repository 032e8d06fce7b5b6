"""Every tile of work exactly once, in splits of nearly equal cost: proved for a model of the schedule; the kernel gives
the model's cuts, in the simulator and on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from mla_cupy.kernels.attention import combine, heuristics, schedule
from mla_cupy.kernels.attention.split_schedule import MAX_SPLITS, PRICE_SCALE
from mla_cupy.kernels.pipeline import Layout, Prepared
from mla_cupy.kernels.spec import Variant
from mla_cupy.runtime import loader
from mla_cupy.runtime.device import DeviceInfo
from tests.decode.schedule_model import (
    ITEM_COST,
    NOT_SPLIT,
    TILE_TOKENS,
    Point,
    WorkItem,
    candidates,
    counts_partials,
    makespan,
    min_limit,
    points,
    price,
    second_round,
    split_requests,
    tiles_of,
    work_items,
)
from tests.support.mutant_suite import mutant_suite
from tests.support.sim_driver import fake_gpu, simulated

MAX_TOKENS = 1 << 20
INT_MIN, INT_MAX = -(2**31), 2**31 - 1

EXAMPLES = settings(max_examples=300, deadline=None, derandomize=True)
"""Examples, equal in every run: a change must not fail by chance. derandomize=False draws others each time."""

lengths = st.lists(
    st.one_of(
        st.integers(0, 400),
        st.integers(0, 40000),
        st.sampled_from([0, 1, 63, 64, 65, -1, INT_MIN, INT_MAX, MAX_TOKENS, MAX_TOKENS + 1]),
    ),
    min_size=1,
    max_size=40,
)
splits = st.integers(1, MAX_SPLITS)
merge_costs = st.sampled_from([0, 2, 8])
piece_costs = st.sampled_from([0, *map(heuristics.piece_cost, (8, 16, 64, 128))])
few_lengths = st.lists(st.one_of(st.integers(0, 400), st.integers(0, 9000)), min_size=1, max_size=20)


def assert_covered(cuts: list[Point], seqlens: Sequence[int], most: int) -> list[list[WorkItem]]:
    """Each tile once, each request's pieces where the combine kernel will read them, no partial index twice."""
    num_splits = len(cuts) - 1
    work = [work_items(cuts, split, seqlens, most) for split in range(num_splits)]
    by_request: dict[int, list[WorkItem]] = {}
    for item in (item for split in work for item in split):
        by_request.setdefault(item.request, []).append(item)
    assert sorted(by_request) == list(range(len(seqlens)))
    merged = split_requests(cuts)
    for request, items in by_request.items():
        covered = [tile for item in items for tile in range(item.begin, item.end)]
        assert covered == list(range(tiles_of(seqlens[request], most)))
        assert [item.partial_index for item in items] == merged.get(request, [NOT_SPLIT])
    indices = [item.partial_index for items in by_request.values() for item in items if item.partial_index != NOT_SPLIT]
    assert len(set(indices)) == len(indices)
    assert all(0 <= index < 2 * num_splits for index in indices)
    return work


@EXAMPLES
@given(lengths, splits, merge_costs)
@example([0], 1, 8)
@example([0] * 40, MAX_SPLITS, 8)  # less work than splits
@example([1], MAX_SPLITS, 8)
@example([MAX_TOKENS], MAX_SPLITS, 8)
@example([INT_MIN, INT_MAX, 64], 132, 8)
@example([0, 0, 8192, 0, 8192], 66, 8)
def test_model_covers_every_tile_once(seqlens: list[int], num_splits: int, merge_cost: int) -> None:
    """The algorithm covers every tile once. Only requests without a tile have an item without one."""
    for item in chain(*assert_covered(points(seqlens, MAX_TOKENS, num_splits, merge_cost), seqlens, MAX_TOKENS)):
        assert item.begin < item.end or tiles_of(seqlens[item.request], MAX_TOKENS) == 0


@EXAMPLES
@given(few_lengths, splits, merge_costs, piece_costs)
@example([8192], 132, 2, heuristics.piece_cost(16))
@example([8192, 1, 0, 640], 132, 2, heuristics.piece_cost(16))
@example([0, 321, 1, 193, 193, 1921, 1921], 99, 0, heuristics.piece_cost(8))
def test_model_that_counts_partials_covers_every_tile_once(
    seqlens: list[int], num_splits: int, merge_cost: int, piece_cost: int
) -> None:
    """The algorithm makes no empty piece, and no higher price than without pricing, except for requests without a tile:
    the length of pieces is chosen without them, and one may share a split with a longest piece.
    """
    units = [tiles_of(seqlen, MAX_TOKENS) for seqlen in seqlens]
    cuts = points(seqlens, MAX_TOKENS, num_splits, merge_cost, piece_cost)
    for item in chain(*assert_covered(cuts, seqlens, MAX_TOKENS)):
        assert item.begin < item.end or units[item.request] == 0
    if counts_partials(units, num_splits, piece_cost):
        old = points(seqlens, MAX_TOKENS, num_splits, merge_cost)
        without_tile = units.count(0) * ITEM_COST * PRICE_SCALE
        assert price(cuts, units, merge_cost, piece_cost) <= price(old, units, merge_cost, piece_cost) + without_tile
    elif not second_round(units, num_splits, merge_cost, piece_cost):
        assert cuts == points(seqlens, MAX_TOKENS, num_splits, merge_cost)


@EXAMPLES
@given(lengths, splits)
def test_every_way_covers_every_tile_once(seqlens: list[int], num_splits: int) -> None:
    """Every way to cut covers every tile once, also where another way is better."""
    for cuts in candidates([tiles_of(seqlen, MAX_TOKENS) for seqlen in seqlens], num_splits):
        for item in chain(*assert_covered(cuts, seqlens, MAX_TOKENS)):
            assert item.begin < item.end or tiles_of(seqlens[item.request], MAX_TOKENS) == 0


@EXAMPLES
@given(lengths, splits, merge_costs)
def test_model_is_balanced(seqlens: list[int], num_splits: int, merge_cost: int) -> None:
    """The algorithm's load exceeds an even share, which no schedule beats, by at most three items and the merge."""
    units = [tiles_of(seqlen, MAX_TOKENS) for seqlen in seqlens]
    total = sum(units) + ITEM_COST * len(units)
    assume(total >= num_splits)
    found = makespan(points(seqlens, MAX_TOKENS, num_splits, merge_cost), units, merge_cost)
    assert -(-total // num_splits) <= found <= -(-total // num_splits) + 3 * ITEM_COST + merge_cost


@EXAMPLES
@given(st.lists(st.integers(1, 40000), min_size=1, max_size=40), st.integers(2, 6))
def test_few_requests_get_the_shortest_pieces(seqlens: list[int], splits_per_request: int) -> None:
    """With a piece per split, no shorter longest piece is possible."""
    num_splits = min(MAX_SPLITS, len(seqlens) * splits_per_request)
    units = [tiles_of(seqlen, MAX_TOKENS) for seqlen in seqlens]
    limit = min_limit(units, num_splits)
    assert sum(-(-n // limit) for n in units) <= num_splits
    assert limit == 1 or sum(-(-n // (limit - 1)) for n in units) > num_splits
    assert makespan(points(seqlens, MAX_TOKENS, num_splits), units, 8) <= limit + ITEM_COST + 8


@EXAMPLES
@given(lengths, splits, st.data())
def test_model_covers_other_lengths_than_planned(seqlens: list[int], num_splits: int, data: st.DataObject) -> None:
    """A stale schedule is slow, not wrong."""
    changed = data.draw(st.lists(st.integers(0, 40000), min_size=len(seqlens), max_size=len(seqlens)))
    assert_covered(
        points(seqlens, MAX_TOKENS, num_splits), changed, MAX_TOKENS
    )  # pieces beyond a shorter request's end are empty


@pytest.mark.parametrize(
    ("b", "tokens", "num_splits", "merge_cost", "longest", "cut_requests"),
    [
        (128, 4096, 66, 8, 2 * 64, 0),  # the batch fills the GPU: whole requests
        (128, 4096, 33, 8, 4 * 64, 0),
        (64, 16384, 66, 8, 256, 0),
        (128, 8192, 132, 2, 128, 0),
        (32, 8192, 132, 2, 32, 32),  # a piece per split
        (16, 8192, 66, 8, 32, 16),
        (4, 8192, 66, 8, 8, 4),
        (1, 8192, 66, 8, 2, 1),
        (1, 1024, 132, 2, 1, 1),  # one piece per tile
        (1, 131072, 66, 8, 32, 1),
    ],
)
def test_equal_lengths(b: int, tokens: int, num_splits: int, merge_cost: int, longest: int, cut_requests: int) -> None:
    cuts = points([tokens] * b, MAX_TOKENS, num_splits, merge_cost)
    work = assert_covered(cuts, [tokens] * b, MAX_TOKENS)
    assert max(sum(item.end - item.begin for item in split) for split in work) == longest
    assert len(split_requests(cuts)) == cut_requests
    assert all(len(split) <= 1 for split in work) or not cut_requests


@pytest.mark.parametrize(("num_splits", "longest", "cut_queries"), [(132, 1092, 96), (66, 2178, 48)])
def test_many_selections_are_cut_evenly(num_splits: int, longest: int, cut_queries: int) -> None:
    """4,096 queries of 32 tiles, 64 and 128 heads: whole ones would make the longest split 2.6 or 1.2 % longer."""
    cuts, even = points([32 * TILE_TOKENS] * 4096, 32 * TILE_TOKENS, num_splits), 4096 * (32 + ITEM_COST) / num_splits
    assert makespan(cuts, [32] * 4096, 0) == longest < even + 2 * ITEM_COST + 3
    assert len(split_requests(cuts)) == cut_queries
    assert -(-4096 // num_splits) * (32 + ITEM_COST) > longest + heuristics.merge_cost(64)


# Sequences, tokens of each, splits, query rows of all heads, rows of a block; pieces, with the cost of a partial.
FEWER_PIECES = [
    (1, 4096, 132, 16, 16, 64),  # a tile each
    (1, 8192, 132, 16, 16, 64),  # 128 without
    (2, 8192, 132, 16, 16, 64),
    (4, 8192, 132, 16, 16, 76),
    (1, 32768, 132, 16, 16, 74),
    (1, 8192, 132, 64, 64, 64),
    (1, 8192, 66, 128, 64, 43),  # 64 without
    (1, 8192, 33, 128, 32, 32),
]
SAME_PIECES = [
    (8, 8192, 132, 16, 16),
    (32, 8192, 132, 16, 16),
    (128, 8192, 132, 16, 16),
    (1, 131072, 132, 16, 16),
    (8, 8192, 66, 128, 64),
    (4, 8192, 66, 128, 64),
    (1, 131072, 66, 128, 64),
    (1, 1024, 132, 16, 16),
    (8, 1024, 33, 128, 32),
]


def counted(b: int, tokens: int, num_splits: int, rows: int, block_rows: int) -> list[Point]:
    """The model's cuts of dense decode with `rows` query rows."""
    costs = heuristics.merge_cost(block_rows), heuristics.piece_cost(rows)
    return points([tokens] * b, MAX_TOKENS, num_splits, *costs)


@pytest.mark.parametrize(("b", "tokens", "num_splits", "rows", "block_rows", "pieces"), FEWER_PIECES)
def test_short_splits_make_fewer_partial_results(
    b: int, tokens: int, num_splits: int, rows: int, block_rows: int, pieces: int
) -> None:
    merged = split_requests(counted(b, tokens, num_splits, rows, block_rows))
    assert sum(map(len, merged.values())) == pieces


@pytest.mark.parametrize(("b", "tokens", "num_splits", "rows", "block_rows"), SAME_PIECES)
def test_long_splits_are_as_if_partial_results_cost_nothing(
    b: int, tokens: int, num_splits: int, rows: int, block_rows: int
) -> None:
    uncounted = points([tokens] * b, MAX_TOKENS, num_splits, heuristics.merge_cost(block_rows))
    assert counted(b, tokens, num_splits, rows, block_rows) == uncounted


# Tokens of one sequence, splits, query rows, rows of a block; pieces, tiles of the longest one.
LONE_REQUESTS = [
    (100000, 66, 128, 64, 63, 25),  # 66 of 24 would be merged in two rounds
    (66 * 62 * TILE_TOKENS, 66, 128, 64, 64, 64),
    (66 * 65 * TILE_TOKENS, 66, 128, 64, 66, 65),  # 68 tiles instead of 65 would not pay
    (131072, 66, 128, 64, 64, 32),
    (100000, 132, 64, 64, 121, 13),
    (100000, 132, 16, 16, 131, 12),  # one round merges all pieces of few rows
    (14000, 33, 128, 32, 32, 7),
]


@pytest.mark.parametrize(("tokens", "num_splits", "rows", "block_rows", "pieces", "longest"), LONE_REQUESTS)
def test_pieces_of_a_lone_request(
    tokens: int, num_splits: int, rows: int, block_rows: int, pieces: int, longest: int
) -> None:
    """Slightly longer pieces where one round merges them, in the model and in the kernel."""
    cuts = counted(1, tokens, num_splits, rows, block_rows)
    assert [len(found) for found in split_requests(cuts).values()] == [pieces]
    work = assert_covered(cuts, [tokens], MAX_TOKENS)
    assert max(item.end - item.begin for split in work for item in split) == longest
    costs, seqlens = (heuristics.merge_cost(block_rows), heuristics.piece_cost(rows)), np.array([tokens], np.int32)
    assert_points(simulated_points(seqlens, 1, MAX_TOKENS, num_splits, costs), seqlens, MAX_TOKENS, num_splits, costs)


def test_the_model_can_fail() -> None:
    cuts = points([5000, 5000], MAX_TOKENS, 4)
    assert_covered(cuts, [5000, 5000], MAX_TOKENS)
    for broken in ([*cuts[:2], (cuts[2][0], cuts[2][1] + 99), *cuts[3:]], [(1, 0), *cuts[1:]], [*cuts[:-1], (1, 2)]):
        with pytest.raises(AssertionError):
            assert_covered(broken, [5000, 5000], MAX_TOKENS)


# ---- The kernel ------------------------------------------------------------------------------------------------


def random_lengths(seed: int, sizes: Sequence[int]) -> np.ndarray:
    rng = np.random.default_rng(seed)
    b = int(rng.choice(sizes))
    seqlens = rng.integers(0, int(rng.choice([2, 70, 5000, 200000])), b)
    hostile = rng.random(b) < 0.1
    seqlens[hostile] = rng.choice([0, -1, INT_MIN, INT_MAX, MAX_TOKENS, MAX_TOKENS + 1], int(hostile.sum()))
    return seqlens.astype(np.int32)


def strided(seqlens: np.ndarray, stride: int) -> np.ndarray:
    wide = np.full(len(seqlens) * stride, 12345, np.int32)
    wide[::stride] = seqlens
    return wide


def prepared(
    gpu: DeviceInfo, b: int, stride: int, most: int, num_splits: int, costs: Sequence[int], stream: int
) -> Prepared:
    merge_cost, piece_cost = costs
    launch = schedule.launch("seqlens", stride, most, b, num_splits, merge_cost, piece_cost=piece_cost)
    return Prepared([launch], ("seqlens",), Layout({"schedule": schedule.nbytes(num_splits)}), gpu, stream)


def settings_of(seed: int) -> tuple[int, int, int, tuple[int, int]]:
    """Stride, longest possible request, splits, costs of a merge and of a piece."""
    num_splits = (1, 2, 7, 66, 132, MAX_SPLITS)[seed % 6]
    most = (MAX_TOKENS, INT_MAX, 100 * TILE_TOKENS + 1, 0)[seed % 4]
    piece_cost = 0 if seed % 2 else heuristics.piece_cost((16, 64, 128)[seed % 7 % 3])
    return 1 + seed % 3, most, num_splits, ((0, 2, 8)[seed % 5 % 3], piece_cost)


def simulated_points(seqlens: np.ndarray, stride: int, most: int, num_splits: int, costs: Sequence[int]) -> np.ndarray:
    cuts, wide = np.full((num_splits + 4, 2), -77, np.int32), strided(seqlens, stride)
    with simulated(132) as target:
        step = prepared(fake_gpu(132), len(seqlens), stride, most, num_splits, costs, 0)
        step.enqueue([0, target.memory.map(wide)], target.memory.map(cuts[1:]), 0)
    return cuts


def assert_points(found: np.ndarray, seqlens: np.ndarray, most: int, num_splits: int, costs: Sequence[int]) -> None:
    assert (found[0] == -77).all()
    assert (found[num_splits + 2 :] == -77).all()
    expected = [list(point) for point in points(seqlens.tolist(), most, num_splits, *costs)]
    assert found[1 : num_splits + 2].tolist() == expected


@pytest.mark.parametrize("seed", range(12))
def test_kernel_gives_the_models_points_in_the_simulator(seed: int) -> None:
    seqlens = random_lengths(seed, [1, 2, 3, 31, 32, 33, 100, 255, 256, 257, 1025, 1100])
    stride, most, num_splits, costs = settings_of(seed)
    found = simulated_points(seqlens, stride, most, num_splits, costs)
    assert_points(found, seqlens, most, num_splits, costs)


def short_batch(seed: int) -> tuple[np.ndarray, int, tuple[int, int]]:
    """Lengths of few short sequences, splits, costs of a merge and of a piece."""
    rng = np.random.default_rng(seed)
    num_splits, rows = ((132, 16), (132, 64), (66, 128), (MAX_SPLITS, 8))[seed % 4]
    b = int(rng.integers(1, 9 if seed % 3 else 33))
    seqlens = rng.integers(0, num_splits * TILE_TOKENS * 5 // b, b).astype(np.int32)
    return seqlens, num_splits, (heuristics.merge_cost(rows), heuristics.piece_cost(rows))


def test_short_batches_count_partials() -> None:
    """Most of them, and some are cut otherwise for it."""
    counted, changed = 0, 0
    for seed in range(8):
        seqlens, num_splits, (merge_cost, piece_cost) = short_batch(seed)
        units = [tiles_of(int(seqlen), MAX_TOKENS) for seqlen in seqlens]
        counted += counts_partials(units, num_splits, piece_cost)
        cuts = [points(seqlens.tolist(), MAX_TOKENS, num_splits, merge_cost, cost) for cost in (0, piece_cost)]
        changed += cuts[0] != cuts[1]
    assert counted >= 5
    assert changed >= 3


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", range(8))
def test_kernel_gives_the_models_points_for_short_batches(seed: int) -> None:
    seqlens, num_splits, costs = short_batch(seed)
    found = simulated_points(seqlens, 1, MAX_TOKENS, num_splits, costs)
    assert_points(found, seqlens, MAX_TOKENS, num_splits, costs)


@pytest.mark.parametrize(
    ("b", "tokens", "num_splits", "merge_cost"),
    [(128, 4096, 66, 8), (16, 8192, 66, 8), (4, 8192, 66, 8), (1, 131072, 132, 2), (66, 4096, 66, 8), (3, 0, 7, 2)],
)
def test_kernel_gives_the_models_points_for_equal_lengths(
    b: int, tokens: int, num_splits: int, merge_cost: int
) -> None:
    seqlens = np.full(b, tokens, np.int32)
    for costs in ((merge_cost, 0), (merge_cost, heuristics.piece_cost(16))):
        found = simulated_points(seqlens, 1, MAX_TOKENS, num_splits, costs)
        assert_points(found, seqlens, MAX_TOKENS, num_splits, costs)


@pytest.mark.parametrize(("b", "num_splits", "rows"), [(1, 132, 16), (4, 132, 16), (1, 132, 64), (8, 132, 16)])
def test_kernel_counts_partials(b: int, num_splits: int, rows: int) -> None:
    seqlens, costs = np.full(b, 8192, np.int32), (heuristics.merge_cost(rows), heuristics.piece_cost(rows))
    found = simulated_points(seqlens, 1, MAX_TOKENS, num_splits, costs)
    assert_points(found, seqlens, MAX_TOKENS, num_splits, costs)


@pytest.mark.parametrize(
    ("num_splits", "rows", "seqlens"),
    [  # here it counts that a whole request is no partial result, and that one in the middle of a split is one
        (132, 128, [704, 364, 906, 224, 356, 48, 838, 563, 421, 968, 627, 1017, 778, 618, 529, 213]),
        (132, 128, [62, 811, 757, 115, 638, 647, 231, 940, 824, 204, 543, 542, 922, 548, 814, 899, 99]),
    ],
)
def test_kernel_counts_partials_of_ragged_batches(num_splits: int, rows: int, seqlens: list[int]) -> None:
    costs, lengths = (heuristics.merge_cost(rows), heuristics.piece_cost(rows)), np.array(seqlens, np.int32)
    found = simulated_points(lengths, 1, MAX_TOKENS, num_splits, costs)
    assert_points(found, lengths, MAX_TOKENS, num_splits, costs)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(40))
def test_kernel_gives_the_models_points(gpu: DeviceInfo, seed: int) -> None:
    import cupy

    seqlens = random_lengths(seed, [1, 2, 3, 31, 32, 33, 100, 255, 256, 257, 1023, 1024, 1025, 2048, 5000])
    stride, most, num_splits, costs = settings_of(seed)
    cuts, wide = cupy.full((num_splits + 4, 2), -77, cupy.int32), cupy.asarray(strided(seqlens, stride))
    stream = cupy.cuda.get_current_stream().ptr
    step = prepared(gpu, len(seqlens), stride, most, num_splits, costs, stream)
    step.enqueue([0, wide.data.ptr], cuts[1:].data.ptr, stream)
    assert_points(cupy.asnumpy(cuts), seqlens, most, num_splits, costs)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(24))
def test_kernel_gives_the_models_points_for_short_batches_on_a_gpu(gpu: DeviceInfo, seed: int) -> None:
    import cupy

    seqlens, num_splits, costs = short_batch(seed)
    cuts, lengths = cupy.full((num_splits + 4, 2), -77, cupy.int32), cupy.asarray(seqlens)
    stream = cupy.cuda.get_current_stream().ptr
    step = prepared(gpu, len(seqlens), 1, MAX_TOKENS, num_splits, costs, stream)
    step.enqueue([0, lengths.data.ptr], cuts[1:].data.ptr, stream)
    assert_points(cupy.asnumpy(cuts), seqlens, MAX_TOKENS, num_splits, costs)


@pytest.mark.gpu
def test_combine_takes_as_many_splits_as_are_ever_made(gpu: DeviceInfo) -> None:
    facts = loader.obtain(combine.KERNEL.request(Variant(dtype="bfloat16"), gpu.arch)).facts
    assert facts["max_splits"] == MAX_SPLITS
    assert facts["tile_tokens"] == TILE_TOKENS


test_is_caught, test_as_it_is = mutant_suite(
    "attention_schedule",
    [
        partial(test_kernel_gives_the_models_points_for_short_batches, 1),
        partial(test_kernel_gives_the_models_points_in_the_simulator, 1),
        partial(test_kernel_gives_the_models_points_for_equal_lengths, 66, 4096, 66, 8),
    ],
    {
        "bar.sync": (15, [3, 7, 14]),
    },
)
