"""Dense decode in FP8 by clusters: blocks that share a request and merge, and pairs that read each tile once.

The merge of clusters is that of `decode_sm90_small_cluster8`, whose planted bugs are in `test_cluster_merge.py`.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import UnsupportedDeviceError
from mla_cupy.kernels.decode import DECODE, heuristics
from mla_cupy.kernels.decode.problem import Batch, DecodeProblem
from mla_cupy.kernels.decode.sm90_fp8_cluster8 import preferred
from mla_cupy.shapes import D_V
from tests.decode.cluster_inputs import uneven
from tests.decode.test_cluster_merge import MODES, SMS_OF_SHARED, twice
from tests.decode.test_fp8_math import errors, fp8, with_rounded_weights, with_values
from tests.support.cases import DecodeCase, make
from tests.support.gpu import run_and_check
from tests.support.mutants import Mutant, Plant, as_verdict
from tests.support.recorder import H200, Recorder
from tests.support.sim_driver import simulated
from tests.support.tolerance import check
from tests.support.workspace import assert_laid_out

EIGHT, PAIR = "decode_sm90_fp8_cluster8", "decode_sm90_fp8_pair"

#: One cluster for each request: blocks with two tiles, with one, and without any.
WITHIN = fp8(b=2, seqlens=(0, 330), s_q=2, h_q=3, page_size=16, missing_pages=1)
#: A cluster for the short one of two requests, two for the long one, and one without work.
SHARED = fp8(b=2, seqlens=(30, 1030), s_q=2, h_q=5)
CASES = (
    (WITHIN, 1),
    (SHARED, SMS_OF_SHARED),
    (fp8(b=1, seqlens=130, h_q=20, queries="float8_e4m3fn", q_scale=0.02), 1),  # two blocks of rows
    (fp8(b=2, seqlens=(389, 1), s_q=4, h_q=4, cp_world=3, cp_rank=1), 1),  # a third of the tokens
)
MORE_CASES = (
    (fp8(b=1, seqlens=1100, h_q=16, dtype="float16"), 18),  # two clusters
    (fp8(b=5, seqlens=(70, 1, 0, 1800, 130), h_q=8), 80),
    (fp8(b=1, seqlens=66, h_q=3, page_size=1, strides="odd", kv_scale=1.0), 1),
)
#: More tiles than stages; the causal edge and missing pages; boxes of one token.
OF_PAIRS = (
    (fp8(b=2, seqlens=(3, 130), s_q=2, h_q=40, page_size=16, missing_pages=1), 2),
    (fp8(b=1, seqlens=720, h_q=65), 2),
)
MORE_PAIRS = (
    (fp8(b=2, seqlens=(66, 470), h_q=100, page_size=1, queries="float8_e4m3fn", q_scale=0.02), 2),
    (fp8(b=1, seqlens=400, h_q=128, dtype="float16"), 4),  # split
    (fp8(b=1, seqlens=(200,), s_q=2, h_q=128), 4),  # two pairs
    (fp8(b=3, seqlens=(200, 0, 70), h_q=128, page_size=24), 2),
)


def _cases(quick: tuple[Any, ...], more: tuple[Any, ...]) -> list[Any]:
    chosen = [pytest.param(*case, id=case[0].id) for case in quick]
    return chosen + [pytest.param(*case, id=case[0].id, marks=pytest.mark.slow) for case in more]


@pytest.mark.parametrize(("case", "sm_count"), _cases(CASES, MORE_CASES))
def test_clusters(case: DecodeCase, sm_count: int) -> None:
    inputs, number = uneven(case), (*CASES, *MORE_CASES).index((case, sm_count))
    got = twice(inputs, sm_count, MODES[number % len(MODES)], EIGHT)
    check(got, inputs.exact, inputs.rounded, case.dtype)


def run_pairs(case: DecodeCase, sm_count: int, mode: tuple[str, int], **options: Any) -> Any:
    inputs = make(case)
    with simulated(sm_count, mode=mode[0], seed=mode[1]) as target:
        got = mla_cupy.mla_decode(*inputs.arguments, **inputs.case.options, kernel=PAIR, **options)
    assert f"mla_{PAIR}" in target.launched
    return got


@pytest.mark.parametrize(("case", "sm_count"), _cases(OF_PAIRS, MORE_PAIRS))
def test_pairs(case: DecodeCase, sm_count: int) -> None:
    """The same bits as without pairs, whose blocks do the same in the same order."""
    inputs, number = make(case), (*OF_PAIRS, *MORE_PAIRS).index((case, sm_count))
    got = run_pairs(case, sm_count, MODES[number % len(MODES)])
    check(got, inputs.exact, inputs.rounded, case.dtype)
    with simulated(sm_count):
        alone = mla_cupy.mla_decode(*inputs.arguments, **inputs.case.options, kernel="decode_sm90_fp8")
    assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(got, alone, strict=True))


def test_sums_of_clusters_are_not_shortened() -> None:
    inputs = with_values(1024, 1.0, 0.5)
    with simulated(1):
        out, _ = mla_cupy.mla_decode(*inputs.arguments, math="fp8", scale=1 / 8, out_dtype="float32", kernel=EIGHT)
    bias, _ = errors(out, with_rounded_weights(inputs, 1 / 8))
    assert abs(bias) <= 6e-4, bias


def test_values_that_only_the_last_query_sees() -> None:
    """A NaN there is the last row's alone, whichever block of the cluster has it."""
    inputs = make(fp8(b=1, seqlens=70, s_q=2, h_q=3))
    inputs.kv_cache[inputs.block_table[0, 1], 5, 0, 7] = 0x7F
    out, lse = twice(inputs, 1, MODES[0], EIGHT)
    hidden, seen = np.asarray(out[0, 0], np.float32), np.asarray(out[0, 1], np.float32)
    assert np.isfinite(hidden).all()
    assert np.isnan(seen).all()
    assert np.isnan(lse[0, :, 1]).all()
    assert np.isfinite(lse[0, :, 0]).all()


# ---- On the host -------------------------------------------------------------------------------------------------


def _problem(h_q: int, batch: Batch | None = None) -> DecodeProblem:
    return DecodeProblem(1, h_q, 1, "bfloat16", record="fp8", math="fp8", batch=batch)


@pytest.mark.parametrize(
    ("h_q", "batch", "expected"),
    [
        (16, Batch(1, 8192), True),
        (16, Batch(15, 1), True),  # as many clusters as are resident at once
        (16, Batch(16, 1), False),
        (16, Batch(1, 8193), False),
        (17, Batch(1, 64), False),
        (16, None, False),
    ],
)
def test_preference(h_q: int, batch: Batch | None, expected: bool) -> None:
    assert preferred(_problem(h_q, batch), H200) is expected


def test_they_are_chosen_by_name_alone() -> None:
    """Until a GPU has shown where they win."""
    for h_q, batch in ((16, Batch(1, 1024)), (128, Batch(128, 8192))):
        assert DECODE.configure(_problem(h_q, batch), H200).kernel.name == "decode_sm90_fp8"


@pytest.mark.parametrize("h_q", [1, 16, 17, 128])
def test_configuration_of_clusters(h_q: int) -> None:
    config = DECODE.configure(_problem(h_q), H200, EIGHT)
    assert config.row_blocks == -(-h_q // 16)
    blocks = config.row_blocks * config.num_splits * 8
    assert blocks <= H200.sm_count
    assert config.num_splits <= heuristics.MAX_CLUSTERS
    slices = blocks if config.num_splits > 1 else 0
    sizes = {"partial_lse": 4 * slices * 16, "partial_out": 4 * slices * 16 * D_V // 8, "tickets": 4 * slices}
    assert_laid_out(DECODE.workspace(config), sizes)


@pytest.mark.parametrize(("h_q", "fits"), [(64, False), (65, True), (128, True), (129, False), (256, True)])
def test_pairs_take_an_even_number_of_blocks(h_q: int, fits: bool, recorder: Recorder) -> None:
    inputs = make(fp8(b=1, seqlens=70, h_q=h_q))
    if fits:
        mla_cupy.mla_decode(*inputs.arguments, **inputs.case.options, kernel=PAIR)
        launch = recorder.launches[1]
        assert (launch.entry, launch.grid[0]) == (f"mla_{PAIR}", -(-h_q // 64))
    else:
        with pytest.raises(UnsupportedDeviceError, match="an even number of blocks of 64 query rows"):
            mla_cupy.mla_decode(*inputs.arguments, **inputs.case.options, kernel=PAIR)
        assert recorder.launches == []


def test_neither_takes_a_tree() -> None:
    problem = replace(_problem(128), tree_mask=True)
    for kernel in (EIGHT, PAIR):
        with pytest.raises(UnsupportedDeviceError, match="takes no tree_mask"):
            DECODE.configure(problem, H200, kernel)


# ---- Planted bugs ------------------------------------------------------------------------------------------------

CLUSTER, OWN_PAIR = "decode/sm90_fp8_cluster.cuh", "decode/sm90_fp8_pair.cu"
MUTANTS_OF_CLUSTERS = (
    Mutant(
        "sums of weights before they are rounded",
        CLUSTER,
        "merge.sum[thread] = sums.rounded;",
        "merge.sum[thread] = sums.sum;",
    ),
    Mutant("O with a reference of its own", CLUSTER, "ex2_approx(math.own_reference() - sums.reference) * ", ""),
    Mutant("the left side's columns twice", CLUSTER, "merge.out[math.side * Math::kBlocks + b]", "merge.out[b]"),
    Mutant("rows of other heads", CLUSTER, "odd ? four.y : four.x", "odd ? four.x : four.y"),
    Mutant("columns of other warps", CLUSTER, "column0 + warp * kWarpColumns", "column0 + (warp ^ 1) * kWarpColumns"),
    Mutant("rows past the last one stored", CLUSTER, "row >= block.rows) continue;", "row < 0) continue;"),
    Mutant("a share of another block", CLUSTER, "if (threadIdx.x == 0) s.more = share;", "s.more = ClusterShare{};"),
)
MUTANTS_OF_PAIRS = (
    Mutant(
        "a stage released in one block",
        OWN_PAIR,
        "if (lane < kReaders) mbarrier_arrive",
        "if (lane < 1) mbarrier_arrive",
    ),
    Mutant("a stage that waits for one block", OWN_PAIR, "block.rows, kReaders);", "block.rows, 1);"),
    Mutant("columns for one block", OWN_PAIR, "(1 << kReaders) - 1", "1"),
    Mutant("RoPE columns twice", OWN_PAIR, "        if (rank != 0) return;\n", ""),
    Mutant(
        "barriers of the other block not waited for",
        OWN_PAIR,
        "    cluster_sync();         // the",
        "    __syncthreads();  // the",
    ),
)


@as_verdict
def _verdict(pairs: bool, mode: tuple[str, int]) -> None:
    case, sm_count = OF_PAIRS[1] if pairs else SHARED
    inputs = make(case) if pairs else uneven(case)
    got = run_pairs(case, sm_count, mode) if pairs else twice(inputs, sm_count, mode, EIGHT)
    check(got, inputs.exact, inputs.rounded, case.dtype)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [*MUTANTS_OF_CLUSTERS, *MUTANTS_OF_PAIRS], ids=lambda mutant: mutant.id)
def test_is_caught(mutant: Mutant, plant: Plant) -> None:
    plant(mutant)
    pairs = mutant in MUTANTS_OF_PAIRS
    found = itertools.chain((_verdict(pairs, mode) for mode in MODES), (_bias_of_clusters() for _ in range(not pairs)))
    assert any(found), f"nothing shows that {mutant.name}"


@as_verdict
def _bias_of_clusters() -> None:
    test_sums_of_clusters_are_not_shortened()


# ---- On a GPU ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "sm_count"), [*CASES, *MORE_CASES], ids=str)
def test_clusters_on_a_gpu(hopper: object, case: DecodeCase, sm_count: int) -> None:
    run_and_check(case, kernel=EIGHT)


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "sm_count"), [*OF_PAIRS, *MORE_PAIRS], ids=str)
def test_pairs_on_a_gpu(hopper: object, case: DecodeCase, sm_count: int) -> None:
    run_and_check(case, kernel=PAIR)
