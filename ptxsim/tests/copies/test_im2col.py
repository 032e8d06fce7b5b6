# ruff: noqa: E501 (lines of PTX are kept whole)
"""The im2col mode of tensor copies against a walk over the box (ISA 5.5.4; rules of cuTensorMapEncodeIm2col).

The box runs from the lower corner to extent - 1 + upper corner: CUTLASS's (w + upper - lower - 1) / stride + 1 positions.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import ptxsim
from simtest.tma import INIT, MAP, MEMORY, WAIT, load, module, store, swizzled

RNG = np.random.default_rng(6)


def walk(
    dims: list[int], lower: list[int], upper: list[int], strides: list[int], start: list[int], pixels: int
) -> list[list[int]]:
    """Return the base coordinates (W, H, .., N) of a column: every box position in order, from ``start`` on."""
    axes = [
        range(low, extent + high, step)
        for extent, low, high, step in zip(dims[1:-1], lower, upper, strides, strict=True)
    ]
    order = list(itertools.product(*reversed(axes)))
    first = order.index(tuple(reversed(start[:-1])))
    result = []
    for number in range(first, first + pixels):
        batch, inside = divmod(number, len(order))
        result.append([*reversed(order[inside]), start[-1] + batch])
    return result


IM2COL = [
    # dims C W H (D) N, lower, upper, strides, channels, pixels, coordinates, offsets, swizzle
    ([16, 9, 3], [-1], [-1], [1], 16, 12, [0, -1, 1], [0], "32B"),
    ([16, 9, 3], [-1], [-1], [1], 8, 30, [8, 3, 1], [2], "none"),
    ([64, 14, 9, 8], [-1, -1], [-1, -1], [1, 1], 8, 64, [0, 4, 7, 7], [0, 0], "none"),  # ISA 5.5.4.1, example 1
    (
        [64, 14, 9, 8],
        [0, 0],
        [-2, -2],
        [1, 1],
        8,
        64,
        [0, 4, 6, 6],
        [2, 2],
        "none",
    ),  # example 2 (its corner moved into the box)
    ([64, 14, 8, 9], [-1, -1], [-1, -1], [2, 2], 16, 32, [0, 5, 5, 7], [1, 1], "32B"),  # 5.5.4.2
    ([32, 6, 5, 4], [-2, -1], [1, 0], [1, 1], 32, 50, [0, 0, 2, 3], [3, 1], "64B"),
    ([8, 4, 3, 3, 2], [-1, 0, -1], [0, -1, 0], [1, 1, 1], 8, 40, [0, 2, 1, 0, 0], [1, 1, 2], "none"),
    ([8, 5, 4, 3, 2], [0, -1, 0], [-1, 0, 0], [2, 1, 1], 8, 20, [-3, 0, 2, 1, 1], [0, 0, 0], "none"),
]


@pytest.mark.parametrize("nan", [0, 1])
@pytest.mark.parametrize("case", IM2COL, ids=str)
def test_im2col_load(case: tuple, nan: int) -> None:
    dims, lower, upper, strides, channels, pixels, at, offsets, mode = case
    array = RNG.integers(1, 30000, dims[::-1]).astype("u2")
    steps = [1, *strides, 1]
    byte_strides = [array.strides[-1 - i] for i in range(1, len(dims))]
    tmap = ptxsim.encode_im2col(
        "float16", MEMORY.map(array), dims, byte_strides, lower, upper, channels, pixels, steps, mode, oob_fill=nan
    )
    rank, size = len(dims), 2 * channels * pixels
    registers = [f"%h{i}" for i in range(len(offsets))]
    setup = ".reg .b16 %h<3>;" + "".join(f"mov.u16 {r}, {v};" for r, v in zip(registers, offsets, strict=True))
    instruction = f"{setup} cp.async.bulk.tensor.{rank}d.shared::cta.global.im2col.mbarrier::complete_tx::bytes [%r1], [%rd1, {{{', '.join(map(str, at))}}}], [%r2], {{{', '.join(registers)}}}"
    got = load(instruction, tmap, size, size).view("u2")
    for pixel, base in enumerate(walk(dims, lower, upper, strides, at[1:], pixels)):
        place = [p + o for p, o in zip(base, [*offsets, 0], strict=True)]
        for c in range(channels):
            where = [at[0] + c, *place]
            inside = all(0 <= x < extent for x, extent in zip(where, dims, strict=True))
            want = array[tuple(where[::-1])] if inside else 0x7FF7 * nan
            assert got[swizzled(2 * (pixel * channels + c), mode) // 2] == want


@pytest.mark.parametrize("reduction", ["", "add"])
def test_im2col_store(reduction: str) -> None:
    dims, upper, channels, pixels = [16, 6, 4, 3], [-2, -1], 8, 20
    array = RNG.integers(-9, 9, dims[::-1]).astype("i4").view("u4")
    before = array.copy()
    tmap = ptxsim.encode_im2col("int32", MEMORY.map(array), dims, [64, 384, 1536], [0, 0], upper, channels, pixels)
    tile = RNG.integers(0, 100, (pixels, channels)).astype("u4")
    prefix, suffix = ("cp.reduce.async", ".add") if reduction else ("cp.async", "")
    store(
        f"{prefix}.bulk.tensor.4d.global.shared::cta{suffix}.im2col_no_offs.bulk_group [%rd1, {{8, 1, 2, 0}}], [%r1]",
        tmap,
        tile.reshape(-1).view("u1"),
    )
    for pixel, (w, h, n) in enumerate(walk(dims, [0, 0], upper, [1, 1], [1, 2, 0], pixels)):
        if n < 3:
            before[n, h, w, 8:16] = tile[pixel] + (before[n, h, w, 8:16] if reduction else 0)
    assert array.tolist() == before.tolist()


GOOD_IM2COL = {
    "dtype": "float16", "address": 1 << 44, "dims": [64, 9, 9, 4], "strides": [128, 1152, 10368], "lower": [-1, -1], "upper": [-1, -1],
    "channels": 64, "pixels": 128, "swizzle": "128B",
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dims": [64, 9], "strides": [128], "lower": [], "upper": []}, "rank 2"),
        ({"lower": [-1]}, "2 values"),
        ({"lower": [-129, 0]}, "-128..127"),
        ({"upper": [128, 0]}, "-128..127"),
        ({"lower": [5, 0], "upper": [-4, 0]}, "is empty"),
        ({"channels": 257, "swizzle": 0}, "1..256"),
        ({"pixels": 1025}, "1..1024"),
        ({"channels": 128}, "exceeds the 128-byte swizzle"),
        ({"channels": 4, "swizzle": 0}, "multiple of 16"),
        ({"element_strides": [1, 9, 1, 1]}, "element strides"),
        ({"address": 8}, "multiple of 16"),
        ({"oob_fill": 2}, "fill"),
        ({"interleave": 3}, "interleave 3"),
    ],
)
def test_im2col_encoder_refuses(change: dict, why: str) -> None:
    assert len(ptxsim.encode_im2col(**GOOD_IM2COL)) == 128
    with pytest.raises(ptxsim.TensorMapError, match=why):
        ptxsim.encode_im2col(**(GOOD_IM2COL | change))


def test_rank_3_and_5_corners() -> None:
    base = {"dtype": "uint8", "address": 1 << 44, "channels": 16, "pixels": 8}
    ptxsim.encode_im2col(**base, dims=[16, 9, 4], strides=[16, 144], lower=[-32768], upper=[32767])
    ptxsim.encode_im2col(
        **base, dims=[16, 40, 40, 40, 4], strides=[16, 640, 25600, 1 << 20], lower=[-16] * 3, upper=[15] * 3
    )
    with pytest.raises(ptxsim.TensorMapError, match=r"-16\.\.15"):
        ptxsim.encode_im2col(
            **base, dims=[16, 40, 40, 40, 4], strides=[16, 640, 25600, 1 << 20], lower=[-17, 0, 0], upper=[0] * 3
        )


@pytest.mark.parametrize(
    ("instruction", "error", "why"),
    [
        ("cp.async.bulk.tensor.4d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r1], [%rd1, {0, 0, 0, 0}], [%r2]", ptxsim.DescriptorError, "with an im2col tensor map"),
        ("mov.u16 %h0, 256; cp.async.bulk.tensor.4d.shared::cta.global.im2col.mbarrier::complete_tx::bytes [%r1], [%rd1, {0, 0, 0, 0}], [%r2], {%h0, %h0}", ptxsim.MemoryFault, "offsets"),
        ("mov.u16 %h0, 0; cp.async.bulk.tensor.4d.shared::cta.global.im2col.mbarrier::complete_tx::bytes [%r1], [%rd1, {0, 8, 0, 0}], [%r2], {%h0, %h0}", ptxsim.MemoryFault, "W = 8 is outside"),
        ("cp.async.bulk.tensor.4d.shared::cta.global.im2col.mbarrier::complete_tx::bytes [%r1], [%rd1, {0, 0, 0, 0}], [%r2], {%h0}", ptxsim.UnknownInstruction, "2 im2col offsets"),
        ("cp.async.bulk.tensor.4d.shared::cta.global.im2col::w.mbarrier::complete_tx::bytes [%r1], [%rd1, {0, 0, 0, 0}], [%r2], {%h0, %h0}", ptxsim.UnknownInstruction, "im2col::w is not modelled"),
        ("cp.async.bulk.tensor.4d.global.shared::cta.im2col.bulk_group [%rd1, {0, 0, 0, 0}], [%r1]", ptxsim.UnknownInstruction, "not a mode of this direction"),
        ("cp.async.bulk.tensor.4d.global.shared::cta.im2col_no_offs.bulk_group [%rd1, {0, 0, 0, 0}], [%r1]", ptxsim.DescriptorError, "inside the tensor"),
        ("cp.async.bulk.tensor.2d.shared::cta.global.im2col.mbarrier::complete_tx::bytes [%r1], [%rd1, {0, 0}], [%r2], {}", ptxsim.SimError, "three dimensions|operand"),
    ],
)  # fmt: skip
def test_im2col_misuse(instruction: str, error: type, why: str) -> None:
    array = np.zeros((4, 9, 9, 64), "u2")
    tmap = ptxsim.encode_im2col(**(GOOD_IM2COL | {"address": MEMORY.map(array), "pixels": 8}))
    code = (
        ".reg .b16 %h<3>;"
        + INIT
        + MAP
        + "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 1024;"
        + instruction
        + ";"
        + WAIT
    )
    with pytest.raises(error, match=why):
        module(code).launch("k", 1, 1, [tmap, np.zeros(4, "u1")])


@pytest.mark.parametrize("mode", ["im2col", "tile::gather4", "tile", "im2col::w"])
def test_prefetches_do_nothing(mode: str) -> None:
    array = np.zeros((4, 9, 9, 64), "u2")
    tmap = ptxsim.encode_im2col(**(GOOD_IM2COL | {"address": MEMORY.map(array)}))
    more = ", {%h0, %h0}" if mode.startswith("im2col") else ""
    code = f".reg .b16 %h<3>; mov.u16 %h0, 0; {MAP} cp.async.bulk.prefetch.tensor.4d.L2.global.{mode} [%rd1, {{0, 0, 0, 0}}]{more};"
    module(code).launch("k", 1, 1, [tmap, np.zeros(4, "u1")])
