"""Decode in one launch: clusters whose blocks share a request, and clusters that share a long one.

The simulator runs all blocks of a launch at once here, looks for races in global memory, too, and every launch is
repeated in the same workspace: what the clusters count with must be as they found it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from mla_cupy import ArgumentError
from mla_cupy.kernels.decode import DECODE, clusters, heuristics
from mla_cupy.kernels.decode.problem import Batch, DecodeProblem
from mla_cupy.shapes import D_V, TILE_TOKENS
from tests.decode.cluster_inputs import maxima_of_tiles, uneven
from tests.support.calls import assert_same, on_host, plan_of
from tests.support.cases import DecodeCase, DecodeInputs, make
from tests.support.flat import mla_decode
from tests.support.gpu import upload, uploaded
from tests.support.kernels import CLUSTER_KERNELS, DECODE_KERNELS
from tests.support.mutant_suite import mutant_suite
from tests.support.mutants import Mutant
from tests.support.recorder import H200, Recorder
from tests.support.sim_driver import simulated
from tests.support.tolerance import check
from tests.support.workspace import assert_laid_out

Array = npt.NDArray[Any]

EIGHT = "decode_sm90_small_cluster8"
MODES = (("late", 0), ("early", 0), ("random", 1), ("random", 2))

#: One cluster for each request: blocks with two tiles, with one, and without any.
WITHIN = DecodeCase(b=2, seqlens=(0, 330), s_q=2, h_q=3, page_size=16, missing_pages=1)
#: A cluster for the short one of two requests, two for the long one, and one without work.
SHARED = DecodeCase(b=2, seqlens=(30, 1030), s_q=2, h_q=5)
SMS_OF_SHARED = 36

CASES = [
    (WITHIN, 1),
    (SHARED, SMS_OF_SHARED),
    (DecodeCase(b=1, seqlens=130, h_q=40, d_qk=512), 1),  # two row blocks, keys without RoPE columns
    (DecodeCase(b=2, seqlens=(389, 1), s_q=4, h_q=4, cp_world=3, cp_rank=1), 1),  # a third of the tokens
]
MORE_CASES = [
    (DecodeCase(b=1, seqlens=1100, h_q=16, dtype="float16"), 18),  # two clusters
    (DecodeCase(b=1, seqlens=66, s_q=4, h_q=32), 1),  # several blocks of rows, and rows that see little
    (DecodeCase(b=2, seqlens=(3, 130), s_q=5, h_q=20, causal=False), 1),  # 100 rows
    (DecodeCase(b=1, seqlens=1, h_q=1), 1),
    (DecodeCase(b=5, seqlens=(70, 1, 0, 1800, 130), h_q=8), 80),
    (DecodeCase(b=3, seqlens=(66, 5, 131), s_q=4, h_q=12, page_size=16, missing_pages=1), 3),
    (DecodeCase(b=1, seqlens=3000, s_q=2, h_q=16, d_qk=512, dtype="float16"), 60),
    (DecodeCase(b=3, seqlens=(3, 0, 100), s_q=3, h_q=24, d_qk=512, page_size=16, missing_pages=1), 1),
    (DecodeCase(b=2, seqlens=(4000, 1), s_q=3, h_q=5, cp_world=2, cp_rank=0), 80),
    (DecodeCase(b=1, seqlens=66, page_size=1, h_q=3), 1),
]


def _twice(inputs: DecodeInputs, sm_count: int, mode: tuple[str, int], **options: Any) -> Any:
    """The results of a planned call, after the same call and another one with other lengths."""
    with simulated(sm_count, mode=mode[0], seed=mode[1]) as target:
        target.resident, target.race_global = 64, True
        case = inputs.case
        shard = {"cp_world": case.cp_world, "cp_rank": case.cp_rank}
        plan = plan_of(inputs, device=0, kernel=EIGHT, **shard)
        call = {**case.options, **options, "plan": plan}
        first: Any = None
        for _ in range(2):
            plan.update(inputs.seqlens)
            got = mla_decode(*inputs.arguments, **call)
            if first is not None:
                assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(first, got, strict=True)), (
                    "not the same"
                )
            first = got
        assert target.launched == [f"mla_{EIGHT}"] * 2
    return first


def _pytest_cases() -> list[Any]:
    chosen = [pytest.param(*case, id=case[0].id) for case in CASES]
    return chosen + [pytest.param(*case, id=case[0].id, marks=pytest.mark.slow) for case in MORE_CASES]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("case", "sm_count"), _pytest_cases())
def test_against_the_oracle(case: DecodeCase, sm_count: int) -> None:
    inputs = uneven(case)
    number = (*CASES, *MORE_CASES).index((case, sm_count))
    got = _twice(inputs, sm_count, MODES[number % len(MODES)])
    check(got, inputs.exact, inputs.rounded, case.dtype)


def test_inputs_have_different_maxima_in_each_tile() -> None:
    """Otherwise a merge could leave the weights of the blocks out."""
    for case, request in ((SHARED, 1), (DecodeCase(b=1, seqlens=330, s_q=2, h_q=3, page_size=16), 0)):
        maxima = maxima_of_tiles(uneven(case), request)
        assert (maxima.max(0) - maxima.min(0) > 1.5).all()


def test_results_in_float32_and_another_base() -> None:
    inputs = uneven(DecodeCase(b=1, seqlens=200, h_q=7))
    got = _twice(inputs, 1, ("late", 0), out_dtype="float32", lse_base="2")
    check((got[0], got[1] * np.float32(np.log(2))), inputs.exact, inputs.rounded, "bfloat16")
    assert (got[0] != got[0].astype(inputs.q.dtype).astype(np.float32)).mean() > 0.5


# ---- Planted bugs ------------------------------------------------------------------------------------------------


def _run_with_infinity(case: DecodeCase, sm_count: int, mode: tuple[str, int]) -> None:
    """Run with an infinite value that the last row sees."""
    inputs = uneven(case)
    request = case.b - 1
    last = int(case.lengths()[request]) - 1  # only the last query sees it
    page, token = divmod(last, case.page_size)
    inputs.kv_cache[inputs.block_table[request, page], token, 0, [9, 300]] = np.inf
    got = _twice(inputs, sm_count, mode)
    finite = [np.isfinite(exact) for exact in inputs.exact]
    mine = [np.asarray(x, np.float32) for x in got]
    assert all((np.isfinite(x) == mask).all() for x, mask in zip(mine, finite, strict=True))
    alike = [np.where(mask, x, exact).astype(x.dtype) for mask, x, exact in zip(finite, got, inputs.exact, strict=True)]
    check((alike[0], alike[1]), inputs.exact, inputs.rounded, case.dtype)


MERGE = "decode/sm90_small_cluster.cuh"
#: The last barrier is not left out: in the simulator all blocks go on alike after one, so that it would not show that
#: a block ends before all have read its shared memory.
test_is_caught, test_kernel_as_it_is = mutant_suite(
    EIGHT,
    [
        *(partial(_run_with_infinity, WITHIN, 1, mode) for mode in MODES[:3:2]),
        partial(_run_with_infinity, SHARED, SMS_OF_SHARED, MODES[0]),
    ],
    {
        "bar.sync": (11, [0, 5]),
        "barrier.cluster.arrive": (3, [0]),
        "barrier.cluster.wait": (2, [0]),
        "mbarrier.try_wait": (6, [0, 3]),
        "mbarrier.arrive": (6, [3]),
        "fence.proxy": (2, [0]),
        "fence.mbarrier_init": (1, [0]),
        "cp.async.wait_all": (1, [0]),
        "wgmma.fence": (4, [0]),
        "wgmma.commit_group": (2, [0]),
        "wgmma.wait_group": (2, [0]),
    },
    [
        Mutant(
            "values not scaled by the weight of the block",
            MERGE,
            "merge.weights[j][head] = weights[j] * factor;",
            "merge.weights[j][head] = factor;",
        ),
        Mutant("the first to come merges", MERGE, "== block.share.count - 1;", "== 0;"),
    ],
)


# ---- On the host -------------------------------------------------------------------------------------------------


def _problem(h_q: int = 16, d_qk: int = 576, batch: Batch | None = None) -> DecodeProblem:
    return DecodeProblem(1, h_q, "bfloat16", d_qk=d_qk, batch=batch)


@pytest.mark.parametrize(
    ("h_q", "batch", "chosen"),
    [
        (16, Batch(1, 1024), True),
        (16, Batch(1, 1), True),
        (16, Batch(15, 1024), True),  # all clusters that are resident at once
        (16, Batch(16, 1024), False),
        (16, Batch(1, 1025), False),  # more than two tiles per block
        (16, None, False),  # who knows
        (128, Batch(1, 1024), True),
        (128, Batch(2, 1024), False),  # 16 clusters
    ],
)
def test_chosen_for_small_batches_of_short_sequences(h_q: int, batch: Batch | None, chosen: bool) -> None:
    assert (DECODE.configure(_problem(h_q, batch=batch), H200).kernel.name == EIGHT) is chosen


def test_a_plan_asks_its_largest_batch(recorder: Recorder) -> None:
    inputs = make(DecodeCase(b=3, seqlens=(700, 5, 0)))
    assert plan_of(inputs, device=0).kernel == EIGHT
    assert plan_of(inputs, device=0, max_b=16).kernel != EIGHT
    assert plan_of(inputs, device=0, batch_invariant=True).kernel != EIGHT
    plan = plan_of(inputs, device=0)
    plan.update(inputs.seqlens[:2])
    q, kv_cache, block_table, seqlens = inputs.arguments
    mla_decode(q[:2], kv_cache, block_table[:2], seqlens[:2], plan=plan)
    mla_decode(*inputs.arguments)
    assert recorder.entries == [EIGHT] * 2


@pytest.mark.parametrize("kernel", CLUSTER_KERNELS)
@pytest.mark.parametrize("h_q", [1, 16, 17, 32, 33, 128, 1000])
@pytest.mark.parametrize("d_qk", [512, 576])
def test_configuration(kernel: str, h_q: int, d_qk: int) -> None:
    config = DECODE.configure(_problem(h_q, d_qk), H200, kernel)
    chosen = DECODE_KERNELS[kernel]
    build = config.variant
    assert build in chosen.variants
    assert build.block_rows * config.row_blocks >= h_q  # type: ignore[attr-defined]
    blocks = config.row_blocks * config.num_splits * chosen.cluster_blocks
    assert blocks <= H200.sm_count or config.num_splits == 1
    assert config.num_splits <= heuristics.MAX_CLUSTERS
    slices = blocks if config.num_splits > 1 else 0
    sizes = {
        "partial_lse": 4 * slices * build.block_rows,  # type: ignore[attr-defined]
        "partial_out": 4 * slices * build.block_rows * D_V // chosen.cluster_blocks,  # type: ignore[attr-defined]
        "tickets": 4 * slices,
    }
    assert_laid_out(DECODE.workspace(config), sizes)
    assert [spec.name for spec, _ in DECODE.builds(config)] == [kernel]


@pytest.mark.parametrize("kernel", CLUSTER_KERNELS)
def test_clusters_share_requests_only_where_that_can_pay(kernel: str) -> None:
    chosen = DECODE_KERNELS[kernel]
    short = heuristics.MIN_TILES_PER_BLOCK * TILE_TOKENS * chosen.cluster_blocks
    assert clusters.clusters(chosen, 15, 3, short) == 3
    assert clusters.clusters(chosen, 15, 3, short + 1) == 15
    assert clusters.clusters(chosen, 15, 15, short + 1) == 15
    assert clusters.clusters(chosen, 15, 200, 1 << 20) == 200
    assert clusters.clusters(chosen, 1, 1, 1 << 20) == 1


def test_a_short_call_is_one_launch(recorder: Recorder) -> None:
    inputs = make(DecodeCase(b=3, seqlens=(700, 5, 0)))
    mla_decode(*inputs.arguments, kernel=EIGHT)
    (launch,) = recorder.launches
    assert (launch.entry, launch.grid, recorder.memsets) == (f"mla_{EIGHT}", (24, 1, 1), [])
    assert (launch.params["num_splits"], launch.params["schedule"]) == (3, 0)


def test_a_long_call_zeroes_its_tickets_first(recorder: Recorder) -> None:
    inputs = make(DecodeCase(b=1, h_q=64, seqlens=5000))
    config = DECODE.configure(_problem(64), H200, EIGHT)
    mla_decode(*inputs.arguments, kernel=EIGHT, stream=7)
    (launch,) = recorder.launches
    assert launch.grid == (8 * config.num_splits, 4, 1)
    layout = DECODE.workspace(config)
    begin, nbytes = layout.offsets["tickets"], layout.nbytes - layout.offsets["tickets"]
    assert launch.params["tickets"] - launch.params["partial_lse"] == begin
    assert recorder.memsets == [(int(launch.params["tickets"]), 0, nbytes, 7)]


def test_updates_of_a_plan_are_free(recorder: Recorder) -> None:
    """Its tickets are zeroed when it is made; in memory that is the caller's, with every update."""
    inputs = make(DecodeCase(b=1, seqlens=5000))
    plan = plan_of(inputs, device=0, kernel=EIGHT)
    for _ in range(2):
        plan.update(inputs.seqlens)
        mla_decode(*inputs.arguments, plan=plan)
    assert recorder.entries == [EIGHT] * 2
    assert recorder.memsets == []
    lent = np.zeros(plan.workspace_bytes + 256, np.uint8)
    lent = lent[-lent.ctypes.data % 256 :][: plan.workspace_bytes]
    other = plan_of(inputs, device=0, kernel=EIGHT, workspace=lent)
    for _ in range(2):
        other.update(inputs.seqlens)
    assert len(recorder.memsets) == 2
    plan.schedule(inputs.seqlens, int(lent.ctypes.data))  # in a copy of its workspace
    assert len(recorder.memsets) == 3


@pytest.mark.parametrize("kernel", CLUSTER_KERNELS)
def test_not_batch_invariant(recorder: Recorder, kernel: str) -> None:
    with pytest.raises(ArgumentError, match=r"kernel: got .*expected a kernel with a schedule"):
        plan_of(make(WITHIN), device=0, kernel=kernel, batch_invariant=True)


# ---- On a GPU ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("h_q", [16, 128])
@pytest.mark.parametrize("b", [1, 2, 3, 7, 14, 15, 16, 29, 30, 31, 40])
@pytest.mark.parametrize("kernel", CLUSTER_KERNELS)
def test_every_number_of_requests(hopper: object, kernel: str, b: int, h_q: int) -> None:
    """Fewer requests than clusters, equally many, and more."""
    inputs = uneven(DecodeCase(b=b, seqlens="ragged-3000", h_q=h_q, seed=b))
    got = on_host(mla_decode(*uploaded(inputs), kernel=kernel))
    check((got[0], got[1]), inputs.exact, inputs.rounded, "bfloat16")


@pytest.mark.gpu
@pytest.mark.parametrize("d_qk", [576, 512])
@pytest.mark.parametrize("kernel", CLUSTER_KERNELS)
def test_who_comes_last_does_not_show(hopper: object, kernel: str, d_qk: int) -> None:
    """Every launch gives the same bits, in one workspace, with other lengths in between."""
    inputs = uneven(DecodeCase(b=3, seqlens=(9000, 0, 700), s_q=2, h_q=16, d_qk=d_qk))
    arguments = uploaded(inputs)
    other = upload(np.array([70, 8000, 9000], np.int32).clip(max=inputs.case.lengths()))
    plan = plan_of(inputs, kernel=kernel)
    expected: Any = None
    for step in range(500):
        if step % 10 == 9:
            plan.update(other)
            mla_decode(*arguments[:3], other, plan=plan)
        plan.update(arguments[3])
        got = mla_decode(*arguments, plan=plan)
        if expected is None:
            expected = on_host(got)
            check((expected[0], expected[1]), inputs.exact, inputs.rounded, "bfloat16")
        elif step % 50 == 0:
            for mine, first in zip(on_host(got), expected, strict=True):
                assert_same(mine, first)
