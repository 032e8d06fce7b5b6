"""Masks of drafts that form a tree: the oracle, mistakes, plans, and the kernels in the simulator and on a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from mla_cupy import ArgumentError, DTypeError, PlanError, ShapeError, UnsupportedDeviceError, reference
from mla_cupy.kernels import KERNELS
from tests.support.calls import assert_same, plan_of
from tests.support.cases import DecodeCase, DecodeInputs, as_read, make
from tests.support.flat import mla_decode
from tests.support.gpu import upload, uploaded
from tests.support.kernels import cc_of
from tests.support.mutant_suite import mutant_suite
from tests.support.mutants import Mutant
from tests.support.recorder import Recorder
from tests.support.sim_driver import simulated
from tests.support.sim_modes import MODES
from tests.support.tolerance import check

Array = npt.NDArray[Any]

SEESAW, SMALL, RECORDS = "decode_sm90_seesaw", "decode_sm90_small", "decode_sm90_records"
BLACKWELL = "decode_sm100"
GENERIC, GENERIC_RECORDS = "attention_generic", "decode_generic_records"


def tree_masks(case: DecodeCase) -> Array:
    """Random trees: each draft sees itself and its ancestors. Bits that are no draft's are set, too."""
    rng = np.random.default_rng([case.seed, 2])
    masks = np.zeros((case.b, case.s_q), np.uint64)
    garbage = (~np.uint64(0)) << np.uint64(case.s_q) if case.s_q < 64 else np.uint64(0)
    for row in masks:
        for i in range(case.s_q):
            parent = int(rng.integers(-1, i)) if i else -1
            row[i] = np.uint64(1 << i) | (row[parent] if parent >= 0 else np.uint64(0))
    masks |= garbage
    return masks


@dataclass(frozen=True)
class TreeInputs:
    """The inputs of a case with masks, some of them not contiguous, and what the oracle says."""

    base: DecodeInputs
    masks: Array

    @cached_property
    def exact(self) -> tuple[Array, Array]:
        return reference.mla_decode(*self.base.arguments, **self.base.case.options, tree_mask=self.masks)

    @cached_property
    def rounded(self) -> tuple[Array, Array]:
        case = self.base.case
        q, cache, *rest = self.base.arguments
        rounding = case.dtype if case.record in ("", "v4") else "float16"
        given = (q, as_read(case.record, cache), *rest)
        return reference.mla_decode(*given, **case.options, tree_mask=self.masks, rounding=rounding)


def tree_inputs(case: DecodeCase) -> TreeInputs:
    whole = np.zeros((case.b, case.s_q, 2), np.uint64)
    whole[..., 0] = tree_masks(case)
    return TreeInputs(make(case), whole[..., 0])


# ---- The oracle and the NumPy backend --------------------------------------------------------------------------


def chain(s_q: int, b: int = 1) -> Array:
    """The mask that `causal` is."""
    return np.tile(np.array([(2 << i) - 1 for i in range(s_q)], np.uint64), (b, 1))


@pytest.mark.parametrize("cp", [(1, 0), (3, 1)])
def test_a_chain_is_causal(cp: tuple[int, int]) -> None:
    case = DecodeCase(b=3, s_q=4, h_q=2, seqlens=(70, 2, 33), cp_world=cp[0], cp_rank=cp[1])
    inputs = make(case)
    got = reference.mla_decode(*inputs.arguments, **case.options, tree_mask=chain(4, 3))
    for mine, expected in zip(got, inputs.exact, strict=True):
        np.testing.assert_array_equal(mine, expected)


def test_a_path_of_the_tree_is_a_sequence_of_its_own() -> None:
    """Drafts 0, 1, 3 are a path beside 0, 2: the leaf of each sees what it would without the other one."""
    inputs = make(DecodeCase(b=1, s_q=4, h_q=2, seqlens=40, page_size=64, strides="dense"))
    q, cache, table, _ = inputs.arguments
    masks = np.array([[0b0001, 0b0011, 0b0101, 0b1011]], np.uint64)
    out, lse = reference.mla_decode(*inputs.arguments, tree_mask=masks)
    for path in ((0, 1, 3), (0, 2)):
        tokens = [*range(36), *(36 + draft for draft in path)]
        alone = cache[table[0, :1]][:, tokens]
        want = reference.mla_decode(q[:, path], alone, np.zeros((1, 1), np.int32), np.array([len(tokens)]))
        np.testing.assert_allclose(out[:, path], want[0], rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(lse[..., path], want[1], rtol=1e-12)


def test_the_numpy_backend_takes_signed_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    inputs = tree_inputs(DecodeCase(b=2, s_q=3, h_q=2, seqlens=(20, 5)))
    got = [mla_decode(*inputs.base.arguments, tree_mask=masks) for masks in (inputs.masks, inputs.masks.view(np.int64))]
    for one, other in zip(*got, strict=True):
        assert_same(one, other)
    np.testing.assert_array_equal(got[0][1], inputs.exact[1].astype(np.float32))


# ---- Mistakes and choices --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("masks", "s_q", "options", "error", "match"),
    [
        (np.zeros((1, 3), np.int32), 3, {}, DTypeError, "tree_mask.dtype: got int32, expected uint64 or int64"),
        (np.zeros((1, 2), np.uint64), 3, {}, ShapeError, r"tree_mask.shape\[-1\]: got 2, expected s_q=3"),
        (np.zeros((2, 3), np.uint64), 3, {}, ShapeError, r"tree_mask.shape\[0\]: got 2, expected b=1"),
        (np.zeros((1, 65), np.uint64), 65, {}, ShapeError, "s_q: got 65, expected at most 64 with a tree_mask"),
        (np.zeros((1, 3), np.uint64), 3, {"causal": False}, ArgumentError, "causal: got False, expected True"),
        (
            np.zeros((1, 3), np.uint64),
            3,
            {"kernel": "decode_sm90_small_cluster8"},
            UnsupportedDeviceError,
            "takes no tree_mask",
        ),
    ],
    ids=["dtype", "drafts", "sequences", "too many drafts", "not causal", "a kernel without"],
)
def test_mistakes(
    masks: Array, s_q: int, options: dict[str, Any], error: type[Exception], match: str, recorder: Recorder
) -> None:
    q, cache = np.ones((1, s_q, 2, 576), np.float16), np.ones((3, 8, 576), np.float16)
    table, seqlens = np.zeros((1, 20), np.int32), np.ones(1, np.int32)
    with pytest.raises(error, match=match):
        mla_decode(q, cache, table, seqlens, tree_mask=masks, **options)
    assert recorder.launches == []


def test_mistakes_of_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    inputs = tree_inputs(DecodeCase(b=1, s_q=2, seqlens=9))
    for planned, masks in ((True, None), (False, inputs.masks)):
        plan = plan_of(inputs.base, tree_mask=planned)
        plan.update(inputs.base.seqlens)
        with pytest.raises(PlanError, match=f"tree_mask={planned}"):
            mla_decode(*inputs.base.arguments, tree_mask=masks, plan=plan)
    with pytest.raises(ShapeError, match="s_q: got 65"):
        plan_of(inputs.base, tree_mask=True, s_q=65)
    with pytest.raises(ArgumentError, match="tree_mask: got 'yes'"):
        plan_of(inputs.base, tree_mask="yes")


@pytest.mark.parametrize(
    ("case", "kernel"),
    [
        (DecodeCase(b=1, s_q=4, h_q=4, seqlens=9), SMALL),
        (DecodeCase(b=200, s_q=4, h_q=32, seqlens=9), SEESAW),
        (DecodeCase(b=1, s_q=4, h_q=4, seqlens=9, d_qk=512), SEESAW),
        (DecodeCase(b=1, s_q=4, h_q=4, seqlens=9, strides="odd"), GENERIC),
        (DecodeCase(b=1, s_q=4, h_q=4, seqlens=9, record="v32"), RECORDS),
        (DecodeCase(b=1, s_q=4, h_q=4, seqlens=9, record="v4", d_qk=512), RECORDS),
    ],
    ids=lambda value: getattr(value, "id", value),
)
def test_which_kernel(case: DecodeCase, kernel: str, recorder: Recorder) -> None:
    inputs = tree_inputs(case)
    mla_decode(*inputs.base.arguments, tree_mask=inputs.masks)
    launch = next(launch for launch in recorder.launches if kernel in launch.entry)
    assert launch.params["tree_mask"] == inputs.masks.__array_interface__["data"][0]
    assert (launch.params["tree_stride_b_elems"], launch.params["tree_stride_s_elems"]) == (2 * case.s_q, 2)


# ---- Kernels in the simulator ----------------------------------------------------------------------------------

CASES = (
    DecodeCase(b=2, s_q=8, h_q=2, seqlens=(71, 130)),  # the first draft is a tile's last token
    DecodeCase(b=2, s_q=5, h_q=5, seqlens=(3, 70), page_size=16, missing_pages=1),  # shorter than its drafts
    DecodeCase(b=2, s_q=6, h_q=4, seqlens=(64, 100), dtype="float16"),
    DecodeCase(b=2, s_q=7, h_q=3, seqlens=(201, 6), cp_world=3, cp_rank=1),
)
WIDE = DecodeCase(b=1, s_q=64, h_q=1, seqlens=140)  # a whole word, and drafts that cover a tile
RECORD_CASES = tuple(replace(case, record="v32") for case in CASES)
PAIRS = (
    *((case, SEESAW) for case in (CASES[0], CASES[1], CASES[3], WIDE)),
    (replace(CASES[2], d_qk=512), SEESAW),
    *((case, SMALL) for case in CASES),
    (WIDE, SMALL),
    *((case, BLACKWELL) for case in (*CASES, WIDE, replace(CASES[1], h_q=13, d_qk=512))),
    *((case, RECORDS) for case in RECORD_CASES),
    (replace(RECORD_CASES[0], record="fp8", kv_scale=0.5), RECORDS),
    (replace(CASES[1], h_q=1), GENERIC),
    (replace(CASES[3], h_q=1), GENERIC),
    (replace(RECORD_CASES[0], record="v4", d_qk=512), RECORDS),
    (replace(RECORD_CASES[0], record="v4", d_qk=512, h_q=1), GENERIC_RECORDS),
)


def run(inputs: TreeInputs, kernel: str, sm_count: int, mode: tuple[str, int], **options: Any) -> Any:
    base = inputs.base
    with simulated(sm_count, cc_of(kernel), *mode) as target:
        got = mla_decode(*base.arguments, **base.case.options, tree_mask=inputs.masks, kernel=kernel, **options)
    assert KERNELS[kernel].entry in target.launched
    return got


@pytest.mark.one_in(8)
@pytest.mark.parametrize(("case", "kernel"), PAIRS, ids=lambda value: getattr(value, "id", value))
def test_kernels(case: DecodeCase, kernel: str) -> None:
    inputs, number = tree_inputs(case), PAIRS.index((case, kernel))
    got = run(inputs, kernel, (1, 3)[number % 2], MODES[number % len(MODES)])
    check(got, inputs.exact, inputs.rounded, case.dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "kernel"), PAIRS, ids=lambda value: getattr(value, "id", value))
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_kernels_in_all_modes(case: DecodeCase, kernel: str, mode: tuple[str, int]) -> None:
    inputs = tree_inputs(case)
    for sm_count in (1, 3, 5):
        check(run(inputs, kernel, sm_count, mode), inputs.exact, inputs.rounded, case.dtype)


#: Rows and FP8 tokens, also of a shard, with each optional input that a call may combine with a mask.
BESIDE = (
    (replace(CASES[1], h_q=2), "q_rope"),
    (replace(CASES[3], h_q=1), "q_rope"),
    (replace(CASES[0], h_q=1, d_qk=512), "out_cos"),
    (replace(RECORD_CASES[1], h_q=2), "q_rope"),
    (replace(RECORD_CASES[0], h_q=1, record="v4", d_qk=512), "out_cos"),
)


def beside(case: DecodeCase, form: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments and options of a call with a mask and another optional input."""
    inputs = tree_inputs(case)
    q, *rest = inputs.base.arguments
    options = {**case.options, "tree_mask": inputs.masks, "out_dtype": "float32"}
    if form == "q_rope":
        return (q[..., :512], *rest), {**options, "q_rope": q[..., 512:]}
    rng = np.random.default_rng(case.seed)
    cos, sin = rng.standard_normal((2, 9, 32)).astype(np.float32)
    positions = rng.integers(0, 9, (case.b, case.s_q)).astype(np.int32)
    return (q, *rest), {**options, "out_cos": cos, "out_sin": sin, "out_positions": positions}


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("case", "form"), BESIDE, ids=lambda value: getattr(value, "id", value))
@pytest.mark.parametrize("cc", [(8, 0), (9, 0)], ids=str)
def test_queries_in_two_arrays_and_turned_results(case: DecodeCase, form: str, cc: tuple[int, int]) -> None:
    arguments, options = beside(case, form)
    exact = mla_decode(*arguments, **options)  # the oracle: there is no GPU
    with simulated(3, cc) as target:
        got = mla_decode(*arguments, **options)
    assert target.launched[1] == ("mla_decode_generic_records" if case.record else "mla_attention_generic")
    np.testing.assert_allclose(got[0], exact[0], atol=2e-5, rtol=2e-5)
    np.testing.assert_allclose(got[1], exact[1], atol=2e-5)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kernel", [SEESAW, SMALL, BLACKWELL])
def test_what_a_row_does_not_see_does_not_reach_it(kernel: str) -> None:
    """NaN and infinity in drafts: rows of other paths stay finite, and those that see it are NaN or infinite."""
    inputs = make(DecodeCase(b=1, s_q=3, h_q=4, seqlens=66))
    for token, value in ((63, np.nan), (64, np.inf)):
        inputs.kv_cache[inputs.block_table[0, token // 64], token % 64, 0, 300] = value
    masks = np.array([[0b001, 0b010, 0b100]], np.uint64)
    with simulated(1, cc_of(kernel), "late"):
        out, _ = mla_decode(*inputs.arguments, tree_mask=masks, kernel=kernel)
    assert np.isfinite(out[0, 2].astype(np.float32)).all()
    assert not np.isfinite(out[0, :2, :, 300].astype(np.float32)).any()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("cuts", [{}, {"batch_invariant": True, "split_tokens": 64}], ids=["even", "pieces"])
def test_a_plan_serves_masks(cuts: dict[str, Any]) -> None:
    inputs = tree_inputs(CASES[0])
    with simulated(2):
        plan = plan_of(inputs.base, device=0, tree_mask=True, **cuts)
        plan.update(inputs.base.seqlens)
        got = mla_decode(*inputs.base.arguments, tree_mask=inputs.masks, plan=plan)
    assert plan.kernel == SMALL
    check(got, inputs.exact, inputs.rounded, "bfloat16")


# ---- Planted bugs ----------------------------------------------------------------------------------------------

MASK = "attention/tree_mask.cuh"


def run_case(kernel: str, case: DecodeCase, mode: tuple[str, int]) -> None:
    inputs = tree_inputs(case)
    check(run(inputs, kernel, 1, mode), inputs.exact, inputs.rounded, case.dtype)


test_is_caught, test_as_it_is = mutant_suite(
    SMALL,
    [partial(run_case, SMALL, case, MODES[0]) for case in CASES],
    {},
    [
        Mutant("drafts of the tile before", MASK, "seen >> -shift", "seen"),
    ],
)


# ---- On a GPU --------------------------------------------------------------------------------------------------

ON_GPU = (
    *((case, kernel) for case, kernel in PAIRS if kernel != BLACKWELL),
    *(
        (DecodeCase(b=9, s_q=s_q, h_q=h_q, seqlens="ragged-700", page_size=page, missing_pages=1), kernel)
        for s_q, h_q, page, kernel in (
            (4, 8, 64, SMALL),
            (8, 16, 16, SEESAW),
            (64, 2, 64, SEESAW),
            (2, 128, 64, SEESAW),
        )
    ),
    (DecodeCase(b=9, s_q=4, h_q=8, seqlens="ragged-700", record="v32"), RECORDS),
    (DecodeCase(b=3, s_q=16, h_q=16, seqlens=5000, record="v32", dtype="float16"), RECORDS),
    (DecodeCase(b=1, s_q=8, h_q=4, seqlens=20000), SMALL),
)


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "kernel"), ON_GPU, ids=lambda value: getattr(value, "id", value))
def test_kernels_on_a_gpu(hopper: object, case: DecodeCase, kernel: str) -> None:
    import cupy

    inputs = tree_inputs(case)
    arrays, masks = uploaded(inputs.base), upload(inputs.masks)
    out, lse = mla_decode(*arrays, **case.options, tree_mask=masks, kernel=kernel)
    check((cupy.asnumpy(out), cupy.asnumpy(lse)), inputs.exact, inputs.rounded, case.dtype)
