"""Fragments of bytes in the simulator: which byte of a tile each one is, by the rules of `tile/byte_fragments.cuh`."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import ptxsim
from mla_cupy.runtime import nvrtc, sources
from tools import budgets

SOURCE = """
#include "tile/byte_fragments.cuh"
using namespace mla;

// All fragments of an SW128 tile: [step][half][thread][register].
extern "C" __global__ void load(const uint4* tile, u32* to) {
    __shared__ __align__(1024) uint4 smem[512];
    for (i32 i = threadIdx.x; i < 512; i += 128) smem[i] = tile[i];
    __syncthreads();
    const i32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (i32 i = 0; i < 4; ++i) {
        u32 fragment[4];
        load_bytes_transposed(fragment, smem_addr(smem) + byte_matrix_offset(warp, lane), i / 2, i % 2 != 0);
        for (i32 j = 0; j < 4; ++j) to[(i * 128 + threadIdx.x) * 4 + j] = fragment[j];
    }
}

// Each thread's eight words, as a half SW128 tile.
extern "C" __global__ void store(const u32* words, uint4* to) {
    __shared__ __align__(1024) uint4 smem[256];
    u32 mine[8];
    for (i32 i = 0; i < 8; ++i) mine[i] = words[threadIdx.x * 8 + i];
    store_byte_words(smem_addr(smem), mine, threadIdx.x / 32, threadIdx.x % 32);
    __syncthreads();
    for (i32 i = threadIdx.x; i < 256; i += 128) to[i] = smem[i];
}
"""


@functools.cache
def module() -> ptxsim.Module:
    library = budgets.library(budgets.LINES[0])
    if not library:
        pytest.skip(f"no NVRTC wheel of CUDA {budgets.LINES[0]} is installed")
    headers = sources.gather("tile/byte_fragments.cuh")
    flags = ("-arch=compute_90a", "-std=c++17", "-default-device")
    output = nvrtc.load(library).compile("fragments.cu", SOURCE.encode(), headers, flags)
    assert output.ok, output.log
    return ptxsim.Module(output.ptx.decode())


def place_of(position: int) -> int:
    """The token that a position along the sum stands for."""
    half, quad, i = position // 16, position % 16 // 4, position % 4
    return 16 * half + 8 * (i // 2) + 2 * quad + i % 2


def swizzled(rows: np.ndarray, row_bytes: int) -> np.ndarray:
    """Rows of a tile where the swizzle of that span puts their chunks of 16 bytes."""
    out = np.empty_like(rows)
    for r, row in enumerate(rows):
        key = r % 8 if row_bytes == 128 else r // 2 % 4
        for chunk in range(row_bytes // 16):
            out[r, 16 * (chunk ^ key) : 16 * (chunk ^ key) + 16] = row[16 * chunk : 16 * chunk + 16]
    return out


def test_a_transposed_operand_has_every_byte_of_a_tile_once() -> None:
    """Row 16 w + g of the operand is column 16 w + 2 g, row 16 w + g + 8 the next one."""
    tokens = np.random.default_rng(0).integers(0, 256, (64, 128), dtype=np.uint8)
    got = np.zeros((2, 2, 128, 4), np.uint32)
    module().launch("load", 1, 128, [swizzled(tokens, 128), got], mode="random", seed=1)
    for step, half, thread, register in np.ndindex(got.shape):
        warp, g, c = thread // 32, thread % 32 // 4, thread % 4
        column = 64 * half + 16 * warp + 2 * g + register % 2
        positions = 16 * (register // 2) + 4 * c + np.arange(4)
        expected = [tokens[32 * step + place_of(int(p)), column] for p in positions]
        assert list(got[step, half, thread, register : register + 1].view(np.uint8)) == expected


def test_words_of_an_accumulator_are_stored_in_the_same_order() -> None:
    """Byte 16 i + 4 c + k of a row is the accumulator's column that this position stands for."""
    scores = np.random.default_rng(1).integers(0, 256, (64, 64), dtype=np.uint8)
    words = np.zeros((128, 8, 4), np.uint8)
    for thread, word, k in np.ndindex(words.shape):
        row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (word % 2)
        words[thread, word, k] = scores[row, 16 * (word // 2) + 2 * (thread % 4) + (0, 1, 8, 9)[k]]
    stored = np.zeros((64, 64), np.uint8)
    module().launch("store", 1, 128, [words.view(np.uint32), stored], mode="late", seed=0)
    expected = scores[:, [32 * (p // 32) + place_of(p % 32) for p in range(64)]]
    np.testing.assert_array_equal(stored, swizzled(expected, 64))
