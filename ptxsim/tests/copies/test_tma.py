# ruff: noqa: E501 (lines of PTX and CUDA are kept whole)
"""Tensor maps, bulk copies and cp.async against element-by-element formulas."""

from __future__ import annotations

import itertools
from contextlib import nullcontext

import numpy as np
import pytest

import ptxsim
from simtest.tma import INIT, WAIT, dump, kernel, swizzled

CASES = [
    (1, [37], [16], [8], "none"),
    (1, [37], [16], [32], "none"),
    (2, [40, 9], [16, 4], [-8, 3], "32B"),
    (2, [64, 20], [32, 8], [32, 15], "64B"),
    (2, [72, 20], [64, 8], [8, -3], "128B"),
    (3, [16, 5, 4], [8, 3, 2], [8, 4, -1], "none"),
    (4, [64, 4, 3, 2], [64, 2, 3, 1], [0, 3, 0, 1], "128B"),
    (5, [16, 3, 3, 2, 2], [16, 2, 2, 2, 1], [0, 1, 2, 0, 1], "32B"),
]


def tile_offsets(dims: list[int], box: list[int], at: list[int]) -> list[tuple[int, tuple[int, ...] | None]]:
    """Return (byte offset in the tile, tensor index or None when outside) of every element of a box."""
    result = []
    for number, index in enumerate(itertools.product(*(range(b) for b in reversed(box)))):
        where = tuple(c + i for c, i in zip(at, reversed(index), strict=False))
        inside = all(0 <= w < d for w, d in zip(where, dims, strict=False))
        result.append((2 * number, tuple(reversed(where)) if inside else None))
    return result


def encode(module: ptxsim.Module, array: np.ndarray, dims: list[int], box: list[int], swizzle: str, **more: object):
    """Encode a map of 16-bit elements over a padded array."""
    strides = [array.strides[-1 - i] for i in range(1, len(dims))]
    return ptxsim.encode_tiled("float16", module.memory.map(array), dims, strides, box, swizzle=swizzle, **more)


def padded(dims: list[int], rng: np.random.Generator) -> np.ndarray:
    """Return a random tensor whose strides are multiples of 16 bytes."""
    shape = [*reversed(dims)]
    shape[-1] = -(-shape[-1] // 8) * 8
    return rng.integers(1, 65535, shape).astype("u2")


@pytest.mark.parametrize("fill", [0, 1])
@pytest.mark.parametrize(("rank", "dims", "box", "at", "swizzle"), CASES, ids=str)
def test_tile_load(rank: int, dims: list[int], box: list[int], at: list[int], swizzle: str, fill: int) -> None:
    array = padded(dims, np.random.default_rng(rank))
    size = 2 * int(np.prod(box))
    coords = ", ".join(map(str, at))
    code = (
        INIT + f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], {size}; mov.b64 %rd1, tm; cvta.param.u64 %rd1, %rd1;"
        f"cp.async.bulk.tensor.{rank}d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r1], [%rd1, {{{coords}}}], [%r2];"
        + WAIT + dump(size)
    )  # fmt: skip
    module = kernel(".param .align 64 .b8 tm[128], .param .u64 out", code)
    out = np.zeros(size // 2, "u2")
    module.launch("k", 1, 1, [encode(module, array, dims, box, swizzle, oob_fill=fill), out], mode="late")
    want = np.zeros(size // 2, "u2")
    for offset, index in tile_offsets(dims, box, at):
        want[swizzled(offset, swizzle) // 2] = array[index] if index else (0x7FF7 if fill else 0)
    assert out.tolist() == want.tolist()


@pytest.mark.parametrize(("at", "refused"), [([8, 0], False), ([-8, -1], False), ([4, 0], True), ([-3, 1], True)])
def test_first_coordinates_are_multiples_of_16_bytes(at: list[int], refused: bool) -> None:
    array = padded([40, 9], np.random.default_rng(0))
    code = (
        INIT + "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 128; mov.b64 %rd1, tm; cvta.param.u64 %rd1, %rd1;"
        f"cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r1], [%rd1, {{{at[0]}, {at[1]}}}], [%r2];"
        + WAIT
    )
    module = kernel(".param .align 64 .b8 tm[128]", code)
    args = [encode(module, array, [40, 9], [16, 4], "none")]
    if not refused:
        module.launch("k", 1, 1, args)
        return
    with pytest.raises(ptxsim.DescriptorError, match="multiple of 16 bytes"):
        module.launch("k", 1, 1, args)


@pytest.mark.parametrize(("at", "outside"), [((32, 8), False), ((-16, 0), True), ((0, 9), True), ((40, 0), True)])
def test_boxes_outside_their_tensor_are_reported_on_request(at: tuple[int, int], outside: bool) -> None:
    code = (
        INIT + "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 128; mov.b64 %rd1, tm; cvta.param.u64 %rd1, %rd1;"
        f"cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r1], [%rd1, {{{at[0]}, {at[1]}}}], [%r2];"
        + WAIT
    )  # fmt: skip
    module = kernel(".param .align 64 .b8 tm[128]", code)
    args = [encode(module, padded([40, 9], np.random.default_rng(0)), [40, 9], [16, 4], "none")]
    module.launch("k", 1, 1, args)
    with pytest.raises(ptxsim.MemoryFault, match="wholly outside its tensor") if outside else nullcontext():
        module.launch("k", 1, 1, args, tma_outside=True)


@pytest.mark.parametrize("at", [[-8, 0], [0, -1]])
def test_nothing_is_stored_at_negative_coordinates(at: list[int]) -> None:
    array = np.zeros((9, 40), "u2")
    code = INIT + (
        "mov.b64 %rd1, tm; cvta.param.u64 %rd1, %rd1;"
        f"cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd1, {{{at[0]}, {at[1]}}}], [%r1];"
    )
    module = kernel(".param .align 64 .b8 tm[128]", code)
    with pytest.raises(ptxsim.DescriptorError, match="negative coordinates"):
        module.launch("k", 1, 1, [encode(module, array, [40, 9], [16, 4], "none")])


@pytest.mark.parametrize("swizzle", ["32B", "64B", "128B"])
def test_short_rows_begin_at_multiples_of_the_span(swizzle: str) -> None:
    """Rows of 16 bytes with a wider swizzle: an H200 leaves gaps between them, and counts only what it copies."""
    array, span = padded([40, 9], np.random.default_rng(0)), int(swizzle[:-1])
    whole = 8 * span
    fill = "mov.u32 %r9, 0; F: add.u32 %r10, %r1, %r9; st.shared.u32 [%r10], 0xA5A5A5A5; add.u32 %r9, %r9, 4;"
    code = (
        INIT + fill + f"setp.lt.u32 %p2, %r9, {whole}; @%p2 bra F; fence.proxy.async.shared::cta;"
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 128; mov.b64 %rd1, tm; cvta.param.u64 %rd1, %rd1;"
        "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r1], [%rd1, {8, 1}], [%r2];"
        + WAIT + dump(whole)
    )  # fmt: skip
    module = kernel(".param .align 64 .b8 tm[128], .param .u64 out", code)
    out = np.zeros(whole // 2, "u2")
    module.launch("k", 1, 1, [encode(module, array, [40, 9], [8, 8], swizzle), out], mode="late")
    want = np.full(whole // 2, 0xA5A5, "u2")
    for row in range(8):
        for column in range(8):
            want[swizzled(row * span + 2 * column, swizzle) // 2] = array[1 + row, 8 + column]
    assert out.tolist() == want.tolist()


@pytest.mark.parametrize("reduction", ["", "add", "max"])
@pytest.mark.parametrize(("rank", "dims", "box", "at", "swizzle"), [c for c in CASES if min(c[3]) >= 0], ids=str)
def test_tile_store_and_reduce(
    rank: int, dims: list[int], box: list[int], at: list[int], swizzle: str, reduction: str
) -> None:
    rng = np.random.default_rng(rank)
    shape = padded(dims, rng).shape
    array = rng.integers(-8, 8, shape).astype("f2")
    before = array.copy()
    size = 2 * int(np.prod(box))
    tile = rng.integers(-8, 8, size // 2).astype("f2")
    coords = ", ".join(map(str, at))
    prefix = "cp.reduce.async" if reduction else "cp.async"
    suffix = f".{reduction}" if reduction else ""
    code = (
        INIT + "ld.param.u64 %rd9, [tile]; mov.u32 %r9, 0; F: cvt.u64.u32 %rd8, %r9; add.u64 %rd8, %rd8, %rd9;"
        f"ld.global.u32 %r11, [%rd8]; add.u32 %r10, %r1, %r9; st.shared.u32 [%r10], %r11; add.u32 %r9, %r9, 4;"
        f"setp.lt.u32 %p2, %r9, {size}; @%p2 bra F; fence.proxy.async.shared::cta; mov.b64 %rd1, tm; cvta.param.u64 %rd1, %rd1;"
        f"{prefix}.bulk.tensor.{rank}d.global.shared::cta{suffix}.tile.bulk_group [%rd1, {{{coords}}}], [%r1];"
        "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
    )
    module = kernel(".param .align 64 .b8 tm[128], .param .u64 tile", code)
    module.launch("k", 1, 1, [encode(module, array, dims, box, swizzle), tile], mode="late")
    want = before.copy()
    for offset, index in tile_offsets(dims, box, at):
        if index:
            value = tile[swizzled(offset, swizzle) // 2]
            want[index] = {"": value, "add": before[index] + value, "max": max(before[index], value)}[reduction]
    assert array.tolist() == want.tolist()


def test_gather4_and_scatter4() -> None:
    rng = np.random.default_rng(0)
    array, out = rng.integers(1, 60000, (50, 64)).astype("u2"), np.zeros((50, 64), "u2")
    code = (
        INIT + "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 512; mov.b64 %rd1, a; mov.b64 %rd2, b;"
        "cvta.param.u64 %rd1, %rd1; cvta.param.u64 %rd2, %rd2;"
        "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes [%r1], [%rd1, {0, 7, 3, -1, 49}], [%r2];"
        + WAIT + "cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group [%rd2, {0, 1, 60, 5, 9}], [%r1];"
        "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
    )  # fmt: skip
    module = kernel(".param .align 64 .b8 a[128], .param .align 64 .b8 b[128]", code)
    maps = [encode(module, x, [64, 50], [64, 1], "128B") for x in (array, out)]
    module.launch("k", 1, 1, maps, mode="late")
    assert out[1].tolist() == array[7].tolist()
    assert not out[5].any()
    assert out[9].tolist() == array[49].tolist()
    assert not np.delete(out, [1, 5, 9], 0).any()


def test_linear_bulk_copies() -> None:
    data, out, total = np.arange(256, dtype="f4"), np.zeros(256, "f4"), np.ones(256, "f4")
    code = (
        INIT + "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 1024; ld.param.u64 %rd1, [a]; ld.param.u64 %rd2, [b];"
        "ld.param.u64 %rd3, [c]; cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1], 1024, [%r2];"
        + WAIT + "cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r1], 1024;"
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd3], [%r1], 1024;"
        "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
    )  # fmt: skip
    kernel(".param .u64 a, .param .u64 b, .param .u64 c", code).launch("k", 1, 1, [data, out, total], mode="late")
    assert out.tolist() == data.tolist()
    assert total.tolist() == (data + 1).tolist()


def test_cp_async_zero_fill_and_groups() -> None:
    data, out = np.arange(1, 65, dtype="u4"), np.zeros(16, "u4")
    code = (
        INIT + "ld.param.u64 %rd1, [a]; cp.async.cg.shared.global [%r1], [%rd1], 16; cp.async.commit_group;"
        "cp.async.ca.shared.global [%r1+16], [%rd1+64], 16, 8; cp.async.ca.shared.global [%r1+32], [%rd1], 4;"
        "cp.async.ca.shared.global [%r1+36], [%rd1+4], 8; cp.async.commit_group; cp.async.wait_group 0; "
        "st.shared.u32 [%r1+44], 0; st.shared.v4.u32 [%r1+48], {0, 0, 0, 0};" + dump(64)
    )
    code = code.replace("[%r1+36], [%rd1+4], 8", "[%r1+40], [%rd1+8], 4").replace(
        "st.shared.u32 [%r1+44], 0;", "st.shared.u32 [%r1+44], 0; st.shared.u32 [%r1+36], 0;"
    )
    kernel(".param .u64 a, .param .u64 out", code).launch("k", 1, 1, [data, out], mode="late")
    assert out.tolist() == [1, 2, 3, 4, 17, 18, 0, 0, 1, 0, 3, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"address": 8}, "multiple of 16"),
        ({"strides": [100]}, "multiples of 16"),
        ({"strides": [1 << 40]}, "2\\^40"),
        ({"box": [64, 257]}, "1..256"),
        ({"box": [60, 4]}, "multiple of 16"),
        ({"box": [128, 4]}, "exceeds the 128-byte swizzle"),
        ({"dims": [0, 4]}, "extents"),
        ({"element_strides": [1, 9]}, "element strides"),
        ({"dtype": "uint16", "oob_fill": 1}, "floating-point"),
        ({"dtype": 77}, "unknown"),
        ({"swizzle": 9}, "swizzle"),
        ({"dims": [1] * 6, "strides": [16] * 5, "box": [8] * 6}, "rank"),
    ],
)
def test_encoder_refuses(change: dict, why: str) -> None:
    good = {
        "dtype": "bfloat16",
        "address": 1 << 36,
        "dims": [64, 64],
        "strides": [128],
        "box": [64, 64],
        "swizzle": "128B",
    }
    assert len(ptxsim.encode_tiled(**good)) == 128
    with pytest.raises(ptxsim.TensorMapError, match=why) as caught:
        ptxsim.encode_tiled(**(good | change))
    assert caught.value.code == 1


def test_foreign_tensor_map_is_refused() -> None:
    code = INIT + (
        "mov.b64 %rd1, tm; cvta.param.u64 %rd1, %rd1;"
        "cp.async.bulk.tensor.1d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {0}], [%r2];"
    )
    with pytest.raises(ptxsim.DescriptorError, match="not encoded with"):
        kernel(".param .align 64 .b8 tm[128]", code).launch("k", 1, 1, [bytes(128)])


def test_tile_that_overruns_the_array_is_a_fault() -> None:
    array = np.zeros((4, 64), "u2")
    code = INIT + (
        "mov.b64 %rd1, tm; cvta.param.u64 %rd1, %rd1; mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 1024;"
        "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {0, 0}], [%r2];" + WAIT
    )
    module = kernel(".param .align 64 .b8 tm[128]", code)
    tmap = ptxsim.encode_tiled("uint16", module.memory.map(array), [64, 8], [128], [64, 8])
    with pytest.raises(ptxsim.MemoryFault, match="out of bounds"):
        module.launch("k", 1, 1, [tmap])
