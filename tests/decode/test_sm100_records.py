"""Blackwell's dense decode from FP8 records in the simulator, against the oracle, and with planted bugs.

No GPU has run it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy.cache_formats import FORMATS
from mla_cupy.errors import UnsupportedDeviceError
from mla_cupy.kernels.decode import DECODE
from mla_cupy.kernels.decode.problem import DecodeProblem
from tests.decode import blackwell
from tests.decode.blackwell import BLACKWELL
from tests.support.calls import plan_of
from tests.support.cases import DecodeCase, make
from tests.support.flat import mla_decode
from tests.support.mutant_suite import mutant_suite
from tests.support.mutants import Mutant
from tests.support.sim_driver import fake_gpu, simulated
from tests.support.sim_modes import MODES
from tests.support.tolerance import check

KERNEL = "decode_sm100_records"


def case_of(record: str, **changes: Any) -> DecodeCase:
    """A case whose keys have the record's width."""
    scale: dict[str, Any] = {"kv_scale": 0.03} if record == "fp8" else {}
    return DecodeCase(record=record, d_qk=FORMATS[record].d_qk, **{**scale, **changes})


CASES = (
    # Each record with each number of rows of a build, queries of several tokens, missing pages, more rows than a block.
    case_of("v32", b=2, seqlens=(129, 1), h_q=16, strides="odd"),
    case_of("v32", b=3, seqlens=(70, 0, 130), s_q=2, h_q=20, scales="plain", missing_pages=1, page_size=16),
    case_of("v4", b=2, seqlens=(3, 70), s_q=3, h_q=9, missing_pages=1, page_size=16, dtype="float16"),
    case_of("v4", b=1, seqlens=65, h_q=66),
    case_of("fp8", b=2, seqlens=(3, 70), s_q=3, h_q=4, missing_pages=1, page_size=24, dtype="float16"),
    case_of("fp8", b=1, seqlens=66, s_q=2, h_q=33, kv_scale=1.0),
    case_of("v32", b=2, seqlens=(189, 193), s_q=4, h_q=4, cp_world=3, cp_rank=1),  # a third of the tokens
    case_of("v32-nope", b=2, seqlens=(3, 130), s_q=2, h_q=20, scales="plain", missing_pages=1, page_size=16),
    case_of("v32-nope", b=1, seqlens=66, h_q=7, dtype="float16"),
)
MORE_CASES = (
    case_of("v32", b=1, seqlens=400, h_q=16),  # split
    case_of("v32", b=5, seqlens=(70, 1, 0, 200, 130), h_q=64, dtype="float16"),
    case_of("v32", b=2, seqlens=(100, 31), s_q=2, h_q=3, causal=False, head_axis=False, page_size=128),
    case_of("v32", b=1, seqlens=66, s_q=5, h_q=20),
    case_of("v4", b=2, seqlens=(300, 70), h_q=32, dtype="float16"),
    case_of("v4", b=1, seqlens=400, h_q=128),
    case_of("fp8", b=1, seqlens=400, h_q=16),
    case_of("fp8", b=2, seqlens=(300, 70), h_q=64, dtype="float16"),
)


run = partial(blackwell.run, KERNEL)


def check_case(case: DecodeCase, *run_options: Any) -> None:
    inputs = make(case)
    check(run(inputs, *run_options), inputs.exact, inputs.rounded, case.dtype)


@pytest.mark.one_in(8)
@blackwell.in_turns(CASES)
def test_matches_oracle(case: DecodeCase, sm_count: int, mode: tuple[str, int]) -> None:
    check_case(case, sm_count, mode)


@blackwell.in_all_modes([*CASES, *MORE_CASES])
def test_matches_oracle_in_all_modes(case: DecodeCase, mode: tuple[str, int], sm_count: int) -> None:
    check_case(case, sm_count, mode)


def random_case(seed: int) -> DecodeCase:
    one_of, sizes = blackwell.random_sizes(seed, 584, 200)
    return case_of(
        one_of("v32", "v4", "fp8"),
        s_q=one_of(1, 1, 2, 3) if sizes["h_q"] <= 33 else 1,
        page_size=one_of(1, 8, 16, 24, 64, 128),
        dtype=one_of("bfloat16", "float16"),
        causal=one_of(False, True),
        missing_pages=one_of(0, 0, 1),
        **sizes,
    )


@pytest.mark.one_in(4)
@blackwell.SEEDS
def test_random_cases(seed: int) -> None:
    check_case(random_case(seed), *blackwell.turn_of(seed))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("record", ["v4", "fp8"])
def test_what_only_later_queries_see_does_not_reach_earlier_ones(record: str) -> None:
    """A NaN among the codes of the last token, which the first of two queries does not see; and results in float32."""
    inputs = make(case_of(record, b=1, seqlens=129, s_q=2, h_q=20))
    inputs.kv_cache[inputs.block_table[0, 2], 0, 0, 3] = 0x7F
    got = run(inputs, 1, ("late", 0), out_dtype="float32")
    assert np.isnan(got[0][:, 1:]).all()
    first = [(out[:, :1], lse[..., :1]) for out, lse in (got, inputs.exact, inputs.rounded)]
    check(*first, "bfloat16")


def test_a_sink_and_a_batch_invariant_plan() -> None:
    """A request in pieces, each a partial result: the sink counts once, and the scale of the cache, too."""
    case = case_of("fp8", b=2, seqlens=(130, 70), h_q=5)
    inputs = make(case)
    sink = np.linspace(-1, 2, case.h_q).astype(np.float32)
    with simulated(2, BLACKWELL, "random", 5):
        plan = plan_of(inputs, device=0, batch_invariant=True, split_tokens=64, attn_sink=True)
        assert plan.kernel == KERNEL
        plan.update(inputs.seqlens)
        got = mla_decode(*inputs.arguments, **case.options, attn_sink=sink, plan=plan)
    out, lse = mla_cupy.reference.mla_decode(*inputs.arguments, **case.options, attn_sink=sink)
    assert np.abs(got[0].astype(np.float64) - out).max() <= 2.0**-7 * np.abs(out).max()
    np.testing.assert_allclose(got[1], lse, atol=2.0**-10)


@pytest.mark.parametrize(
    ("record", "s_q", "h_q", "rows"),
    [("v32", 1, 1, 32), ("v4", 2, 16, 32), ("fp8", 1, 33, 64), ("v32", 1, 128, 64), ("v32", 4, 16, 64)],
)
def test_default_where_the_self_test_has_admitted_it(record: str, s_q: int, h_q: int, rows: int) -> None:
    """A call gets the build for its rows, and Hopper refuses it by name."""
    problem = DecodeProblem(s_q, h_q, "bfloat16", record=record, d_qk=FORMATS[record].d_qk)
    gpu = fake_gpu(148, BLACKWELL)
    config = DECODE.configure(problem, gpu)
    assert config.kernel.name == KERNEL
    assert config.variant.block_rows == rows
    assert config.row_blocks == -(-s_q * h_q // 64)
    assert DECODE.configure(problem, replace(gpu, admitted=frozenset())).kernel.name == "decode_mma_records"
    with pytest.raises(UnsupportedDeviceError, match=r"compute capability 10\.0 or 10\.3"):
        DECODE.configure(problem, fake_gpu(132, (9, 0)), KERNEL)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"record": "", "d_qk": 576}, "reads a cache of FP8 records"),
        ({"record": "v41", "d_qk": 512}, "v41"),
        ({"tree_mask": True}, "takes no tree_mask"),
    ],
)
def test_what_it_does_not_take(changes: dict[str, Any], said: str) -> None:
    problem = replace(DecodeProblem(1, 16, "bfloat16", record="v32"), **changes)
    with pytest.raises(UnsupportedDeviceError, match=said):
        DECODE.configure(problem, fake_gpu(148, BLACKWELL), KERNEL)


# ---- Planted bugs ----------------------------------------------------------------------------------------------
#: One block works on two requests: the first of two queries does not see the last token, which has a NaN; and a page is
#: missing. Then maxima that rise, so that O is re-scaled.
CASE = case_of("fp8", b=2, seqlens=(130, 70), s_q=2, h_q=5, page_size=16, missing_pages=1)
PLAIN = case_of("v32", b=3, seqlens=(193, 0, 66), h_q=33, scales="plain")
TEXTS = [
    Mutant("values not scaled", "attention/sm100/records.cuh", "s.stats.factor[thread] *= softmax.p.value_scale;", ""),
]


def run_case(mode: tuple[str, int], case: DecodeCase) -> None:
    inputs = make(case)
    if case.s_q > 1:
        page = inputs.block_table[0, 129 // 16]
        assert 0 <= page < len(inputs.kv_cache)
        inputs.kv_cache[page, 129 % 16, 0, 7] = 0x7F
    got = run(inputs, 1, mode)
    seen = slice(None, 1) if case.s_q > 1 else slice(None)  # later queries are NaN as a whole
    check(*[(out[:1, seen], lse[:1, :, seen]) for out, lse in (got, inputs.exact, inputs.rounded)], case.dtype)
    check(*[(out[1:], lse[1:]) for out, lse in (got, inputs.exact, inputs.rounded)], case.dtype)


test_is_caught, test_as_it_is = mutant_suite(
    KERNEL,
    [partial(run_case, MODES[1], CASE), partial(run_case, MODES[1], PLAIN)],
    {
        "bar.sync": (8, [0, 4]),
        "mbarrier.try_wait": (12, [0, 6]),
        "mbarrier.arrive": (5, [0]),
        "fence.proxy": (4, [0]),
        "fence.mbarrier_init": (1, [0]),
        "tcgen05.commit": (6, [0]),
        "tcgen05.wait::ld": (3, [0]),
        "tcgen05.wait::st": (1, [0]),
        "tcgen05.fence::before_thread_sync": (3, [1]),
        "tcgen05.fence::after_thread_sync": (7, [3]),
    },
    TEXTS,
)
