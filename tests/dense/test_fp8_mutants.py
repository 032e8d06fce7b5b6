"""Bugs planted in dense attention over e4m3 codes: each must show."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from tests.dense.runs import GENERIC_FP8, HOPPER_FP8, run
from tests.support import mutants
from tests.support.dense_cases import DenseCase, make

SOURCE, VALUES, PARAMS = "dense/sm90_fp8.cu", "dense/fp8_values.cuh", "dense/fp8_params.cuh"
PLAIN = "dense/generic_fp8.cu"
F8 = "float8_e4m3fn"
SMALL = DenseCase(((2, 3),), dtype=F8)
ENDS = DenseCase(((3, 5), (4, 4)), dtype="uint8")
SCALED = DenseCase(((3, 5), (4, 4)), h_q=2, dtype=F8, scales="qkv")
LONG = DenseCase(((70, 259),), dtype=F8)  # a warpgroup sees a tile less
PIECES = DenseCase(((5, 9),), h_q=4, h_kv=2, k_rope="per_head", dtype=F8)
RISING = DenseCase(((8, 300),), scale=40.0, dtype=F8)  # maxima rise by more than 2^64
ITEMS = DenseCase(((70, 300), (9, 200)), h_q=2, dtype=F8)  # a warpgroup has no row
LATE = ("late", 0)


@dataclass(frozen=True)
class Mutant(mutants.Mutant):
    """The case that shows it, a mode of the simulator, the kernel; whether values are NaN, or the queries' scale 0."""

    case: DenseCase = ENDS
    mode: tuple[str, int] = ("early", 0)
    nan: bool = False
    zero: bool = False
    kernel: str = HOPPER_FP8


MUTANTS = [
    Mutant("NaN stays", VALUES, "word &= ~((nan >> 7) * 0xffu);", "", nan=True),
    Mutant("all NaN goes", VALUES, "8 * (i / 2) + i % 2 >= first)", "8 * (i / 2) + i % 2 >= first - 2)", nan=True),
    Mutant("NaN of other keys goes", VALUES, "2 * (lane % 4) + 8 * (i / 2)", "2 * (lane % 4) + 2 * (i / 2)", nan=True),
    Mutant("what was taken is lost", SOURCE, "if (slot.nonfinite) store_nan", "if (0) store_nan", nan=True),
    Mutant("a key too many", SOURCE, "(math.thread, i) >= seen", "(math.thread, i) > seen"),
    Mutant(
        "columns in the order of rows",
        SOURCE,
        "x[0] * factor, x[4] * factor, x[1]",
        "x[0] * factor, x[1] * factor, x[4]",
    ),
    Mutant("the first columns twice", SOURCE, "kColumnHalf * kSw128Bytes + kKeyHalf", "kKeyHalf", LONG),
    Mutant("the first keys twice", SOURCE, "+ kKeyHalf * kHalfBytes", "+ 0 * kHalfBytes", LONG),
    Mutant("no sum of weights", VALUES, "kOnes = 0x38383838", "kOnes = 0x30303030"),
    Mutant("the sum keeps its scale", SOURCE, "math.rounded_sum[r] *= decay[r];", ";", RISING),
    Mutant("the output keeps its scale", SOURCE, "math.out[half][i] *= decay[fragment_half(i)];", ";", RISING),
    Mutant(
        "weights of one tile for another",
        SOURCE,
        "fmaf(sums[i], math.factor[fragment_half(i)], ",
        "fmaf(sums[i], 1.f, ",
        LONG,
    ),
    Mutant(
        "queries of the other warpgroup",
        SOURCE,
        "smem_addr(s.q) + math.warpgroup * kSw128Bytes",
        "smem_addr(s.q)",
        LONG,
    ),
    Mutant(
        "last columns of the other warpgroup",
        SOURCE,
        "smem_addr(s.q_rope) + math.warpgroup * kSw64Bytes",
        "smem_addr(s.q_rope)",
        LONG,
    ),
    Mutant("the first head's last columns", SOURCE, "min(kv_head, p.k_rope_heads - 1)", "0", PIECES),
    Mutant(
        "the first columns again",
        SOURCE,
        "full, p.k_rope_column, first_key",
        "full, 0, first_key",
        DenseCase(((3, 5),), k_rope="within", dtype=F8),
    ),
    Mutant("keys of another head", SOURCE, "i32 kv_head = head / group();", "i32 kv_head = 0;", PIECES),
    Mutant("rows of the next sequence", SOURCE, "if (math.row(kRow) >= tile.queries) return;", ""),
    Mutant("the next sequence's scales", PARAMS, "min(low - 1, p.b - 1)", "min(low, p.b - 1)", SCALED),
    Mutant("the first head's scales", PARAMS, " + kv_head * stride_h]", "]", SCALED),
    Mutant("values are not scaled", SOURCE, "value_scale / math.rounded_sum", "1.f / math.rounded_sum", SCALED),
    Mutant(
        "a scale of zero is taken",
        PARAMS,
        "factor == 0.f ? kLeastFactor : factor",
        "factor",
        SMALL,
        zero=True,
    ),
    Mutant("idle warpgroups take no part", SOURCE, "skip_keys(s, math), skip_values(s, math);", ";", ITEMS),
    Mutant("nobody passes the turn", SOURCE, "    if (warpgroup == 1) pass_turn<Turn0>(math.warpgroup);\n", ""),
    Mutant("tiles are not waited for", SOURCE, "            tiles.wait_full(s.v_full);\n", "", LONG, LATE),
    Mutant("a turned tile is overwritten", SOURCE, "            tiles.wait_empty(s.turned_empty);\n", "", ITEMS, LATE),
    Mutant("turned tiles have no fence", SOURCE, "            fence_proxy_async();\n", "", LONG),
    Mutant(
        "keys are not waited for",
        SOURCE,
        "    math.k.wait_full(s.k_full);\n    take_turn<Turn0>(math.warpgroup);\n"
        "    start_scores(s, math);\n    math.v",
        "    take_turn<Turn0>(math.warpgroup);\n    start_scores(s, math);\n    math.v",
        LONG,
        LATE,
    ),
    Mutant(
        "values are released before",
        SOURCE,
        "    release_values(s, math);\n    pack_weights<2>(math);",
        "    pack_weights<2>(math);",
        LONG,
    ),
    Mutant(
        "a product is not waited for",
        SOURCE,
        "    wgmma_wait_group<0>();\n    add_values<1, 0>(math, sums);\n    start_values<1, 1>(s, math, sums);\n"
        "    exponentiate",
        "    add_values<1, 0>(math, sums);\n    start_values<1, 1>(s, math, sums);\n    exponentiate",
        LONG,
        LATE,
    ),
    Mutant("plain: keys of another head", PLAIN, "head / (p.h_q / p.h_kv)", "0", PIECES, kernel=GENERIC_FP8),
    Mutant(
        "plain: values are not scaled",
        PLAIN,
        " * sums.out[i] * value_scale",
        " * sums.out[i]",
        SCALED,
        kernel=GENERIC_FP8,
    ),
    Mutant(
        "plain: a key too many",
        PLAIN,
        "if (first + lane < seen) score",
        "if (first + lane <= seen) score",
        kernel=GENERIC_FP8,
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_is_caught(mutant: Mutant, plant: mutants.Plant) -> None:
    plant(mutant)
    with pytest.raises(mutants.CAUGHT):
        attempt(mutant)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutant",
    {(one.case, one.kernel, one.nan, one.zero): one for one in MUTANTS}.values(),
    ids=lambda one: f"{one.case.id}-{one.kernel}-{one.nan:d}{one.zero:d}",
)
def test_as_it_is(mutant: Mutant) -> None:
    attempt(mutant)


def attempt(mutant: Mutant) -> None:
    """The case, with ends that nobody may follow."""
    inputs = make(mutant.case)
    if mutant.nan:
        inputs.v[[1, 3, 4, 8], 0, [6, 5, 4, 7]] = (
            0x7F  # all see the first key, not all the others; the last is another's
        )
    if mutant.zero:
        inputs.options["q_scales"] = np.zeros((1, 1), np.float32)
    for name in ("cu_seqlens_q", "cu_seqlens_kv"):
        inputs.options[name][-1] += 99
    run(inputs, mutant.kernel, 1, mutant.mode)
