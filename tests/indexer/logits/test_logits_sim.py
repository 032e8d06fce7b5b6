"""The kernels of the logits in the simulator, through the public calls, against the oracle.

Keys that no query sees are NaN, and so are all other bytes of the pool outside the sequences.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import dtypes, reference
from mla_cupy.errors import ArgumentError, UnsupportedDeviceError
from mla_cupy.kernels.indexer.logits import LOGITS, LOGITS_PAGED, pipeline
from mla_cupy.kernels.indexer.logits.problem import LogitsProblem
from mla_cupy.reference.indexer_records import page_parts
from tests.support.indexer_cases import (
    IN_FLOAT16,
    LogitsCase,
    PagedCase,
    as_codes,
    check_logits,
    logits_inputs,
    paged_inputs,
)
from tests.support.kernels import by_name
from tests.support.sim_driver import fake_gpu, simulated
from tests.support.sim_modes import MODES

GENERIC = "indexer_logits_generic"
HOPPER, PAGED_HOPPER = "indexer_logits_sm90", "indexer_logits_sm90_paged"
MMA, AMPERE_ON = "indexer_logits_mma", ((8, 0), (8, 9), (12, 0))
SM_COUNTS = (1, 3, 2)

CASES = [
    LogitsCase(s_q=8, s_kv=128, h=64, ranges="none"),  # one tile
    LogitsCase(s_q=1, s_kv=1, h=1, ranges="none", scales=False),
    LogitsCase(s_q=11, s_kv=300, h=9, dtype="uint8"),  # two blocks of tokens, three tiles
    LogitsCase(s_q=19, s_kv=390, h=12, ranges="causal"),
    LogitsCase(s_q=9, s_kv=129, h=24, d=64),
    LogitsCase(s_q=7, s_kv=127, h=3, d=32),
    LogitsCase(s_q=10, s_kv=260, h=72),  # one stage of queries
    LogitsCase(s_q=9, s_kv=257, h=128, ranges="causal"),
    LogitsCase(s_q=12, s_kv=200, h=5, dtype="bfloat16", scales=False),  # keys of two pieces
    LogitsCase(s_q=9, s_kv=150, h=40, d=64, dtype="bfloat16"),
    LogitsCase(s_q=17, s_kv=900, h=4, ranges="none"),  # every stage of keys, several times
]
#: Cases of the kernel for Ampere and newer GPUs: tiles of 256 keys, heads padded to a multiple of 16.
MMA_CASES = [
    LogitsCase(s_q=2, s_kv=128, h=33, ranges="none"),
    LogitsCase(s_q=1, s_kv=1, h=1, ranges="none", scales=False),
    LogitsCase(s_q=11, s_kv=300, h=9, dtype="uint8"),  # two blocks of tokens, two tiles
    LogitsCase(s_q=19, s_kv=590, h=2, d=64, ranges="causal"),
    LogitsCase(s_q=7, s_kv=127, h=3, d=32),
    LogitsCase(s_q=5, s_kv=60, h=72),  # two passes
    LogitsCase(s_q=5, s_kv=57, h=5, dtype="bfloat16", scales=False),
    LogitsCase(s_q=9, s_kv=270, h=17, d=64, dtype="bfloat16"),
    LogitsCase(s_q=3, s_kv=70, h=128, d=32, dtype="bfloat16"),
]


def run(
    case: LogitsCase, kernel: str, sm_count: int, mode: tuple[str, int], cc: tuple[int, int] = (9, 0), **options: Any
) -> Any:
    inputs = logits_inputs(case)
    with simulated(sm_count, cc, *mode) as target:
        got = mla_cupy.indexer_logits(**inputs, kernel=kernel, **options)
    assert target.launched[-1] == f"mla_{kernel}"
    check_logits(got, inputs, reference.indexer_logits(**inputs))
    return got


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("case", "mode", "sm_count"),
    [(case, MODES[i % len(MODES)], SM_COUNTS[i % len(SM_COUNTS)]) for i, case in enumerate(CASES)],
    ids=lambda x: getattr(x, "id", str(x)),
)
def test_hopper(case: LogitsCase, mode: tuple[str, int], sm_count: int) -> None:
    run(case, HOPPER, sm_count, mode)


@pytest.mark.slow
@pytest.mark.parametrize("sm_count", SM_COUNTS)
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_hopper_in_every_mode(case: LogitsCase, mode: tuple[str, int], sm_count: int) -> None:
    run(case, HOPPER, sm_count, mode)


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("case", "mode", "sm_count", "cc"),
    [(case, MODES[i % len(MODES)], SM_COUNTS[i % 2], AMPERE_ON[i % 3]) for i, case in enumerate(MMA_CASES)],
    ids=lambda x: getattr(x, "id", str(x)),
)
def test_mma(case: LogitsCase, mode: tuple[str, int], sm_count: int, cc: tuple[int, int]) -> None:
    run(case, MMA, sm_count, mode, cc)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("cc", AMPERE_ON)
@pytest.mark.parametrize("case", [*CASES, *MMA_CASES], ids=lambda case: case.id)
def test_mma_in_every_mode(case: LogitsCase, mode: tuple[str, int], cc: tuple[int, int]) -> None:
    run(case, MMA, 2, mode, cc)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("cc", AMPERE_ON)
def test_all_codes(cc: tuple[int, int]) -> None:
    """Every code multiplied by every code: exact, and NaN counts as 0."""
    q, k = np.zeros((4, 64, 32), np.uint8), np.zeros((256, 32), np.uint8)
    q.reshape(256, 32)[:, 5] = k[:, 5] = np.arange(256)
    weights = np.ones((4, 64), np.float32)
    for head in range(0, 64, 16):  # one at a time, so that sums are exact
        weights[:] = 0
        weights[:, head] = 1
        with simulated(1, cc):
            got = mla_cupy.indexer_logits(q, k, weights, kernel=MMA)
        np.testing.assert_array_equal(got, reference.indexer_logits(q, k, weights).astype(np.float32))


# ---- Products in float16 -----------------------------------------------------------------------------------------

HALF_CASES = [
    LogitsCase(s_q=8, s_kv=128, h=64, dtype="uint8", ranges="none", float16=True),
    LogitsCase(s_q=11, s_kv=300, h=9, dtype="uint8", float16=True),
    LogitsCase(s_q=9, s_kv=257, h=128, dtype="uint8", ranges="causal", float16=True),
    LogitsCase(s_q=9, s_kv=129, h=24, d=64, dtype="uint8", float16=True),
    LogitsCase(s_q=7, s_kv=127, h=3, d=32, dtype="uint8", scales=False, float16=True),
    LogitsCase(s_q=17, s_kv=900, h=4, dtype="uint8", ranges="none", float16=True),
]


def in_float16(inputs: dict[str, Any], sm_count: int = 2, mode: tuple[str, int] = MODES[0], **options: Any) -> Any:
    with simulated(sm_count, (9, 0), *mode):
        return mla_cupy.indexer_logits(**inputs, **{"kernel": HOPPER, **options}, accumulate="float16")


def run_in_float16(case: LogitsCase, sm_count: int, mode: tuple[str, int]) -> None:
    """The oracle rounds in the same places, and otherwise in float32 alone."""
    inputs = logits_inputs(case)
    inputs["weights"] *= np.float32(1e-30)
    got, rounded = in_float16(inputs, sm_count, mode), reference.indexer_logits(**inputs, accumulate="float16")
    check_logits(got, inputs, rounded)
    check_logits(got, inputs, reference.indexer_logits(**inputs), IN_FLOAT16)


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("case", "mode", "sm_count"),
    [(case, MODES[i % len(MODES)], SM_COUNTS[i % len(SM_COUNTS)]) for i, case in enumerate(HALF_CASES)],
    ids=lambda x: getattr(x, "id", str(x)),
)
def test_float16(case: LogitsCase, mode: tuple[str, int], sm_count: int) -> None:
    run_in_float16(case, sm_count, mode)


@pytest.mark.slow
@pytest.mark.parametrize("sm_count", SM_COUNTS)
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("case", HALF_CASES, ids=lambda case: case.id)
def test_float16_in_every_mode(case: LogitsCase, mode: tuple[str, int], sm_count: int) -> None:
    run_in_float16(case, sm_count, mode)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("weight", [1.0, 1e-38, -1e31])
@pytest.mark.parametrize("d", [32, 64, 128])
def test_the_largest_codes_are_finite_in_float16(d: int, weight: float) -> None:
    """Logits of finite inputs are finite for all weights, as long as the sum fits into a float."""
    q, k = as_codes(np.full((2, 128, d), 128 / d)), as_codes(np.full((5, d), 448.0))
    inputs = {"q": q, "k": k, "weights": np.full((2, 128), weight, np.float32)}
    got = in_float16(inputs)
    np.testing.assert_allclose(got, 57344.0 * 128 * inputs["weights"][0, 0].astype(np.float64), rtol=1e-2)


def test_ordinary_codes_may_be_infinite_in_float16() -> None:
    """No error: a code that is too large spoils its own logits alone."""
    inputs = logits_inputs(LogitsCase(s_q=9, s_kv=140, h=3, dtype="uint8", ranges="none", float16=True))
    inputs["weights"] = np.abs(inputs["weights"])
    clean = in_float16(inputs)
    inputs["q"][4, 1], inputs["k"][130] = as_codes(np.array([448.0])), as_codes(np.array([448.0]))
    got, rounded = in_float16(inputs), reference.indexer_logits(**inputs, accumulate="float16")
    np.testing.assert_array_equal(np.isposinf(got), np.isposinf(rounded))
    assert np.isposinf(got[4, 130])
    np.testing.assert_array_equal(np.delete(np.delete(got, 4, 0), 130, 1), np.delete(np.delete(clean, 4, 0), 130, 1))


def test_weights_of_all_sizes_in_float16() -> None:
    """Infinities and NaN reach the logits of their tokens; weights next to a large weight lose bits, as is allowed."""
    inputs = logits_inputs(LogitsCase(s_q=6, s_kv=140, h=9, dtype="uint8", ranges="none", float16=True))
    inputs["weights"][1, 2], inputs["weights"][2, 3], inputs["weights"][3, 4] = np.nan, -np.inf, 1e5
    inputs["weights"][4] = 0
    got = in_float16(inputs)
    assert np.isnan(got[1]).all()
    assert not np.isfinite(got[2]).any()
    assert (got[4] == 0).all()
    for t in (0, 3, 5):
        part = {name: x[t : t + 1] if name in ("q", "weights") else x for name, x in inputs.items()}
        check_logits(got[t : t + 1], part, reference.indexer_logits(**part, accumulate="float16"))
        check_logits(got[t : t + 1], part, reference.indexer_logits(**part), IN_FLOAT16)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kernel", [GENERIC, MMA])
def test_other_kernels_add_up_in_float32(kernel: str) -> None:
    inputs = logits_inputs(LogitsCase(s_q=3, s_kv=70, h=3, d=32, dtype="uint8", float16=True))
    check_logits(in_float16(inputs, kernel=kernel), inputs, reference.indexer_logits(**inputs))


def test_float16_is_for_codes() -> None:
    inputs = logits_inputs(LogitsCase(s_q=3, s_kv=70, h=3, d=32, dtype="bfloat16"))
    with simulated(1):
        with pytest.raises(ArgumentError, match=r'accumulate: .* expected "float32" for q of bfloat16'):
            mla_cupy.indexer_logits(**inputs, accumulate="float16")
        with pytest.raises(ArgumentError, match='"float32" or "float16"'):
            mla_cupy.indexer_logits(**inputs, accumulate="fp16")


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "case", [LogitsCase(s_q=2, s_kv=140, h=17, d=64), LogitsCase(s_q=3, s_kv=20, h=2, d=32, dtype="bfloat16")],
    ids=lambda case: case.id,
)  # fmt: skip
def test_generic(case: LogitsCase) -> None:
    with simulated(1, (7, 5)):
        inputs = logits_inputs(case)
        check_logits(mla_cupy.indexer_logits(**inputs), inputs, reference.indexer_logits(**inputs))


@pytest.mark.parametrize("kernel", [GENERIC, HOPPER, MMA])
def test_bfloat16_results(kernel: str) -> None:
    """bfloat16 logits equal the rounded float32 logits."""
    case = LogitsCase(s_q=3, s_kv=70, h=3, d=32)
    wide, narrow = (run(case, kernel, 1, ("early", 0), out_dtype=name) for name in ("float32", "bfloat16"))
    np.testing.assert_array_equal(narrow, wide.astype(narrow.dtype))


@pytest.mark.one_in(8)
@pytest.mark.parametrize("s_kv", [260, 263])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("kernel", [HOPPER, MMA])
def test_nothing_is_written_outside(kernel: str, clean: bool, dtype: str, s_kv: int) -> None:
    """Nothing is written between the rows of the result nor, without `clean`, outside the ranges."""
    case = LogitsCase(s_q=9, s_kv=s_kv, h=2, d=32)
    inputs = logits_inputs(case)
    exact = reference.indexer_logits(**inputs)
    memory = np.full((case.s_q, s_kv + 5), 7, dtypes.numpy_dtype(dtype))
    with simulated(2, (9, 0), "random", 3):
        got = mla_cupy.indexer_logits(**inputs, clean=clean, logits=memory[:, :s_kv], kernel=kernel)
    assert (memory[:, s_kv:].astype(np.float32) == 7).all()
    check_logits(np.where(np.isfinite(exact), got.astype(np.float32), -np.inf).astype(got.dtype), inputs, exact)
    outside = got[~np.isfinite(exact)].astype(np.float32)
    assert (outside == (-np.inf if clean else 7)).all()


@pytest.mark.parametrize("kernel", [HOPPER, MMA])
def test_every_range_is_empty(kernel: str) -> None:
    inputs = logits_inputs(LogitsCase(s_q=10, s_kv=200, h=2, d=32))
    inputs["ks"][:], inputs["ke"][:] = 150, 150
    with simulated(3):
        assert (mla_cupy.indexer_logits(**inputs, kernel=kernel) == -np.inf).all()


@pytest.mark.parametrize("kernel", [HOPPER, MMA])
def test_ranges_without_a_common_tile(kernel: str) -> None:
    """Ranges of neighbours in one block, in any order."""
    inputs = logits_inputs(LogitsCase(s_q=8, s_kv=640, h=2, d=32, ranges="none"))
    inputs["ks"] = np.array([600, 0, 300, 130, 639, 0, 256, 5], np.int32)
    inputs["ke"] = np.array([640, 1, 310, 128, 640, 0, 257, 4], np.int32)
    with simulated(2, (9, 0), "random", 1):
        got = mla_cupy.indexer_logits(**inputs, kernel=kernel)
    check_logits(got, inputs, reference.indexer_logits(**inputs))


def test_nan_and_infinity() -> None:
    """A product that is NaN counts as 0; a NaN weight or scale reaches its logits and no others."""
    inputs = logits_inputs(LogitsCase(s_q=9, s_kv=140, h=3, d=32, ranges="none"))
    inputs["q"][1, 1, 3] = inputs["k"][130, 7] = np.nan
    inputs["weights"][2, 2], inputs["k_scale"][5] = np.nan, np.inf
    exact = reference.indexer_logits(**inputs)
    for kernel in (HOPPER, MMA, GENERIC):
        with simulated(1):
            got = mla_cupy.indexer_logits(**inputs, kernel=kernel)
        np.testing.assert_array_equal(np.isnan(got), np.isnan(exact))
        assert np.isinf(got[:, 5]).any()
        assert (got[np.isfinite(exact[:, 130]), 130] == 0).all()


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("kernel", "accumulate"), [(HOPPER, "float32"), (HOPPER, "float16"), (MMA, "float32")], ids=str
)
@pytest.mark.parametrize("sm_count", [1, 5])
def test_bits_do_not_depend_on_the_place(sm_count: int, kernel: str, accumulate: str) -> None:
    """Bits stay the same at other positions, with other neighbours, more heads of weight 0, or other cuts."""
    half = accumulate == "float16"
    inputs = logits_inputs(LogitsCase(s_q=9, s_kv=150, h=11, ranges="none", dtype="uint8", float16=half))
    with simulated(2):
        here = mla_cupy.indexer_logits(**inputs, accumulate=accumulate, kernel=kernel)
    other = {name: np.concatenate([x[-5:], x, x[:3]]) for name, x in inputs.items()}
    for name in ("q", "weights"):
        other[name] = np.concatenate([other[name], other[name][:, ::-1]], axis=1)
    other["weights"][:, 11:] = 0
    with simulated(sm_count):
        there = mla_cupy.indexer_logits(**other, accumulate=accumulate, kernel=kernel)
    np.testing.assert_array_equal(there[5:14, 5:155].view(np.uint32), here.view(np.uint32))


SCHEDULE = "indexer_logits_schedule"


def always(*_: object) -> bool:
    """Replacement for the decision whether there is a schedule."""
    return True


#: Blocks of one tile or two: more blocks of tokens than a warp has lanes would be slow to simulate.
MANY_BLOCKS = LogitsCase(s_q=150, s_kv=160, h=1, d=32, ranges="causal")


def launched(case: LogitsCase | PagedCase, sm_count: int, **options: Any) -> list[str]:
    """Launches of a call; its results must match the oracle."""
    name, inputs = "indexer_logits", logits_inputs(case) if isinstance(case, LogitsCase) else paged_inputs(case)
    name += "" if isinstance(case, LogitsCase) else "_paged"
    with simulated(sm_count, (9, 0), "random", 2) as target:
        got = getattr(mla_cupy, name)(**inputs, **options)
    check_logits(got, inputs, getattr(reference, name)(**inputs))
    return [kernel.removeprefix("mla_") for kernel in target.launched]


def test_shares_of_a_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares are equal to one tile (a block's queries count as one, too), and all blocks are computed."""
    monkeypatch.setattr(pipeline, "scheduled", always)
    splits, inputs = 3, logits_inputs(MANY_BLOCKS)
    workspace = np.zeros(256, np.uint8)
    assert launched(MANY_BLOCKS, splits, workspace=workspace) == [SCHEDULE, HOPPER]
    last = np.minimum(np.arange(8, 160, 8), 150) - 1
    line = [(n, max(0, i - 1)) for n, end in enumerate(inputs["ke"][last]) for i in range(1 + -(-int(end) // 128))]
    size, larger = divmod(len(line), splits)
    places = [i * size + min(i, larger) for i in range(splits)]
    cuts = workspace.view(np.int32).reshape(-1, 2)[: splits + 1]
    assert cuts.tolist() == [*map(list, (line[i] for i in places)), [19, 0]]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("schedule", [True, False])
def test_many_sequences(schedule: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """More blocks than a warp has lanes, some empty, with a schedule and without."""
    if schedule:
        monkeypatch.setattr(pipeline, "scheduled", always)
    lengths = tuple(int(n) for n in np.random.default_rng(5).choice([0, 1, 64, 65, 130], 70))
    assert launched(PagedCase(b=70, h=2, seqlens=lengths), 3) == [SCHEDULE] * schedule + [PAGED_HOPPER]


def test_sequences_of_many_groups() -> None:
    """Groups of 32 sequences, some empty, and more than are read at once; shares within a group and across groups."""
    lengths = np.zeros((170, 2), int)
    lengths[[3, 40, 69, 100, 165, 169]] = [[100, 3], [1, 64], [0, 65], [200, 130], [64, 0], [1, 1]]
    case = PagedCase(b=170, s_q=2, h=2, seqlens=tuple(int(n) for n in lengths.max(axis=1)))
    inputs = paged_inputs(case)
    for given in (inputs, inputs | {"seqlens": lengths.astype(np.int32)}):
        for sm_count in (1, 5):
            with simulated(sm_count, (9, 0), "random", 2) as target:
                got = mla_cupy.indexer_logits_paged(**given)
            check_logits(got, given, reference.indexer_logits_paged(**given))
            assert target.launched == [f"mla_{PAGED_HOPPER}"]


# ---- Paged -------------------------------------------------------------------------------------------------------

PAGED_KERNELS = {name: kernel for name, kernel in by_name(LOGITS_PAGED).items() if "sm100" not in name}
PAGED_CASES = [
    PagedCase(),
    PagedCase(b=3, s_q=2, h=33, seqlens=(64, 0, 129), dtype="float8_e4m3fn"),
    PagedCase(b=2, s_q=3, h=64, seqlens=(2, 200), per_token=True, missing_page=True),
    PagedCase(b=1, s_q=8, h=32, seqlens=(300,)),
    PagedCase(b=1, s_q=2, h=70, seqlens=(130,)),
    PagedCase(b=2, s_q=2, h=3, d=32, page_size=16, seqlens=(40, 70)),
]


def run_paged(case: PagedCase, kernel: str, sm_count: int, mode: tuple[str, int], **options: Any) -> Any:
    inputs = paged_inputs(case)
    with simulated(sm_count, (9, 0), *mode):
        got = mla_cupy.indexer_logits_paged(**inputs, kernel=kernel, **options)
    check_logits(got, inputs, reference.indexer_logits_paged(**inputs))
    return got


def takes(kernel: str, case: PagedCase) -> bool:
    problem = LogitsProblem(1, 1, case.h, case.d, "float8_e4m3fn", case.s_q, case.page_size, 1)
    return not PAGED_KERNELS[kernel].unsupported(problem, fake_gpu(1))


PAGED = [
    (case, kernel)
    for case, kernel in itertools.product(PAGED_CASES, PAGED_KERNELS)
    if takes(kernel, case) and (kernel != GENERIC or case.d == 32)
]


def test_long_shares() -> None:
    """The first pages and queries are requested before an earlier kernel is done."""
    case = PagedCase(b=2, s_q=2, h=2, seqlens=(8200, 8300), missing_page=True)
    run_paged(case, PAGED_HOPPER, 2, ("late", 0))


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("case", "kernel", "mode", "sm_count"),
    [(*pair, MODES[i % len(MODES)], SM_COUNTS[i % len(SM_COUNTS)]) for i, pair in enumerate(PAGED)],
    ids=lambda x: getattr(x, "id", str(x)),
)
def test_paged(case: PagedCase, kernel: str, mode: tuple[str, int], sm_count: int) -> None:
    run_paged(case, kernel, sm_count, mode)


@pytest.mark.parametrize("kernel", PAGED_KERNELS)
@pytest.mark.parametrize("clean", [True, False])
def test_paged_results_beside_others(kernel: str, clean: bool) -> None:
    """Rows of a wider array, in bfloat16; nothing outside is written."""
    case = PagedCase(b=2, s_q=2, seqlens=(30, 70), h=2)
    inputs = paged_inputs(case)
    exact = reference.indexer_logits_paged(**inputs)
    memory = np.full((*exact.shape[:2], exact.shape[2] + 3), 7, dtypes.numpy_dtype("bfloat16"))
    with simulated(2, (9, 0), "random", 3):
        target = memory[..., : exact.shape[2]]
        got = mla_cupy.indexer_logits_paged(**inputs, clean=clean, logits=target, kernel=kernel)
    assert (memory[..., exact.shape[2] :].astype(np.float32) == 7).all()
    seen = np.isfinite(exact)
    check_logits(np.where(seen, got.astype(np.float32), -np.inf).astype(got.dtype), inputs, exact)
    assert (got[~seen].astype(np.float32) == (-np.inf if clean else 7)).all()


def test_hostile_lengths() -> None:
    """Lengths are clamped: negative ones see nothing, large ones the whole table, with its invalid pages."""
    case = PagedCase(b=2, s_q=2, h=2, seqlens=(70, 60))
    inputs = paged_inputs(case)
    inputs["seqlens"] = np.array([[2**31 - 1, -5], [-(2**31), 3]], np.int32)
    for kernel in PAGED_KERNELS:
        with simulated(1):
            got = mla_cupy.indexer_logits_paged(**inputs, kernel=kernel)
        exact = reference.indexer_logits_paged(**inputs)
        np.testing.assert_array_equal(np.isfinite(got) | np.isnan(got), ~np.isneginf(exact))
        assert (got[0, 0, 128:] == 0).all()


def test_no_kernel_is_forgotten() -> None:
    assert set(by_name(LOGITS)) == {GENERIC, MMA, HOPPER, "indexer_logits_sm100"}
    assert set(PAGED_KERNELS) == {GENERIC, MMA, PAGED_HOPPER}


def test_paged_and_prefill_have_the_same_bits() -> None:
    """Equal keys in pages and in one array, for several numbers of heads; 70 heads take two blocks of columns."""
    for h in (5, 33, 70):
        case = PagedCase(b=1, s_q=3, h=h, seqlens=(100,), per_token=True)
        inputs = paged_inputs(case)
        codes, scales = page_parts(inputs["cache"][:, :, 0])
        pages = inputs["block_table"][0, :2]
        with simulated(2):
            paged = mla_cupy.indexer_logits_paged(**inputs, kernel=PAGED_HOPPER)
            prefill = mla_cupy.indexer_logits(
                inputs["q"][0],
                codes[pages].reshape(128, 128).view(np.uint8),
                inputs["weights"][0],
                ke=inputs["seqlens"][0],
                k_scale=scales[pages].reshape(128).copy(),
                kernel=HOPPER,
            )
        np.testing.assert_array_equal(paged[0, :, :128].view(np.uint32), prefill.view(np.uint32))


# ---- Keys in e2m1 ----------------------------------------------------------------------------------------------


def test_keys_in_e2m1_side_by_side_are_refused() -> None:
    """Kernels read e2m1 keys from pages alone, and the error says so; other widths get no such advice."""
    q, k = np.zeros((2, 4, 128), np.uint8), np.zeros((9, 68), np.uint8)
    with pytest.raises(mla_cupy.ShapeError, match=r"k.shape\[-1\]: got 68, expected d=128.*indexer_logits_paged"):
        mla_cupy.indexer_logits(q, k, np.ones((2, 4), np.float32))
    with pytest.raises(mla_cupy.ShapeError, match=r"k.shape\[-1\]: got 64, expected d=128, as in q$"):
        mla_cupy.indexer_logits(q, k[:, :64], np.ones((2, 4), np.float32))


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("case", "kernel", "launched"),
    [
        (PagedCase(b=1, s_q=2, h=17, page_size=12, seqlens=(40,), per_token=True, e2m1=True), None, MMA),
        (PagedCase(b=3, h=2, seqlens=(65, 0, 130), e2m1=True), MMA, MMA),
        (PagedCase(b=1, h=2, page_size=16, seqlens=(21,), missing_page=True, e2m1=True), GENERIC, GENERIC),
        (PagedCase(b=3, h=2, seqlens=(65, 0, 130), e2m1=True), None, PAGED_HOPPER),
        (PagedCase(b=2, s_q=2, h=64, seqlens=(70, 5), per_token=True, e2m1=True), None, PAGED_HOPPER),
        (PagedCase(b=2, s_q=3, h=33, seqlens=(1300, 70), missing_page=True, e2m1=True), None, PAGED_HOPPER),
    ],
    ids=lambda x: getattr(x, "id", str(x)),
)
def test_keys_in_e2m1(case: PagedCase, kernel: str | None, launched: str) -> None:
    """Pages of 64 run the WGMMA kernel on Hopper, others the mma.sync kernel."""
    inputs = paged_inputs(case)
    with simulated(2, (9, 0), "random", 3) as target:
        got = mla_cupy.indexer_logits_paged(**inputs, kernel=kernel)
        assert target.launched[-1] == f"mla_{launched}"
    check_logits(got, inputs, reference.indexer_logits_paged(**inputs))


def test_keys_in_e2m1_of_many_heads() -> None:
    """WGMMA builds have 64 heads, and Blackwell builds accept e4m3 alone: both errors say so."""
    inputs = paged_inputs(PagedCase(b=1, h=65, seqlens=(20,), e2m1=True))
    with simulated(1, (9, 0)) as target:
        mla_cupy.indexer_logits_paged(**inputs)
        assert target.launched[-1] == f"mla_{MMA}"
        with pytest.raises(UnsupportedDeviceError, match="at most 64 heads of keys in e2m1, not 65"):
            mla_cupy.indexer_logits_paged(**inputs, kernel=PAGED_HOPPER)
    with simulated(1, (10, 0)), pytest.raises(UnsupportedDeviceError, match="e4m3, not in e2m1"):
        mla_cupy.indexer_logits_paged(**inputs, kernel="indexer_logits_sm100")


def test_keys_in_e2m1_far_apart() -> None:
    """Keys with scales more than 2^14 apart, or NaN, next to keys with similar scales."""
    inputs = paged_inputs(PagedCase(b=1, s_q=2, h=3, seqlens=(128,), e2m1=True))
    scales = inputs["cache"].reshape(len(inputs["cache"]), -1)[:, 64 * 64 :].reshape(-1, 64, 4)
    scales[:, :, :] = 120
    scales[:, ::5, 1] -= np.arange(13, dtype=np.uint8) + 6
    scales[:, 3::9, 2] = 0xFF
    scales[:, 60, :] = (0, 0, 1, 3)  # the least powers, one of them subnormal
    with simulated(1, (9, 0), "random", 3):
        got = mla_cupy.indexer_logits_paged(**inputs, kernel=PAGED_HOPPER)
    check_logits(got, inputs, reference.indexer_logits_paged(**inputs))
    np.testing.assert_array_equal(got[:, :, 3:128:9][..., :7], 0)  # a product that is NaN counts as none


def test_keys_in_e2m1_by_hand() -> None:
    """Two elements per byte, the first in the low bits; an exponent per 32 elements, after all codes of a page."""
    page = np.zeros(4 * 68, np.uint8)  # of four keys
    page[64], page[64 + 16] = 0xC7, 0x05  # of key 1: 6 and -2; the second group's first element is 3
    page[4 * 64 + 4 : 4 * 64 + 8] = 128, 126, 0, 255
    q = np.zeros((1, 1, 1, 128), np.uint8)
    q[..., 0], q[..., 1], q[..., 32] = 0x38, 0x30, 0x38  # 1, 0.5 and 1
    inputs = {
        "q": q,
        "cache": page.reshape(1, 4, 68),
        "weights": np.ones((1, 1, 1), np.float32),
        "seqlens": np.array([2], np.int32),
        "block_table": np.zeros((1, 1), np.int32),
    }
    nothing = reference.indexer_logits_paged(**inputs)
    assert nothing.tolist() == [[[0, 0, -np.inf, -np.inf]]], "a group is NaN, so the product is none"
    page[4 * 64 + 7], expected = 120, 2 * (6 - 0.5 * 2) + 3 / 2
    assert reference.indexer_logits_paged(**inputs).tolist() == [[[0, expected, -np.inf, -np.inf]]]
    with simulated(1):
        assert mla_cupy.indexer_logits_paged(**inputs).tolist() == [[[0, expected, -np.inf, -np.inf]]]
