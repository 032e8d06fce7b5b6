"""Bugs planted in the kernels of the cache: each must show in the simulator."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.cache.runs import (
    CacheCase,
    SlotsCase,
    check_append_and_gather,
    check_copy,
    check_slots,
    check_ties,
    check_update,
)
from tests.support.mutants import CAUGHT, Mutant, Plant, steps
from tests.support.sim_driver import simulated


def _pages(case: CacheCase) -> Callable[[], None]:
    return lambda: check_append_and_gather(case, lambda x: x, np.asarray)


def _update() -> None:
    check_update(lambda x: x, np.asarray, (6, 5, 3))


def _slots(**sizes: int) -> Callable[[], None]:
    return lambda: check_slots(SlotsCase(**sizes), lambda x: x, np.asarray)


def _ties() -> None:
    check_ties(lambda x: x, np.asarray)


APPEND, RECORD, CONVERT = "cache/append.cuh", "attention/record.cuh", "ptx/convert.cuh"
FP4 = "ptx/fp4.cuh"
ROPE = "tile/rope.cuh"
SLOTS = "cache/slots.cu"
PLANTED: tuple[tuple[Mutant, Callable[[], None]], ...] = (
    (Mutant("scale of the wrong group", APPEND, "lane / 8 : lane / 4;", "lane / 8 ^ 1 : lane / 4 ^ 1;"),
     _pages(CacheCase("v32"))),
    (Mutant("scale of another group", APPEND, "piece / group_pieces;", "piece / group_pieces ^ 1;"),
     _pages(CacheCase("v32", dtype="float32"))),
    (Mutant("group of half its size", APPEND, "step < p.group_chunks", "step < p.group_chunks / 2"),
     _pages(CacheCase("v4"))),
    (Mutant("pieces of half a group", APPEND, "step < group_pieces", "step < group_pieces / 2"),
     _pages(CacheCase("v4", dtype="float32"))),
    (Mutant("scale of the power below", APPEND, "kCarry = 0x7fffffu - 0x600000u", "kCarry = 0"),
     _pages(CacheCase("v32"))),
    (Mutant("the power below", APPEND, "+ ((bits & 0x7fffffu) != 0)", ""), _pages(CacheCase("v32", dtype="float32"))),
    (Mutant("NaN is forgotten", CONVERT, "max.NaN.xorsign.abs.bf16x2", "max.xorsign.abs.bf16x2"),
     _pages(CacheCase("v32", special=True))),
    (Mutant("NaN is less", APPEND, "return a > b || a != a ? a : b;", "return fmaxf(a, b);"),
     _pages(CacheCase("v32", dtype="float32", special=True))),
    (Mutant("a sign is part of the largest", APPEND, "both >> 16 & 0x7fff", "both >> 16"), _pages(CacheCase("v32"))),
    (Mutant("infinity is a number", APPEND, "if (bits >= kExponentMask)", "if (bits > kExponentMask)"),
     _pages(CacheCase("v4", special=True))),
    (Mutant("no least exponent", APPEND, "max((bits + kCarry) >> 23, kMinExponent + 8)", "((bits + kCarry) >> 23)"),
     _pages(CacheCase("v32", special=True))),
    (Mutant("no least ratio", APPEND, "ratio = nan_max(ratio, kMinRatio);", ""),
     _pages(CacheCase("v32", dtype="float32", special=True))),
    (Mutant("padding is not written", APPEND, "group * p.group_chunks <= p.latent_chunks",
            "group * p.group_chunks < p.latent_chunks"), _pages(CacheCase("v4"))),
    (Mutant("padding is forgotten", APPEND, "if (padded) token.scales", "if (false) token.scales"),
     _pages(CacheCase("v4", dtype="float32"))),
    (Mutant("RoPE is not rounded before its codes", APPEND, "if (p.element != kFloat32) return piece_values",
            "if (p.element == kBfloat16 + 9) return piece_values"), _pages(CacheCase("v41", rotation="halves"))),
    (Mutant("RoPE begins a piece early", APPEND, "2 * p.latent_chunks - kWarpThreads : 0",
            "2 * p.latent_chunks - kWarpThreads - 8 : 0"), _pages(CacheCase("v41-fp4"))),
    (Mutant("e2m1 scales are not rounded", APPEND, "plain_scale(cvt_f32_x2_e4m3(code).x)", "plain_scale(ratio)"),
     _pages(CacheCase("v41-fp4"))),
    (Mutant("no least e4m3 scale", APPEND, "fmaxf(ratio, kMinE4m3)", "ratio"),
     _pages(CacheCase("v41-fp4", special=True))),
    (Mutant("infinity has a scale", APPEND, "finite ? cvt_e4m3_x2", "true ? cvt_e4m3_x2"),
     _pages(CacheCase("v41-fp4", special=True))),
    (Mutant("ties away from even", FP4, "size > 1.25f", "size >= 1.25f"), _ties),
    (Mutant("ties towards zero", FP4, "size >= 0.75f", "size > 0.75f"), _ties),
    (Mutant("no sign of e2m1", FP4, "__float_as_uint(x) >> 28 & 8 | code", "code"), _pages(CacheCase("v41-fp4"))),
    (Mutant("sign of a neighbour", FP4, "0x1504", "0x0514"), _pages(CacheCase("v41-fp4"))),
    (Mutant("upper half twice", FP4, "sizes >> 16", "sizes"), _pages(CacheCase("v41-fp4"))),
    (Mutant("scales of two groups", RECORD, "cvt_f32_x2_e4m3(token.scales[chunk / layout.group_chunks])",
            "cvt_f32_x2_e4m3(token.scales[chunk / 2])"), _pages(CacheCase("v41-fp4"))),
    (Mutant("place of another token", APPEND, "from_lane(mine.data, t)", "from_lane(mine.data, 0)"),
     _pages(CacheCase("bf16"))),
    (Mutant("halves for pairs", ROPE, "if (interleaved) {", "if (!interleaved) {"),
     _pages(CacheCase("v32", rotation="interleaved"))),
    (Mutant("positions are not clamped", APPEND, "max(0ll, min(position, (i64)max_position - 1))", "position"),
     _pages(CacheCase("v32", rotation="halves"))),
    (Mutant("slots of 32 bits", APPEND, "in_cache ? read_index(", "in_cache ? (i32)read_index("),
     _pages(CacheCase("v32", num_pages=20))),
    (Mutant("a slot of 32 bits", APPEND, "nullptr ? -1 : read_index(", "nullptr ? -1 : (i32)read_index("),
     _pages(CacheCase("v32", dtype="float32", num_pages=20))),
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
    (Mutant("tokens are not limited", "cache/update.cu", "last = min(end, p.max_tokens)", "last = end"), _update),
    (Mutant("a token too early", "cache/update.cu", "(i64)length - end + token,", "(i64)length - end + token - 1,"),
     _update),
    (Mutant("tokens of no page", "cache/update.cu", "position >= 0 && column < p.max_pages", "position >= 0"), _update),
    (Mutant("positions are not checked", SLOTS, "position < 0 || ", ""), _slots()),
    (Mutant("the table has no end", SLOTS, " || column >= p.max_pages", ""), _slots()),
    (Mutant("any page will do", SLOTS, "(u32)page < (u32)p.num_pages", "true"), _slots()),
    (Mutant("negative lengths", SLOTS, "max(0, length)", "length"), _slots()),
    (Mutant("more slots than there are", SLOTS, "(i32)min(end, (i64)p.max_tokens)", "(i32)end"), _slots(max_tokens=7)),
    (Mutant("each batch of sequences begins anew", SLOTS, "before = end;", "before = 0;"), _slots(b=300)),
    (Mutant("ends are read at once", SLOTS, *steps("bar.sync", 1, of=2)), _slots()),
    (Mutant("sums are read at once", SLOTS, *steps("bar.sync", 0, of=2)), _slots()),
    (Mutant("the next sequence", SLOTS, "s.ends[middle] > token", "s.ends[middle] >= token"), _slots()),
    (Mutant("rows are not checked", "cache/update.cu", "if ((u32)row >= (u32)p.max_rows) return;", ""), _update),
)  # fmt: skip


#: Every one is compiled anew: the ordinary run takes a few.
QUICK = ("scale of the wrong group", "slots are not checked", "columns are not checked", "the table has no end")


@pytest.mark.parametrize(
    ("mutant", "check"),
    [
        pytest.param(mutant, check, id=mutant.id, marks=[] if mutant.name in QUICK else [pytest.mark.slow])
        for mutant, check in PLANTED
    ],
)
def test_shows(mutant: Mutant, check: Callable[[], None], plant: Plant) -> None:
    with simulated(2):
        check()
    plant(mutant)
    with simulated(2), pytest.raises(CAUGHT):
        check()
