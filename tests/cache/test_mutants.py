"""Bugs planted in the kernels of the cache: each must show in the simulator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mla_cupy.errors import KernelCompileError
from tests.cache.runs import CacheCase, check_append_and_gather, check_copy, check_update
from tests.support.mutants import Mutant, planted
from tests.support.sim_driver import simulated


def _pages(case: CacheCase) -> Callable[[], None]:
    return lambda: check_append_and_gather(case, lambda x: x, np.asarray)


def _update() -> None:
    check_update(lambda x: x, np.asarray, (6, 5, 3))


APPEND, RECORD = "cache/append.cu", "attention/record.cuh"
PLANTED: tuple[tuple[Mutant, Callable[[], None]], ...] = (
    (Mutant("scale of the wrong group", APPEND, "lane / p.group_chunks;", "lane / p.group_chunks ^ 1;"),
     _pages(CacheCase("v32"))),
    (Mutant("group of half its size", APPEND, "step < group_chunks", "step < group_chunks / 2"),
     _pages(CacheCase("v4"))),
    (Mutant("scale of the power below", APPEND, "+ ((bits & 0x7fffffu) != 0)", ""), _pages(CacheCase("v32"))),
    (Mutant("NaN is forgotten", APPEND, "return a > b || a != a ? a : b;", "return fmaxf(a, b);"),
     _pages(CacheCase("v32", special=True))),
    (Mutant("no least ratio", APPEND, "ratio = nan_max(ratio, kMinRatio);", ""),
     _pages(CacheCase("v32", dtype="float32", special=True))),
    (Mutant("padding is not written", APPEND, "if (lane == 0) token.scales", "if (false) token.scales"),
     _pages(CacheCase("v4"))),
    (Mutant("halves for pairs", APPEND, "if (p.interleaved) {", "if (!p.interleaved) {"),
     _pages(CacheCase("v32", rotation="interleaved"))),
    (Mutant("positions are not clamped", APPEND, "max(0ll, min(position, (i64)p.max_position - 1))", "position"),
     _pages(CacheCase("v32", rotation="halves"))),
    (Mutant("slots of 32 bits", APPEND, "const TokenBytes token = token_at(layout, p.cache, read_index(",
            "const TokenBytes token = token_at(layout, p.cache, (i32)read_index("),
     _pages(CacheCase("v32", num_pages=20))),
    (Mutant("slots are not checked", RECORD, "slot >= (i64)layout.num_pages * layout.page_size", "false"),
     _pages(CacheCase("v4"))),
    (Mutant("scales of a neighbour", RECORD, "layout.scales_offset + token * layout.scales_stride",
            "layout.scales_offset + (token ^ 1) * layout.scales_stride"), _pages(CacheCase("v4"))),
    (Mutant("pages are not checked", "cache/copy_pages.cu", "|| (u32)destination >= (u32)p.num_pages", ""),
     lambda: check_copy((3, 7, 640, 32), lambda x: x, np.asarray)),
    (Mutant("one layer", "cache/copy_pages.cu", "pieces * p.num_layers", "pieces"),
     lambda: check_copy((3, 7, 640, 32), lambda x: x, np.asarray)),
    (Mutant("columns are not checked", "cache/update.cu", "if ((u32)column >= (u32)p.max_pages) continue;", ""),
     _update),
    (Mutant("rows are not checked", "cache/update.cu", "if ((u32)row >= (u32)p.max_rows) return;", ""), _update),
)  # fmt: skip


#: Every one is compiled anew: the ordinary run takes a few.
QUICK = ("scale of the wrong group", "slots are not checked", "columns are not checked")


@pytest.mark.parametrize(
    ("mutant", "check"),
    [
        pytest.param(mutant, check, id=mutant.id, marks=[] if mutant.name in QUICK else [pytest.mark.slow])
        for mutant, check in PLANTED
    ],
)
def test_shows(mutant: Mutant, check: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated(2):
        check()
    with planted(mutant, tmp_path / "sources", monkeypatch), simulated(2), pytest.raises(Exception) as caught:  # noqa: PT011
        check()
    assert not isinstance(caught.value, KernelCompileError)
