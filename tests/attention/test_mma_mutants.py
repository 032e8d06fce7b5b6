"""Bugs planted in the mma.sync kernels: each must show, the kernels as they are must not (see tests/decode)."""

from __future__ import annotations

import numpy as np
import pytest

from mla_cupy.kernels.attention import mma
from tests.attention.runs import GPUS, decode
from tests.decode.test_small_mutants import alike_where_finite
from tests.support.cases import DecodeCase, make
from tests.support.flat import mla_decode
from tests.support.mutants import Mutant, Plant, as_verdict, steps
from tests.support.sim_driver import simulated
from tests.support.tolerance import check

RING, BLOCK, SOFTMAX = "attention/mma/key_ring.cuh", "attention/mma/block.cuh", "attention/mma/softmax.cuh"
SMALL, WIDE, LOADER = "attention/mma_small.cu", "attention/mma.cu", "attention/mma/step_loader.cuh"
MODES = (("late", 0), ("random", 1))
#: One block works at both requests, each of more tokens than a ring holds. What hides tokens of
#: their last steps: of the first one, queries alone; of the other, the end of the block table, too.
CASE = DecodeCase(b=2, seqlens=(96, 138), s_q=2, h_q=7, page_size=4, missing_pages=1)

OF_SMALL = [
    # What both kernels share
    Mutant("absent pages count", RING, "% kOctetTokens] = present;", "% kOctetTokens] = true;"),
    Mutant("tokens past the end", RING, "page = left > 0 ? *entry : -1;", "page = *entry;"),
    Mutant("rows past the last one", BLOCK, "if (block.row0 + row < block.rows) store_row", "if (true) store_row"),
    Mutant("first octet never wraps", RING, "return at >= kOctets ? at - kOctets : at;", "return at % (kOctets - 1);"),
    # Its own
    Mutant("keys not waited for", SMALL, *steps("mbarrier.try_wait", 0, 1, of=2)),
    Mutant("parity stuck", RING, "parity ^= barrier == 0;", ""),
    Mutant("scores not waited for", SMALL, *steps("bar.sync", 2, of=5)),
    Mutant("P not waited for", SMALL, *steps("bar.sync", 3, of=5)),
    Mutant("one place too few", RING, "kStepOctets * done + Ring::kOctets;", "kStepOctets * done + Ring::kOctets + 4;"),
    Mutant("no mask", SOFTMAX, "if (masked) present &=", "if (false) present &="),
    Mutant("values not cleaned", SMALL, "if (masked &&\n        clean_values", "if (false &&\n        clean_values"),
    Mutant(
        "values read as if not swizzled",
        SMALL,
        "Ring::offset(row, chunk + lane / 16)",
        "Ring::offset(0, chunk + lane / 16) + row * Ring::kRowBytes",
    ),
    Mutant("output not rescaled", SMALL, "softmax.rescales) != 0", "softmax.rescales) == 1"),
    Mutant("sum of one lane", SOFTMAX, "return over_lanes(sum,", "return over_lanes(is_first() ? sum : 0.f,"),
]
OF_WIDE = [
    Mutant("keys not waited for by 64 rows", WIDE, *steps("mbarrier.test_wait", 0, 2, of=6)),
    Mutant("sent scores not waited for", WIDE, *steps("mbarrier.test_wait", 4, of=6)),
    Mutant("written P not waited for", WIDE, *steps("mbarrier.test_wait", 3, of=6)),
    Mutant("rows of the first steps not awaited", WIDE, *steps("bar.sync", 2, of=6)),
    Mutant("cleaned before all have scored", WIDE, *steps("bar.sync", 3, 4, of=6)),
    Mutant("parity of whole steps stuck", LOADER, "parity ^= first == 0;", ""),
    Mutant("sent by one warp too few", WIDE, "mbarrier_init(sent, kQuarters)", "mbarrier_init(sent, kQuarters - 1)"),
    Mutant("one buffer of P", WIDE, "s, math, ~step & 1, factor)", "s, math, step & 1, factor)"),
    Mutant(
        "scores to another warp",
        WIDE,
        "to = math.half() * kQuarters + (c ^ math.quarter());",
        "to = math.half() * kQuarters + ((c + 1) ^ math.quarter()) % 4;",
    ),
    Mutant("values of the next step", WIDE, "math.keys.back(1)", "math.keys.first"),
    Mutant("queries of one head", WIDE, "query_head(p, block.kv_head, row)", "query_head(p, block.kv_head, 0)"),
    Mutant("outputs in one row", WIDE, "out_offset(p, 0, block.kv_head, row)", "out_offset(p, 0, block.kv_head, 0)"),
    Mutant("P of tokens in the other order", WIDE, "2 * (pair ^ math.flip())", "2 * pair"),
    Mutant("no mask of 64 rows", WIDE, "if (hides_some) hide(block, s, math, step + 1, scores);", ";"),
    Mutant(
        "values of 64 rows not cleaned",
        WIDE,
        "clean_values<Element, Ring>(s.keys, math.keys.first, token, block.item().seen_by_all)",
        "false",
    ),
    Mutant("a step that hides some counts whole", WIDE, "(step >= math.first_masked) | ", "false | "),
    Mutant("no step's end hides anything", WIDE, "seldom = (step + 1 >= math.first_masked) | ", "seldom = "),
    Mutant(
        "ends hide a step late",
        WIDE,
        "seldom = (step + 1 >= math.first_masked)",
        "seldom = (step >= math.first_masked)",
    ),
    Mutant("absent pages of 64 rows count", WIDE, "(present_bits(s.rows, step) != kAllPresent)", "false"),
    Mutant("place of a step taken too early", LOADER, "(done > 0) & (step < steps)", "step < steps"),
    Mutant("a warp's tokens are one", LOADER, "lane % Ring::kWarpTokens;\n    }", "0;\n    }"),
]
#: Of a request of more steps than are looked up at once.
OF_LONG = [
    Mutant("next rows not kept", LOADER, "if (at == kLookUp + 1) keep_rows", "if (false) keep_rows"),
    Mutant("next pages looked up, rows not kept", LOADER, "return ((done + kSteps - 1) %", "return ((done + kSteps) %"),
    Mutant(
        "rows kept, next pages not looked up", LOADER, "return ((done + kSteps - 1) %", "return ((done + kSteps - 2) %"
    ),
    Mutant("next rows in the place of others", LOADER, "index % kRowTables * kWarpThreads + lane", "lane"),
]
#: Of a request in pages that no step is whole ones of.
OF_PAGES = [
    Mutant("place in a page never wraps", RING, "offset = more ? next - block.p.page_size : next;", "offset = next;"),
    Mutant("next page not turned to", RING, "(step_pages + more)", "step_pages"),
]
PLANTED = [(mma.SMALL.name, mutant) for mutant in OF_SMALL] + [(mma.WIDE.name, mutant) for mutant in OF_WIDE]
LONG = DecodeCase(b=1, seqlens=290, h_q=2)
PAGES = DecodeCase(b=1, seqlens=100, h_q=2, page_size=24)


@as_verdict
def verdict(kernel: str, mode: tuple[str, int]) -> None:
    """What a run shows; empty if nothing."""
    inputs = make(CASE)
    last = CASE.lengths()[0] - 1  # of the first request: only its last query sees it
    page = inputs.kv_cache[inputs.block_table[0, last // CASE.page_size], :, 0]
    page[last % CASE.page_size, 7] = np.inf
    page[last % CASE.page_size - 1] *= np.asarray(8, page.dtype)  # raises the maxima of the last tile
    with simulated(1, GPUS[kernel], *mode):
        got = mla_decode(*inputs.arguments, kernel=kernel)
    alike = [alike_where_finite(mine, exact) for mine, exact in zip(got, inputs.exact, strict=True)]
    check((alike[0], alike[1]), inputs.exact, inputs.rounded, CASE.dtype)


@as_verdict
def verdict_of_long(mode: tuple[str, int]) -> None:
    """The same of 64 rows that one block works at from end to end."""
    decode(make(LONG), mma.WIDE.name, mode, sm_count=1)


@as_verdict
def verdict_of_pages(mode: tuple[str, int]) -> None:
    """The same of few rows, whose steps are not whole pages."""
    decode(make(PAGES), mma.SMALL.name, mode, sm_count=1)


@pytest.mark.parametrize(("kernel", "mutant"), PLANTED, ids=lambda x: x if isinstance(x, str) else x.id)
def test_is_caught(kernel: str, mutant: Mutant, plant: Plant) -> None:
    plant(mutant)
    assert any(verdict(kernel, mode) for mode in MODES), f"nothing shows that {mutant.name}"


@pytest.mark.parametrize("mutant", OF_LONG, ids=lambda x: x.id)
def test_is_caught_later(mutant: Mutant, plant: Plant) -> None:
    plant(mutant)
    assert verdict_of_long(MODES[0]), f"nothing shows that {mutant.name}"


@pytest.mark.parametrize("mutant", OF_PAGES, ids=lambda x: x.id)
def test_is_caught_in_pages(mutant: Mutant, plant: Plant) -> None:
    plant(mutant)
    assert verdict_of_pages(MODES[0]), f"nothing shows that {mutant.name}"


def test_pages() -> None:
    assert verdict_of_pages(MODES[0]) == ""


def test_long_request() -> None:
    assert verdict_of_long(MODES[0]) == ""


@pytest.mark.one_in(8)
@pytest.mark.parametrize("kernel", [mma.SMALL.name, mma.WIDE.name])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_kernel_as_it_is(kernel: str, mode: tuple[str, int]) -> None:
    assert verdict(kernel, mode) == ""
