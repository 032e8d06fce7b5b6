"""The flow of one case on the NumPy device: what is checked, what is timed, what the rows say."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

import mla_cupy
from bench.core import report
from bench.core.implementation import Choices, make
from bench.core.runner import Options, run_case
from bench.core.tolerance import spaced
from bench.operations import OPERATIONS
from bench.ops.decode import DecodeOutputs, expect, judge, make_inputs
from bench.ops.decode_cases import DecodeCase
from bench.ops.sparse_decode import SPARSE_DECODE
from tests.bench.small import SMALL
from tests.support.flat import flat, flat_plan

DECODE = OPERATIONS["decode"]

CASE = DecodeCase(b=3, s_q=2, h_q=3, s_kv=100, page_size=16)


@pytest.fixture
def options(limits):
    return Options("bfloat16", replays=20, check=True, limits=limits, env={"gpu": "host"}, repro="bench")


class WallClock:
    def start(self):
        self.begin = time.perf_counter()

    def stop_us(self):
        return (time.perf_counter() - self.begin) * 1e6


def run(device, options, *implementations):
    rows = run_case(DECODE, CASE, implementations, device, options)
    for row in rows:
        report.validate(row)
    return {row["implementation"]: row for row in rows}


def test_times_and_ratios(device, options, fake):
    ours, peer = fake("mla_cupy", 10.0), fake("flashmla", 8.0)
    slow = fake("cupy", 1.0)
    rows = run(device, options, ours, peer, slow)
    row = rows["mla_cupy"]
    assert row["status"] == "ok"
    assert row["timing"]["us_median"] == pytest.approx(10.0)
    assert row["timing"]["spread"] == pytest.approx(0.0)
    assert row["timing"]["replays"] >= 20
    assert row["figures_us"]["plan_update"] == pytest.approx(2.5)
    assert row["speed_vs"] == pytest.approx({"flashmla": 0.8, "cupy": 0.1})
    assert row["speed_vs_best_peer"] == pytest.approx(0.8), "a baseline is not a peer while a peer is there"
    assert rows["flashmla"]["speed_vs_best_peer"] == pytest.approx(1.0)
    assert row["tflops"] == pytest.approx(row["flops"] / 10.0 / 1e6)
    assert row["share_roofline"] == pytest.approx(max(row["share_gemm"], row["share_copy"]))
    assert row["check"]["ok"]
    assert set(row["host_us"]) == {"call", "repeated_call", "empty_launch", "plan_update"}
    assert row["workspace_bytes"] == 5000
    assert (row["l2_bytes"], row["l2_tbps"]) == (None, None)


def test_single_calls_are_timed_where_an_operation_wants_them(device, options, fake):
    """Each between two looks at the clock; a replay of several calls is none."""
    operation = replace(DECODE, single_calls=True)
    rows = run_case(operation, CASE, [fake("mla_cupy", 10.0), fake("flashmla", 8.0)], device, options)
    assert [row["figures_us"]["single_call"] for row in rows] == pytest.approx([10.0, 8.0])
    assert [row["timing"]["us_median"] for row in rows] == pytest.approx([10.0, 8.0])


def test_batch_invariant_plans_are_asked_for(device, numpy_backend, monkeypatch):
    asked, plan_decode = [], mla_cupy.plan_decode

    def noted(**options):
        asked.append({name: options.get(name) for name in ("batch_invariant", "split_tokens")})
        return flat_plan(plan_decode)(**options)

    monkeypatch.setattr(mla_cupy, "plan_decode", noted)
    sets = [make_inputs(CASE, "bfloat16", seed, device) for seed in range(2)]
    for implementation in make(["batch_invariant", "batch_invariant_512"], DECODE.implementations(Choices())):
        implementation.prepare(CASE, "bfloat16", sets, device)
    usual = {"batch_invariant": None, "split_tokens": None}
    assert asked == [usual, *({"batch_invariant": True, "split_tokens": split} for split in (4096, 512))]


def test_batch_invariant_sparse_calls_are_asked_for(device, numpy_backend, monkeypatch):
    asked = []
    monkeypatch.setattr(mla_cupy, "sparse_mla_decode", lambda *arrays, **options: asked.append(options))
    case = SPARSE_DECODE.case_of("1", "1", "16", "64", None, None, "1024")
    sets = [SPARSE_DECODE.inputs(case, "bfloat16", 0, device)]
    for implementation in make(["batch_invariant", "batch_invariant_256"], SPARSE_DECODE.implementations(Choices())):
        for call in implementation.prepare(case, "bfloat16", sets, device).calls:
            call()
    assert [options.get("split_tokens") for options in asked] == [None, 4096, 256]
    assert [options.get("batch_invariant") for options in asked] == [None, True, True]


def test_a_chain_of_drafts_as_a_tree_is_the_causal_mask(device, numpy_backend, monkeypatch):
    masks, mla_decode = [], mla_cupy.mla_decode

    def noted(*arrays, **options):
        masks.append(options.get("tree_mask"))
        return flat(mla_decode)(*arrays, **options)

    monkeypatch.setattr(mla_cupy, "mla_decode", noted)
    sets, found = [make_inputs(CASE, "bfloat16", 0, device)], []
    for implementation in make(["mla_cupy", "tree_mask"], DECODE.implementations(Choices())):
        prepared = implementation.prepare(CASE, "bfloat16", sets, device)
        prepared.calls[0]()
        found.append(prepared.outputs(0))
    assert masks[0] is None
    assert masks[1].tolist() == [[0b01, 0b11]] * CASE.b
    assert np.array_equal(found[0].out, found[1].out)
    assert np.array_equal(found[0].lse, found[1].lse)


@pytest.fixture
def briefly(options, monkeypatch):
    """Options of few replays, with no warm-up and with host times by a scripted clock; and what that was asked."""
    asked = []

    def scripted(calls, synchronize, *, per_batch=20):
        asked.append((len(calls), per_batch))
        for call in calls:
            call()
        return 10.0 * len(asked)

    monkeypatch.setattr("bench.core.runner.host_us", scripted)
    monkeypatch.setattr("bench.core.runner.WARMUP", 0)
    return replace(options, replays=1), asked


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=lambda operation: operation.name)
def test_host_times_of_every_operation(device, briefly, numpy_backend, operation):
    """A repeated call is one with the same arrays; the empty launch is measured beside it."""
    options, asked = briefly
    case = operation.parse(SMALL[operation.name][0])
    device.watch = WallClock()
    (row,) = run_case(operation, case, make([], operation.implementations(Choices())), device, options)
    assert row["status"] == "ok", row["reason"]
    sets = row["timing"]["sets"]
    assert sets > 1
    assert [row["host_us"][key] for key in ("call", "repeated_call", "empty_launch")] == [10.0, 20.0, 30.0]
    assert [count for count, _ in asked[:3]] == [sets, 1, 1]
    assert all(4 <= per_batch <= 20 for _, per_batch in asked), "far below the depth of the launch queue"
    assert device.empty_launches == 1


def test_load_before_compute_bound_cases_only(device, options, fake, monkeypatch):
    monkeypatch.setattr("bench.core.runner.LOAD_US", 5000.0)
    took = []
    for compute_bound in (0.0, 1e9):
        monkeypatch.setattr("bench.core.runner.COMPUTE_BOUND", compute_bound)
        began = device.clock().now_us
        run(device, options, fake("mla_cupy", 100.0))
        took.append(device.clock().now_us - began)
    assert took[0] - took[1] == pytest.approx(5000, abs=1000)


def test_without_peers_the_fastest_baseline_counts(device, options, fake):
    ours, slow = fake("mla_cupy", 10.0), fake("generic", 40.0)
    assert run(device, options, ours, slow)["mla_cupy"]["speed_vs_best_peer"] == pytest.approx(4.0)


def _wrong_value(calls, result):
    result.out[2, 1, 2, 7] += 1.0  # the last sequence, the last head


def _wrong_lse(calls, result):
    result.lse[0, 0, 0] += 0.1


def _nan_outside_the_sample(calls, result):
    assert 1 in spaced(3)
    result.out[1, 0, 2, 5] = np.nan


@pytest.mark.parametrize("spoil", [_wrong_value, _wrong_lse, _nan_outside_the_sample])
def test_a_wrong_result_is_said_and_not_timed(device, options, fake, spoil):
    wrong, right = fake("mla_cupy", 1.0, spoil=spoil), fake("flashmla", 8.0)
    rows = run(device, options, wrong, right)
    row = rows["mla_cupy"]
    assert row["status"] == "wrong"
    assert row["reason"]
    assert row["timing"] is None
    assert row["tflops"] is None
    assert not row["host_us"]
    assert rows["flashmla"]["status"] == "ok"
    assert rows["flashmla"]["speed_vs"] == {}, "a wrong result is nothing to be compared with"


def test_a_result_that_turns_wrong_in_the_replays_is_caught(device, options, fake):
    def later(calls, result):
        if calls > 30:
            result.out[...] = 0

    row = run(device, options, fake("mla_cupy", 1.0, spoil=later))["mla_cupy"]
    assert row["status"] == "wrong"
    assert row["timing"] is None


def test_a_replay_that_writes_nothing_is_caught(device, options, fake):
    implementation = fake("mla_cupy", 1.0)
    prepare = implementation.prepare

    class Idle:
        method = "idle"
        current = staticmethod(device.current)

        def record(self, calls):
            return lambda: None

    def lazy(*args):
        prepared = prepare(*args)
        return replace(prepared, recorder=Idle())

    implementation.prepare = lazy
    row = run(device, options, implementation)["mla_cupy"]
    assert row["status"] == "wrong"
    assert "never written" in row["reason"]


def test_one_that_throws_or_refuses_stops_no_other(device, options, fake):
    def explode(calls, result):
        raise RuntimeError("illegal address")

    rows = run(
        device,
        options,
        fake("generic", 1.0, spoil=explode),
        fake("fa3", 1.0, refuse="no such shape"),
        fake("mla_cupy", 2.0),
    )
    assert rows["generic"]["status"] == "error"
    assert "illegal address" in rows["generic"]["reason"]
    assert (rows["fa3"]["status"], rows["fa3"]["reason"]) == ("unsupported", "no such shape")
    assert rows["mla_cupy"]["status"] == "ok"


def test_a_further_figure_that_throws_leaves_the_row(device, options, fake):
    implementation = fake("mla_cupy", 3.0)
    prepare = implementation.prepare

    def broken(*args):
        def boom():
            raise RuntimeError("not capturable")

        return replace(prepare(*args), figures={"no_plan": [boom] * 100})

    implementation.prepare = broken
    row = run(device, options, implementation)["mla_cupy"]
    assert row["status"] == "ok"
    assert row["timing"]["us_median"] == pytest.approx(3.0)
    assert "not capturable" in row["reason"]
    assert row["figures_us"] == {}


def test_a_workspace_that_cannot_be_measured_leaves_the_row(device, options, fake):
    implementation = fake("mla_cupy", 3.0)
    prepare = implementation.prepare

    def no_memory():
        raise MemoryError("1 TB")

    implementation.prepare = lambda *arguments: replace(prepare(*arguments), workspace_bytes=no_memory)
    row = run(device, options, implementation)["mla_cupy"]
    assert (row["status"], row["workspace_bytes"]) == ("ok", None)
    assert "workspace: MemoryError: 1 TB" in row["reason"]


def test_a_case_without_inputs_is_an_error_of_every_row(device, options, fake):
    def too_large(*args):
        raise MemoryError("1 TB")

    device.normal = too_large
    rows = run(device, options, fake("mla_cupy", 1.0), fake("generic", 1.0))
    assert {row["status"] for row in rows.values()} == {"error"}
    assert all("1 TB" in row["reason"] for row in rows.values())


def test_unchecked_rows_say_so(device, options, fake):
    options = Options("bfloat16", 20, False, options.limits, {}, "")
    row = run(device, options, fake("mla_cupy", 2.0, spoil=_wrong_value))["mla_cupy"]
    assert row["status"] == "ok"
    assert row["check"] is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_tolerance_lets_rounding_pass_and_little_more(device, dtype):
    inputs = make_inputs(CASE, dtype, 5, device)
    expected = expect(CASE, dtype, inputs, device)
    assert {(e.batch, head) for e in expected for head in e.heads} == {(b, h) for b in range(3) for h in range(3)}

    out = device.empty((3, 2, 3, 512), dtype)
    lse = device.empty((3, 3, 2), "float32")
    for e in expected:
        out[e.batch][:, e.heads] = e.out
        lse[e.batch, e.heads] = e.lse
    verdict = judge(expected, DecodeOutputs(out, lse), dtype, device)
    assert verdict.ok
    assert verdict.sampled_rows == 18
    assert judge(expected, DecodeOutputs(out, None), dtype, device).lse_max is None

    out[0, 0, 0, 0] += 2 * verdict.out_tolerance
    assert not judge(expected, DecodeOutputs(out, lse), dtype, device).ok
    assert verdict.out_tolerance < 0.05 * max(abs(e.out).max() for e in expected)


def test_spaced():
    assert spaced(1).tolist() == [0]
    assert spaced(2).tolist() == [0, 1]
    assert spaced(128).tolist() == [0, 64, 127]


def test_the_project_through_its_public_call(device, briefly, monkeypatch):
    """The real adapters on the NumPy backend: plans, results in place, further figures."""
    from bench.ops.decode import GENERIC, Decode

    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    device.watch = WallClock()
    small = DecodeCase(b=2, s_q=2, h_q=4, s_kv=20, page_size=16)
    rows = {
        row["implementation"]: row
        for row in run_case(DECODE, small, [Decode(), Decode(GENERIC, "generic")], device, briefly[0])
    }
    assert [row["status"] for row in rows.values()] == ["ok", "ok"], rows
    assert rows["mla_cupy"]["kernel"] == "numpy"
    figures = {"no_plan", "plan_update", "update_and_1_layers", "update_and_61_layers"}
    assert set(rows["mla_cupy"]["figures_us"]) == figures
    assert set(rows["mla_cupy"]["host_us"]) == {"call", "repeated_call", "empty_launch", *figures}
    assert rows["generic"]["figures_us"] == {}


def test_prefill_of_a_selection(device, options, numpy_backend):
    """The mask is made within the call; other forms are figures, sparse attention with the same indices among them."""
    operation = OPERATIONS["prefill"]
    case = operation.parse("b2-sq3-skv8-hq2-topk4")
    assert case.name == "b2-sq3-skv8-hq2-topk4"
    device.watch = WallClock()
    (row,) = run_case(operation, case, make([], operation.implementations(Choices())), device, options)
    assert row["status"] == "ok", row["reason"]
    assert row["figures_us"].keys() == {"single_call", "mask_given", "without_mask", "sparse_forward"}
    assert row["shape"]["topk"] == 4
