"""Operations that are made of others: their checks come before any work, and are about what the caller passed."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mla_cupy
from mla_cupy import ArgumentError, DTypeError, PrefixGroup, ShapeError
from mla_cupy.ops import COMPOSITE_OPERATIONS
from mla_cupy.ops.operation import Operation
from tests.operations.test_way import LAST, MAX_FILES, way_of
from tests.support.flat import cascade_decode, mla_decode, plan_cascade, plan_decode
from tests.support.operations import function_of, good_call
from tests.support.recorder import Recorder
from tests.support.sim_driver import simulated
from tests.support.workspace import aligned_bytes

Array = np.ndarray[Any, Any]
composites = pytest.mark.parametrize("operation", COMPOSITE_OPERATIONS.values(), ids=lambda operation: operation.name)


def selection(s_q: int = 4, s_kv: int = 6, dtype: Any = ml_dtypes.bfloat16) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((s_q, 1, 32)).astype(dtype), rng.standard_normal((s_kv, 32)).astype(dtype)
    return {"q": q, "k": k, "weights": np.ones((s_q, 1), np.float32)}


def cascade(**changes: Any) -> dict[str, Any]:
    """Two groups of two sequences; the first share a page of 4 tokens, the others one more."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((4, 1, 2, 576)).astype(ml_dtypes.bfloat16)
    cache = rng.standard_normal((6, 4, 576)).astype(ml_dtypes.bfloat16)
    table = np.array([[2, 0], [2, 1], [3, 4], [3, 5]], np.int32)
    groups = (PrefixGroup(0, 2, 1), PrefixGroup(2, 2, 1))
    call = {"q": q, "kv_cache": cache, "block_table": table, "seqlens": np.array([7, 6, 8, 7], np.int32)}
    return {**call, "groups": groups, **changes}


# ---- Selections -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"ke": np.full(3, 6, np.int32)}, ShapeError, r"ke\.shape\[0\]: got 3, expected s_q=4"),
        ({"ke": np.full(9, 6, np.int32)}, ShapeError, r"ke\.shape\[0\]: got 9, expected s_q=4"),
        ({"ks": np.zeros(5, np.int32)}, ShapeError, r"ks\.shape\[0\]: got 5, expected s_q=4"),
        ({"weights": np.ones((9, 1), np.float32)}, ShapeError, r"weights\.shape\[0\]: got 9, expected s_q=4"),
        ({"k_scale": np.ones(7, np.float32)}, ShapeError, r"k_scale\.shape\[0\]: got 7, expected s_kv=6"),
        ({"weights": np.ones((4, 1))}, DTypeError, "weights.dtype: got float64"),
        ({"logits": np.zeros((2, 6), ml_dtypes.bfloat16)}, DTypeError, "logits.dtype: got bfloat16, expected float32"),
        ({"logits": np.zeros((2, 6), np.float64)}, DTypeError, "logits.dtype: got float64"),
        ({"logits": np.zeros((2, 7), np.float32)}, ShapeError, r"logits\.shape\[-1\]: got 7, expected s_kv=6"),
        ({"logits": np.zeros((0, 6), np.float32)}, ShapeError, r"logits\.shape\[0\]: got rows=0, expected at least 1"),
        ({"logits": []}, DTypeError, "logits: got a list"),
        ({"indices": np.zeros((2, 4), np.int32).T}, ShapeError, r"indices\.strides\[-1\]"),
        ({"indices": "x"}, DTypeError, "indices: got a str"),
        ({"counts": np.zeros(4, np.int64)}, DTypeError, "counts.dtype: got int64"),
        ({"weights": None}, DTypeError, "weights: got None"),
        ({"ks": 3}, DTypeError, "ks: got an int"),
        ({"topk": 0}, ArgumentError, "topk: got 0"),
        ({"kernel": "fastest"}, ArgumentError, "kernel: got 'fastest', expected None, one of .*indexer_topk_select"),
        ({"kernel": {"top-k": None}}, ArgumentError, "kernel: got a stage 'top-k', expected one of logits, topk"),
        ({"kernel": {"topk": "indexer_logits_generic"}}, ArgumentError, r"kernel\['topk'\]: got 'indexer_logits_"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_a_selection_is_checked_as_a_whole(
    changes: dict[str, Any], error: type[Exception], match: str, place: str
) -> None:
    """Sizes in the message are the caller's, not a chunk's; nothing is written."""
    if place == "cupy":
        pytest.skip("has no more to say")
    indices, counts = np.full((4, 2), -7, np.int32), np.full(4, -7, np.int32)
    given = {"topk": 2, "logits": np.zeros((2, 6), np.float32), "indices": indices, "counts": counts}
    with pytest.raises(error, match=match):
        mla_cupy.indexer_select(**{**selection(), **given, **changes})
    assert (indices == -7).all()
    assert (counts == -7).all()


@pytest.mark.parametrize("name", ["q", "k", "weights", "logits"])
def test_results_of_a_selection_over_its_arrays(name: str, place: str) -> None:
    if place == "cupy":
        pytest.skip("has no more to say")
    call: dict[str, Any] = {**selection(s_kv=300), "logits": np.zeros((1, 300), np.float32)}
    memory = aligned_bytes(call[name].nbytes + 64)
    whole = memory[: call[name].nbytes].view(call[name].dtype).reshape(call[name].shape)
    whole[...] = call[name]
    call[name] = whole
    counts = memory[:16].view(np.int32)
    with pytest.raises(ShapeError, match=f"memory that overlaps {name}" if name != "logits" else "overlaps"):
        mla_cupy.indexer_select(**call, topk=2, counts=counts)


def test_the_buffer_of_a_selection_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    call = selection(s_kv=600)
    wanted = mla_cupy.indexer_select(**call, topk=20)
    got = mla_cupy.indexer_select(**call, topk=20, logits=np.zeros((3, 600), np.float32))
    for x, y in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    ("kernel", "generic"),
    [("indexer_topk_select", False), ({"logits": "indexer_logits_generic"}, True), ({"topk": None}, False)],
    ids=str,
)
def test_kernels_of_stages(kernel: Any, generic: bool, recorder: Recorder) -> None:
    """Again, too: a mapping does not stand in the way of a repeated call."""
    call = selection(dtype=np.uint8)
    for _ in range(2):
        recorder.launches.clear()
        mla_cupy.indexer_select(**call, topk=2, kernel=kernel)
        assert ("indexer_logits_generic" in recorder.entries) == generic
    way = way_of(lambda: mla_cupy.indexer_select(**call, topk=2, kernel=kernel))
    assert len(set(way)) <= MAX_FILES + isinstance(kernel, dict)


# ---- Shared prefixes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        (
            {"out": np.zeros((4, 1, 2, 512), np.float16)},
            DTypeError,
            "out.dtype: got float16, expected float32 or bfloat16, like q",
        ),
        ({"out_dtype": "float16"}, DTypeError, "out_dtype: got float16"),
        ({"out": []}, DTypeError, "out: got a list"),
        ({"groups": None}, ArgumentError, "groups: got None"),
        ({"groups": [(0, 2, "1")]}, ArgumentError, r"groups\[0\]: got"),
        ({"plan": "x"}, mla_cupy.PlanError, "plan: got 'x'"),
        ({"block_table": np.zeros(4, np.int32)}, ShapeError, r"block_table\.shape"),
        ({"seqlens": np.zeros(4, np.int16)}, DTypeError, "seqlens.dtype"),
        ({"kernel": {"suffix": None}}, ArgumentError, "one of prefix, rest, alone, merge"),
        ({"scale": -1}, ArgumentError, "scale: got -1"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_a_cascade_is_checked_as_a_whole(
    changes: dict[str, Any], error: type[Exception], match: str, place: str
) -> None:
    if place == "cupy":
        pytest.skip("has no more to say")
    lse = np.full((4, 2, 1), 7, np.float32)
    with pytest.raises(error, match=match):
        cascade_decode(**cascade(lse=lse, **changes))
    assert (lse == 7).all()


def test_the_result_of_a_cascade_within_its_cache(place: str) -> None:
    if place == "cupy":
        pytest.skip("has no more to say")
    call = cascade()
    memory = aligned_bytes(call["kv_cache"].nbytes)
    cache = memory.view(ml_dtypes.bfloat16).reshape(call["kv_cache"].shape)
    cache[...] = call["kv_cache"]
    out = memory[12 * 1152 :][: 4 * 2 * 512 * 2].view(ml_dtypes.bfloat16).reshape(4, 1, 2, 512)
    with pytest.raises(ShapeError, match="out: got memory that overlaps kv_cache"):
        cascade_decode(**{**call, "kv_cache": cache, "out": out})
    assert cache.tobytes() == call["kv_cache"].tobytes()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"block_table": np.array([[2, 0], [1, 1], [3, 4], [3, 5]], np.int32)},
            r"block_table\[1, 0\]: got 1, .* 2,",
        ),
        ({"seqlens": np.array([7, 6, 8, 3], np.int32)}, r"seqlens\[3\]: got 3, expected at least 4"),
        ({"seqlens": np.array([7, 6, 9, 7], np.int32)}, r"seqlens\[2\]: got 9, expected 0 to"),
    ],
    ids=["another page", "too short", "too long"],
)
@pytest.mark.parametrize("on_gpu", [True, False])
def test_groups_are_checked_on_request(
    changes: dict[str, Any], match: str, on_gpu: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if on_gpu:
        request.getfixturevalue("recorder")
    else:
        monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    cascade_decode(**cascade(), check=True)
    cascade_decode(**cascade(**changes))
    with pytest.raises(ArgumentError, match=match):
        cascade_decode(**cascade(**changes), check=True)


def test_queries_that_do_not_step_evenly_are_copied() -> None:
    """The first two of three sequences form a group; two tokens each, in memory for three."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((3, 3, 2, 576)).astype(ml_dtypes.bfloat16)
    table = np.array([[2, 0], [2, 1], [3, 4]], np.int32)
    call = cascade(q=q[:, :2], block_table=table, seqlens=np.array([7, 6, 8], np.int32), groups=[(0, 2, 1)])
    even = {**call, "q": np.ascontiguousarray(call["q"])}
    with simulated(2):
        got, wanted = cascade_decode(**call), cascade_decode(**even)
    for x, y in zip(got, wanted, strict=True):
        assert x.tobytes() == y.tobytes()


# ---- Repeated calls ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [1, 7])
def test_the_way_of_a_repeated_selection(chunks: int, recorder: Recorder) -> None:
    """However many chunks there are, it passes as few files as any operation, and checks nothing again."""
    call = selection(s_q=14, s_kv=64, dtype=np.uint8)
    results = {"indices": np.zeros((14, 2), np.int32), "counts": np.zeros(14, np.int32)}
    given = {**call, **results, "topk": 2, "logits": np.zeros((14 // chunks, 64), np.float32)}
    mla_cupy.indexer_select(**given)
    launched = len(recorder.launches)
    assert sum("topk" in entry for entry in recorder.entries) == chunks
    way = way_of(lambda: mla_cupy.indexer_select(**given))
    assert len(recorder.launches) == 2 * launched
    assert way[-1] == LAST
    assert len(set(way)) <= MAX_FILES, way
    assert not {"ops/schema.py", "ops/checks.py", "ops/indexer/logits.py", "ops/indexer/topk.py"} & set(way)


@composites
def test_one_workspace_serves_all_stages(operation: Operation, recorder: Recorder) -> None:
    call = good_call(operation)
    function = function_of(operation)
    nbytes = mla_cupy.workspace_bytes(function, **call)
    without = {name: x for name, x in call.items() if name != "logits"}
    assert mla_cupy.workspace_bytes(function, **without) >= nbytes
    function(**call, workspace=aligned_bytes(nbytes))
    assert recorder.allocations == []


def test_streams_of_stages(recorder: Recorder) -> None:
    for function, call in ((cascade_decode, cascade()), (mla_cupy.indexer_select, selection())):
        recorder.launches.clear()
        function(**call, stream=5)
        assert {launch.stream for launch in recorder.launches} == {5}


def test_plans_of_other_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of plan serves one operation, and says which."""
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    call = cascade()
    groups = call.pop("groups")
    shape: dict[str, Any] = {"s_q": 1, "h_q": 2, "max_pages": 2, "page_size": 4, "dtype": "bfloat16"}
    shared = plan_cascade(groups, b=4, **shape)
    dense = plan_decode(max_b=4, **shape)
    for plan in (shared, dense):
        plan.update(call["seqlens"])
    with pytest.raises(mla_cupy.PlanError, match=r"plan: got CascadePlan\(b=4, .*, expected a plan of mla_decode"):
        mla_decode(**call, plan=shared)
    with pytest.raises(mla_cupy.PlanError, match=r"plan: got DecodePlan\(.*, expected a plan of cascade_decode"):
        cascade_decode(**call, groups=groups, plan=dense)
    mla_decode(**call, plan=dense)
    cascade_decode(**call, groups=groups, plan=shared)
