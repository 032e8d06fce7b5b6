"""The driver calls of decode, argument by argument: the GPU's path, on a fake one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import KernelNotBuiltError, PlanError, ShapeError
from mla_cupy.kernels.attention.combine import needed_blocks
from mla_cupy.kernels.decode import DECODE
from mla_cupy.kernels.decode.problem import DecodeProblem
from mla_cupy.runtime import loader
from tests.support.calls import plan_of
from tests.support.cases import DecodeCase, DecodeInputs, make
from tests.support.flat import mla_decode
from tests.support.recorder import H200, Launched, Recorder, address, elements

CASE = DecodeCase(b=3, s_q=2, h_q=8, page_size=32, seqlens="ragged-1100")  # longer than clusters get
FAST = "decode_sm90_small"


def results(inputs: DecodeInputs, dtype: Any = None) -> tuple[Any, Any]:
    """Arrays for out and lse, with gaps."""
    b, s_q, h_q, _ = inputs.q.shape
    out = np.zeros((b, s_q, h_q, 520), dtype or inputs.q.dtype)[..., :512]
    return out, np.zeros((b, h_q, s_q + 1), np.float32)[..., :s_q]


def assert_record(launch: Launched, inputs: DecodeInputs, out: Any, lse: Any) -> None:
    p = launch.params
    q, cache, table, seqlens = inputs.arguments
    assert [p[name] for name in ("q", "kv", "block_table", "seqlens", "out", "lse")] == [
        address(x) for x in (q, cache, table, seqlens, out, lse)
    ]
    assert [p[f"q_stride_{axis}_elems"] for axis in "bsh"] == elements(q, 3)
    assert [p[f"kv_stride_{axis}_elems"] for axis in ("page", "token")] == elements(cache, 2)
    assert [p[f"table_stride_{axis}_elems"] for axis in ("b", "page")] == elements(table, 2)
    assert [p["seqlens_stride_elems"]] == elements(seqlens, 1)
    assert [p[f"out_stride_{axis}_elems"] for axis in "bsh"] == elements(out, 3)
    assert [p[f"lse_stride_{axis}_elems"] for axis in "bhs"] == elements(lse, 3)
    assert [p[name] for name in ("b", "s_q", "h_q")] == [*q.shape[:3]]
    assert [p[name] for name in ("num_pages", "page_size")] == [*cache.shape[:2]]
    assert p["max_pages"] == table.shape[1]


def test_a_call(recorder: Recorder) -> None:
    inputs = make(CASE)
    out, lse = results(inputs)
    mla_cupy.mla_decode(*inputs.arguments, out=out, lse=lse, scale=0.25, causal=False, empty_lse=5.0, stream=99)
    schedule, attend, combine = recorder.launches
    config = DECODE.configure(attend_problem(inputs), H200)
    space = DECODE.workspace(config)
    assert recorder.entries == ["attention_schedule", FAST, "attention_combine"]
    assert {launch.stream for launch in recorder.launches} == {99}
    assert attend.grid == (config.row_blocks, config.num_splits, 1)
    b, rows = CASE.b, CASE.s_q * CASE.h_q
    assert combine.grid == (needed_blocks(config.combine_blocks, b, rows, config.num_splits), 1, 1)
    assert schedule.grid == (1, 1, 1)
    for launch in (attend, combine):
        assert_record(launch, inputs, out, lse)
    p = attend.params
    assert (p["causal"], p["out_is_fp32"], p["num_splits"]) == (0, 0, config.num_splits)
    assert p["scale_log2"] == pytest.approx(0.25 / math.log(2), rel=1e-7)
    assert p["factor"] == pytest.approx(math.log(2), rel=1e-7)
    assert p["empty"] == 5.0
    assert p["partial_out"] - p["schedule"] == space.offsets["partial_out"]
    assert p["partial_lse"] - p["schedule"] == space.offsets["partial_lse"]
    s = schedule.params
    assert (s["seqlens"], s["schedule"]) == (address(inputs.seqlens), p["schedule"])
    assert (s["b"], s["num_splits"]) == (CASE.b, config.num_splits)
    assert s["max_tokens"] == inputs.block_table.shape[1] * CASE.page_size
    assert recorder.allocations == [(space.nbytes,)]  # results are given, so only the workspace


def attend_problem(inputs: DecodeInputs) -> Any:
    case = inputs.case
    return DecodeProblem(case.s_q, case.h_q, case.dtype)


@pytest.mark.parametrize(("lse_base", "factor"), [("e", math.log(2)), ("2", 1.0)])
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
def test_flags(recorder: Recorder, lse_base: str, factor: float, out_dtype: str) -> None:
    inputs = make(CASE)
    out, lse = mla_decode(*inputs.arguments, lse_base=lse_base, out_dtype=out_dtype)
    p = recorder.launches[1].params
    assert p["factor"] == pytest.approx(factor, rel=1e-7)
    assert p["out_is_fp32"] == (out_dtype == "float32")
    assert p["scale_log2"] == pytest.approx(576**-0.5 / math.log(2), rel=1e-7)
    assert (p["causal"], p["empty"]) == (1, -np.inf)
    assert (out.dtype.name, out.shape, lse.dtype.name) == (out_dtype, (3, 2, 8, 512), "float32")
    assert lse.shape == (3, 8, 2)


def test_tensor_maps_are_kept_by_cache(recorder: Recorder) -> None:
    first, second = make(CASE), make(CASE)
    for inputs in (first, second, first, second):
        mla_decode(*inputs.arguments)
    maps = [launch.more[0] for launch in recorder.launches if launch.entry.endswith(FAST)]
    assert len(recorder.maps) == 2
    assert maps[0] == maps[2]
    assert maps[1] == maps[3]
    assert maps[0] != maps[1]
    assert [spec.base for spec in recorder.maps] == [address(first.kv_cache), address(second.kv_cache)]


def test_nothing_is_launched_for_an_empty_batch(recorder: Recorder) -> None:
    inputs = make(DecodeCase(b=0, seqlens=0))
    out, lse = mla_decode(*inputs.arguments)
    assert (out.shape, lse.shape) == ((0, 1, 16, 512), (0, 16, 1))
    assert recorder.launches == []
    mla_cupy.merge_states(np.zeros((2, 0, 1, 16, 8), np.float32), np.zeros((2, 0, 16, 1), np.float32))
    assert recorder.launches == []


@pytest.mark.parametrize(
    "change",
    [
        lambda q, kv: (q[:, ::-1], kv),
        lambda q, kv: (np.broadcast_to(q[:1], q.shape), kv),
        lambda q, kv: (np.zeros(q.size + 1, q.dtype)[1:].reshape(q.shape), kv),
        lambda q, kv: (q, kv[::-1]),
        lambda q, kv: (q, np.zeros(kv.size + 4, kv.dtype)[4:].reshape(kv.shape)),
        lambda q, kv: (q, np.zeros((*kv.shape[:3], 577), kv.dtype)[..., :576]),
    ],
    ids=["q backwards", "q repeated", "q unaligned", "pages backwards", "cache unaligned", "cache rows odd"],
)
def test_what_tma_cannot_take_goes_to_the_generic_kernel(recorder: Recorder, change: Any) -> None:
    inputs = make(CASE)
    q, kv_cache = change(inputs.q, inputs.kv_cache)
    mla_decode(q, kv_cache, inputs.block_table, inputs.seqlens)
    assert recorder.entries[1] == "attention_generic"
    p = recorder.launches[1].params
    assert (p["q"], p["kv"]) == (address(q), address(kv_cache))
    assert [p[f"q_stride_{axis}_elems"] for axis in "bsh"] == elements(q, 3)
    assert [p[f"kv_stride_{axis}_elems"] for axis in ("page", "token")] == elements(kv_cache, 2)


def test_strides_of_axes_of_one_do_not_matter(recorder: Recorder) -> None:
    inputs = make(DecodeCase(b=1, s_q=1, h_q=8, seqlens=1100))
    q = np.lib.stride_tricks.as_strided(inputs.q, inputs.q.shape, (6, 0, *inputs.q.strides[2:]))
    mla_decode(q, *inputs.arguments[1:])
    assert recorder.entries[1] == FAST


# ---- Plans -----------------------------------------------------------------------------------------------------


def test_planned_call(recorder: Recorder) -> None:
    inputs = make(CASE)
    out, lse = results(inputs)
    plan = plan_of(inputs, max_b=7)
    plan.update(inputs.seqlens, stream=5)
    assert recorder.entries == ["attention_schedule"]
    assert recorder.launches[0].stream == 5
    assert recorder.launches[0].params["b"] == 3
    assert recorder.launches[0].params["schedule"] == plan.address
    recorder.launches.clear()
    for _ in range(3):
        got = mla_decode(*inputs.arguments, plan=plan, out=out, lse=lse, stream=5)
        assert got[0] is out
        assert got[1] is lse
    assert recorder.entries == [FAST, "attention_combine"] * 3  # never scheduled again
    assert recorder.allocations == []
    for launch in recorder.launches:
        assert_record(launch, inputs, out, lse)
        assert launch.params["schedule"] == plan.address
    assert len({(launch.entry, launch.params.tobytes(), *launch.more) for launch in recorder.launches}) == 2


def test_repeated_calls_follow_every_change(recorder: Recorder) -> None:
    """A call that looks like the last one is not checked again: what does change must arrive all the same."""
    inputs, other = make(CASE), make(CASE)
    out, lse = results(inputs)
    plan = plan_of(inputs)
    plan.update(inputs.seqlens)
    calls: list[tuple[dict[str, Any], dict[str, float]]] = [
        ({}, {}),
        ({"scale": 0.5}, {"scale_log2": 0.5 / math.log(2)}),
        ({"causal": False}, {"causal": 0}),
        ({"lse_base": "2"}, {"factor": 1.0}),
        ({"empty_lse": 3.0}, {"empty": 3.0}),
        ({"out_dtype": "float32"}, {"out_is_fp32": 1}),
        ({"stream": 12}, {}),
        ({"out": out}, {"out": address(out), "out_stride_h_elems": 520}),
        ({"lse": lse}, {"lse": address(lse)}),
    ]
    default = {"scale_log2": 576**-0.5 / math.log(2), "causal": 1, "factor": math.log(2), "out_is_fp32": 0}
    for options, expected in [*calls, *reversed(calls)]:
        for inputs_now in (inputs, other, inputs):
            recorder.launches.clear()
            mla_decode(*inputs_now.arguments, plan=plan, **options)
            assert recorder.entries == [FAST, "attention_combine"]
            for launch in recorder.launches:
                assert launch.stream == options.get("stream", 0)
                wanted = {**default, "q": address(inputs_now.q), "kv": address(inputs_now.kv_cache), **expected}
                assert {name: float(launch.params[name]) for name in wanted} == pytest.approx(wanted)
            base = recorder.maps[int.from_bytes(recorder.launches[0].more[0], "little") - 1].base
            assert base == address(inputs_now.kv_cache)


def test_repeated_calls_with_other_strides(recorder: Recorder) -> None:
    inputs = make(CASE)
    dense = [np.ascontiguousarray(x) for x in inputs.arguments]
    plan = plan_of(inputs)
    plan.update(inputs.seqlens)
    for q, kv_cache, table, seqlens in (inputs.arguments, dense, inputs.arguments):
        recorder.launches.clear()
        mla_decode(q, kv_cache, table, seqlens, plan=plan)
        p = recorder.launches[0].params
        assert p["q_stride_h_elems"] == q.strides[2] // 2
        assert p["kv_stride_page_elems"] == kv_cache.strides[0] // 2
        assert p["table_stride_b_elems"] == table.strides[0] // 4


def unaligned(x: Any) -> Any:
    """Equal shape and strides, one element past a multiple of 16 bytes."""
    whole = np.zeros(address_span(x) + 16, x.dtype)
    return np.lib.stride_tricks.as_strided(whole[1:], x.shape, x.strides)


def address_span(x: Any) -> int:
    return 1 + sum((n - 1) * stride // x.itemsize for n, stride in zip(x.shape, x.strides, strict=True))


@pytest.mark.parametrize(("name", "error"), [("q", PlanError), ("kv_cache", PlanError), ("out", ShapeError)])
def test_repeated_calls_still_need_aligned_addresses(recorder: Recorder, name: str, error: type[Exception]) -> None:
    """An address is all that differs from the good call before, and it decides whether TMA can take the array."""
    inputs = make(CASE)
    out, lse = results(inputs)
    names = ("q", "kv_cache", "block_table", "seqlens")
    call = {**dict(zip(names, inputs.arguments, strict=True)), "out": out, "lse": lse}
    plan = plan_of(inputs)
    plan.update(inputs.seqlens)
    mla_decode(**call, plan=plan)
    recorder.launches.clear()
    call[name] = unaligned(call[name])
    with pytest.raises(error, match="multiples of 16 bytes"):
        mla_decode(**call, plan=plan)
    assert recorder.launches == []


@pytest.mark.parametrize(
    "mistake",
    [
        {"scale": math.nan},
        {"scale": 0},
        {"lse_base": "10"},
        {"out_dtype": "float16"},
        {"kernel": "fastest"},
        {"stream": "mine"},
        {"lse": np.zeros((3, 2, 8), np.float32)},
        {"out": np.zeros((3, 2, 8, 512), np.float16)},
    ],
    ids=str,
)
def test_mistakes_after_a_good_call_are_found(recorder: Recorder, mistake: dict[str, Any]) -> None:
    inputs = make(CASE)
    plan = plan_of(inputs)
    plan.update(inputs.seqlens)
    mla_decode(*inputs.arguments, plan=plan)
    recorder.launches.clear()
    with pytest.raises(mla_cupy.MlaError):
        mla_decode(*inputs.arguments, plan=plan, **mistake)
    assert recorder.launches == []
    mla_decode(*inputs.arguments, plan=plan)
    assert len(recorder.launches) == 2


def test_smaller_batches_after_larger_ones(recorder: Recorder) -> None:
    inputs = make(CASE)
    plan = plan_of(inputs)
    for b in (3, 1, 2, 3):
        few = (inputs.q[:b], inputs.kv_cache, inputs.block_table[:b], inputs.seqlens[:b])
        plan.update(few[3])
        recorder.launches.clear()
        out, _ = mla_decode(*few, plan=plan)
        assert out.shape[0] == b
        assert {int(launch.params["b"]) for launch in recorder.launches} == {b}
    with pytest.raises(PlanError, match="update for b=3"):
        mla_decode(inputs.q[:2], inputs.kv_cache, inputs.block_table[:2], inputs.seqlens[:2], plan=plan)


def test_unloaded_kernel_in_a_capture(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """`loader.loaded` refuses; the call must let it before anything is allocated or launched."""

    def refuse(request: Any, device: int, stream: int) -> Any:
        raise KernelNotBuiltError("not loaded, being captured")

    monkeypatch.setattr(loader, "loaded", refuse)
    with pytest.raises(KernelNotBuiltError, match="being captured"):
        mla_decode(*make(CASE).arguments)
    assert recorder.launches == []
    assert recorder.allocations == []
