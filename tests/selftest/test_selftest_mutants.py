"""Each probe can fail: one thing is changed in a copy of the sources, or in what is expected."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any
from unittest import mock

import numpy as np
import pytest

from mla_cupy.kernels import KERNELS
from mla_cupy.selftest import catalog, copies, layouts, mma, reductions, tmem, trial
from mla_cupy.selftest.layouts import Cells
from mla_cupy.selftest.place import Place, opened
from mla_cupy.selftest.probe import Machine
from tests.support import sim_driver  # noqa: F401 (the tests' own copy of the simulator)
from tests.support.mutant_suite import Step, without
from tests.support.mutants import Mutant, Plant

LD2, LD16 = "tmem/ld/16x256b.x2-lane0", "tmem/ld/32x32b.x16-lane0"
S32, DP32, DKV32 = "mma/bfloat16/s-m64n32", "mma/bfloat16/dp-m64n32", "mma/bfloat16/dkv-m128n32"
DQ = "mma/bfloat16/dq-m128n64-64keys"
PAIR128, PAIR256 = "mma.pair/bfloat16/scores-n128", "mma.pair/bfloat16/values-n256"
STMATRIX = "stmatrix/bfloat16-32keys"

DESC, SW128, PAIR = "tile/matrix_desc.cuh", "tile/sw128.cuh", "ptx/tcgen05_pair.cuh"
#: Bug -> the probes that must fail then, and those that must not.
TEXTS = (
    (Mutant("strides exchanged", DESC, "(leading_bytes >> 4) << 16 |", "(stride_bytes >> 4) << 16 |"),
     (DKV32, DQ), (S32,)),
    (Mutant("row step of an SW128 tile", SW128, "kMmaK * kSw128RowBytes", "8 * kSw128RowBytes"), (DKV32, DQ), (S32,)),
    (Mutant("no swizzle", SW128, "(chunk ^ (row & 7))", "(chunk)"), (S32, STMATRIX), ()),
    (Mutant("never adds", "probes/mma.cu", "x.accumulate || step > 0", "step > 0"),
     ("mma/bfloat16/dv-then-dk",), (S32,)),
    (Mutant("commit to the first block alone", PAIR, "(1 << kPairBlocks) - 1", "1"), (PAIR128, PAIR256), (S32,)),
    (Mutant("numbers of a sum", "ptx/reduce.cuh", "{%1, %2, %3, %4}", "{%1, %2, %4, %3}"),
     ("reduce/v4*",), ("reduce/v2*",)),
)  # fmt: skip
#: Step that is left out -> the probe that must fail then.
STEPS = (
    (Step("probes_mma", "tcgen05.commit", 0, 1), S32),
    (Step("probes_mma", "tcgen05.wait::ld", 0, 1), S32),
    (Step("probes_mma", "fence.proxy.async", 0, 1), S32),
    (Step("probes_copy", "fence.proxy.async", 0, 1), "copy/store/64heads"),
    (Step("probes_tmem", "tcgen05.wait::ld", 0, 2), LD2),
    (Step("probes_tmem", "tcgen05.wait::ld", 1, 2), LD2),
    *((Step("probes_tmem", "tcgen05.fence::after_thread_sync", i, 4), "tmem/ld/16x256b.x2-lane16") for i in (0, 1)),
    *((Step("probes_mma", "tcgen05.fence::after_thread_sync", i, 5), S32) for i in (0, 2)),
)


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with opened(Place("sm_100a", "", "none", "a test", "late")) as found:
        yield found


def results(machine: Machine, patterns: tuple[str, ...]) -> list[trial.Result]:
    chosen = [
        probe for probe in catalog.probes(machine.arch) if any(fnmatchcase(probe.name, pattern) for pattern in patterns)
    ]
    assert len(chosen) >= len(patterns)
    return [trial.attempt(probe, machine) for probe in chosen]


@pytest.mark.parametrize(("bug", "seen_by", "fine"), TEXTS, ids=[bug.id for bug, *_ in TEXTS])
def test_changed_source(
    machine: Machine, bug: Mutant, seen_by: tuple[str, ...], fine: tuple[str, ...], plant: Plant
) -> None:
    plant(bug)
    assert [result for result in results(machine, seen_by) if result.status not in trial.BAD] == []
    assert [result for result in results(machine, fine) if result.status != trial.PASSED] == []


@pytest.mark.parametrize(("bug", "seen_by"), STEPS, ids=[f"{bug.kernel}-{bug.id}" for bug, _ in STEPS])
def test_left_out(machine: Machine, bug: Step, seen_by: str) -> None:
    with mock.patch.dict(KERNELS, catalog.KERNELS), without(bug):
        assert [result for result in results(machine, (seen_by,)) if result.status not in trial.BAD] == []


def upper_lanes_too(m: int, n: int, weight_stationary: bool = False) -> Cells:
    """Layout D for every M."""
    row, column = np.broadcast_arrays(np.arange(m)[:, None], np.arange(n)[None, :])
    return Cells(row, column)


def parts_exchanged(m: int, n: int, weight_stationary: bool = False) -> Cells:
    """Columns dealt out to the parts in turn."""
    true = layouts.sum_cells(m, n, weight_stationary)
    if not weight_stationary:
        return true
    parts, column = layouts.LANES // m, np.arange(n)[None, :] + 0 * true.lanes
    return Cells(column % parts * m + true.lanes % m, column // parts)


def halves_exchanged(shape: str, registers: int) -> Cells:
    """Registers 1 and 2 of every four."""
    true = layouts.shape_cells(shape, registers)
    order = np.arange(registers).reshape(-1, 4)[:, [0, 2, 1, 3]].reshape(-1)
    return Cells(true.lanes[order], true.columns[order])


def plain(rows: int) -> Any:
    """Without the swizzle."""
    return np.arange(rows * layouts.SW128_COLUMNS).reshape(rows, -1)


#: Wrong expectation -> module, attribute, and probes that must detect it.
EXPECTATIONS: tuple[tuple[Any, Any, str, tuple[str, ...], tuple[str, ...]], ...] = (
    (upper_lanes_too, mma, "sum_cells", (S32, DP32, "mma/bfloat16/s-and-dp-n32"), (DKV32,)),
    (parts_exchanged, mma, "sum_cells", ("mma.ws/*/s-m32n64", "mma.ws/*/dq-m64n256"), (S32,)),
    (halves_exchanged, tmem, "shape_cells", ("tmem/ld/16x256b.x1-*", "tmem/st/16x256b.x8-*", LD16), ()),
    (
        plain,
        copies,
        "sw_tile_elements",
        ("copy/gather4/*rows", "copy/load/*", "copy/store/*"),
        ("copy/gather4/4rows-none",),
    ),
    (plain, reductions, "sw_tile_elements", ("stmatrix/*",), ("reduce/*",)),
)


@pytest.mark.parametrize(
    ("wrong", "module", "name", "seen_by", "fine"), EXPECTATIONS, ids=[f"{x[0].__name__}-{x[2]}" for x in EXPECTATIONS]
)
def test_changed_expectation(
    machine: Machine,
    wrong: Any,
    module: Any,
    name: str,
    seen_by: tuple[str, ...],
    fine: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, name, wrong)
    for result in results(machine, seen_by):
        assert result.status == trial.FAILED, result
        assert "got" in result.message
        assert "expected" in result.message
        assert "values differ" in result.message
    assert [result for result in results(machine, fine) if result.status != trial.PASSED] == []
