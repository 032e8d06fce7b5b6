"""The compiled kernels in the simulator, through the public calls, against the oracle: on any machine.

The simulator reports races, reads of anything undefined, and deadlocks, so a case that passes says more than its
numbers. Each case runs with each kernel once; modes take turns.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

import mla_cupy
from mla_cupy.kernels import KERNELS
from tests.support.cases import DecodeCase, make
from tests.support.flat import mla_decode
from tests.support.kernels import SCHEDULED_KERNELS, on_hopper, takes
from tests.support.sim_driver import simulated
from tests.support.sim_modes import parametrize_pairs
from tests.support.tolerance import check

HOPPER = on_hopper(SCHEDULED_KERNELS)
GENERIC = "attention_generic"

CASES = [
    DecodeCase(b=1, seqlens=64, h_q=64),  # one whole tile
    DecodeCase(b=1, seqlens=1, h_q=1),
    DecodeCase(b=1, seqlens=129, h_q=16),  # an odd number of tiles, the last one with a single token
    DecodeCase(b=2, seqlens=(0, 128), h_q=5),  # a request without tokens, two tiles
    DecodeCase(b=3, seqlens=(200, 0, 70), h_q=16, dtype="float16"),
    DecodeCase(b=2, seqlens=(65, 190), s_q=2, h_q=8),  # the causal edge within a tile
    DecodeCase(b=1, seqlens=66, s_q=4, h_q=32),  # several blocks of rows, and rows that see little
    DecodeCase(b=2, seqlens=(3, 130), s_q=5, h_q=20, causal=False),  # two row blocks
    DecodeCase(b=1, seqlens=150, page_size=16, missing_pages=2),
    DecodeCase(b=2, seqlens=(100, 31), page_size=24, dtype="float16"),  # boxes of 8 tokens
    DecodeCase(b=1, seqlens=140, page_size=128),
    DecodeCase(b=1, seqlens=66, page_size=1, h_q=3),  # boxes of one token
    DecodeCase(b=1, seqlens=400, h_q=16),  # split
    # Up to 32 rows per KV head: each width of the kernel for few rows, full and not, and several requests per block.
    DecodeCase(b=5, seqlens=(70, 1, 0, 200, 130), h_q=8),
    DecodeCase(b=2, seqlens=(2, 130), s_q=3, h_q=7, page_size=16),  # rows that see nothing
    DecodeCase(b=2, seqlens=(300, 70), h_q=32, dtype="float16"),
    DecodeCase(b=3, seqlens=(66, 5, 131), s_q=4, h_q=12, missing_pages=1),
    DecodeCase(b=2, seqlens=(200, 64), h_q=16, d_qk=512),  # no RoPE columns
    DecodeCase(b=4, seqlens=(389, 1, 193, 390), s_q=4, h_q=4, cp_world=3, cp_rank=1),  # a third of the tokens
    DecodeCase(b=2, seqlens=(3, 100), s_q=3, h_q=24, d_qk=512, page_size=16, missing_pages=1),
]


PAIRS = [(case, kernel) for case, kernel in itertools.product(CASES, HOPPER) if takes(kernel, case)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_hopper_kernels:
        parametrize_pairs(metafunc, PAIRS)


def _run(case: DecodeCase, kernel: str, sm_count: int, mode: tuple[str, int]) -> list[str]:
    inputs = make(case)
    with simulated(sm_count, mode=mode[0], seed=mode[1]) as target:
        got = mla_decode(*inputs.arguments, **case.options, kernel=kernel)
    check(got, inputs.exact, inputs.rounded, case.dtype)
    return target.launched


@pytest.mark.one_in(12)
def test_hopper_kernels(case: DecodeCase, kernel: str, mode: tuple[str, int], sm_count: int) -> None:
    assert KERNELS[kernel].entry in _run(case, kernel, sm_count, mode)


# It has blocks of 8 rows: a few of them reach all that many do.
@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    "case",
    [replace(CASES[8], strides="odd"), CASES[2], CASES[13], replace(CASES[6], h_q=6), CASES[14]],
    ids=lambda case: case.id,
)
def test_generic_kernel(case: DecodeCase) -> None:
    _run(case, GENERIC, 1, ("random", 3))


def test_a_split_request_is_merged() -> None:
    """Few pieces go by warps, many by blocks: both must be reached."""
    case = DecodeCase(b=2, seqlens=(700, 130), h_q=2)
    assert "mla_attention_combine" in _run(case, HOPPER[0], 12, ("early", 0))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kernel", HOPPER)
def test_results_in_float32(kernel: str) -> None:
    """They are not rounded to 16 bits on the way."""
    inputs = make(DecodeCase(b=2, seqlens=(90, 3), h_q=19))
    with simulated(1):
        got = mla_decode(*inputs.arguments, kernel=kernel, out_dtype="float32")
    check(got, inputs.exact, inputs.rounded, "bfloat16")
    assert (got[0] != got[0].astype(inputs.q.dtype).astype(np.float32)).mean() > 0.5


@pytest.mark.one_in(8)
@pytest.mark.parametrize("kernel", HOPPER)
@pytest.mark.parametrize("tokens", [130, 193])
def test_what_only_later_queries_see_does_not_reach_earlier_ones(kernel: str, tokens: int) -> None:
    """With 193 tokens the token in question is in a tile that another one follows."""
    inputs = make(DecodeCase(b=1, seqlens=tokens, s_q=3, h_q=4))
    hidden = tokens - 2  # from the first query only
    inputs.kv_cache[inputs.block_table[0, hidden // 64], hidden % 64, 0, [3, 300]] = np.nan, np.inf
    with simulated(1, mode="late"):
        got = mla_decode(*inputs.arguments, kernel=kernel)
    assert np.isfinite(got[0][:, :1].astype(np.float32)).all()
    check(got, inputs.exact, inputs.rounded, "bfloat16")


def test_a_plan_serves_other_lengths() -> None:
    case = DecodeCase(b=2, seqlens=(100, 65), h_q=4)
    first, second = make(case), make(replace(case, seqlens=(30, 128), seed=1))
    width = max(x.block_table.shape[1] for x in (first, second))
    with simulated(2):
        plan = mla_cupy.plan_decode(max_b=3, s_q=1, h_q=4, max_pages=width, page_size=64, dtype="bfloat16", device=0)
        for inputs in (first, second, first):
            table = np.full((2, width), -7, np.int32)
            table[:, : inputs.block_table.shape[1]] = inputs.block_table
            plan.update(inputs.seqlens)
            got = mla_decode(inputs.q, inputs.kv_cache, table, inputs.seqlens, plan=plan)
            check(got, inputs.exact, inputs.rounded, case.dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_states_are_merged(dtype: str) -> None:
    rng = np.random.default_rng(0)
    from mla_cupy import dtypes, reference

    outs = rng.standard_normal((3, 2, 2, 3, 40)).astype(dtypes.numpy_dtype(dtype))
    lses = rng.standard_normal((3, 2, 3, 2)).astype(np.float32)
    lses[0, 0] = -np.inf
    lses[:, 1, 2, 1] = np.inf, -np.inf, np.inf
    outs[0, 0] = np.nan  # of a state without a key: not read
    with simulated(1):
        got = mla_cupy.merge_states(outs, lses, out_dtype="float32")
    exact = reference.merge_states(outs, lses)
    np.testing.assert_allclose(got[0], exact[0], rtol=3e-6, atol=3e-6)
    np.testing.assert_allclose(got[1], exact[1], rtol=3e-6, atol=3e-6)
