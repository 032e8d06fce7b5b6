"""Every tile of work exactly once: proved for a model of the schedule; the kernel gives the model's points."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mla_cupy.launchers import decode_schedule, split_combine
from mla_cupy.launchers.decode_problem import MAX_PARTS
from mla_cupy.launchers.spec import Launch, Variant
from mla_cupy.runtime.device import DeviceInfo
from tests.ops.schedule_model import REQUEST_COST, TILE_TOKENS, WHOLE, Fragment, fragments, points, splits, tiles_of

MOST = 1 << 20
INT_MIN, INT_MAX = -(2**31), 2**31 - 1

lengths = st.lists(
    st.one_of(
        st.integers(0, 400),
        st.integers(0, 40000),
        st.sampled_from([0, 1, 63, 64, 65, -1, INT_MIN, INT_MAX, MOST, MOST + 1]),
    ),
    min_size=1,
    max_size=40,
)
parts = st.integers(1, MAX_PARTS)


def assert_covered(cuts: list[tuple[int, int]], seqlens: Sequence[int], most: int) -> list[list[Fragment]]:
    """Each tile once, each request's pieces in the slots that the combine kernel will read, no slot twice."""
    num_parts = len(cuts) - 1
    work = [fragments(cuts, part, seqlens, most) for part in range(num_parts)]
    by_request: dict[int, list[Fragment]] = {}
    for fragment in (fragment for part in work for fragment in part):
        by_request.setdefault(fragment.request, []).append(fragment)
    assert sorted(by_request) == list(range(len(seqlens)))
    merged = splits(cuts)
    for request, pieces in by_request.items():
        covered = [tile for piece in pieces for tile in range(piece.begin, piece.end)]
        assert covered == list(range(tiles_of(seqlens[request], most)))
        if request in merged:
            assert [piece.slot for piece in pieces] == merged[request]
        else:
            assert [piece.slot for piece in pieces] == [WHOLE]
    slots = [piece.slot for pieces in by_request.values() for piece in pieces if piece.slot != WHOLE]
    assert len(set(slots)) == len(slots)
    assert all(0 <= slot < 2 * num_parts for slot in slots)
    return work


@settings(max_examples=300, deadline=None)
@given(lengths, parts)
@example([0], 1)
@example([0] * 40, MAX_PARTS)  # less work than parts
@example([1], MAX_PARTS)
@example([MOST], MAX_PARTS)
@example([INT_MIN, INT_MAX, 64], 132)
def test_model_covers_every_tile_once(seqlens: list[int], num_parts: int) -> None:
    """Of the algorithm."""
    assert_covered(points(seqlens, MOST, num_parts), seqlens, MOST)


@settings(max_examples=200, deadline=None)
@given(lengths, parts)
def test_model_is_balanced(seqlens: list[int], num_parts: int) -> None:
    """Of the algorithm: no part has more tiles than an even share and what one request costs besides."""
    cuts = points(seqlens, MOST, num_parts)
    total = sum(tiles_of(seqlen, MOST) + REQUEST_COST for seqlen in seqlens)
    for part in range(num_parts):
        tiles = sum(piece.end - piece.begin for piece in fragments(cuts, part, seqlens, MOST))
        assert tiles <= -(-total // num_parts) + REQUEST_COST


@settings(max_examples=200, deadline=None)
@given(lengths, parts, st.data())
def test_model_covers_other_lengths_than_planned(seqlens: list[int], num_parts: int, data: st.DataObject) -> None:
    """Of the algorithm: a stale schedule is slow, not wrong."""
    changed = data.draw(st.lists(st.integers(0, 40000), min_size=len(seqlens), max_size=len(seqlens)))
    assert_covered(points(seqlens, MOST, num_parts), changed, MOST)  # pieces beyond a shorter request's end are empty


def test_the_model_can_fail() -> None:
    cuts = points([500, 500], MOST, 4)
    assert_covered(cuts, [500, 500], MOST)
    for broken in ([*cuts[:2], (cuts[2][0], cuts[2][1] + 99), *cuts[3:]], [(1, 0), *cuts[1:]], [*cuts[:-1], (1, 2)]):
        with pytest.raises(AssertionError):
            assert_covered(broken, [500, 500], MOST)


# ---- The kernel ------------------------------------------------------------------------------------------------


def kernel_points(gpu: DeviceInfo, seqlens: np.ndarray, most: int, num_parts: int, stride: int = 1) -> list[list[int]]:
    import cupy

    launch = Launch(decode_schedule.SPEC.request(Variant(), gpu.arch), gpu.ordinal)
    wide = np.full(len(seqlens) * stride, 12345, np.int32)
    wide[::stride] = seqlens
    device_lengths = cupy.asarray(wide)
    schedule = cupy.full((num_parts + 4, 2), -77, cupy.int32)
    stream = cupy.cuda.get_current_stream().ptr
    decode_schedule.launch(
        launch, device_lengths.data.ptr, stride, len(seqlens), most, schedule[1:].data.ptr, num_parts, stream
    )
    found = cupy.asnumpy(schedule)
    assert (found[0] == -77).all()
    assert (found[num_parts + 2 :] == -77).all()
    return found[1 : num_parts + 2].tolist()


def random_lengths(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    b = int(rng.choice([1, 2, 3, 31, 32, 33, 100, 1023, 1024, 1025, 2048, 5000]))
    seqlens = rng.integers(0, int(rng.choice([2, 70, 5000, 200000])), b)
    hostile = rng.random(b) < 0.1
    seqlens[hostile] = rng.choice([0, -1, INT_MIN, INT_MAX, MOST, MOST + 1], int(hostile.sum()))
    return seqlens.astype(np.int32)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(40))
def test_kernel_gives_the_models_points(gpu: DeviceInfo, seed: int) -> None:
    seqlens = random_lengths(seed)
    num_parts = (1, 2, 7, 66, 132, MAX_PARTS)[seed % 6]
    most = (MOST, INT_MAX, 100 * TILE_TOKENS + 1, 0)[seed % 4]
    expected = [list(point) for point in points(seqlens.tolist(), most, num_parts)]
    assert kernel_points(gpu, seqlens, most, num_parts, stride=1 + seed % 3) == expected


@pytest.mark.gpu
def test_combine_takes_as_many_parts_as_are_ever_made(gpu: DeviceInfo) -> None:
    from mla_cupy.launchers.spec import DtypeVariant
    from mla_cupy.runtime import kernels

    facts = kernels.obtain(split_combine.SPEC.request(DtypeVariant("bfloat16"), gpu.arch)).facts
    assert facts["max_parts"] == MAX_PARTS
    assert facts["tile_tokens"] == TILE_TOKENS
