"""`prefill_segments`: sequences by the ids of packed tokens. The oracle by its docstring, the kernel by the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import mla_cupy
from mla_cupy import ArgumentError, DTypeError, ShapeError, reference
from tests.support.dense_cases import DenseCase, make
from tests.support.flat import flat
from tests.support.mutant_suite import mutant_suite
from tests.support.mutants import Mutant
from tests.support.recorder import Recorder
from tests.support.sim_driver import simulated
from tests.support.sim_modes import MODES

Array = npt.NDArray[Any]


def ids_of(names: Any, rng: np.random.Generator, count: int, longest: int) -> Array:
    """Runs of some of the names, in this order, with padding between."""
    parts = [np.zeros(rng.integers(0, 2), np.int32)]
    for name in names:
        if rng.random() < 0.7:
            parts += [np.full(rng.integers(1, longest + 1), name), np.full(rng.integers(0, 3), -rng.integers(0, 2))]
    ids = np.concatenate(parts).astype(np.int32)[:count]
    return np.pad(ids, (0, count - len(ids)))


def pairs(starts_q: Any, starts_kv: Any, s_q: int, s_kv: int) -> Array:
    """Pairs of queries and keys that attend, by the sequences."""
    seen = np.zeros((s_q, s_kv), bool)
    for n in range(len(starts_q) - 1):
        seen[starts_q[n] : starts_q[n + 1], starts_kv[n] : starts_kv[n + 1]] = True
    return seen


@pytest.mark.parametrize("of_keys", [False, True])
def test_the_oracle_by_its_docstring(of_keys: bool) -> None:
    """Equal ids attend to each other, and nobody else; starts ascend; padding and what is left have no partner."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        names = rng.permutation(np.arange(1, 30))[:6]
        ids_q, ids_kv = ids_of(names, rng, 15, 4), ids_of(names, rng, 12, 5)
        given = {"segment_ids_kv": ids_kv} if of_keys else {}
        ids_kv = ids_kv if of_keys else ids_q
        starts = reference.prefill_segments(ids_q, 7, **given)
        for one, size in zip(starts, (len(ids_q), len(ids_kv)), strict=True):
            assert (one.dtype, one.shape) == (np.int32, (22,))
            assert (np.diff(one, prepend=0, append=size) >= 0).all()
        wanted = (ids_q[:, None] == ids_kv) & (ids_q > 0)[:, None]
        np.testing.assert_array_equal(pairs(*starts, len(ids_q), len(ids_kv)), wanted)
    assert [x.tolist() for x in reference.prefill_segments([3, 3, 1], 1, segment_ids_kv=[3, 1])] == [
        [0, 0, 0, 2],
        [0, 0, 0, 1],
    ]


def run(ids_q: Array, most: int, ids_kv: Array | None = None, mode: tuple[str, int] = MODES[1]) -> None:
    """The kernel leaves the oracle's bits, in arrays with gaps that nobody touches."""
    spread = [np.full((3 * len(x), 2), 7, np.int32)[::3, 1] for x in (ids_q, () if ids_kv is None else ids_kv)]
    spread[0][:] = ids_q
    if ids_kv is not None:
        spread[1][:] = ids_kv
    given = {} if ids_kv is None else {"segment_ids_kv": spread[1]}
    room = [np.full((3 * most + 1, 2), 99, np.int32) for _ in range(2)]
    results = {"cu_seqlens_q": room[0][:, 0], "cu_seqlens_kv": room[1][:, 0]}
    with simulated(1, mode=mode[0], seed=mode[1]) as target:
        got = mla_cupy.prefill_segments(spread[0], most, **given, **results)
    assert target.launched == ["mla_dense_segments"]
    wanted = reference.prefill_segments(ids_q, most, segment_ids_kv=ids_kv)
    for x, expected, whole in zip(got, wanted, room, strict=True):
        np.testing.assert_array_equal(x, expected)
        assert (whole[:, 1] == 99).all()


def one_side() -> None:
    """Three tokens a thread, runs that end within one and between two, and two segments too many."""
    rng = np.random.default_rng(1)
    ids = np.repeat(rng.permutation(np.arange(1, 67)), rng.integers(9, 25, 66))
    run(np.pad(ids, (3, 5)).astype(np.int32), 64)  # its runs fill the workspace


def two_sides() -> None:
    """More segments than a warp has lanes; some on one side only."""
    rng = np.random.default_rng(2)
    names = rng.permutation(np.arange(1, 80))
    run(ids_of(names, rng, 180, 3), 70, ids_of(names, rng, 160, 3))


def hostile() -> None:
    """Ids that come again, in another order, and at the ends of the range."""
    run(
        np.array([5, 5, 1, 5, 2**31 - 1, 0, -(2**31), 1], np.int32),
        6,
        np.array([1, 2**31 - 1, 5, 0, 5, 1], np.int32),
    )


@pytest.mark.parametrize("case", [one_side, two_sides, hostile])
def test_kernel(case: Callable[[], None]) -> None:
    case()


@pytest.mark.parametrize("mode", MODES[:2], ids=str)
def test_small(mode: tuple[str, int]) -> None:
    none = np.zeros(0, np.int32)
    run(np.array([1, 1, 2], np.int32), 2, None, mode)
    run(np.array([0, 0], np.int32), 1, np.array([4], np.int32), mode)
    run(np.array([2, 2, 4], np.int32), 1, np.array([4], np.int32), mode)
    run(np.array([9, 4], np.int32), 2, np.array([4, 4], np.int32), mode)
    run(none, 2, np.array([4, 4], np.int32), mode)
    run(np.array([4, 4], np.int32), 2, none, mode)  # an empty array, and not the queries' ids


def test_attention_within_segments() -> None:
    """The starts in mla_prefill: as a call for each segment, with NaN in everything that is padding."""
    inputs = make(DenseCase(((8, 8),), h_q=2, h_kv=2, k_rope="within", starts=False))
    ids = np.array([0, 7, 7, 7, -1, 3, 3, 0], np.int32)
    q, k, v = (x.copy() for x in (inputs.q, inputs.k, inputs.v))
    for x in (q, k, v):
        x[ids <= 0] = np.nan
    with simulated(1):
        starts = flat(mla_cupy.prefill_segments)(ids, 3, check=True)
        out, lse = mla_cupy.mla_prefill(q, k, v, packed=mla_cupy.Packed(*starts))
    for name in (7, 3):
        own = ids == name
        exact = reference.mla_prefill(*(x[own].astype(np.float64) for x in (q, k, v)))
        np.testing.assert_allclose(out[own].astype(np.float64), exact[0], rtol=2e-2, atol=2e-2)
        np.testing.assert_allclose(lse[own], exact[1], rtol=1e-3, atol=1e-3)
    assert (out[ids <= 0] == 0).all()
    assert np.isneginf(lse[ids <= 0]).all()


IDS = np.array([1, 1, 2], np.int32)
WRONG: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "none": ((IDS, 0), {}, ArgumentError, "max_segments: got 0, expected an integer from 1 to 16384"),
    "flag": ((IDS, True), {}, ArgumentError, "max_segments: got True"),
    "many": ((IDS, 16385), {}, ArgumentError, "max_segments: got 16385"),
    "dtype": ((IDS.astype(np.int16), 2), {}, DTypeError, "segment_ids_q.dtype: got int16, expected int32"),
    "rows": ((IDS[None], 2), {}, ShapeError, "segment_ids_q.shape: got (1, 3), expected (s_q,)"),
    "result": ((IDS, 2), {"cu_seqlens_q": np.zeros(6, np.int32)}, ShapeError, "cu_seqlens_q"),
    "again": (
        (np.array([1, 2, 1], np.int32), 3),
        {"check": True},
        ArgumentError,
        "segment_ids_q[2]: got 1, expected an id that does not come again: it has begun at 0",
    ),
    "too many": ((IDS, 1), {"check": True}, ArgumentError, "segment_ids_q[2]: got 2, expected one of max_segments=1"),
    "order": (
        (IDS, 2),
        {"segment_ids_kv": np.array([2, 1], np.int32), "check": True},
        ArgumentError,
        "segment_ids_kv[0]: got 2, expected an id behind 1, as in segment_ids_q",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_refusals(wrong: str, recorder: Recorder) -> None:
    arguments, options, error, text = WRONG[wrong]
    with pytest.raises(error) as refused:
        flat(mla_cupy.prefill_segments)(*arguments, **options)
    assert text in str(refused.value)
    assert recorder.launches == []


# ---- Planted bugs --------------------------------------------------------------------------------------------------

SOURCE = "dense_segments"


TEXTS = [
    Mutant("keys may end behind the next", SOURCE, "max(before, run.begin)", "run.begin"),
]
test_is_caught, test_as_it_is = mutant_suite(
    "dense_segments",
    [two_sides, one_side, hostile],
    {"bar.sync": (7, [1, 6])},
    TEXTS,
)


# ---- On a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_on_a_gpu(gpu: object) -> None:
    """Long rows of ids, and a captured call that is replayed for others."""
    import cupy as cp

    rng = np.random.default_rng(3)
    names = rng.permutation(np.arange(1, 900))
    drawn = [(ids_of(names, rng, 50_000, 90), ids_of(names, rng, 70_000, 120)) for _ in range(3)]
    q, kv = (cp.asarray(x) for x in drawn[0])
    results = {name: cp.empty(3001, cp.int32) for name in ("cu_seqlens_q", "cu_seqlens_kv")}
    stream = cp.cuda.Stream(non_blocking=True)
    mla_cupy.prefill_segments(q, 1000, segment_ids_kv=kv, **results)
    cp.cuda.Device().synchronize()
    workspace = cp.empty(mla_cupy.workspace_bytes(mla_cupy.prefill_segments, q, 1000, segment_ids_kv=kv), cp.uint8)
    with stream:
        stream.begin_capture()
        mla_cupy.prefill_segments(q, 1000, segment_ids_kv=kv, workspace=workspace, **results)
        graph = stream.end_capture()
        for ids_q, ids_kv in drawn:
            q.set(ids_q, stream=stream)
            kv.set(ids_kv, stream=stream)
            graph.launch(stream)
            stream.synchronize()
            wanted = reference.prefill_segments(ids_q, 1000, segment_ids_kv=ids_kv)
            for got, expected in zip(results.values(), wanted, strict=True):
                np.testing.assert_array_equal(got.get(), expected)
