"""The kernel of the logits for Blackwell in the simulator, through the public calls, against the oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import reference
from mla_cupy.errors import UnsupportedDeviceError
from mla_cupy.kernels.indexer.logits import LOGITS, LOGITS_PAGED, sm100
from mla_cupy.kernels.indexer.logits.problem import LogitsProblem
from tests.support.indexer_cases import LogitsCase, PagedCase, check_logits, logits_inputs, paged_inputs
from tests.support.recorder import B200
from tests.support.sim_driver import simulated
from tests.support.sim_modes import MODES

KERNEL = sm100.KERNEL.name
SM_COUNTS = (1, 3, 2)
CCS = ((10, 0), (10, 3))

CASES = [
    LogitsCase(s_q=8, s_kv=128, h=16, ranges="none"),  # one tile, one chunk of columns
    LogitsCase(s_q=1, s_kv=1, h=1, ranges="none", scales=False),
    LogitsCase(s_q=11, s_kv=300, h=9, dtype="uint8"),  # two blocks of tokens, three tiles
    LogitsCase(s_q=9, s_kv=257, h=19, ranges="causal"),  # a second chunk, which is not full
    LogitsCase(s_q=9, s_kv=129, h=24, d=64),
    LogitsCase(s_q=7, s_kv=127, h=3, d=32),
    LogitsCase(s_q=10, s_kv=200, h=65),  # one stage of queries
    LogitsCase(s_q=17, s_kv=900, h=4, ranges="none"),  # every stage of keys, several times
]
PAGED_CASES = [
    PagedCase(),
    PagedCase(b=3, s_q=1, h=20, seqlens=(1, 0, 260)),  # 16 columns at last
    PagedCase(b=2, s_q=2, h=3, seqlens=(90, 270), missing_page=True),
    PagedCase(b=2, s_q=3, h=33, seqlens=(200, 65), per_token=True),
    PagedCase(b=1, s_q=8, h=65, seqlens=(130,)),  # one stage of queries
    PagedCase(b=34, s_q=1, h=2, seqlens=(70, 0) * 17),  # more sequences than a warp has lanes
]


def run(case: LogitsCase | PagedCase, sm_count: int, mode: tuple[str, int], cc: tuple[int, int] = (10, 0)) -> Any:
    paged = isinstance(case, PagedCase)
    name = "indexer_logits" + "_paged" * paged
    inputs = paged_inputs(case) if isinstance(case, PagedCase) else logits_inputs(case)
    with simulated(sm_count, cc, *mode) as target:
        got = getattr(mla_cupy, name)(**inputs, kernel=KERNEL)
    assert target.launched[-1] == "mla_indexer_logits_sm100"
    check_logits(got, inputs, getattr(reference, name)(**inputs))
    return got


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("case", "mode", "sm_count", "cc"),
    [
        (case, MODES[i % len(MODES)], SM_COUNTS[i % len(SM_COUNTS)], CCS[i % len(CCS)])
        for i, case in enumerate([*CASES, *PAGED_CASES])
    ],
    ids=lambda x: getattr(x, "id", str(x)),
)
def test_logits(case: LogitsCase | PagedCase, mode: tuple[str, int], sm_count: int, cc: tuple[int, int]) -> None:
    run(case, sm_count, mode, cc)


@pytest.mark.slow
@pytest.mark.parametrize("sm_count", SM_COUNTS)
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("case", [*CASES, *PAGED_CASES], ids=lambda case: case.id)
def test_logits_in_every_mode(case: LogitsCase | PagedCase, mode: tuple[str, int], sm_count: int) -> None:
    run(case, sm_count, mode)


def test_all_codes() -> None:
    """Each one with each other one: exact, and NaN counts as 0."""
    q, k = np.zeros((4, 64, 32), np.uint8), np.zeros((256, 32), np.uint8)
    q.reshape(256, 32)[:, 5] = k[:, 5] = np.arange(256)
    weights = np.zeros((4, 64), np.float32)
    weights[:, 17] = 1
    with simulated(1, (10, 0)):
        got = mla_cupy.indexer_logits(q, k, weights, kernel=KERNEL)
    np.testing.assert_array_equal(got, reference.indexer_logits(q, k, weights).astype(np.float32))


def test_strided_queries_and_keys_behind_one_another() -> None:
    """Views of larger arrays, whose other elements are NaN."""
    inputs = logits_inputs(LogitsCase(s_q=9, s_kv=150, h=10, dtype="uint8", ranges="none"))
    q, k = np.full((18, 10, 256), 0x7F, np.uint8), np.full((150, 256), 0x7F, np.uint8)
    q[::2, :, :128], k[:, :128] = inputs["q"], inputs["k"]
    with simulated(2, (10, 0), "late"):
        plain = mla_cupy.indexer_logits(**inputs, kernel=KERNEL)
        got = mla_cupy.indexer_logits(**{**inputs, "q": q[::2, :, :128], "k": k[:, :128]}, kernel=KERNEL)
    np.testing.assert_array_equal(got, plain)


@pytest.mark.parametrize("h", [5, 40])
def test_paged_and_prefill_have_the_same_bits(h: int) -> None:
    """Equal keys in pages and in one array, for one token, with 16 columns or more, and for eight."""
    case = PagedCase(b=1, s_q=1, h=h, seqlens=(150,))
    inputs = paged_inputs(case)
    pages = inputs["block_table"][0, :3]
    rows = inputs["cache"].reshape(len(inputs["cache"]), -1)[pages]
    codes = rows[:, : 64 * 128].reshape(-1, 128)[:150]
    scales = np.ascontiguousarray(rows[:, 64 * 128 :]).view(np.float32).reshape(-1)[:150]
    with simulated(2, (10, 0)):
        paged = mla_cupy.indexer_logits_paged(**inputs, kernel=KERNEL)
        prefill = mla_cupy.indexer_logits(
            np.ascontiguousarray(inputs["q"][:, 0]),
            np.ascontiguousarray(codes),
            np.ascontiguousarray(inputs["weights"].reshape(1, h)),
            k_scale=scales,
            kernel=KERNEL,
        )
    np.testing.assert_array_equal(np.asarray(paged).reshape(-1)[:150], prefill[0])


def test_logits_stay_as_they_are_where_they_need_not_be_clean() -> None:
    inputs = logits_inputs(LogitsCase(s_q=3, s_kv=200, h=2, dtype="uint8"))
    out = np.full((3, 200), 7, np.float32)
    with simulated(2, (10, 0)):
        got = mla_cupy.indexer_logits(**inputs, clean=False, logits=out, kernel=KERNEL)
    exact = reference.indexer_logits(**inputs)
    assert (got[np.isneginf(exact)] == 7).all()
    assert (got[np.isfinite(exact)] != 7).all()


def test_a_call_without_a_key() -> None:
    inputs = logits_inputs(LogitsCase(s_q=3, s_kv=70, h=2, dtype="uint8", ranges="none"))
    inputs |= {"ks": np.full(3, 50, np.int32), "ke": np.full(3, 50, np.int32)}
    with simulated(2, (10, 0), "late"):
        assert np.isneginf(mla_cupy.indexer_logits(**inputs, kernel=KERNEL)).all()


# ---- The choice ----------------------------------------------------------------------------------------------------


def problem(**changes: Any) -> LogitsProblem:
    return LogitsProblem(
        **{"num_tokens": 9, "num_keys": 900, "heads": 64, "head_dim": 128, "dtype": "float8_e4m3fn"} | changes
    )


@pytest.mark.parametrize(
    ("pipeline", "changes", "said"),
    [
        (LOGITS, {"dtype": "bfloat16"}, "takes e4m3, not bfloat16"),
        (LOGITS, {"accumulate": "float16"}, "adds in float32"),
        (LOGITS, {"heads": 129}, "at most 128 heads, not 129"),
        (LOGITS, {"aligned": False}, "multiples of 16 bytes"),
        (LOGITS_PAGED, {"page_size": 16, "num_pages": 9}, "takes pages of 64 keys, not 9 of 16"),
        (LOGITS_PAGED, {"page_size": 64, "num_pages": 9, "head_dim": 64}, "takes keys of 128 codes, not of 64"),
        (LOGITS_PAGED, {"page_size": 64, "num_pages": 9, "block_tokens": 9}, "at most 8 tokens"),
    ],
)
def test_what_it_does_not_take(pipeline: Any, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedDeviceError, match=said):
        pipeline.configure(problem(**changes), B200, KERNEL)


def test_where_it_is_admitted_it_runs_by_default() -> None:
    """And what it does not take goes to the next kernel."""
    paged = problem(page_size=64, num_pages=9, block_tokens=1)
    assert LOGITS.configure(problem(), B200).kernel is sm100.KERNEL
    assert LOGITS_PAGED.configure(paged, B200).kernel is sm100.KERNEL
    assert LOGITS.configure(problem(dtype="bfloat16"), B200).kernel.name == "indexer_logits_mma"


def test_where_it_is_not_it_runs_on_request() -> None:
    untested = replace(B200, admitted=frozenset())
    paged = problem(page_size=64, num_pages=9, block_tokens=1)
    assert LOGITS.configure(problem(), untested).kernel.name == "indexer_logits_mma"
    assert LOGITS_PAGED.configure(paged, untested).kernel.name == "indexer_logits_mma"
    assert LOGITS.configure(problem(), untested, KERNEL).kernel is sm100.KERNEL
    assert LOGITS_PAGED.configure(paged, untested, KERNEL).kernel is sm100.KERNEL


@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (2, 2), (3, 4), (5, 8), (8, 8)])
def test_the_narrowest_build_of_paged_calls(tokens: int, width: int) -> None:
    config = LOGITS_PAGED.configure(problem(page_size=64, num_pages=9, block_tokens=tokens), B200, KERNEL)
    build = config.kernel.variant(config.problem)
    assert build.block_tokens == width
    assert build in config.kernel.variants
