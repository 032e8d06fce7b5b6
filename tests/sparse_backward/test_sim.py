"""The kernels of the sparse backward in the simulator, through the public call, against the oracle."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import reference
from mla_cupy.arrays import View
from mla_cupy.kernels.exact_sums.launches import NUM_BINS, launch_bins
from mla_cupy.kernels.pipeline import Call, Launch, Layout, Prepared
from mla_cupy.kernels.sparse_backward import mma
from mla_cupy.kernels.sparse_backward.passes import launch_dkv
from mla_cupy.kernels.sparse_backward.problem import DkvOrder, SparseBackwardProblem
from mla_cupy.runtime import sources
from tests.support.flat import flat
from tests.support.gradients import check_gradients, reason_against
from tests.support.kernels import BACKWARD_KERNELS, BLACKWELL, in_both_sizes, on_hopper
from tests.support.sim_driver import DEVICE, SimDriver, fake_gpu, simulated
from tests.support.sim_modes import MODES
from tests.support.sparse_cases import SparseCase, SparseInputs, lower_scores, make

HOPPER = on_hopper(BACKWARD_KERNELS)
GENERIC = "sparse_backward_generic"
MMA = mma.KERNEL.name
ALL = (GENERIC, *HOPPER, *BLACKWELL, MMA)
#: One kernel per source, except those that run on request: the others take equally long, and test_kernels has them.
EACH_SOURCE = [
    *(pytest.param(kernel, marks=[pytest.mark.slow] if kernel in BLACKWELL[1:] else []) for kernel in ALL),
    pytest.param(MMA, id=f"{MMA}-99kb", marks=[pytest.mark.slow, pytest.mark.in_99kb]),
]
DETERMINISTIC = tuple(
    name for name, kernel in BACKWARD_KERNELS.items() if any(build.deterministic for build in kernel.variants)
)

CASES = [
    SparseCase(s_q=1, s_kv=60, h_q=1, topk=1, invalid=0.0),
    SparseCase(s_q=2, s_kv=200, h_q=3, topk=63, invalid=0.0, sink=True),
    SparseCase(s_q=2, s_kv=200, h_q=3, topk=65, d_qk=512, dtype="float16", dlse=True),
    SparseCase(s_q=4, s_kv=100, h_q=3, topk=70, lengths=True, sink=True, dlse=True),  # a query that has no row
    SparseCase(s_q=3, s_kv=40, h_q=9, topk=130, causal=True, invalid=0.0),  # more slots than rows: duplicates
    SparseCase(s_q=6, s_kv=90, h_q=2, topk=40, sequences=((2, 30), (0, 5), (3, 40)), causal=True, dtype="float16"),
    SparseCase(s_q=2, s_kv=100, h_q=64, topk=20, sink=True, d_qk=512, dlse=True),
    SparseCase(s_q=1, s_kv=100, h_q=100, topk=70, sink=True),
    SparseCase(s_q=3, s_kv=50, h_q=2, topk=9, invalid=1.0, sink=True),  # nothing to attend to
    SparseCase(s_q=2, s_kv=70, h_q=2, topk=30, head_axis=True),
]


#: Cases with too many heads or queries to simulate the generic kernel with, except in a full run.
WIDE = [
    SparseCase(s_q=7, s_kv=150, h_q=20, topk=200, lengths=True),  # several items of a block, with and without keys
    SparseCase(s_q=3, s_kv=90, h_q=128, topk=70, lengths=True, sink=True, dlse=True),
    SparseCase(s_q=4, s_kv=200, h_q=65, topk=130, causal=True, d_qk=512, dtype="float16"),
]


def cc_of(kernel: str) -> tuple[int, int]:
    """A compute capability on which the kernel runs."""
    return (8, 0) if kernel == MMA else (10, 0) if kernel in BLACKWELL else (9, 0)


def takes(kernel: str, case: SparseCase, deterministic: bool = False) -> bool:
    return not reason_against(kernel, fake_gpu(2, cc_of(kernel)), case, deterministic)


def narrow(case: SparseCase) -> SparseCase:
    """The case with three blocks of heads of the generic kernel, instead of many; the last block is as full.

    With two, a place in the blocks would have no head but one whose sink takes all of its weight.
    """
    return replace(case, h_q=17 + (case.h_q - 1) % 8) if case.h_q > 24 else case


def _pairwise() -> Iterator[tuple[SparseCase, str, tuple[str, int], bool]]:
    """Each case with each kernel once; modes and determinism take turns."""
    for i, (kernel, case) in enumerate(itertools.product(ALL, [*CASES, *WIDE])):
        if case in CASES or kernel not in (GENERIC, MMA):
            shape = narrow(case) if kernel == GENERIC else case
            yield shape, kernel, MODES[i % len(MODES)], i % 4 == 1 and takes(kernel, shape, True)


def _parameters() -> Iterator[Any]:
    """Parameters; for mma.sync, the sizes of shared memory alternate, too."""
    for case, kernel, (mode, seed), deterministic in _pairwise():
        if takes(kernel, case, deterministic):
            in_99kb = kernel == MMA and CASES.index(case) % 2 == 1
            ending = "-deterministic" * deterministic + "-99kb" * in_99kb
            marks = [pytest.mark.in_99kb] if in_99kb else []
            yield pytest.param(
                case, kernel, (mode, seed), deterministic, id=f"{case.id}-{kernel}-{mode}{seed}{ending}", marks=marks
            )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_kernels:
        metafunc.parametrize(("case", "kernel", "mode", "deterministic"), [*_parameters()])


def run(
    inputs: SparseInputs,
    kernel: str,
    mode: tuple[str, int] = ("early", 0),
    cc: tuple[int, int] | None = None,
    **options: Any,
) -> tuple[Any, Any, Any]:
    with simulated(2, cc or cc_of(kernel), *mode) as target:
        got = flat(mla_cupy.sparse_mla_backward)(
            *inputs.backward_arguments, **inputs.backward_options, kernel=kernel, **options
        )
    assert BACKWARD_KERNELS[kernel].entry in target.launched
    return got


@pytest.mark.one_in(16)
def test_kernels(case: SparseCase, kernel: str, mode: tuple[str, int], deterministic: bool) -> None:
    inputs = make(case)
    check_gradients(run(inputs, kernel, mode, deterministic=deterministic), inputs, deterministic=deterministic)


def with_heads(kernel: str, case: SparseCase) -> SparseCase:
    """The case, or the case with the kernel's number of heads."""
    return case if takes(kernel, case) else replace(case, h_q=70)


# The others' grids are the same whatever the number of multiprocessors, and so is all that they do.
@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("sm_count", "kernel"),
    [
        *itertools.product([2], ALL),
        *itertools.product([5], HOPPER),
        pytest.param(2, MMA, id=f"2-{MMA}-99kb", marks=pytest.mark.in_99kb),
    ],
)
def test_lists_that_are_sorted(sm_count: int, kernel: str) -> None:
    """Lists are sorted if the sums do not fit in L2; the blocks then keep in step, if the kernel supports it."""
    inputs = make(with_heads(kernel, SparseCase(s_q=4, s_kv=150, h_q=2, topk=70)))
    with simulated(sm_count, cc_of(kernel), mode="random", seed=5, l2_bytes=1 << 10) as target:
        got = flat(mla_cupy.sparse_mla_backward)(*inputs.backward_arguments, **inputs.options, kernel=kernel)
    assert BACKWARD_KERNELS[kernel].entry in target.launched
    check_gradients(got, inputs)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("strides", ["odd", "dense"])
def test_generic_kernel_on_an_older_gpu(strides: Any) -> None:
    inputs = make(SparseCase(s_q=2, s_kv=60, h_q=3, topk=30, strides=strides, lengths=True, sink=True))
    check_gradients(run(inputs, GENERIC, cc=(7, 5)), inputs)


def test_float32_gradient_of_kv() -> None:
    """Never added to: the array given is overwritten, and what lies between its rows stays."""
    inputs = make(SparseCase(s_q=2, s_kv=50, h_q=2, topk=20))
    whole = np.full((50, 600), 7, np.float32)
    dkv = whole[:, 5:581]
    got = run(inputs, GENERIC, dkv=dkv, dkv_dtype="float32")
    assert got[1] is dkv
    check_gradients(got, inputs, "float32")
    assert (whole[:, :5] == 7).all()
    assert (whole[:, 581:] == 7).all()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kernel", EACH_SOURCE)
def test_base_two_and_a_scale(kernel: str) -> None:
    inputs = make(with_heads(kernel, SparseCase(s_q=2, s_kv=80, h_q=2, topk=20, sink=True)))
    options = {**inputs.options, "scale": 0.02, "lse_base": "2"}
    out, lse, _ = reference.sparse_mla_forward(*inputs.arguments, **options)
    arguments = (inputs.q, inputs.kv, out.astype(np.float32), inputs.dout, lse.astype(np.float32), inputs.indices)
    exact = reference.sparse_mla_backward(*arguments, **options)
    with simulated(cc=cc_of(kernel)):
        got = flat(mla_cupy.sparse_mla_backward)(*arguments, **options, kernel=kernel, dkv_dtype="float32")
    for x, y in zip(got, exact, strict=True):
        np.testing.assert_allclose(x.astype(np.float64), y, rtol=0, atol=1e-2 * np.abs(y).max())


@pytest.mark.one_in(8)
@pytest.mark.parametrize("kernel", [one for one in EACH_SOURCE if one.values[0] in DETERMINISTIC])
def test_deterministic_gradients_are_the_same_bits(kernel: str) -> None:
    """Equal bits in every order of the additions, which the modes change; and close to plain sums."""
    inputs = make(with_heads(kernel, SparseCase(s_q=3, s_kv=20, h_q=9, topk=24, sink=True)))
    once, again = (
        run(inputs, kernel, mode, deterministic=True, dkv_dtype="float32") for mode in (("late", 0), ("random", 7))
    )
    plain = run(inputs, kernel, dkv_dtype="float32")
    for x, y in zip(once, again, strict=True):
        assert x.tobytes() == y.tobytes()
    assert plain[0].tobytes() == once[0].tobytes()
    peak = np.abs(plain[1]).max(axis=1, keepdims=True)
    assert (np.abs(plain[1] - once[1]) <= 1e-3 * peak).all()
    assert peak.max() > 0


ONE_HEAD = SparseCase(s_q=2, s_kv=40, h_q=1, topk=20, invalid=0.0)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "kernel", in_both_sizes(name for name in DETERMINISTIC if takes(name, ONE_HEAD, deterministic=True))
)
def test_numbers_below_the_finest_level_are_rounded_away(kernel: str) -> None:
    """A deterministic call returns 0 for rows of tiny weight, within its rule; a plain call does not."""
    inputs = make(ONE_HEAD)
    inputs.q[:] = 3 * inputs.q
    plain, exact = (run(inputs, kernel, dkv_dtype="float32", deterministic=one) for one in (False, True))
    check_gradients(plain, inputs, "float32")
    check_gradients(exact, inputs, "float32", deterministic=True)
    vanished = (exact[1] == 0).all(axis=1) & (plain[1] != 0).any(axis=1)
    assert 0 < vanished.sum() < (plain[1] != 0).any(axis=1).sum()
    with pytest.raises(AssertionError, match="dkv"):
        check_gradients(exact, inputs, "float32")


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("kernel", "deterministic"),
    [
        *((kernel, False) for kernel in ALL),
        *((kernel, True) for kernel in DETERMINISTIC),
        pytest.param(MMA, False, id=f"{MMA}-False-99kb", marks=pytest.mark.in_99kb),
        pytest.param(MMA, True, id=f"{MMA}-True-99kb", marks=pytest.mark.in_99kb),
    ],
)
def test_nan_reaches_the_rows_of_its_query_and_no_others(kernel: str, deterministic: bool) -> None:
    inputs = make(with_heads(kernel, SparseCase(s_q=4, s_kv=120, h_q=3, topk=12, invalid=0.0)))
    inputs.dout[2, 1, 77] = np.nan
    dq, dkv, _ = (x if x is None else x.astype(np.float32) for x in run(inputs, kernel, deterministic=deterministic))
    assert np.isnan(dq[2, 1]).all()
    assert np.isfinite(np.delete(dq, 2, axis=0)).all()
    spoiled = np.zeros(120, bool)
    spoiled[inputs.rows[2]] = True
    assert np.isnan(dkv[spoiled]).all()
    assert np.isfinite(dkv[~spoiled]).all()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kernel", EACH_SOURCE)
def test_queries_without_a_gradient(kernel: str) -> None:
    """An infinite lse means that there is none, whatever out and dout contain."""
    inputs = make(with_heads(kernel, SparseCase(s_q=3, s_kv=90, h_q=3, topk=12, invalid=0.0)))
    inputs.lse[0, 1], inputs.lse[2] = np.inf, -np.inf
    inputs.dout[2], inputs.out[2] = np.nan, np.nan
    expected = reference.sparse_mla_backward(*inputs.backward_arguments)
    got = run(inputs, kernel)
    assert (got[0][0, 1] == 0).all()
    assert (got[0][2] == 0).all()
    for x, y in zip(got[:2], expected[:2], strict=True):
        np.testing.assert_allclose(x.astype(np.float64), y, rtol=0, atol=2e-2 * np.abs(y).max())


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kernel", EACH_SOURCE)
def test_scores_so_low_that_their_exponents_overflow(kernel: str) -> None:
    """exp(0 - lse) of keys past the end must not contribute."""
    inputs = make(with_heads(kernel, SparseCase(s_q=2, s_kv=90, h_q=3, topk=41, invalid=0.0)))
    lower_scores(inputs)
    check_gradients(run(inputs, kernel), inputs)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("sizes", [(0, 30, 4), (2, 0, 4), (2, 30, 0)], ids=str)
def test_nothing_to_do(sizes: tuple[int, int, int], deterministic: bool) -> None:
    s_q, s_kv, topk = sizes
    inputs = make(SparseCase(s_q=s_q, s_kv=s_kv, h_q=2, topk=topk, sink=True, strides="dense"))
    with simulated():
        dq, dkv, d_sink = flat(mla_cupy.sparse_mla_backward)(
            *inputs.backward_arguments, **inputs.options, deterministic=deterministic
        )
    for x, shape in ((dq, (s_q, 2, 576)), (dkv, (s_kv, 576)), (d_sink, (2,))):
        assert x.shape == shape
        assert (x == 0).all()


def test_a_query_without_a_row_adds_nothing_to_the_sinks_gradient() -> None:
    """Its lse may be finite, as for attention to more keys."""
    inputs = make(SparseCase(s_q=2, s_kv=30, h_q=2, topk=4, sink=True, strides="dense", invalid=0.0))
    q, kv, out, dout, lse, indices = inputs.backward_arguments
    indices[1] = -1
    out[1], lse[1] = 1, 0.5
    arguments = (q, kv, out, dout, lse, indices)
    with simulated():
        got = flat(mla_cupy.sparse_mla_backward)(*arguments, **inputs.options)
    wanted = reference.sparse_mla_backward(*arguments, **inputs.options)
    for x, y in zip(got, wanted, strict=True):
        np.testing.assert_allclose(x.astype(np.float64), y, rtol=2e-2, atol=2e-2 * np.abs(y).max())
    np.testing.assert_allclose(got[2], wanted[2], rtol=1e-4)


def launch(target: SimDriver, step: Launch, **arrays: Any) -> None:
    """One launch alone, on arrays by the names of its record."""
    prepared = Prepared([step], tuple(arrays), Layout({}), fake_gpu(1), 0)
    prepared.enqueue([0, *(target.memory.map(x) for x in arrays.values())], 0, 0)


@pytest.mark.parametrize("d_qk", [512, 576])
@pytest.mark.parametrize("num_bins", [1, 6])
@pytest.mark.parametrize(
    ("order", "function"), [(DkvOrder.SM90, "dkv_position"), (DkvOrder.SM100, "dkv_position_sm100")]
)
def test_dims_come_back_into_their_order(d_qk: int, num_bins: int, order: DkvOrder, function: str) -> None:
    """Dims return from a main kernel's order of additions, as in the header; the bins are added up."""
    header = sources.gather("sparse_backward/params.cuh")["sparse_backward/params.cuh"].decode()
    (formula,) = re.findall(rf"i32 {function}\(i32 dim\) \{{\s*return (.*?);\s*\}}", header, re.DOTALL)
    # C's choice is Python's, the other way round.
    formula = re.sub(r"^(.*?) \? (.*?) : (.*)$", r"(\2) if (\1) else (\3)", " ".join(formula.split()))
    position = np.array([eval(formula.replace("/", "//"), {"dim": dim}) for dim in range(d_qk)])
    assert sorted(position) == list(range(d_qk))
    rows = 11
    wanted = np.random.default_rng(0).integers(-(2**18), 2**18, (num_bins, rows, d_qk)).astype(np.float32)
    sums = np.empty_like(wanted)
    sums[..., position] = wanted
    dkv = np.full((rows, d_qk + 3), 7, np.float32)
    with simulated() as target:
        problem = SparseBackwardProblem(1, rows, 1, 1, d_qk, "bfloat16")
        call = Call({"dkv": View(0, (rows, d_qk), (d_qk + 3, 1), "float32", DEVICE)}, options=None)
        launch(target, launch_dkv(problem, call, num_bins, order), sums=sums, dkv=dkv)
    np.testing.assert_array_equal(dkv[:, :d_qk], wanted.sum(axis=0))
    assert (dkv[:, d_qk:] == 7).all()


@pytest.mark.parametrize("largest", [0.0, 1e-45, 1e-30, 0.7, 1.0, 3.0, 8.0, 1e6, 1e27, 3e38])
def test_bins_leave_room_for_all_numbers(largest: float) -> None:
    """And for no more than that; their bound is a power of two."""
    selected = np.array([0, 1, 2, 3, 1000, 2**20, 2**24, 2**30], np.uint32)
    extractors = np.zeros(9, np.float32)
    with simulated() as target:
        step = launch_bins(8, additions=3)
        launch(target, step, selected=selected, largest=np.array([largest], np.float32), extractors=extractors)
    exponent = np.clip(np.ceil(np.log2(np.float64(np.float32(largest)))) if largest else -80, -80, 90)
    assert extractors[8] == 2.0**exponent
    mantissa, exponents = np.frexp(extractors[:8])
    assert (mantissa == 0.75).all()
    quanta = 2.0 ** (exponent - (exponents - 1.0 - 23))  # in the bound
    most = 3 * np.maximum(selected, 1 / 3).astype(np.float64)
    assert (quanta * most <= 2.0**23).all()
    assert ((quanta * most > 2.0**22) | (quanta == 2.0**22)).all()


def test_exact_additions_in_any_order() -> None:
    """The header's guarantees in NumPy: no bit depends on the order, and little is lost."""
    rng = np.random.default_rng(0)
    numbers = (rng.standard_normal(3000) * 10.0 ** rng.uniform(-6, 0, 3000)).astype(np.float32)
    bound, bits = np.float32(8), 23 - 12
    rounder = np.float32(1.5 * 2.0**23 * bound / 2.0**bits)
    steps = (bound.view(np.int32) - np.abs(numbers).view(np.int32)) >> 25
    levels = np.clip(steps, 0, NUM_BINS - 1)
    by = rounder / np.float32(16) ** levels.astype(np.float32)
    rounded = (numbers + by) - by
    found = set()
    for _ in range(20):
        order = rng.permutation(3000)
        sums = np.zeros(NUM_BINS, np.float32)
        for level, number in zip(levels[order], rounded[order], strict=True):
            sums[level] += number
        found.add(sums.tobytes())
    assert len(found) == 1
    exact = numbers.astype(np.float64).sum()
    assert abs(sums[::-1].sum() - exact) < 2.0 ** (4 - bits) * np.sqrt((numbers.astype(np.float64) ** 2).sum())
