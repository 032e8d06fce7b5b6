"""Dense decode by pairs of SMs on Blackwell in the simulator, through the public call, against the oracle.

No GPU has run this kernel: see `test_sm100_sim.py` for what is tried. Here, beside it: rows of the second block, odd
numbers of tiles of 64 tokens, whose last joint tile is half empty, and values that rows of one block see and rows of
the other do not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mla_cupy.errors import UnsupportedDeviceError
from mla_cupy.kernels.decode import DECODE
from mla_cupy.kernels.decode.problem import DecodeProblem
from tests.support.calls import plan_of
from tests.support.cases import DecodeCase, DecodeInputs, make
from tests.support.flat import mla_decode
from tests.support.sim_driver import fake_gpu, simulated
from tests.support.sim_modes import MODES, parametrize_pairs
from tests.support.tolerance import check

KERNEL, ALONE = "decode_sm100_joint", "decode_sm100"
BLACKWELL = (10, 0)
QUICK_SEEDS, ALL_SEEDS = 10, 200

#: An ordinary run has every third one.
CASES = [
    # Rows of the second block: 1, 32, 64; tiles 1, 2, 3, 4, 5; remainders.
    DecodeCase(b=1, seqlens=1, h_q=65),
    DecodeCase(b=2, seqlens=(64, 129), h_q=96, dtype="float16"),
    DecodeCase(b=3, seqlens=(200, 0, 70), h_q=128, page_size=16, missing_pages=2),
    DecodeCase(b=1, seqlens=300, h_q=128, page_size=24),
    # Query tokens as rows, and what they do not see: the causal edge between tiles, rows that see nothing.
    DecodeCase(b=2, seqlens=(65, 190), s_q=2, h_q=64),
    DecodeCase(b=2, seqlens=(2, 130), s_q=3, h_q=32, page_size=128),
    DecodeCase(b=2, seqlens=(3, 130), s_q=5, h_q=20, causal=False),
    DecodeCase(b=1, seqlens=70, s_q=2, h_q=128),  # two pairs
    # KV heads, several items per pair, no RoPE columns, a rank's share.
    DecodeCase(b=1, seqlens=66, h_q=160),
    DecodeCase(b=5, seqlens=(70, 1, 0, 200, 130), h_q=80),
    DecodeCase(b=2, seqlens=(100, 31), s_q=3, h_q=24, d_qk=512, page_size=1),
    DecodeCase(b=4, seqlens=(389, 1, 193, 390), s_q=4, h_q=24, cp_world=3, cp_rank=1),
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_matches_oracle:
        parametrize_pairs(metafunc, [(case, KERNEL) for case in CASES[::3]])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_matches_oracle_in_all_modes(case: DecodeCase, mode: tuple[str, int]) -> None:
    check_case(make(case), 2, mode)


def run(inputs: DecodeInputs, sm_count: int = 1, mode: tuple[str, int] = ("early", 0), **options: Any) -> Any:
    with simulated(sm_count, BLACKWELL, *mode) as target:
        got = mla_decode(*inputs.arguments, **inputs.case.options, kernel=KERNEL, **options)
    assert "mla_decode_sm100_joint" in target.launched
    return got


def check_case(inputs: DecodeInputs, *run_options: Any) -> None:
    check(run(inputs, *run_options), inputs.exact, inputs.rounded, inputs.case.dtype)


@pytest.mark.one_in(4)
def test_matches_oracle(case: DecodeCase, kernel: str, mode: tuple[str, int], sm_count: int) -> None:
    check_case(make(case), 2 * sm_count, mode)


def test_a_sequence_cut_within_a_joint_tile() -> None:
    """Each of two pairs has eleven tiles of 64 tokens: the second half of the first pair's last joint tile is empty."""
    check_case(make(DecodeCase(b=1, seqlens=22 * 64, h_q=65)), 4)


def random_case(seed: int) -> DecodeCase:
    rng = np.random.default_rng([seed, 38])

    def one_of(*choices: Any) -> Any:
        return choices[int(rng.integers(len(choices)))]

    s_q, heads = one_of((1, 65), (1, 96), (1, 128), (2, 33), (2, 64), (3, 32), (4, 32), (5, 21), (8, 16))
    shard = int(rng.integers(3)) if rng.random() < 0.2 else None
    most = 3 if seed < QUICK_SEEDS else 5
    lengths = tuple(int(n) for n in rng.integers(0, rng.choice([5, 70, 300]), int(rng.integers(1, most))))
    return DecodeCase(
        b=len(lengths),
        seqlens=lengths,
        s_q=s_q,
        h_q=heads,
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
    check_case(make(random_case(seed)), 2 * (1 + seed % 6), mode)


def test_maxima_that_grow() -> None:
    """Each joint tile outweighs the one before, so that O is re-scaled again and again."""
    inputs = make(DecodeCase(b=1, seqlens=400, h_q=70))
    for token in range(399):
        inputs.kv_cache[inputs.block_table[0, token // 64], token % 64] *= (0.1, 0.4, 1.5, 5)[token // 128]
    check_case(inputs, 1, ("late", 0))


@pytest.mark.parametrize(("tokens", "s_q"), [(130, 3), (193, 2)])
def test_what_only_later_queries_see_does_not_reach_earlier_ones(tokens: int, s_q: int) -> None:
    """With two queries of 64 heads one block has the rows that see the token, the other the rows that do not.

    NaN and infinity are in columns of both blocks' values; with 193 tokens the token's tile is not the last one.
    """
    inputs = make(DecodeCase(b=1, seqlens=tokens, s_q=s_q, h_q=128 // s_q))
    hidden = tokens - s_q + 1  # from the first query only
    inputs.kv_cache[inputs.block_table[0, hidden // 64], hidden % 64, 0, [3, 300]] = np.nan, np.inf
    got = run(inputs, 2, ("late", 0))
    assert np.isfinite(got[0][:, :1].astype(np.float32)).all()
    check(got, inputs.exact, inputs.rounded, "bfloat16")


def test_out_of_the_caller_keeps_its_gaps() -> None:
    """Nothing between the rows of `out`, and nothing of rows that are not there, is written; float32 is not rounded."""
    inputs = make(DecodeCase(b=1, seqlens=70, h_q=67))
    whole = np.full((3, 3, 70, 528), 7, np.float32)
    out = whole[:1, :1, 1:68, 8:520]
    got = run(inputs, out=out)
    assert got[0] is out
    check(got, inputs.exact, inputs.rounded, "bfloat16")
    assert (out != out.astype(inputs.q.dtype).astype(np.float32)).mean() > 0.5
    out[...] = 7
    assert (whole == 7).all()


@pytest.mark.parametrize(
    "cuts",
    [
        pytest.param({}, marks=pytest.mark.slow, id="even"),
        pytest.param({"batch_invariant": True, "split_tokens": 64}, id="pieces"),
    ],
)
def test_a_plan_serves_other_lengths(cuts: dict[str, Any]) -> None:
    """Also one whose pieces are half of a joint tile."""
    case = DecodeCase(b=2, seqlens=(150, 65), h_q=66)
    batches = [make(case), make(replace(case, seqlens=(30, 190), seed=1))]
    width = max(inputs.block_table.shape[1] for inputs in batches)
    with simulated(4, BLACKWELL):
        plan = plan_of(batches[0], device=0, max_pages=width, kernel=KERNEL, **cuts)
        for inputs in batches:
            table = np.full((2, width), -7, np.int32)
            table[:, : inputs.block_table.shape[1]] = inputs.block_table
            plan.update(inputs.seqlens)
            got = mla_decode(inputs.q, inputs.kv_cache, table, inputs.seqlens, plan=plan)
            check(got, inputs.exact, inputs.rounded, case.dtype)


def test_b300_and_pairs_side_by_side() -> None:
    """The other target; clusters share global memory alone, and give their tensor memory back."""
    inputs = make(DecodeCase(b=2, seqlens=(70, 140), h_q=66))
    with simulated(8, (10, 3), "random", 5) as target:
        target.resident = 4
        got = mla_decode(*inputs.arguments, kernel=KERNEL)
    check(got, inputs.exact, inputs.rounded, "bfloat16")


# ---- Choice ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("s_q", "h_q", "chosen"),
    [
        *((1, 64, ALONE), (1, 65, KERNEL), (1, 128, KERNEL), (4, 32, KERNEL), (1, 129, ALONE), (3, 64, ALONE)),
        *((1, 193, KERNEL), (2, 128, KERNEL)),
    ],
)
def test_default_where_the_self_test_has_admitted_it(s_q: int, h_q: int, chosen: str) -> None:
    problem, gpu = DecodeProblem(s_q, h_q, "bfloat16"), fake_gpu(148, BLACKWELL)
    config = DECODE.configure(problem, gpu)
    assert config.kernel.name == chosen
    if chosen == KERNEL:
        assert config.row_blocks % 2 == 0
        assert config.row_blocks * config.num_splits <= 148
        others = replace(gpu, admitted=frozenset({ALONE}))
        assert DECODE.configure(problem, others).kernel.name == ALONE


@pytest.mark.parametrize(
    ("problem", "cc", "reason"),
    [
        (DecodeProblem(1, 128, "bfloat16"), (9, 0), r"compute capability 10\.0 or 10\.3"),
        (DecodeProblem(1, 64, "bfloat16"), BLACKWELL, "even number of blocks of 64 rows"),
        (DecodeProblem(1, 129, "bfloat16"), BLACKWELL, "even number of blocks of 64 rows"),
        (DecodeProblem(2, 64, "bfloat16", tree_mask=True), BLACKWELL, "no tree_mask"),
        (DecodeProblem(1, 128, "bfloat16", record="v32"), BLACKWELL, "16-bit rows"),
        (DecodeProblem(1, 128, "bfloat16", aligned=False), BLACKWELL, "multiples of 16 bytes"),
    ],
)
def test_refusals_say_why(problem: DecodeProblem, cc: tuple[int, int], reason: str) -> None:
    with pytest.raises(UnsupportedDeviceError, match=reason):
        DECODE.configure(problem, fake_gpu(148, cc), KERNEL)
