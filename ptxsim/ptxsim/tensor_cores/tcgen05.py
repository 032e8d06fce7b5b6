"""Decoders and data-path layouts of tcgen05.mma: instruction and shared-memory descriptors, bit by bit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ..errors import DescriptorError
from .operand import SmemLayout

_SWIZZLE = {0: (0, 16), 1: (128, 32), 2: (128, 16), 4: (64, 16), 6: (32, 16)}
DENSE = {"f16": 16, "tf32": 8, "f8f6f4": 32, "i8": 32}
DEPTH = {**DENSE, "mxf8f6f4": 32, "mxf4": 64, "mxf4nvf4": 64}
"""K of a dense MMA per kind (ISA table 39); always 32 bytes of an operand row."""

_TYPES = {
    "f16": {0: "f16", 1: "bf16"},
    "tf32": {2: "tf32"},
    "f8f6f4": {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"},
    "i8": {0: "u8", 1: "s8"},
}
_OUTPUTS = {"f16": {0: "f16", 1: "f32"}, "tf32": {1: "f32"}, "f8f6f4": {0: "f16", 1: "f32"}, "i8": {2: "s32"}}


@lru_cache(maxsize=4096)
def decode_smem_descriptor(bits: int) -> SmemLayout:
    """Decode an sm_100 shared-memory descriptor (ISA table 40), refusing reserved bits."""

    def refuse(condition: bool, why: str) -> None:
        if condition:
            raise DescriptorError(f"shared-memory descriptor {bits:#018x}: {why}")

    refuse(bits >> 46 & 7 != 1, f"bits 46-48 are {bits >> 46 & 7:#05b}, must be 0b001")
    refuse(bits >> 14 & 3 != 0 or bits >> 30 & 3 != 0, "bits 14-15 and 30-31 must be zero")
    refuse(bits >> 53 & 0xFF != 0, "bits 53-60 must be zero")
    refuse(bits >> 52 & 1 != 0, "bit 52 (absolute leading-dimension address) exists on sm_103a only")
    mode, base = bits >> 61, bits >> 49 & 7
    refuse(mode not in _SWIZZLE, f"swizzle mode {mode} is invalid")
    refuse(mode == 0 and base != 0, f"base offset {base} without a swizzle")
    lbo, sbo = (bits >> 16 & 0x3FFF) << 4, (bits >> 32 & 0x3FFF) << 4
    return SmemLayout((bits & 0x3FFF) << 4, lbo, sbo, *_SWIZZLE[mode], base)


def check_layout(layout: SmemLayout, mn_major: bool, kind: str) -> None:
    """Refuse combinations of swizzle and major that the ISA excludes (tables 51 and 55)."""
    wide = layout.atom == 32
    if wide and not mn_major:
        raise DescriptorError("128-byte swizzling with 32-byte atoms has no K-major layout (ISA table 55)")
    if mn_major and wide != (kind == "tf32"):
        only = "needs 128-byte swizzling with 32-byte atoms" if kind == "tf32" else "cannot use 32-byte swizzle atoms"
        raise DescriptorError(f"a transposed operand of .kind::{kind} {only}")


@dataclass(frozen=True)
class InstructionDescriptor:
    """The 32-bit instruction descriptor of a dense MMA, decoded."""

    m: int
    n: int
    a_kind: str
    b_kind: str
    out: str
    negate_a: bool
    negate_b: bool
    a_mn: bool
    b_mn: bool
    saturate: bool


@lru_cache(maxsize=1024)
def decode_instruction_descriptor(bits: int, kind: str, group: int, ws: bool) -> InstructionDescriptor:
    """Decode and check an instruction descriptor (ISA table 42) for an MMA kind, group and form."""

    def refuse(condition: bool, why: str) -> None:
        if condition:
            raise DescriptorError(f"instruction descriptor {bits:#010x}: {why}")

    refuse(bits & 0b111 != 0, "sparsity bits 0-2 are set in a dense MMA")
    refuse(bits >> 3 & 1 == 1 and kind != "i8", "bit 3 (saturate) is for .kind::i8 only")
    for position in (6, 23, 29):
        refuse(bits >> position & 1 == 1, f"reserved bit {position} is set")
    refuse(bits >> 30 != 0 and not ws, "bits 30-31 (maximum shift) are for .ws only")
    out, a_code, b_code = bits >> 4 & 3, bits >> 7 & 7, bits >> 10 & 7
    refuse(out not in _OUTPUTS[kind], f"D type {out} is invalid for .kind::{kind}")
    refuse(a_code not in _TYPES[kind], f"A type {a_code} is invalid for .kind::{kind}")
    refuse(b_code not in _TYPES[kind], f"B type {b_code} is invalid for .kind::{kind}")
    a_kind, b_kind = _TYPES[kind][a_code], _TYPES[kind][b_code]
    refuse(_OUTPUTS[kind][out] == "f16" and "bf16" in (a_kind, b_kind), "D of f16 needs f16 operands")
    negative = bits >> 13 & 3
    refuse(negative != 0 and kind == "i8", ".kind::i8 cannot negate operands")
    m, n = (bits >> 24 & 31) << 4, (bits >> 17 & 63) << 3
    _check_shape(m, n, kind, group, ws, refuse)
    a_mn, b_mn = bool(bits >> 15 & 1), bool(bits >> 16 & 1)
    if b_mn and kind in ("f8f6f4", "i8"):
        refuse(n % (16 * group) != 0, f"N={n} of a transposed 8-bit B must be a multiple of {16 * group}")
    return InstructionDescriptor(
        m,
        n,
        a_kind,
        b_kind,
        _OUTPUTS[kind][out],
        bool(negative & 1),
        bool(negative & 2),
        a_mn,
        b_mn,
        bool(bits >> 3 & 1),
    )


def _check_shape(m: int, n: int, kind: str, group: int, ws: bool, refuse: Any) -> None:
    """Check M and N against ISA table 39."""
    if ws:
        refuse(group != 1, ".ws needs .cta_group::1")
        refuse(m not in (32, 64, 128), f"M={m}: .ws takes 32, 64 or 128")
        refuse(n not in (64, 128, 256), f"N={n}: .ws takes 64, 128 or 256")
    elif group == 1:
        refuse(m not in (64, 128), f"M={m}: .cta_group::1 takes 64 or 128")
        if kind == "i8" and n > 32:
            refuse(n % 16 != 0 or n > 256, f"N={n}: .kind::i8 takes multiples of 16 above 32")
        refuse(not 8 <= n <= 256 or n % 8 != 0, f"N={n}: multiples of 8 up to 256")
    else:
        step = 32 if kind == "i8" else 16
        refuse(m not in (128, 256), f"M={m}: .cta_group::2 takes 128 or 256")
        refuse(not step <= n <= 256 or n % step != 0, f"N={n}: .cta_group::2 takes multiples of {step} up to 256")


@lru_cache(maxsize=256)
def data_path(m: int, n: int, group: int, ws: bool) -> tuple[str, int, np.ndarray, np.ndarray]:
    """Return the layout of D in one block's tensor memory.

    Returns
    -------
    tuple
        Layout letter; the number of parts P that N is cut into; lanes [rows, P] and the columns per part. Row r of the
        block, columns ``p * n/P + c`` lie at lane ``lanes[r, p]``, column c.

    Notes
    -----
    Source: the ISA's table of data-path organisations, with the lane formulas of CUTLASS's ``tmem_frg`` layouts.
    """
    rows = m // group
    r = np.arange(rows)
    if group == 2 and m == 128:
        letter, parts = "B", 2
    elif ws and m == 32:
        letter, parts = "G", 4
    elif ws and m == 64:
        letter, parts = "E", 2
    elif not ws and m == 64:
        letter, parts = "F", 1
    else:
        letter, parts = ("A" if group == 2 else "D"), 1
    if letter == "F":
        lanes = (32 * (r // 16) + r % 16)[:, None]
    else:
        lanes = r[:, None] + 128 // parts * np.arange(parts)[None, :]
    columns = np.arange(n // parts)
    lanes.flags.writeable = columns.flags.writeable = False
    return letter, parts, lanes, columns


def zero_columns(bits: int, m: int, n: int) -> np.ndarray:
    """Return which columns of B a zero-column mask descriptor replaces by zeros (ISA table 45 and its examples).

    N is cut into 128/M parts. Each part's mask alternates runs of ones (Skip Span + 1 long) and zeros (Use Span + 1),
    begins with the value First Span, and lacks its Start Count lowest bits.
    """

    def refuse(condition: bool, why: str) -> None:
        if condition:
            raise DescriptorError(f"zero-column mask descriptor {bits:#018x}: {why}")

    refuse(bits >> 36 & 7 != 0 or bits >> 62 != 0, "bits 36-38 and 62-63 must be zero")
    refuse(bits >> 56 & 63 != 0, "a column shift is not modelled")
    if not bits >> 39 & 1:
        return np.zeros(n, bool)
    ones, zeros = (bits >> 40 & 255) + 1, (bits >> 48 & 255) + 1
    parts = 128 // m
    masks = []
    for part in range(parts):
        place = np.arange(n // parts) + (bits >> 8 * part & 255)
        if bits >> 32 + part & 1:
            masks.append(place % (ones + zeros) < ones)
        else:
            masks.append(place % (ones + zeros) >= zeros)
    return np.concatenate(masks)
