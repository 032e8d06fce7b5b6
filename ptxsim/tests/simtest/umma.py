# ruff: noqa: E501 (lines of PTX are kept whole)
"""Runs tcgen05 instructions on given shared- and tensor-memory contents, and lays operands out by the ISA's formulas.

Nothing here uses the simulator's decoders: layouts come from the table of canonical layouts (PTX ISA 9.7.16.3.3, and
CUTLASS's make_umma_desc for 32-byte atoms), data paths from ``simtest.runners.cell_of``, values from ml_dtypes.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

import ptxsim
from simtest.runners import cell_of
from simtest.single import HEADER


@dataclass(frozen=True)
class Type:
    """An operand type: its kind and code in the instruction descriptor, bits, NumPy type.

    Without one, the bits of exponent and fraction are given, and the element's place in a tensor-memory container.
    """

    kind: str
    code: int
    bits: int
    dtype: type | None
    exponent: int = 0
    fraction: int = 0
    shift: int = 0

    @property
    def depth(self) -> int:
        """K of one MMA: 32 bytes of containers (ISA table 39)."""
        return 256 // max(self.bits, 8)


TYPES = {
    "f16": Type("f16", 0, 16, np.float16),
    "bf16": Type("f16", 1, 16, ml_dtypes.bfloat16),
    "tf32": Type("tf32", 2, 32, np.float32),
    "e4m3": Type("f8f6f4", 0, 8, ml_dtypes.float8_e4m3fn),
    "e5m2": Type("f8f6f4", 1, 8, ml_dtypes.float8_e5m2),
    "e2m3": Type("f8f6f4", 3, 6, None, 2, 3, 1),
    "e3m2": Type("f8f6f4", 4, 6, None, 3, 2, 1),
    "e2m1": Type("f8f6f4", 5, 4, None, 2, 1, 2),
    "u8": Type("i8", 0, 8, np.uint8),
    "s8": Type("i8", 1, 8, np.int8),
}
"""ISA table 42. Containers in tensor memory: CUTLASS's example cp_narrow_a_to_tmem_mma.py (0xxxxxx0, 00xxxx00)."""

MODES = {"none": 0, "128B/32B": 1, "128B": 2, "64B": 4, "32B": 6}
"""Swizzle field of the shared-memory descriptor, ISA table 40."""

SWIZZLES = {"none": (0, 4, 3), "32B": (1, 4, 3), "64B": (2, 4, 3), "128B": (3, 4, 3), "128B/32B": (2, 5, 2)}
"""CuTe's Swizzle<B, M, S> on byte addresses."""


def random_codes(name: str, rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Return random raw elements whose products sum up exactly in float32."""
    kind = TYPES[name]
    if kind.bits < 8:
        return rng.integers(0, 1 << kind.bits, shape).astype("u1")
    low = {"u8": 0, "s8": -128}.get(name, -6)
    high = {"u8": 256, "s8": 128}.get(name, 7)
    return rng.integers(low, high, shape).astype(kind.dtype).view(f"u{kind.bits // 8}")


def numbers(name: str, codes: np.ndarray) -> np.ndarray:
    """Return raw elements as float64."""
    kind = TYPES[name]
    if kind.dtype is not None:
        return np.ascontiguousarray(codes).view(kind.dtype).astype("f8")
    # No infinities and no NaNs; the bias is 2^(exponent bits - 1) - 1.
    bias = 2 ** (kind.exponent - 1) - 1
    parts = codes.astype("i8")
    sign, exponent = 1 - 2 * (parts >> kind.bits - 1), parts >> kind.fraction & 2**kind.exponent - 1
    fraction = (parts & 2**kind.fraction - 1) / 2**kind.fraction
    return sign * (fraction + (exponent > 0)) * 2.0 ** (np.maximum(exponent, 1) - bias)


def cute(shape: tuple, stride: tuple, index: np.ndarray) -> np.ndarray:
    """Evaluate a CuTe layout (colexicographic) at linear indices."""
    total = 0
    for s, d in zip(shape[:-1], stride[:-1], strict=True):
        total, index = total + index % s * d, index // s
    return total + index * stride[-1]


def offsets(mode: str, mn_major: bool, width: int, mn: int, k: int, lbo: int, sbo: int) -> np.ndarray:
    """Return the byte offset of every element [mn, k] before swizzling: the ISA's canonical layouts.

    ``width`` is the bytes of an element (one for a narrower element's container).
    """
    t = 16 // width
    span = {"none": 1, "32B": 2, "64B": 4}.get(mode, 8)
    group = 4 if mode == "128B/32B" else 8
    i, j = np.arange(mn)[:, None], np.arange(k)[None, :]
    if mn_major and mode == "none":
        elements = cute((t, 1, 0), (1, t, sbo // width), i) + cute((8, 0), (t, lbo // width), j)
    elif mn_major:
        elements = cute((t, span, 0), (1, t, lbo // width), i) + cute((group, 0), (span * t, sbo // width), j)
    elif mode == "none":
        elements = cute((8, 0), (t, sbo // width), i) + cute((t, 0), (1, lbo // width), j)
    else:
        elements = cute((8, 0), (span * t, sbo // width), i) + cute((t, 0), (1, t), j)
    return elements * width


def swizzled(address: np.ndarray, mode: str) -> np.ndarray:
    """Apply CuTe's Swizzle<B, M, S> to byte addresses: bits [M, M+B) ^= bits [M+S, M+S+B)."""
    b, m, s = SWIZZLES[mode]
    return address ^ ((address >> s) & (((1 << b) - 1) << m))


def strides(mode: str, mn_major: bool, width: int, mn: int, k: int) -> tuple[int, int, int]:
    """Return LBO, SBO and the bytes of a tightly packed operand."""
    span = {"none": 16, "32B": 32, "64B": 64}.get(mode, 128)
    group = 4 if mode == "128B/32B" else 8
    if mn_major:
        if mode == "none":
            return 128, 128 * (k // 8), mn * k * width
        panels = -(-mn * width // span)
        return group * span * (k // group), group * span, panels * k * span
    if mode == "none":
        return 128, 128 * (k * width // 16), mn * k * width
    return 16, 8 * span, mn * span


def fill(image: np.ndarray, at: np.ndarray, codes: np.ndarray, bits: int) -> None:
    """Write raw elements at byte offsets; 16 narrow ones are packed at the start of each 16 bytes (ISA 9.7.16.10.4.4)."""
    if bits >= 8:
        raw = codes.view("u1").reshape(*codes.shape, bits // 8)
        for byte in range(bits // 8):
            image[at + byte] = raw[..., byte]
        return
    position = at // 16 * 128 + at % 16 * bits
    for bit in range(bits):
        place = position + bit
        np.bitwise_or.at(image, place // 8, (codes >> bit & 1) << (place % 8).astype("u1"))


class Tile:
    """An operand in shared memory: its bytes from an offset on, and its descriptor."""

    def __init__(
        self, name: str, codes: np.ndarray, mode: str = "128B", mn_major: bool = False, start: int = 0, base: int = 0,
        gaps: tuple[int, int] = (0, 0),
    ) -> None:  # fmt: skip
        """``gaps`` are bytes added to the tightly packed LBO and SBO."""
        mn, k = codes.shape
        width = max(TYPES[name].bits, 8) // 8
        self.lbo, self.sbo, size = strides(mode, mn_major, width, mn, k)
        self.lbo, self.sbo = self.lbo + gaps[0], self.sbo + gaps[1]
        # With a base offset the pattern starts at ``start``, which is not a multiple of the pattern's length.
        plain = offsets(mode, mn_major, width, mn, k, self.lbo, self.sbo)
        self.at = start + swizzled(plain, mode) if base else swizzled(start + plain, mode)
        self.codes, self.bits, self.end = codes, TYPES[name].bits, max(start + size, int(self.at.max()) // 16 * 16 + 16)
        self.descriptor = (
            start >> 4 | self.lbo >> 4 << 16 | self.sbo >> 4 << 32 | 1 << 46 | base << 49 | MODES[mode] << 61
        )

    def write(self, image: np.ndarray) -> None:
        """Put the operand into an image of shared memory."""
        fill(image, self.at, self.codes, self.bits)


def idesc(a: str, b: str, out: str, m: int, n: int, a_mn: bool = False, b_mn: bool = False, more: int = 0) -> int:
    """Return the instruction descriptor (ISA table 42)."""
    d = {"f16": 0, "f32": 1, "s32": 2}[out]
    types = TYPES[a].code << 7 | TYPES[b].code << 10
    return d << 4 | types | int(a_mn) << 15 | int(b_mn) << 16 | n >> 3 << 17 | m >> 4 << 24 | more


def a_lanes(m: int, group: int, ws: bool, half: int) -> list[tuple[int, int, list[int]]]:
    """Return (row, block, lanes that must hold the row) for A in tensor memory: as D, in every part of the data path."""
    n = 256  # any
    rows = []
    for r in range(m):
        places = {cell_of(r, c, m, n, group, ws, half)[:2] for c in range(0, n, n // 4)}
        rows.append((r, places.copy().pop()[0], sorted(lane for _, lane in places)))
    return rows


def tensor_a(name: str, codes: np.ndarray, group: int, ws: bool, half: int) -> np.ndarray:
    """Return the cells [blocks, 128, 8] of A in tensor memory."""
    containers = (codes << TYPES[name].shift).astype("u1") if TYPES[name].bits < 8 else codes
    words = np.ascontiguousarray(containers).view("u4")
    cells = np.zeros((group, 128, 8), "u4")
    for r, block, lanes in a_lanes(len(codes), group, ws, half):
        cells[block, lanes] = words[r]
    return cells


def program(code: str, columns: int, shared: int, group: int, defined: int, copied: int) -> str:
    """Return PTX: fill shared and tensor memory, run ``code`` in one thread of block 0, commit, dump tensor memory.

    ``code`` may use %tm (tensor-memory base), %sb (shared base / 16), %yes, %no, %x<30>, %y<30>.
    """
    chunk = min(32, columns)
    regs = ", ".join(f"%c{i}" for i in range(chunk))
    loads, dumps = "", ""
    for first in range(0, columns, chunk):
        if first < defined:
            loads += "".join(f"ld.global.u32 %c{i}, [%rc+{4 * (first + i)}];" for i in range(chunk))
            loads += f"tcgen05.st.sync.aligned.32x32b.x{chunk}.b32 [%lane+{first}], {{{regs}}};"
        dumps += (
            f"tcgen05.ld.sync.aligned.32x32b.x{chunk}.b32 {{{regs}}}, [%lane+{first}]; tcgen05.wait::ld.sync.aligned;"
        )
        dumps += "".join(f"st.global.u32 [%ro+{4 * (first + i)}], %c{i};" for i in range(chunk))
    cg = f"cta_group::{group}"
    sync = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" if group == 2 else "bar.sync 0;"
    tail = "multicast::cluster.b64 [%bar], %both;" if group == 2 else "b64 [%bar];"
    return (
        HEADER
        + f"""
.visible .entry k(.param .u64 image, .param .u64 cells, .param .u64 out)
{{
.reg .b32 %r<20>; .reg .b64 %rd<20>; .reg .pred %p<4>; .reg .pred %yes; .reg .pred %no; .reg .b32 %c<{chunk}>;
.reg .b16 %both; mov.b16 %both, 3; .reg .b32 %tm; .reg .b32 %lane; .reg .b32 %bar; .reg .b64 %sb; .reg .b64 %rc; .reg .b64 %ro; .reg .b32 %x<30>; .reg .b64 %y<30>;
.shared .align 1024 .b8 s[{shared}]; .shared .align 8 .b8 bar[8]; .shared .align 4 .b8 slot[4];
mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mov.u32 %r2, s; mov.u32 %bar, bar; mov.u32 %r9, slot;
setp.eq.u32 %p2, %r0, 0; setp.lt.u32 %p1, %r0, 32; setp.eq.u32 %yes, %r0, %r0; setp.ne.u32 %no, %r0, %r0;
ld.param.u64 %rd1, [image]; mad.wide.u32 %rd1, %r1, {shared}, %rd1; shl.b32 %r5, %r0, 4;
C: cvt.u64.u32 %rd2, %r5; add.u64 %rd2, %rd2, %rd1; ld.global.v4.u32 {{%r10, %r11, %r12, %r13}}, [%rd2];
add.u32 %r6, %r2, %r5; st.shared.v4.u32 [%r6], {{%r10, %r11, %r12, %r13}};
add.u32 %r5, %r5, 2048; setp.lt.u32 %p3, %r5, {copied}; @%p3 bra C;
@%p1 tcgen05.alloc.{cg}.sync.aligned.shared::cta.b32 [%r9], {columns};
@%p2 mbarrier.init.shared::cta.b64 [%bar], 1;
fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta; tcgen05.fence::before_thread_sync; {sync}
tcgen05.fence::after_thread_sync; ld.shared.u32 %tm, [%r9];
shr.u32 %lane, %r0, 5; shl.b32 %lane, %lane, 21; add.u32 %lane, %lane, %tm;
mad.lo.u32 %r3, %r1, 128, %r0; ld.param.u64 %rc, [cells]; mad.wide.u32 %rc, %r3, {4 * columns}, %rc; {loads}
tcgen05.wait::st.sync.aligned; tcgen05.fence::before_thread_sync; {sync} tcgen05.fence::after_thread_sync;
shr.u32 %r4, %r2, 4; cvt.u64.u32 %sb, %r4;
setp.eq.u32 %p3, %r1, 0; @!%p3 bra J; @!%p2 bra J;
{code}
tcgen05.commit.{cg}.mbarrier::arrive::one.shared::cluster.{tail}
J: bar.warp.sync -1;
W: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%bar], 0; @!%p3 bra W;
tcgen05.fence::after_thread_sync;
ld.param.u64 %ro, [out]; mad.wide.u32 %ro, %r3, {4 * columns}, %ro; {dumps}
tcgen05.fence::before_thread_sync; {sync} tcgen05.fence::after_thread_sync;
@%p1 tcgen05.dealloc.{cg}.sync.aligned.b32 %tm, {columns};
ret;
}}
"""
    )


def execute(
    code: str, images: list[np.ndarray], cells: np.ndarray, mode: str = "late", seed: int = 0, defined: int | None = None,
    copied: int | None = None, check: bool = True,
) -> np.ndarray:  # fmt: skip
    """Run ``code`` on blocks with shared-memory images and tensor-memory cells [blocks, 128, columns]; return the cells.

    Only the first ``defined`` columns and ``copied`` bytes are written before (all by default).
    """
    shared = max(2048, -(-max(len(i) for i in images) // 2048) * 2048)
    image = np.zeros((len(images), shared), "u1")
    for row, each in zip(image, images, strict=True):
        row[: len(each)] = each
    out = np.zeros_like(cells)
    columns, group = cells.shape[2], len(cells)
    text = program(code, columns, shared, group, columns if defined is None else defined, copied or shared)
    ptxsim.Module(text).launch("k", group, 128, [image, cells, out], cluster=group, mode=mode, seed=seed, check=check)
    return out


def descriptor(register: str, bits: int) -> str:
    """Return code that builds a descriptor relative to the shared base."""
    return f"add.u64 {register}, %sb, {bits:#x};"


def as_cells(values: np.ndarray, out: str) -> np.ndarray:
    """Return numbers as 32-bit cells of D."""
    if out == "f16":
        return values.astype("f2").view("u2").astype("u4")
    return values.astype("f4" if out == "f32" else "i4").view("u4")


def from_cells(cells: np.ndarray, out: str) -> np.ndarray:
    """Return cells of D as float64."""
    if out == "f16":
        return cells.astype("u2").view("f2").astype("f8")
    return cells.view("f4" if out == "f32" else "i4").astype("f8")
