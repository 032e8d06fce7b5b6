"""Each probe can fail: one thing is changed in a copy of the sources, or in what is expected."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import pytest

from mla_cupy.selftest import catalog, copies, layouts, mma, reductions, tmem, trial
from mla_cupy.selftest.layouts import Cells
from mla_cupy.selftest.place import Place, opened
from mla_cupy.selftest.probe import Machine
from tests.support import (
    mutants,
    sim_driver,  # noqa: F401 (the tests' own copy of the simulator)
)

LD2, LD16 = "tmem/ld/16x256b.x2-lane0", "tmem/ld/32x32b.x16-lane0"
S32, DP32, DKV32 = "mma/bfloat16/s-m64n32", "mma/bfloat16/dp-m64n32", "mma/bfloat16/dkv-m128n32"
DQ = "mma/bfloat16/dq-m128n64-64keys"
PAIR128, PAIR256 = "mma.pair/bfloat16/scores-n128", "mma.pair/bfloat16/values-n256"
CODES, CODES32 = "mma.f8f6f4/float8_e4m3fn/m128n128", "mma.f8f6f4/float8_e4m3fn/m128n128-32codes"
STMATRIX = "stmatrix/bfloat16-32keys"


@dataclass(frozen=True)
class Mutant(mutants.Mutant):
    """Every probe of `seen_by` must then fail, and those of `fine` must not."""

    seen_by: tuple[str, ...]
    fine: tuple[str, ...] = ()


DESC, TCGEN05, SW128 = "tile/matrix_desc.cuh", "ptx/tcgen05.cuh", "tile/sw128.cuh"
COPY, REDUCE, MMA, TMEM = "ptx/copy.cuh", "ptx/reduce.cuh", "probes/mma.cu", "probes/tmem.cu"
PAIR = "ptx/tcgen05_pair.cuh"
AFTER, STORE = "tcgen05.fence::after_thread_sync", "copy/store/64heads"

MUTANTS = (
    Mutant("swizzle of Hopper's descriptors", DESC, "2ull << 61", "1ull << 62 >> 1", (S32, DKV32)),
    Mutant("no version", DESC, "1ull << 46", "0ull << 46", (S32,)),
    Mutant(
        "strides exchanged", DESC, "(leading_bytes >> 4) << 16 |", "(stride_bytes >> 4) << 16 |", (DKV32, DQ), (S32,)
    ),
    Mutant(
        "SW128 tiles overlap",
        DESC,
        "(sw_tile, sw_tile_bytes, kSw",
        "(sw_tile, sw_tile_bytes / 2, kSw",
        (DKV32,),
        (S32,),
    ),
    Mutant("bfloat16 read as float16", DESC, "(bfloat16) { return 1; }", "(bfloat16) { return 0; }", (S32, DQ)),
    Mutant(
        "float16 read as bfloat16",
        DESC,
        "(float16) { return 0; }",
        "(float16) { return 1; }",
        ("mma/float16/s-m64n32",),
        (S32,),
    ),
    Mutant("majors exchanged", DESC, "(u32)a << 15", "(u32)b << 15", (DKV32,), (S32, DQ)),
    Mutant("B always K-major", DESC, "(u32)b << 16 |", "0u << 16 |", (DQ,), (S32, DKV32)),
    Mutant("half of N", DESC, "n / 8 << 17", "n / 16 << 17", (S32, "mma.ws/bfloat16/s-m32n64")),
    Mutant("M 64 instead of 128", DESC, "m / 16 << 24", "(m > 64 ? 4 : m / 16) << 24", (DKV32, DQ), (S32, DP32)),
    Mutant("lane field", TCGEN05, "value + (lanes << 16)", "value + (lanes / 32 * 32 << 16)", (DP32,), (S32,)),
    Mutant("column", TCGEN05, "value + columns", "value + columns / 2", ("tmem/ld/16x256b.x2-lane16", LD16)),
    Mutant("row step of an SW128 tile", SW128, "kMmaK * kSw128RowBytes", "8 * kSw128RowBytes", (DKV32, DQ), (S32,)),
    Mutant("column step of an SW128 tile", SW128, "kMmaK * 2;", "kMmaK;", (S32,), ("mma/bfloat16/s-m64n32-1step", DQ)),
    Mutant("no swizzle", SW128, "(chunk ^ (row & 7))", "(chunk)", (S32, STMATRIX)),
    Mutant("always adds", MMA, "x.accumulate || step > 0", "true", (S32,), (f"{S32}-added",)),
    Mutant("never adds", MMA, "x.accumulate || step > 0", "step > 0", ("mma/bfloat16/dv-then-dk",), (S32,)),
    Mutant("one step too few", MMA, "step < x.steps", "step < x.steps - 1", (S32, DQ, "mma.ws/*/dq-m64n256")),
    Mutant("weight-stationary is not", MMA, "tcgen05_mma_ws_f16(d", "tcgen05_mma_f16(d", ("mma.ws/*/m64n64",), (S32,)),
    Mutant("no commit", MMA, *mutants.steps("tcgen05.commit", 0, of=1), (S32,)),
    Mutant(
        "second product from the first one's operand",
        MMA,
        "step_of(s.b[i], x.n",
        "step_of(s.b[0], x.n",
        ("mma/bfloat16/s-and-dp-n32", "mma/bfloat16/ropes-n64"),
        (S32,),
    ),
    Mutant(
        "e4m3 read as e5m2",
        DESC,
        "return make_instruction_desc<float16>(m",
        "return make_instruction_desc<bfloat16>(m",
        (CODES, CODES32),
        (S32,),
    ),
    Mutant("M 64 instead of 128 of e4m3", DESC, "<float16>(m, n", "<float16>(m / 2, n", (CODES, CODES32), (DKV32,)),
    Mutant("e4m3 of half of N", DESC, "<float16>(m, n", "<float16>(m, n / 2", (CODES, CODES32), (DKV32,)),
    Mutant("e4m3 as 16 bits", TCGEN05, "cta_group::1.kind::f8f6f4", "cta_group::1.kind::f16", (CODES, CODES32), (S32,)),
    Mutant("half of a pair's rows", DESC, "m / 16 << 24", "(m > 64 ? 16 : m / 16) << 24", (PAIR128,), (S32,)),
    Mutant("commit to the first block alone", PAIR, "(1 << kPairBlocks) - 1", "1", (PAIR128, PAIR256), (S32,)),
    Mutant(
        "bytes counted by each block",
        "probes/pair.cu",
        "const ClusterAddr full = map_to_rank(smem_addr(&s.full), kPairLeader);",
        "const ClusterAddr full = map_to_rank(smem_addr(&s.full), rank);",
        (PAIR128, PAIR256),
    ),
    Mutant("rows of a pair's gather", PAIR, "{%3, %4, %5, %6, %7}", "{%3, %4, %6, %5, %7}", (PAIR128, PAIR256), (S32,)),
    Mutant("arrival at the own block", "probes/pair.cu", "(&s.ready), kPairLeader)", "(&s.ready), rank)", (PAIR128,)),
    Mutant(
        "another shape of load",
        TCGEN05,
        "tcgen05.ld.sync.aligned.16x256b.x2",
        "tcgen05.ld.sync.aligned.16x128b.x4",
        (LD2,),
        ("tmem/ld/16x256b.x4-lane0",),
    ),
    Mutant(
        "another shape of store",
        TCGEN05,
        "tcgen05.st.sync.aligned.16x256b.x4",
        "tcgen05.st.sync.aligned.16x128b.x8",
        ("tmem/st/16x256b.x4-lane*",),
        ("tmem/ld/16x256b.x4-lane0",),
    ),
    Mutant(
        "registers exchanged",
        TCGEN05,
        'x16.b32 "\n                 "{%0, %1, %2',
        'x16.b32 "\n                 "{%1, %0, %2',
        (LD16,),
        (LD2,),
    ),
    Mutant("no wait for a load", TMEM, *mutants.steps("tcgen05.wait::ld", 0, 1, of=2), (LD2,)),
    Mutant("no wait for a load of sums", MMA, *mutants.steps("tcgen05.wait::ld", 0, of=1), (S32,)),
    Mutant("no fence after", TMEM, *mutants.steps(AFTER, *range(4), of=4), ("tmem/ld/16x256b.x2-lane16",)),
    Mutant("no fence after products", MMA, *mutants.steps(AFTER, *range(5), of=5), (S32,)),
    Mutant("no proxy fence", MMA, *mutants.steps("fence.proxy.async", 0, of=1), (S32,)),
    Mutant("no proxy fence before a copy", "probes/copy.cu", *mutants.steps("fence.proxy.async", 0, of=1), (STORE,)),
    Mutant(
        "rows of a gather", "ptx/gather4.cuh", "{%3, %4, %5, %6, %7}", "{%3, %4, %6, %5, %7}", ("copy/gather4/32rows",)
    ),
    Mutant("coordinates of a load", COPY, "{%3, %4, %5}], [%2], %6", "{%3, %5, %4}], [%2], %6", ("copy/load/*",)),
    Mutant("coordinates of a store", COPY, "[%0, {%2, %3, %4}]", "[%0, {%2, %4, %3}]", ("copy/store/*",)),
    Mutant("distance of gathers", "probes/copy.cu", "i * kGatherBytes", "i * 1024", ("copy/gather4/32rows",)),
    Mutant("numbers of a sum", REDUCE, "{%1, %2, %3, %4}", "{%1, %2, %4, %3}", ("reduce/v4*",), ("reduce/v2*",)),
    Mutant("a store, not a sum", REDUCE, "red.relaxed.gpu.global.add.v2.f32", "st.global.v2.f32", ("reduce/v2*",)),
    Mutant("adds what is not wanted", REDUCE, "setp.ne.s32 p, %5, 0", "setp.ge.s32 p, %5, 0", ("reduce/v4*",)),
    Mutant("subtracts", REDUCE, '"l"(to), "r"(x)', '"l"(to), "r"(-x)', ("reduce/s32*",), ("reduce/v4*",)),
    Mutant(
        "not transposed",
        "ptx/matrix.cuh",
        "stmatrix.sync.aligned.m8n8.x4.trans",
        "stmatrix.sync.aligned.m8n8.x4",
        (STMATRIX,),
    ),
    Mutant("halves exchanged", "ptx/convert.cuh", '"f"(hi), "f"(lo)', '"f"(lo), "f"(hi)', ("stmatrix/*",)),
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


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_changed_source(machine: Machine, mutant: Mutant, plant: mutants.Plant) -> None:
    plant(mutant)
    assert [result for result in results(machine, mutant.seen_by) if result.status not in trial.BAD] == []
    assert [result for result in results(machine, mutant.fine) if result.status != trial.PASSED] == []


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


#: What is expected instead -> where, by what name, and which probes must see that.
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
