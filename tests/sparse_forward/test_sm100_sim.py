"""The Blackwell kernels of the sparse forward in the simulator, through the public call, against the oracle.

No GPU has run these kernels. So beside lists by number and remainder, and heads by number, here is what could go wrong
in their choreography: loads, products and accesses to tensor memory that complete early, late and in random order, and
several blocks at a time. An ordinary run takes ten random cases beside those named below; `-m slow` takes 200.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy.kernels.sparse_forward import SPARSE_FORWARD
from mla_cupy.kernels.sparse_forward.problem import SparseForwardProblem
from mla_cupy.runtime.device import DeviceInfo
from tests.support.flat import flat
from tests.support.gradients import check_gradients
from tests.support.kernels import FORWARD_KERNELS, on_blackwell
from tests.support.sim_driver import fake_gpu, simulated
from tests.support.sparse_cases import SparseCase, SparseInputs, make
from tests.support.sparse_gpu import problem_of
from tests.support.tolerance import check, check_lse

KERNELS = on_blackwell(FORWARD_KERNELS)
ALONE, JOINT = "sparse_forward_sm100", "sparse_forward_sm100_joint"
MODES = (("early", 0), ("late", 0), *(("random", seed) for seed in range(1, 21)))
RANDOM_CASES, SLOW_CASES = 10, 200

#: Each with the heads of a kernel's builds, full or not.
CASES = [
    # Tiles of 64 keys, scored in pairs: 1, 2, 3, 4, 5.
    SparseCase(s_q=1, h_q=64, topk=64, invalid=0.0),
    SparseCase(s_q=1, h_q=16, topk=128, invalid=0.0, sink=True),
    SparseCase(s_q=1, h_q=128, topk=192, d_qk=512, invalid=0.0, sink=True),
    SparseCase(s_q=1, h_q=32, topk=256, invalid=0.0, dtype="float16"),
    SparseCase(s_q=1, h_q=100, topk=320, invalid=0.0, d_qk=512),
    # The last tile has 1 key, 63, 1.
    SparseCase(s_q=1, h_q=1, topk=1, invalid=0.0),
    SparseCase(s_q=2, h_q=17, topk=63, invalid=0.0, dtype="float16"),
    SparseCase(s_q=2, h_q=65, topk=65, invalid=0.0),
    # Lists of every length, empty ones among them; a block has several queries, or parts of one.
    SparseCase(s_q=6, h_q=48, topk=150, lengths=True, sink=True),
    SparseCase(s_q=6, h_q=5, topk=70, sequences=((2, 90), (0, 5), (3, 80)), causal=True, head_axis=True),
    SparseCase(s_q=3, h_q=128, topk=40, invalid=1.0, sink=True),  # nothing to attend to
    SparseCase(s_q=2, s_kv=40, h_q=20, topk=130, causal=True, dtype="float16"),  # more slots than rows: duplicates
]


def random_case(seed: int) -> SparseCase:
    """Sizes that the tests above do not name, too."""
    rng = np.random.default_rng([seed, 100])

    def chance(share: float) -> bool:
        return bool(rng.random() < share)

    dtype = ("bfloat16", "float16")[int(chance(0.3))]
    return SparseCase(
        s_q=int(rng.integers(1, 4)),
        s_kv=int(rng.choice([1, 50, 300, 500])),
        h_q=int(rng.choice([1, 8, 16, 17, 32, 33, 64, 65, 96, 128])),
        topk=int(rng.integers(1, 330)),
        d_qk=(576, 512)[int(chance(0.3))],
        dtype=dtype,
        causal=chance(0.3),
        lengths=chance(0.4),
        sink=dtype == "bfloat16" and chance(0.5),  # what sinks leave of some heads float16 would lose
        invalid=float(rng.choice([0.0, 0.1, 0.8])),
        head_axis=chance(0.2),
        seed=seed,
    )


#: Joint products: tiles of 64 keys by number and remainder, whole joint tiles and halves, most and fewest heads.
JOINT_CASES = [
    SparseCase(s_q=1, h_q=128, topk=64, invalid=0.0),
    SparseCase(s_q=1, h_q=65, topk=128, invalid=0.0, dtype="float16"),
    SparseCase(s_q=1, h_q=100, topk=129, invalid=0.0, d_qk=512, sink=True),
    SparseCase(s_q=2, h_q=128, topk=1, invalid=0.0),
    SparseCase(s_q=5, h_q=66, topk=150, lengths=True, sink=True),
    SparseCase(s_q=2, h_q=97, topk=40, invalid=1.0, sink=True),  # nothing to attend to
]


def joint_case(seed: int) -> SparseCase:
    """A random case with the heads of the joint products; ordinary runs have short ones."""
    case, rng = random_case(seed), np.random.default_rng([seed, 128])
    topk = int(rng.integers(1, 200)) if seed < RANDOM_CASES else case.topk
    return replace(case, s_q=min(case.s_q, 2), topk=topk, h_q=int(rng.choice([65, 80, 96, 112, 127, 128])))


def takes(kernel: str, case: SparseCase) -> bool:
    return not FORWARD_KERNELS[kernel].unsupported(problem_of(case), fake_gpu(1, (10, 0)))


def in_turns(cases: Sequence[SparseCase]) -> list[tuple[SparseCase, str, tuple[str, int], int]]:
    """Each with one of the kernels that take it, a mode and a number of multiprocessors."""
    chosen = []
    for i, case in enumerate(cases):
        kernels = [kernel for kernel in KERNELS if takes(kernel, case)]
        mode = MODES[i % 3] if i % 2 else MODES[2 + i // 2 % 20]
        chosen.append((case, kernels[i // 2 % len(kernels)], mode, (1, 4, 2)[i % 3]))
    return chosen


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function not in (test_matches_oracle, test_random_cases):
        return
    if metafunc.function is test_random_cases:
        cases = [random_case(seed) for seed in range(SLOW_CASES)]
        turns = in_turns(cases)
        marks = [[] if i < RANDOM_CASES else [pytest.mark.slow] for i in range(SLOW_CASES)]
    else:
        turns = in_turns(CASES)
        marks = [[] for _ in turns]
    ids = [f"{case.id}-{kernel}-{mode}{seed}-{sms}sm" for case, kernel, (mode, seed), sms in turns]
    values = [pytest.param(*turn, marks=mark) for turn, mark in zip(turns, marks, strict=True)]
    metafunc.parametrize(("case", "kernel", "mode", "sm_count"), values, ids=ids)


def run(
    inputs: SparseInputs,
    kernel: str,
    mode: tuple[str, int] = ("early", 0),
    sm_count: int = 1,
    resident: int = 1,
    cc: tuple[int, int] = (10, 0),
    **options: Any,
) -> tuple[Any, Any, Any]:
    """The public call, checked against the oracle."""
    with simulated(sm_count, cc, *mode) as target:
        target.resident = resident
        got = flat(mla_cupy.sparse_mla_forward)(*inputs.arguments, **inputs.options, kernel=kernel, **options)
    assert f"mla_{kernel}" in target.launched
    check(got[:2], inputs.exact[:2], inputs.rounded[:2], inputs.case.dtype)
    check_lse(got[2], inputs.exact[2], inputs.rounded[2])
    return got


@pytest.mark.one_in(16)
def test_matches_oracle(case: SparseCase, kernel: str, mode: tuple[str, int], sm_count: int) -> None:
    run(make(case), kernel, mode, sm_count)


@pytest.mark.one_in(8)
def test_random_cases(case: SparseCase, kernel: str, mode: tuple[str, int], sm_count: int) -> None:
    run(make(case), kernel, mode, sm_count)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("case", "mode", "sm_count"),
    [
        pytest.param(
            case, MODES[(7 * i) % len(MODES)], (1, 4, 2)[i % 3], id=case.id, marks=[pytest.mark.slow] * (i % 2)
        )
        for i, case in enumerate(JOINT_CASES)
    ],
)
def test_joint_products(case: SparseCase, mode: tuple[str, int], sm_count: int) -> None:
    run(make(case), JOINT, mode, sm_count)


def test_a_list_cut_within_a_joint_tile() -> None:
    """Each of two pairs has eleven tiles of 64 keys: the second half of the first pair's last joint tile is empty."""
    run(make(SparseCase(s_q=1, s_kv=400, h_q=65, topk=22 * 64, invalid=0.0)), JOINT, sm_count=4)


@pytest.mark.one_in(16)
@pytest.mark.parametrize(
    "seed", [pytest.param(i, marks=[pytest.mark.slow] if i >= RANDOM_CASES else []) for i in range(SLOW_CASES)]
)
def test_joint_products_of_random_cases(seed: int) -> None:
    run(make(joint_case(seed)), JOINT, MODES[seed % len(MODES)], (1, 4, 2)[seed % 3])


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kernel", KERNELS)
def test_blocks_side_by_side(kernel: str) -> None:
    """They share global memory alone; each has the tensor memory of an SM, and gives it back."""
    inputs = make(SparseCase(s_q=4, h_q=66, topk=70, sink=True))
    run(inputs, kernel, ("random", 7), sm_count=4, resident=4)


def test_results_in_float32() -> None:
    """They are not rounded to 16 bits on the way."""
    inputs = make(SparseCase(s_q=1, h_q=35, topk=90, sink=True))
    out, _, _ = run(inputs, ALONE, ("late", 0), out_dtype="float32", cc=(10, 3))
    assert out.dtype == np.float32
    assert (out != out.astype(inputs.q.dtype).astype(np.float32)).mean() > 0.5


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("kernel", "h_q"), [(ALONE, 3), (JOINT, 67)])
def test_what_one_query_selects_stays_with_it(kernel: str, h_q: int) -> None:
    """NaN in the values, infinity in the RoPE columns; `max_logits` tells of NaN too."""
    inputs = make(SparseCase(s_q=4, s_kv=900, h_q=h_q, topk=100, invalid=0.0))
    rows = inputs.rows
    inputs.kv[np.setdiff1d(rows[2], np.concatenate(rows[:2] + rows[3:]))[0], 5] = np.nan
    inputs.kv[np.setdiff1d(rows[3], np.concatenate(rows[:3]))[0], 570] = np.inf
    out, _, max_logits = run(inputs, kernel, ("random", 5))
    assert np.isfinite(out[:2].astype(np.float32)).all()
    assert np.isnan(max_logits[2]).all()


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("kernel", "h_q", "growth"), [(ALONE, 9, 4.0), (ALONE, 9, 400.0), (JOINT, 65, 400.0)], ids=str)
def test_maxima_that_grow_from_tile_to_tile(kernel: str, h_q: int, growth: float) -> None:
    """Maxima that grow by less than 2^8 are kept; larger ones rescale the sums, in both tiles of a pair and in the next
    one.
    """
    inputs = make(SparseCase(s_q=1, h_q=h_q, topk=250, s_kv=250, invalid=0.0))
    (rows,) = inputs.rows
    inputs.q[...] = np.abs(inputs.q.astype(np.float32))
    loudness = np.exp2(np.arange(len(rows)) // 64) * growth / 400
    inputs.kv[rows] = inputs.kv[rows].astype(np.float32) / 4
    inputs.kv[rows, :8] = loudness[:, None] * 4
    run(inputs, kernel, ("late", 0))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kernel", KERNELS)
def test_nan_behind_the_last_head(kernel: str) -> None:
    """Boxes end at the array's heads: what lies behind them in memory is another query."""
    inputs = make(SparseCase(s_q=2, s_kv=60, h_q=69, topk=30, invalid=0.0))
    inputs.q[1] = np.nan
    expected, _, _ = mla_cupy.reference.sparse_mla_forward(*inputs.arguments, **inputs.options)
    with simulated(1, (10, 0), "random", 3):
        out, _, _ = flat(mla_cupy.sparse_mla_forward)(*inputs.arguments, **inputs.options, kernel=kernel)
    np.testing.assert_allclose(out[0].astype(np.float64), expected[0], rtol=0, atol=2e-2 * np.abs(expected[0]).max())


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("kernel", "h_q"), [(ALONE, 3), (JOINT, 70)])
def test_gradients_end_to_end(kernel: str, h_q: int) -> None:
    """The backward takes what this forward gives: `out` and `lse` are its own, not the oracle's.

    So the kernels' error is compared with the rounding oracle's error of both passes, too.
    """
    case = SparseCase(s_q=2, s_kv=120, h_q=h_q, topk=80)
    inputs, chained = make(case), make(case)
    with simulated(2, (10, 0)) as target:
        out, lse, _ = flat(mla_cupy.sparse_mla_forward)(*inputs.arguments, **inputs.options, kernel=kernel)
        got = flat(mla_cupy.sparse_mla_backward)(
            inputs.q, inputs.kv, out, inputs.dout, lse, inputs.indices, **inputs.options,
            kernel="sparse_backward_sm100",
        )  # fmt: skip
    assert {f"mla_{kernel}", "mla_sparse_backward_sm100"} <= set(target.launched)
    chained.out[...], chained.lse[...] = inputs.rounded[0].astype(out.dtype), inputs.rounded[1]
    vars(inputs)["rounded_gradients"] = chained.rounded_gradients
    check_gradients(got, inputs)


# ---- Choice
@pytest.mark.parametrize("h_q", [16, 64, 128])
@pytest.mark.parametrize("cc", [(10, 0), (10, 3)], ids=str)
@pytest.mark.parametrize("admitted", [True, False])
def test_default_where_the_self_test_has_admitted_them(cc: tuple[int, int], h_q: int, admitted: bool) -> None:
    gpu = fake_gpu(148, cc) if admitted else replace(fake_gpu(148, cc), admitted=frozenset())
    chosen = SPARSE_FORWARD.configure(_problem(h_q), gpu).kernel
    assert (chosen.name in KERNELS) == admitted
    if admitted:
        assert chosen.name == (JOINT if h_q > 64 else ALONE)


def test_products_of_one_block_where_only_those_are_admitted() -> None:
    gpu = replace(fake_gpu(148, (10, 0)), admitted=frozenset({ALONE}))
    assert SPARSE_FORWARD.configure(_problem(128), gpu).kernel.name == ALONE


def _problem(h_q: int, **changes: Any) -> SparseForwardProblem:
    return SparseForwardProblem(10, 4096, h_q, 2048, 576, "bfloat16", **changes)


@pytest.mark.parametrize(
    ("h_q", "heads", "blocks"), [(1, 16, 1), (16, 16, 1), (17, 32, 1), (33, 64, 1), (64, 64, 1), (65, 64, 2)]
)
def test_build_for_the_heads(h_q: int, heads: int, blocks: int) -> None:
    config = SPARSE_FORWARD.configure(_problem(h_q), fake_gpu(148, (10, 0)), ALONE)
    assert (config.variant.block_heads, config.row_blocks) == (heads, blocks)


@pytest.mark.parametrize(
    ("kernel", "problem", "device", "reason"),
    [
        (ALONE, _problem(64), fake_gpu(4, (9, 0)), r"compute capability 10\.0 or 10\.3"),
        (ALONE, _problem(64, aligned=False), fake_gpu(4, (10, 0)), "multiples of 16 bytes"),
        (ALONE, _problem(64, record="v32"), fake_gpu(4, (10, 0)), "16-bit rows"),
        (JOINT, _problem(64), fake_gpu(4, (10, 0)), "takes 65 to 128 heads"),
        (JOINT, _problem(129), fake_gpu(4, (10, 0)), "takes 65 to 128 heads"),
        (JOINT, _problem(128, aligned=False), fake_gpu(4, (10, 0)), "multiples of 16 bytes"),
        (JOINT, _problem(128), fake_gpu(4, (12, 0)), r"compute capability 10\.0 or 10\.3"),
    ],
)
def test_refusals_say_why(kernel: str, problem: SparseForwardProblem, device: DeviceInfo, reason: str) -> None:
    with pytest.raises(mla_cupy.errors.UnsupportedDeviceError, match=reason):
        SPARSE_FORWARD.configure(problem, device, kernel)
