"""Products by WGMMA: every shape of `ptx/wgmma.cuh` and every verb of `tile/product.cuh`, in the simulator.

Operands are laid out here by the rules of the swizzle and of the fragments, not by functions of the sources. Numbers
are so small that sums are exact.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import pytest

import ptxsim
from mla_cupy.runtime import nvrtc, sources
from tools import budgets

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float8_e4m3fn": ml_dtypes.float8_e4m3fn}
WIDTHS = (8, 16, 24, 32, 64, 128, 192, 256)
ROWS = 64  # of D
TILE_BYTES = 128  # of a row of an SW128 tile
STEP_BYTES = 32  # of a row, for one step

SOURCE = """
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "tile/fragment.cuh"
#include "tile/product.cuh"

namespace mla {
MLA_DEVICE float sum_of(const float* d, i32 i) { return d[i]; }
MLA_DEVICE float sum_of(const u32* d, i32 i) { return float16::to_float((u16)(d[i / 2] >> 16 * (i % 2))); }
MLA_DEVICE void set_to_one(float& x) { x = 1.f; }
MLA_DEVICE void set_to_one(u32& x) { x = 0x3c003c00; }  // two numbers in float16

template <class Word, i32 kWords, i32 kN, i32 kSteps, class Multiply>
MLA_DEVICE void run(const uint4* a, const uint4* b, const u32* fragments, float* to, i32 a_chunks, i32 b_chunks,
                    Multiply multiply) {
    extern __shared__ __align__(1024) uint4 smem[];
    for (i32 i = threadIdx.x; i < a_chunks; i += kWarpgroupThreads) smem[i] = a[i];
    for (i32 i = threadIdx.x; i < b_chunks; i += kWarpgroupThreads) smem[a_chunks + i] = b[i];
    fence_proxy_async();
    __syncthreads();
    u32 held[kSteps][4];
    for (i32 i = 0; i < 4 * kSteps; ++i) held[i / 4][i % 4] = fragments[threadIdx.x * 4 * kSteps + i];
    Word d[kWords];
    for (Word& x : d) set_to_one(x);
    pin(d);
    wgmma_fence();
    multiply(d, smem_addr(smem), smem_addr(smem + a_chunks), held);
    wgmma_commit_group();
    wgmma_wait_group<0>();
    pin(d);
    for (i32 i = 0; i < kN / 2; ++i) {
        to[fragment_row(threadIdx.x, i) * kN + fragment_column(threadIdx.x, i)] = sum_of(d, i);
    }
}
}  // namespace mla
using namespace mla;
"""
ENTRY = """
extern "C" __global__ void {name}(const uint4* a, const uint4* b, const u32* fragments, float* to, i32 a_chunks,
                                  i32 b_chunks) {{
    run<{word}, {words}, {n}, {steps}>(a, b, fragments, to, a_chunks, b_chunks,
        [](auto& d, SmemAddr a, SmemAddr b, const auto& held) {{ {product}; }});
}}
"""


@dataclass(frozen=True)
class Case:
    """One product: `verb` says how A and B lie, `held` that A is in registers."""

    dtype: str
    n: int
    verb: str = "abt"
    held: bool = False
    steps: int = 1
    accumulate: bool = False
    float16_sums: bool = False

    @property
    def name(self) -> str:
        parts = (self.verb, self.dtype, f"n{self.n}", f"steps{self.steps}", *(["held"] if self.held else []))
        return "_".join((*parts, *(["add"] if self.accumulate else []), *(["half"] if self.float16_sums else [])))

    @property
    def depth(self) -> int:
        return self.steps * STEP_BYTES // np.dtype(DTYPES[self.dtype]).itemsize

    @property
    def a_is_transposed(self) -> bool:
        return "at" in self.verb

    @property
    def b_is_transposed(self) -> bool:
        return "bt" in self.verb

    def product(self) -> str:
        """The call of the verb. A K-major operand's next tile comes after all its rows, an MN-major one's at once."""
        depth_bytes = self.depth * TILE_BYTES
        k_major, mn_major = "k_major_desc({})", f"make_desc({{}}, {depth_bytes}, kSwizzleAtomBytes)"
        a = "held" if self.held else (mn_major if self.a_is_transposed else k_major).format("a")
        b = (k_major if self.b_is_transposed else mn_major).format("b")
        next_b = self.n * TILE_BYTES if self.b_is_transposed else ROWS * TILE_BYTES
        options = f"{next_b}" if self.held else f"{self.steps}, {ROWS * TILE_BYTES}, {next_b}"
        return f"multiply_{self.verb}<{options}>({self.dtype}{{}}, d, {a}, {b}, {str(self.accumulate).lower()})"

    def entry(self) -> str:
        words = self.n // 4 if self.float16_sums else self.n // 2
        word = "u32" if self.float16_sums else "float"
        return ENTRY.format(name=self.name, word=word, words=words, n=self.n, steps=self.steps, product=self.product())


SHAPES = [
    Case(dtype, n, held=held, accumulate=(i + held) % 2 == 1)
    for dtype in DTYPES
    for i, n in enumerate(WIDTHS)
    for held in (False, True)
]
SHAPES += [Case("float8_e4m3fn", 256, held=held, accumulate=held, float16_sums=True) for held in (False, True)]
# Further than one SW128 tile along the sum; of more columns than one, and of fewer.
DEEP = [Case(dtype, n, steps=6) for dtype in DTYPES for n in (24, 128)]
DEEP += [Case(dtype, n, "ab", steps=8, accumulate=True) for dtype in ("bfloat16", "float16") for n in (32, 192)]
DEEP += [Case("float16", n, verb, steps=8) for verb in ("atb", "atbt") for n in (8, 128)]
DEEP += [replace(case, held=True) for case in DEEP if not case.a_is_transposed]
CASES = SHAPES + DEEP


@functools.cache
def module() -> ptxsim.Module:
    """The kernels of all cases."""
    library = budgets.library(budgets.LINES[0])
    if not library:
        pytest.skip(f"no NVRTC wheel of CUDA {budgets.LINES[0]} is installed")
    text = SOURCE + "".join(case.entry() for case in CASES)
    headers: dict[str, bytes] = {}
    for name in ("ptx/convert.cuh", "ptx/copy.cuh", "tile/fragment.cuh", "tile/product.cuh"):
        headers |= sources.gather(name)
    flags = ("-arch=compute_90a", "-std=c++17", "-default-device")
    output = nvrtc.load(library).compile("products.cu", text.encode(), headers, flags)
    assert output.ok, output.log
    return ptxsim.Module(output.ptx.decode())


def in_sw128_tiles(matrix: np.ndarray) -> np.ndarray:
    """The bytes of a matrix in SW128 tiles, side by side: the 16-byte chunk c of row r is at chunk c ^ (r % 8)."""
    rows, columns = matrix.shape
    row_bytes = columns * matrix.itemsize
    tiles = -(-row_bytes // TILE_BYTES)
    plain = np.zeros((rows, tiles * TILE_BYTES), np.uint8)
    plain[:, :row_bytes] = np.ascontiguousarray(matrix).view(np.uint8)
    chunks = plain.reshape(rows, tiles, TILE_BYTES // 16, 16)
    swizzled = np.empty_like(chunks)
    for row in range(rows):
        for chunk in range(TILE_BYTES // 16):
            swizzled[row, :, chunk ^ (row % 8)] = chunks[row, :, chunk]
    return np.ascontiguousarray(swizzled.transpose(1, 0, 2, 3)).ravel()


def fragments(a: np.ndarray, steps: int) -> np.ndarray:
    """The registers of each thread that hold A: four words a step."""
    words = np.ascontiguousarray(a).view(np.uint32)  # 64 x 8 words a step
    thread, step, word = np.ogrid[:128, :steps, :4]
    row = thread // 32 * 16 + thread % 32 // 4 + word % 2 * 8
    return np.ascontiguousarray(words[row, step * 8 + word // 2 * 4 + thread % 4])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_product(case: Case) -> None:
    random = np.random.default_rng(case.n)
    a = random.integers(-3, 4, (ROWS, case.depth)).astype(DTYPES[case.dtype])
    b = random.integers(-3, 4, (case.depth, case.n)).astype(DTYPES[case.dtype])
    a_bytes = in_sw128_tiles(a.T if case.a_is_transposed else a)
    b_bytes = in_sw128_tiles(b.T if case.b_is_transposed else b)
    d = np.full((ROWS, case.n), np.nan, np.float32)
    arguments = [a_bytes, b_bytes, fragments(a, case.steps), d, a_bytes.size // 16, b_bytes.size // 16]
    module().launch(case.name, 1, 128, arguments, smem=a_bytes.size + b_bytes.size, mode="late")
    expected = a.astype(np.float32) @ b.astype(np.float32) + case.accumulate
    assert np.array_equal(d, expected)
