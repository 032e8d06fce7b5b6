"""Dense decode on Blackwell in the simulator, through the public call, against the oracle.

No GPU has run this kernel, so here is what could go wrong in its choreography: rows by number, tiles by number and
remainder, several work items per block, and the asynchrony of loads, products and reads of tensor memory, early, late
and in random order. Masks, shards, sinks and batch-invariant plans have it in tests of their own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from mla_cupy.errors import UnsupportedDeviceError
from mla_cupy.kernels.decode import DECODE
from mla_cupy.kernels.decode.problem import DecodeProblem
from tests.support.calls import plan_of
from tests.support.cases import DecodeCase, DecodeInputs, make
from tests.support.flat import mla_decode
from tests.support.sim_driver import fake_gpu, simulated
from tests.support.sim_modes import parametrize_pairs
from tests.support.tolerance import check

KERNEL = "decode_sm100"
BLACKWELL = (10, 0)
QUICK_SEEDS, ALL_SEEDS = 10, 200

CASES = [
    # Rows of each build, and divided among blocks: 1 of 16, 16, 17 of 32, 33 of 48, 64, two blocks of 48, of 64.
    DecodeCase(b=1, seqlens=1, h_q=1),
    DecodeCase(b=2, seqlens=(64, 129), h_q=16),
    DecodeCase(b=3, seqlens=(200, 0, 70), h_q=17, dtype="float16"),
    DecodeCase(b=1, seqlens=130, h_q=33, page_size=16, missing_pages=2),
    DecodeCase(b=2, seqlens=(65, 190), s_q=2, h_q=32),  # the causal edge within a tile
    DecodeCase(b=1, seqlens=100, h_q=96),
    DecodeCase(b=1, seqlens=140, h_q=128, dtype="float16", page_size=128),
    # Several items per block, split requests, rows that see nothing, KV heads.
    DecodeCase(b=5, seqlens=(70, 1, 0, 200, 130), h_q=8),
    DecodeCase(b=1, seqlens=400, h_q=16),
    DecodeCase(b=2, seqlens=(2, 130), s_q=3, h_q=7, page_size=16),
    DecodeCase(b=1, seqlens=66, s_q=4, h_q=32),
    DecodeCase(b=2, seqlens=(3, 130), s_q=5, h_q=20, causal=False),  # 100 rows
    # Pages of each number of boxes, keys without RoPE columns.
    DecodeCase(b=2, seqlens=(100, 31), page_size=24, dtype="float16"),
    DecodeCase(b=1, seqlens=66, page_size=1, h_q=3),
    DecodeCase(b=2, seqlens=(200, 64), h_q=16, d_qk=512),
    DecodeCase(b=2, seqlens=(3, 100), s_q=3, h_q=24, d_qk=512, page_size=16, missing_pages=1),
    DecodeCase(b=4, seqlens=(389, 1, 193, 390), s_q=4, h_q=4, cp_world=3, cp_rank=1),
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_matches_oracle:
        parametrize_pairs(metafunc, [(case, KERNEL) for case in CASES])


def run(inputs: DecodeInputs, sm_count: int = 1, mode: tuple[str, int] = ("early", 0), **options: Any) -> Any:
    with simulated(sm_count, BLACKWELL, *mode) as target:
        got = mla_decode(*inputs.arguments, **inputs.case.options, kernel=KERNEL, **options)
    assert "mla_decode_sm100" in target.launched
    return got


def check_case(inputs: DecodeInputs, *run_options: Any) -> None:
    check(run(inputs, *run_options), inputs.exact, inputs.rounded, inputs.case.dtype)


@pytest.mark.one_in(8)
def test_matches_oracle(case: DecodeCase, kernel: str, mode: tuple[str, int], sm_count: int) -> None:
    check_case(make(case), sm_count, mode)


def random_case(seed: int) -> DecodeCase:
    rng = np.random.default_rng([seed, 37])

    def one_of(*choices: Any) -> Any:
        return choices[int(rng.integers(len(choices)))]

    h_q = one_of(1, 3, 8, 16, 21, 32, 48, 64, 96, 128)
    shard = int(rng.integers(3)) if rng.random() < 0.2 else None
    lengths = tuple(int(n) for n in rng.integers(0, rng.choice([5, 70, 300]), int(rng.integers(1, 5))))
    return DecodeCase(
        b=len(lengths),
        seqlens=lengths,
        s_q=one_of(1, 1, 2, 3, 5) if h_q <= 64 else 1,
        h_q=h_q,
        page_size=one_of(2, 8, 16, 24, 48, 64, 96, 128),
        dtype=one_of("bfloat16", "float16"),
        causal=bool(rng.integers(2)),
        missing_pages=one_of(0, 0, 1),
        d_qk=one_of(576, 576, 512),
        cp_world=1 if shard is None else 3,
        cp_rank=shard or 0,
        seed=seed,
    )


@pytest.mark.one_in(16)
@pytest.mark.parametrize(
    "seed", [pytest.param(i, marks=() if i < QUICK_SEEDS else pytest.mark.slow) for i in range(ALL_SEEDS)]
)
def test_random_cases(seed: int) -> None:
    """An ordinary run has a few of them; a seed also decides modes and GPUs."""
    mode = ("random", seed) if seed % 3 else (("early", "late")[seed // 3 % 2], 0)
    check_case(make(random_case(seed)), 1 + seed % 6, mode)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("h_q", [16, 64])
def test_maxima_that_grow(h_q: int) -> None:
    """Each tile outweighs the one before, so that O is re-scaled again and again."""
    inputs = make(DecodeCase(b=2, seqlens=(300, 130), h_q=h_q))
    for request, length in enumerate(inputs.seqlens):
        for token in range(length - 1):
            inputs.kv_cache[inputs.block_table[request, token // 64], token % 64] *= (0.1, 0.4, 1.5, 5, 1)[token // 64]
    check_case(inputs, 1, ("late", 0))
    check_case(inputs, 1, ("random", 7))


@pytest.mark.parametrize("change", ["mean", "giant", "ties"])
def test_hostile_numbers(change: str) -> None:
    inputs = make(DecodeCase(b=1, seqlens=200, h_q=20))
    tokens = inputs.kv_cache[inputs.block_table[0, :3]].copy()
    if change == "mean":
        tokens += np.asarray(3, tokens.dtype)
    elif change == "giant":
        tokens[1, 5] *= np.asarray(100, tokens.dtype)
    else:
        tokens[:] = tokens[0, :1]
    inputs.kv_cache[inputs.block_table[0, :3]] = tokens
    check_case(inputs, 2)


def test_results_in_float32() -> None:
    """They are not rounded to 16 bits on the way."""
    inputs = make(DecodeCase(b=2, seqlens=(90, 3), h_q=19))
    got = run(inputs, out_dtype="float32")
    check(got, inputs.exact, inputs.rounded, "bfloat16")
    assert (got[0] != got[0].astype(inputs.q.dtype).astype(np.float32)).mean() > 0.5


@pytest.mark.parametrize("tokens", [130, 193])
def test_what_only_later_queries_see_does_not_reach_earlier_ones(tokens: int) -> None:
    """With 193 tokens the token in question is in a tile that another one follows."""
    inputs = make(DecodeCase(b=1, seqlens=tokens, s_q=3, h_q=4))
    hidden = tokens - 2  # from the first query only
    inputs.kv_cache[inputs.block_table[0, hidden // 64], hidden % 64, 0, [3, 300]] = np.nan, np.inf
    got = run(inputs, 1, ("late", 0))
    assert np.isfinite(got[0][:, :1].astype(np.float32)).all()
    check(got, inputs.exact, inputs.rounded, "bfloat16")


def test_out_of_the_caller_keeps_its_gaps() -> None:
    """Nothing between the rows of `out`, and nothing of rows that are not there, is written."""
    inputs = make(DecodeCase(b=2, seqlens=(70, 5), s_q=2, h_q=5))
    whole = np.full((3, 3, 7, 528), 7, inputs.q.dtype)
    out = whole[:2, :2, 1:6, 8:520]
    got = run(inputs, out=out)
    assert got[0] is out
    check(got, inputs.exact, inputs.rounded, "bfloat16")
    out[...] = 7
    assert (whole == 7).all()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("cuts", [{}, {"batch_invariant": True, "split_tokens": 64}], ids=["even", "pieces"])
def test_a_plan_serves_other_lengths(cuts: dict[str, Any]) -> None:
    case = DecodeCase(b=2, seqlens=(150, 65), h_q=4)
    batches = [make(case), make(replace(case, seqlens=(30, 190), seed=1))]
    width = max(inputs.block_table.shape[1] for inputs in batches)
    with simulated(2, BLACKWELL):
        plan = plan_of(batches[0], device=0, max_pages=width, kernel=KERNEL, **cuts)
        for inputs in (batches[0], batches[1], batches[0]):
            table: npt.NDArray[Any] = np.full((2, width), -7, np.int32)
            table[:, : inputs.block_table.shape[1]] = inputs.block_table
            plan.update(inputs.seqlens)
            got = mla_decode(inputs.q, inputs.kv_cache, table, inputs.seqlens, plan=plan)
            check(got, inputs.exact, inputs.rounded, case.dtype)


def test_b300() -> None:
    """The other target; the cubin is the GPU's."""
    inputs = make(DecodeCase(b=1, seqlens=70, h_q=3))
    with simulated(1, (10, 3)):
        got = mla_decode(*inputs.arguments, kernel=KERNEL)
    check(got, inputs.exact, inputs.rounded, "bfloat16")


# ---- Choice ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "blocks", "block_rows"),
    [
        *((1, 1, 16), (16, 1, 16), (17, 1, 32), (33, 1, 48), (48, 1, 48), (49, 1, 64), (64, 1, 64)),
        *((65, 2, 48), (96, 2, 48), (97, 2, 64), (128, 2, 64), (129, 3, 48), (256, 4, 64), (385, 7, 64)),
    ],
)
def test_rows_are_divided_evenly(rows: int, blocks: int, block_rows: int) -> None:
    config = DECODE.configure(DecodeProblem(1, rows, "bfloat16"), fake_gpu(148, BLACKWELL), KERNEL)
    build = config.variant
    assert (config.row_blocks, build.block_rows) == (blocks, block_rows)
    assert build in config.kernel.variants
    assert blocks == -(-rows // block_rows)  # as the kernel divides them


@pytest.mark.parametrize("d_qk", [576, 512])
@pytest.mark.parametrize("tree_mask", [False, True])
@pytest.mark.parametrize("h_q", [1, 40, 128])
def test_every_problem_has_a_build(d_qk: int, tree_mask: bool, h_q: int) -> None:
    problem = DecodeProblem(2, h_q, "float16", d_qk=d_qk, tree_mask=tree_mask)
    config = DECODE.configure(problem, fake_gpu(148, BLACKWELL), KERNEL)
    build = config.variant
    assert build in config.kernel.variants
    assert config.row_blocks == -(-problem.rows // build.block_rows)


@pytest.mark.parametrize("admitted", [True, False])
def test_is_the_default_where_the_self_test_has_admitted_it(admitted: bool) -> None:
    problem = DecodeProblem(1, 64, "bfloat16")
    gpu = fake_gpu(148, BLACKWELL) if admitted else replace(fake_gpu(148, BLACKWELL), admitted=frozenset())
    assert (DECODE.configure(problem, gpu).kernel.name == KERNEL) == admitted
    assert DECODE.configure(problem, gpu, KERNEL).kernel.name == KERNEL


def test_refusals_say_why() -> None:
    inputs = make(DecodeCase(b=1, seqlens=30, h_q=2))
    with pytest.raises(UnsupportedDeviceError, match=r"compute capability 10\.0 or 10\.3"), simulated(1, (9, 0)):
        mla_decode(*inputs.arguments, kernel=KERNEL)
    odd = make(DecodeCase(b=1, seqlens=30, h_q=2, strides="odd"))
    with pytest.raises(UnsupportedDeviceError, match="multiples of 16 bytes"), simulated(1, BLACKWELL):
        mla_decode(*odd.arguments, kernel=KERNEL)
