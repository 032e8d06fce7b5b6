"""The merge of partial results alone, on made-up ones, in the simulator: every number of pieces takes another way."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest

from mla_cupy.arrays import View
from mla_cupy.kernels.attention import combine
from mla_cupy.kernels.attention.split_schedule import MAX_SPLITS
from mla_cupy.kernels.decode import DECODE
from mla_cupy.kernels.decode.configs import InSplits
from mla_cupy.kernels.decode.finish import Merge
from mla_cupy.kernels.decode.problem import DecodeProblem
from mla_cupy.kernels.params import DecodeParams
from mla_cupy.kernels.pipeline import Call, Prepared
from mla_cupy.ops.decode import OPERATION
from mla_cupy.shapes import D_V
from tests.decode.schedule_model import Point, split_requests
from tests.support.mutant_suite import mutant_suite
from tests.support.mutants import Mutant
from tests.support.recorder import H200
from tests.support.sim_driver import fake_gpu, simulated

H_Q, S_Q = 2, 1


def cuts_of(pieces: list[int], num_splits: int) -> list[Point]:
    """A schedule with pieces[i] pieces of one tile for request i; the splits after them are empty."""
    cuts = [(request, tile) for request, count in enumerate(pieces) for tile in range(count)]
    return [*cuts, *[(len(pieces), 0)] * (num_splits + 1 - len(cuts))]


def contiguous(shape: tuple[int, ...], dtype: str) -> View:
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return View(0, shape, strides, dtype, 0)


def merged(
    cuts: list[Point],
    b: int,
    lse: np.ndarray,
    out: np.ndarray,
    dtype: str,
    blocks: int,
    mode: tuple[str, int] = ("early", 0),
) -> tuple[Any, Any]:
    """The kernel's result for partial results (2 num_splits, rows) and (2 num_splits, rows, 512)."""
    num_splits, rows = len(cuts) - 1, H_Q * S_Q
    problem = DecodeProblem(S_Q, H_Q, "bfloat16")
    kernel = next(kernel for kernel in reversed(DECODE.kernels) if kernel.params is DecodeParams)
    config = InSplits(problem, kernel, kernel.variants[0], 1, num_splits, blocks, Merge())
    shapes = {
        "q": ((b, S_Q, H_Q, 576), "bfloat16"),
        "kv_cache": ((1, 64, 576), "bfloat16"),
        "block_table": ((b, 1), "int32"),
        "seqlens": ((b,), "int32"),
        "out": ((b, S_Q, H_Q, D_V), dtype),
        "lse": ((b, H_Q, S_Q), "float32"),
    }
    call = Call(
        {name: contiguous(*form) for name, form in shapes.items()},
        OPERATION.options_of(scale=1.0, lse_base="2", empty_lse=7.0),
        True,
    )
    step = DECODE.steps(config, call)[-1]
    assert step.kernel is combine.KERNEL
    layout = DECODE.workspace(config)
    workspace = np.full(layout.nbytes + 256, 0xFF, np.uint8)
    workspace = workspace[-workspace.ctypes.data % 256 :][: layout.nbytes]
    values = {
        "schedule": np.array(cuts, np.int32),
        "partial_lse": lse.astype(np.float32),
        "partial_out": out.astype(np.float32),
    }
    for name, value in values.items():
        part = value.reshape(-1).view(np.uint8)
        workspace[layout.offsets[name] :][: part.size] = part
    result = np.full((b, S_Q, H_Q, D_V), 9, "f4" if dtype == "float32" else "u2")
    result_lse = np.full((b, H_Q, S_Q), np.nan, np.float32)
    with simulated(2, mode=mode[0], seed=mode[1]) as target:
        address = target.memory.map
        prepared = Prepared([step], tuple(shapes), layout, fake_gpu(2), 0)
        prepared.enqueue([0, 0, 0, 0, 0, address(result), address(result_lse)], address(workspace), 0)
    assert rows == lse.shape[1]
    return result, result_lse


def expected(lse: np.ndarray, out: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The merge of pieces (n, rows), (n, rows, 512) in float64."""
    top = np.where(np.isinf(lse.max(0)), 0, lse.max(0))
    weights = np.exp2(lse - top)
    total = weights.sum(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = np.where(total[:, None] > 0, (weights[..., None] * out).sum(0) / total[:, None], 0)
        return mean, np.where(total > 0, top + np.log2(total), 7.0)


def check_merge(
    pieces: list[int], num_splits: int, dtype: str, blocks: int = 3, mode: tuple[str, int] = ("early", 0)
) -> None:
    """Random partial results of a batch, merged, against the mean in float64."""
    check_cuts(cuts_of(pieces, num_splits), len(pieces), dtype, blocks, mode)


def check_cuts(cuts: list[Point], b: int, dtype: str, blocks: int, mode: tuple[str, int]) -> None:
    """Check any schedule with a cut first request."""
    num_splits = len(cuts) - 1
    rng = np.random.default_rng(num_splits)
    lse = rng.normal(0, 4, (2 * num_splits, H_Q))
    out = rng.standard_normal((2 * num_splits, H_Q, D_V)).astype(np.float32).astype(float)
    lse[num_splits, 0] = -np.inf  # the first piece of the first request sees nothing, its last head nothing at all
    out[num_splits, 0] = 0
    splits = split_requests(cuts)
    for index in splits.get(0, []):
        lse[index, -1], out[index, -1] = -np.inf, 0
    result, result_lse = merged(cuts, b, lse, out, dtype, blocks, mode)
    for request in range(b):
        if request not in splits:
            assert np.isnan(result_lse[request]).all()  # not the merge's business
            continue
        mean, total = expected(lse[splits[request]], out[splits[request]])
        found = result[request, 0]
        if dtype == "bfloat16":
            found = (found.astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_allclose(found, mean, rtol=2**-8 if dtype == "bfloat16" else 1e-5, atol=1e-5)
        np.testing.assert_allclose(result_lse[request, :, 0], total, rtol=1e-5, atol=1e-5)


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("pieces", "num_splits"),
    [
        ([2, 1, 3, 4], 10),
        ([5, 1, 2], 9),
        ([8, 16], 25),
        ([17, 3], 20),
        ([33], 40),
        ([64, 65], 132),
        ([129, 2, 1], 132),
        ([MAX_SPLITS], MAX_SPLITS),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pieces_are_merged(pieces: list[int], num_splits: int, dtype: str) -> None:
    check_merge(pieces, num_splits, dtype)


#: Pieces of each request, and splits without any: what is merged without a list.
EVEN = [(2, 0), (3, 1), (4, 0), (8, 1), (9, 0), (17, 0), (64, 4), (84, 0)]


@pytest.mark.one_in(8)
@pytest.mark.parametrize(("pieces", "empty"), EVEN, ids=str)
def test_equal_pieces_have_the_bits_of_the_list(pieces: int, empty: int) -> None:
    """Beside a request that is cut otherwise a list of all is made; `empty` splits follow the last piece."""
    rng = np.random.default_rng(pieces)
    lse, out = rng.normal(0, 4, (2, pieces, H_Q)), rng.standard_normal((2, pieces, H_Q, D_V))
    lse[1, 0] = -np.inf
    found = []
    for more in ([], [pieces + 1]):
        counts = [pieces, pieces, *more]
        num_splits = sum(counts) + empty
        cuts = cuts_of(counts, num_splits)
        all_lse, all_out = np.full((2 * num_splits, H_Q), np.nan), np.full((2 * num_splits, H_Q, D_V), np.nan)
        for request, indices in list(split_requests(cuts).items())[:2]:
            all_lse[indices], all_out[indices] = lse[request], out[request]
        result, result_lse = merged(cuts, len(counts), all_lse, all_out, "float32", blocks=1)
        found.append((result[:2], result_lse[:2]))
    for even, listed in zip(*found, strict=True):
        np.testing.assert_array_equal(even, listed)
    for request in range(2):
        mean, total = expected(lse[request], out[request])
        np.testing.assert_allclose(found[0][0][request, 0].view(np.float32), mean, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(found[0][1][request, :, 0], total, rtol=1e-5, atol=1e-5)


#: Two splits begin in each of two requests, but the second one holds a piece of both.
NEARLY_EVEN = [(0, 0), (0, 1), (1, 1), (1, 2), (2, 0)]


#: The most splits hold two pieces of each of 128 requests, the last one two whole requests as well.
CUT_AND_WHOLE = [*[(request, tile) for request in range(128) for tile in range(2)], (130, 0)]


def test_a_schedule_that_is_nearly_even_is_listed() -> None:
    """A nearly even schedule has the same number of splits as two equal requests."""
    check_merge([5, 3], 8, "float32")
    check_merge([3, 5], 8, "float32")
    check_cuts(NEARLY_EVEN, 2, "float32", 1, ("early", 0))


MODES = (("late", 0), ("early", 0), ("random", 1), ("random", 2), ("random", 3))
#: Several units per team, of every shape.
PIECES, NUM_SPLITS = [3, 20, 2, 7, 12], 46


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_in_every_order(mode: tuple[str, int]) -> None:
    check_merge(PIECES, NUM_SPLITS, "float32", 2, mode)


def check_even(mode: tuple[str, int]) -> None:
    """Two groups with a piece to spare, several rows of one unit, and a schedule that is nearly even."""
    for pieces in ([11, 11, 11], [3, 3], [2, 2], [1, 1]):
        check_merge(pieces, sum(pieces), "float32", 1, mode)
    check_cuts(NEARLY_EVEN, 2, "float32", 1, mode)
    check_cuts(CUT_AND_WHOLE, 130, "float32", 8, mode)


def test_a_merge_does_not_depend_on_other_requests() -> None:
    """Same pieces, same bits, wherever they are in the batch."""
    rng = np.random.default_rng(0)
    count = 20
    lse, out = rng.normal(0, 4, (count, H_Q)), rng.standard_normal((count, H_Q, D_V))
    found = []
    for pieces in ([count], [3, 1, count, 18], [count, 6]):
        num_splits, request = sum(pieces) + 2, pieces.index(count)
        cuts = cuts_of(pieces, num_splits)
        all_lse, all_out = rng.normal(0, 4, (2 * num_splits, H_Q)), rng.standard_normal((2 * num_splits, H_Q, D_V))
        indices = split_requests(cuts)[request]
        all_lse[indices], all_out[indices] = lse, out
        result, result_lse = merged(cuts, len(pieces), all_lse, all_out, "float32", blocks=len(pieces))
        found.append((result[request].tobytes(), result_lse[request].tobytes()))
    assert found[0] == found[1] == found[2]


def units(pieces: int) -> int:
    """Units of a row: a thread reads at most 8 pieces."""
    return 1 << max(0, math.ceil(math.log2(pieces / 8)))


@pytest.mark.parametrize(
    ("b", "rows", "num_splits"), [(1, 16, 132), (1, 128, 66), (4, 128, 66), (128, 128, 66), (1, 1, 2)]
)
def test_blocks_for_all_units_of_work_that_there_may_be(b: int, rows: int, num_splits: int) -> None:
    blocks = combine.needed_blocks(10**9, b, rows, num_splits)
    for count in range(1, min(b, num_splits // 2) + 1):
        each = max(2, num_splits // count)
        assert 2 * blocks >= rows * count * units(each)
    assert combine.needed_blocks(5, b, rows, num_splits) == min(5, blocks)


def test_one_split_needs_no_merge() -> None:
    assert combine.blocks(1, H200) == 0


test_is_caught, test_as_it_is = mutant_suite(
    combine.KERNEL.name,
    [*(partial(check_merge, PIECES, NUM_SPLITS, "float32", 2, mode) for mode in MODES), partial(check_even, MODES[0])],
    {
        "bar.sync": (7, [0, 3, 5, 6]),
    },
    [
        Mutant("absent pieces read", "attention/merge_partials.cuh", "present ? index", "true ? index"),
        Mutant("another request's pieces", "attention/combine.cu", "request * even, even,", "request, even,"),
    ],
)
