"""Blackwell's dense decode in FP8 in the simulator, against the oracle, and with planted bugs.

No GPU has run it. The simulator adds products of e4m3 in float32 on these tensor cores.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy.errors import UnsupportedDeviceError
from mla_cupy.kernels.decode import DECODE
from mla_cupy.kernels.decode.problem import DecodeProblem
from tests.decode import blackwell
from tests.decode.blackwell import BLACKWELL
from tests.support.calls import plan_of
from tests.support.cases import D_V, DecodeCase, make
from tests.support.flat import mla_decode
from tests.support.mutant_suite import mutant_suite
from tests.support.mutants import Mutant
from tests.support.sim_driver import fake_gpu, simulated
from tests.support.sim_modes import MODES
from tests.support.tolerance import check

KERNEL = "decode_sm100_fp8"


def fp8(**changes: Any) -> DecodeCase:
    return DecodeCase(**{"record": "fp8", "math": "fp8", "kv_scale": 0.03, **changes})


CASES = (
    # Odd numbers of tiles, empty sequences, queries of several tokens and at any byte, missing pages, two row blocks,
    # boxes of one token, a rank of three, more tiles than stages.
    fp8(b=2, seqlens=(129, 1), h_q=16, strides="odd"),
    fp8(b=3, seqlens=(70, 0, 130), s_q=2, h_q=20, missing_pages=1, page_size=16, kv_scale=1.0),
    fp8(b=2, seqlens=(3, 70), s_q=3, h_q=4, missing_pages=1, page_size=24, dtype="float16"),
    fp8(b=1, seqlens=400, s_q=2, h_q=33, queries="float8_e4m3fn", q_scale=0.02),
    fp8(b=1, seqlens=66, h_q=3, page_size=1, strides="odd", queries="uint8"),
    fp8(b=2, seqlens=(189, 193), s_q=4, h_q=4, cp_world=3, cp_rank=1),
)
MORE_CASES = (
    fp8(b=1, seqlens=800, h_q=16),
    fp8(b=5, seqlens=(70, 1, 0, 200, 130), h_q=64, dtype="float16"),
    fp8(b=2, seqlens=(100, 31), s_q=2, h_q=3, causal=False, head_axis=False, page_size=128),
    fp8(b=1, seqlens=66, s_q=5, h_q=20, queries="uint8", q_scale=3.0),
    fp8(b=2, seqlens=(300, 70), h_q=128),
)


run = partial(blackwell.run, KERNEL)

#: The rounded oracle has each tile's largest weight at a power of two, which is not rounded. Here a row's largest
#: weight may be anything up to 2^8.
ROUNDED_MORE = 1.5


def check_case(case: DecodeCase, *run_options: Any) -> None:
    inputs = make(case)
    (exact, _), (rounded, lse) = inputs.exact, inputs.rounded
    check(run(inputs, *run_options), inputs.exact, (exact + ROUNDED_MORE * (rounded - exact), lse), case.dtype)


@pytest.mark.one_in(4)
@blackwell.in_turns(CASES)
def test_matches_oracle(case: DecodeCase, sm_count: int, mode: tuple[str, int]) -> None:
    check_case(case, sm_count, mode)


@blackwell.in_all_modes([*CASES, *MORE_CASES])
def test_matches_oracle_in_all_modes(case: DecodeCase, mode: tuple[str, int], sm_count: int) -> None:
    check_case(case, sm_count, mode)


def random_case(seed: int) -> DecodeCase:
    one_of, sizes = blackwell.random_sizes(seed, 576, 400)
    queries = one_of("", "", "float8_e4m3fn", "uint8")
    return fp8(
        s_q=one_of(1, 1, 2, 3) if sizes["h_q"] <= 33 else 1,
        page_size=one_of(1, 8, 16, 24, 64, 128),
        dtype="bfloat16" if queries else one_of("bfloat16", "float16"),
        queries=queries,
        q_scale=one_of(0.02, 1.0) if queries else 1.0,
        kv_scale=one_of(0.03, 1.0),
        strides=one_of("padded", "odd", "dense"),
        causal=one_of(False, True),
        missing_pages=one_of(0, 0, 1),
        **sizes,
    )


@pytest.mark.one_in(4)
@blackwell.SEEDS
def test_random_cases(seed: int) -> None:
    check_case(random_case(seed), *blackwell.turn_of(seed))


def test_a_growing_maximum_and_a_mean() -> None:
    """Each tile's scores are far above those before, so that O is rescaled; values of one sign keep their sum."""
    case = fp8(b=1, seqlens=321, h_q=8, kv_scale=0.01)
    inputs = make(case)
    pages = inputs.block_table[0]
    for tile in range(5):
        page = inputs.kv_cache[pages[tile]].reshape(case.page_size, -1)
        page[:, :] = 0x38 + 4 * tile  # 1, 1.5, 2, 3, 4: keys and values
    got = run(inputs, 1, ("late", 0))
    out, lse = mla_cupy.reference.mla_decode(*inputs.arguments, **case.options)
    # A weight is rounded by up to a sixteenth, and few of them count.
    assert np.abs(got[0].astype(np.float64) - out).max() <= 2.0**-4 * np.abs(out).max()
    np.testing.assert_allclose(got[1], lse, atol=2.0**-9)


def equal_values(mode: tuple[str, int]) -> None:
    """Values of one number are that number, whatever their weights are rounded to: both sums have the same weights."""
    case = fp8(b=1, seqlens=130, h_q=4, kv_scale=0.5)
    inputs = make(case)
    for page in inputs.block_table[0, :3]:
        inputs.kv_cache[page, ..., :D_V] = 0x3C  # 1.5
    got = run(inputs, 1, mode, out_dtype="float32")
    np.testing.assert_allclose(got[0], 0.75, rtol=1e-6)


@pytest.mark.parametrize("mode", MODES[:1], ids=str)
def test_equal_values_stay_equal(mode: tuple[str, int]) -> None:
    equal_values(mode)


def test_what_only_later_queries_see_does_not_reach_earlier_ones() -> None:
    """A NaN among the codes of the last token, which the first of two queries does not see; and results in float32."""
    inputs = make(fp8(b=1, seqlens=129, s_q=2, h_q=20))
    inputs.kv_cache[inputs.block_table[0, 2], 0, 0, 3] = 0x7F
    got = run(inputs, 1, ("late", 0), out_dtype="float32")
    assert np.isnan(got[0][:, 1:]).all()
    first = [(out[:, :1], lse[..., :1]) for out, lse in (got, inputs.exact, inputs.rounded)]
    check(*first, "bfloat16")


def test_a_sink_and_a_batch_invariant_plan() -> None:
    """A request in pieces, each a partial result: the sink counts once, and the scale of the cache, too."""
    case = fp8(b=2, seqlens=(130, 70), h_q=5)
    inputs = make(case)
    sink = np.linspace(-1, 2, case.h_q).astype(np.float32)
    with simulated(2, BLACKWELL, "random", 5):
        plan = plan_of(inputs, device=0, batch_invariant=True, split_tokens=64, attn_sink=True)
        assert plan.kernel == KERNEL
        plan.update(inputs.seqlens)
        got = mla_decode(*inputs.arguments, **case.options, attn_sink=sink, plan=plan)
    exact = mla_cupy.reference.mla_decode(*inputs.arguments, **case.options, attn_sink=sink)
    rounded = mla_cupy.reference.mla_decode(*inputs.arguments, **case.options, attn_sink=sink, rounding="bfloat16")
    check(got, exact, rounded, case.dtype)


def test_scales_on_the_device() -> None:
    """One of each row of queries, and one of the cache."""
    case = fp8(b=2, seqlens=(70, 3), s_q=2, h_q=3, queries="float8_e4m3fn", kv_scale=1.0)
    inputs = make(case)
    scales = {
        "q_scales": np.linspace(0.01, 0.05, 12).reshape(2, 2, 3).astype(np.float32),
        "kv_scales": np.array([0.04], np.float32),
    }
    got = run(inputs, 1, ("random", 3), **scales)
    expected = [
        mla_cupy.reference.mla_decode(*inputs.arguments, **case.options, **scales, rounding=rounding)
        for rounding in (None, "bfloat16")
    ]
    check(got, *expected, case.dtype)


@pytest.mark.parametrize(("s_q", "h_q", "rows"), [(1, 1, 32), (2, 16, 32), (1, 33, 64), (1, 128, 64), (4, 16, 64)])
def test_default_where_the_self_test_has_admitted_it(s_q: int, h_q: int, rows: int) -> None:
    """A call gets the build for its rows; without a record none is left, and Hopper refuses it by name."""
    problem = DecodeProblem(s_q, h_q, "bfloat16", record="fp8", math="fp8")
    gpu = fake_gpu(148, BLACKWELL)
    config = DECODE.configure(problem, gpu)
    assert config.kernel.name == KERNEL
    assert config.variant.block_rows == rows
    assert config.row_blocks == -(-s_q * h_q // 64)
    with pytest.raises(UnsupportedDeviceError, match="selftest"):
        DECODE.configure(problem, replace(gpu, admitted=frozenset()))
    with pytest.raises(UnsupportedDeviceError, match=r"compute capability 10\.0 or 10\.3"):
        DECODE.configure(problem, fake_gpu(132, (9, 0)), KERNEL)


@pytest.mark.parametrize(
    ("changes", "said"), [({"record": "v32"}, 'reads the record "fp8"'), ({"tree_mask": True}, "takes no tree_mask")]
)
def test_what_it_does_not_take(changes: dict[str, Any], said: str) -> None:
    problem = replace(DecodeProblem(1, 16, "bfloat16", record="fp8", math="fp8"), **changes)
    with pytest.raises(UnsupportedDeviceError, match=said):
        DECODE.configure(problem, fake_gpu(148, BLACKWELL), KERNEL)


# ---- Planted bugs ----------------------------------------------------------------------------------------------
CODES = "decode/sm100_codes.cuh"
#: One block works on two requests: the first of two queries does not see the last token, which has a NaN; and a page is
#: missing. Then more tiles than stages, and a scale for each row.
CASE = fp8(b=2, seqlens=(130, 70), s_q=2, h_q=5, page_size=16, missing_pages=1)
LONG = fp8(b=3, seqlens=(513, 0, 66), h_q=33)
TEXTS = [
    Mutant("bytes of other lanes", CODES, "odd ? 0x3715 : 0x6240", "odd ? 0x6240 : 0x3715"),
]


def run_case(mode: tuple[str, int], case: DecodeCase) -> None:
    inputs = make(case)
    if case.s_q > 1:
        page = inputs.block_table[0, 129 // 16]
        assert 0 <= page < len(inputs.kv_cache)
        inputs.kv_cache[page, 129 % 16, 0, [7, 500]] = 0x7F
    got = run(inputs, 1, mode)
    seen = slice(None, 1) if case.s_q > 1 else slice(None)  # later queries are NaN as a whole
    check(*[(out[:1, seen], lse[:1, :, seen]) for out, lse in (got, inputs.exact, inputs.rounded)], case.dtype)
    check(*[(out[1:], lse[1:]) for out, lse in (got, inputs.exact, inputs.rounded)], case.dtype)


test_is_caught, test_as_it_is = mutant_suite(
    KERNEL,
    [partial(run_case, MODES[1], CASE), partial(equal_values, MODES[1]), partial(run_case, MODES[1], LONG)],
    {
        "bar.sync": (5, [0, 2]),
        "mbarrier.try_wait": (18, [0, 9]),
        "mbarrier.arrive": (9, [0]),
        "fence.proxy": (2, [0]),
        "fence.mbarrier_init": (1, [0]),
        "tcgen05.commit": (5, [0]),
        "tcgen05.wait::ld": (3, [0]),
        "tcgen05.wait::st": (1, [0]),
        "tcgen05.fence::before_thread_sync": (4, [2]),
        "tcgen05.fence::after_thread_sync": (8, [7]),
    },
    TEXTS,
)
