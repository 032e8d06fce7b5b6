"""The selection in one launch, in the simulator: what the two kernels' calls select, index by index."""

from __future__ import annotations

import numpy as np
import pytest

import mla_cupy
from mla_cupy import UnsupportedDeviceError
from mla_cupy.kernels.indexer.logits.problem import LogitsProblem
from mla_cupy.kernels.indexer.select import SELECT, sm90_paged
from mla_cupy.kernels.indexer.select.problem import SelectProblem
from mla_cupy.simulation import fake_gpu
from tests.indexer.select.select_cases import KERNEL, LOGITS, Array, SelectCase, check
from tests.support.indexer_cases import PagedCase
from tests.support.sim_driver import simulated

MODES = (("early", 0), ("late", 0), ("random", 3))
CASES = (
    SelectCase(PagedCase(b=1, h=64, seqlens=(1500,)), topk=300),
    SelectCase(PagedCase(b=2, s_q=2, h=5, seqlens=(1100, 90), missing_page=True), topk=100, keep_first=3, keep_last=5),
    SelectCase(PagedCase(b=2, s_q=2, h=3, seqlens=(1200, -4), per_token=True), topk=700, slots=False, levels=3),
    SelectCase(PagedCase(b=3, h=33, seqlens=(0, 64, 200)), topk=65, levels=1),
)
#: More pages of a block than it has stages.
LONG = SelectCase(PagedCase(b=1, h=2, seqlens=(16 * 1024 + 700,)), topk=2048)


def select(case: SelectCase, inputs: dict[str, Array], mode: tuple[str, int]) -> tuple[Array, Array]:
    with simulated(4, (9, 0), *mode) as target:
        got = mla_cupy.indexer_select_paged(**inputs, **case.options, kernel=KERNEL)
        assert target.launched == [f"mla_{KERNEL}"]
    return got


def logits_of(inputs: dict[str, Array]) -> Array:
    with simulated(4, (9, 0)):
        found: Array = mla_cupy.indexer_logits_paged(**inputs, kernel=LOGITS)
    return found


@pytest.mark.one_in(12)
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_selects_as_two_launches_do(case: SelectCase, mode: tuple[str, int]) -> None:
    inputs = case.inputs()
    check(case, inputs, select(case, inputs, mode), logits_of(inputs))


def test_a_block_of_more_pages_than_stages() -> None:
    inputs = LONG.inputs()
    check(LONG, inputs, select(LONG, inputs, ("late", 0)), logits_of(inputs))


def test_hostile_lengths() -> None:
    """Clamped to what the table has room for, whose last entries are no pages."""
    case = SelectCase(PagedCase(b=2, h=2, seqlens=(200, 100)), topk=150)
    inputs = case.inputs()
    inputs["seqlens"][:] = 2**31 - 1, -(2**31)
    check(case, inputs, select(case, inputs, ("early", 0)), logits_of(inputs))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("sign", [1, -1])
def test_digits_begin_anew(sign: int) -> None:
    """Logits outside of the windows of the first digit: huge ones of both signs."""
    case = SelectCase(PagedCase(b=1, h=2, seqlens=(700,)), topk=90)
    inputs = case.inputs()
    inputs["weights"][...] = sign * 2.0**30
    check(case, inputs, select(case, inputs, ("early", 0)), logits_of(inputs))


def test_strides_and_given_arrays() -> None:
    case = SelectCase(PagedCase(b=2, s_q=2, h=3, seqlens=(300, 200)), topk=50)
    inputs = case.inputs()
    apart = {"weights": np.zeros((4, 2, 9), np.float32)[::2, :, ::3], "seqlens": np.zeros((2, 3), np.int32)[:, 1]}
    table = inputs["block_table"]
    apart["block_table"] = np.zeros((2, 2 * table.shape[1]), np.int32)[:, ::2]
    for name, array in apart.items():
        array[...] = inputs[name]
    results = {"indices": np.full((2, 2, 60), 7, np.int32)[..., :50], "counts": np.full((2, 4), 7, np.int32)[:, ::2]}
    with simulated(4, (9, 0)):
        got = mla_cupy.indexer_select_paged(**{**inputs, **apart}, **results, **case.options, kernel=KERNEL)
    check(case, inputs, got, logits_of(inputs))
    assert (results["indices"].base[..., 50:] == 7).all()


def problem(order: str = "index", **sizes: object) -> SelectProblem:
    given = {"num_tokens": 1, "num_keys": 16384, "heads": 64, "head_dim": 128, "block_tokens": 1}
    given |= {"page_size": 64, "num_pages": 999, "dtype": "float8_e4m3fn"}
    return SelectProblem(LogitsProblem(**{**given, **sizes}), order)  # type: ignore[arg-type]


def test_it_is_chosen_where_it_wins() -> None:
    gpu = fake_gpu(132)
    few = sm90_paged.RESIDENT_TOKENS
    for tokens, keys in ((1, 32768), (few, 32768), (few + 1, 16384)):
        assert SELECT.prefers(problem(num_tokens=tokens, num_keys=keys), gpu)
        assert not SELECT.prefers(problem(num_tokens=tokens, num_keys=keys + 64), gpu)
    others = (
        problem(num_tokens=sm90_paged.MAX_TOKENS + 1, num_keys=64),
        problem(heads=65),
        problem(page_size=32),
        problem(e2m1=True),
        problem(order="value"),
    )
    assert not any(SELECT.prefers(other, gpu) for other in others)
    assert not SELECT.prefers(problem(), fake_gpu(114))  # clusters of 16 may have no place
    assert not SELECT.prefers(problem(), fake_gpu(132, (10, 0)))


def test_the_call_takes_it() -> None:
    case = SelectCase(PagedCase(b=1, h=2, seqlens=(70,)), topk=7)
    inputs = case.inputs()
    found = []
    for kernel in (None, {"logits": LOGITS}, {"select": KERNEL}):
        with simulated(132, (9, 0)) as target:
            found.append(mla_cupy.indexer_select_paged(**inputs, **case.options, kernel=kernel))
            found[-1] = (*found[-1], len(target.launched))
    assert [launches for *_, launches in found] == [1, 2, 1]
    for other in found[1:]:
        np.testing.assert_array_equal(other[0], found[0][0])
    with simulated(132, (9, 0)), pytest.raises(UnsupportedDeviceError, match="in the order of the index"):
        mla_cupy.indexer_select_paged(**inputs, **case.options, order="value", kernel=KERNEL)
