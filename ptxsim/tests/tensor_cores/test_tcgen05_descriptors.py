# ruff: noqa: E501 (lines of tables are kept whole)
"""tcgen05 descriptors, bit by bit: ISA tables 39, 40, 42, 45, 51, 52 and 55, checked against CUTLASS's fields by number."""

from __future__ import annotations

import itertools

import pytest

import ptxsim
from ptxsim.tensor_cores.operand import SmemLayout
from ptxsim.tensor_cores.tcgen05 import (
    check_layout,
    decode_instruction_descriptor,
    decode_smem_descriptor,
    zero_columns,
)


# Values of sm100 kernels' descriptors, made by hand from ISA table 42.
@pytest.mark.parametrize(
    ("bits", "m", "n", "a_mn", "b_mn"),
    [(0x4080490, 64, 32, 0, 0), (0x4100490, 64, 64, 0, 0), (0x8088490, 128, 32, 1, 0), (0x8118490, 128, 64, 1, 1)],
)
def test_instruction_descriptor_values(bits: int, m: int, n: int, a_mn: int, b_mn: int) -> None:
    desc = decode_instruction_descriptor(bits, "f16", 1, False)
    assert (desc.m, desc.n, desc.a_mn, desc.b_mn) == (m, n, bool(a_mn), bool(b_mn))
    assert (desc.a_kind, desc.b_kind, desc.out) == ("bf16", "bf16", "f32")


GOOD = 0x4100490


@pytest.mark.parametrize(
    ("bits", "kind", "group", "ws"),
    [
        *((GOOD | 1 << bit, "f16", 1, False) for bit in (0, 2, 3, 6, 23, 29, 30)),
        (GOOD | 2 << 4, "f16", 1, False),
        (GOOD | 7 << 7, "f16", 1, False),
        (GOOD & ~(31 << 24) | 2 << 24, "f16", 1, False),
        (GOOD & ~(63 << 17), "f16", 1, False),
        (GOOD, "f16", 2, False),
        (GOOD & ~(63 << 17) | 4 << 17, "f16", 1, True),
        (GOOD, "f16", 2, True),
        (GOOD | 7 << 7, "f8f6f4", 1, False),
        (GOOD & ~(7 << 4), "tf32", 1, False),
    ],
)
def test_bad_instruction_descriptors(bits: int, kind: str, group: int, ws: bool) -> None:
    with pytest.raises(ptxsim.DescriptorError):
        decode_instruction_descriptor(bits, kind, group, ws)


def test_shared_memory_descriptor() -> None:
    base = 1 << 46 | 2 << 61 | 64 << 32 | 1 << 16 | 0x123
    layout = decode_smem_descriptor(base)
    assert (layout.start, layout.lbo, layout.sbo, layout.span) == (0x1230, 16, 1024, 128)
    none = base & ~(7 << 61)
    for bad in (base ^ 1 << 46, base | 1 << 47, base | 1 << 52, base | 1 << 53, base | 1 << 60, base | 1 << 14,
                base | 1 << 30, base | 1 << 61, none | 5 << 61, none | 7 << 61, none | 1 << 49):  # fmt: skip
        with pytest.raises(ptxsim.DescriptorError):
            decode_smem_descriptor(bad)
    for mode, span, atom in ((0, 0, 16), (1, 128, 32), (2, 128, 16), (4, 64, 16), (6, 32, 16)):
        layout = decode_smem_descriptor(none | mode << 61)
        assert (layout.span, layout.atom, layout.base) == (span, atom, 0)
    assert decode_smem_descriptor(base | 5 << 49).base == 5


FIELDS = {
    # CUTLASS's bit fields of SmemDescriptor (mma_sm100_desc.hpp): first bit, bits.
    "start_address_": (0, 14), "leading_byte_offset_": (16, 14), "stride_byte_offset_": (32, 14), "base_offset_": (49, 3), "layout_type_": (61, 3),
}  # fmt: skip


@pytest.mark.parametrize(
    ("start", "lbo", "sbo", "base", "mode"),
    [(0x3FFF, 1, 64, 0, 2), (5, 0x3FFF, 8, 7, 1), (64, 3, 0x3FFF, 2, 4), (0, 9, 7, 4, 6), (1, 2, 3, 0, 0)],
)
def test_fields_of_a_shared_memory_descriptor(start: int, lbo: int, sbo: int, base: int, mode: int) -> None:
    bits = 1 << 46
    for value, (first, _) in zip((start, lbo, sbo, base, mode), FIELDS.values(), strict=True):
        bits |= value << first
    span, atom = {0: (0, 16), 1: (128, 32), 2: (128, 16), 4: (64, 16), 6: (32, 16)}[mode]
    assert decode_smem_descriptor(bits) == SmemLayout(16 * start, 16 * lbo, 16 * sbo, span, atom, base)


@pytest.mark.parametrize(("kind", "mn_major", "atom", "legal"), [
    ("f16", False, 16, True), ("f16", True, 16, True), ("f16", True, 32, False), ("f16", False, 32, False),
    ("f8f6f4", True, 16, True), ("f8f6f4", True, 32, False), ("i8", True, 16, True), ("i8", True, 32, False),
    ("tf32", False, 16, True), ("tf32", True, 16, False), ("tf32", True, 32, True), ("tf32", False, 32, False),
])  # fmt: skip
def test_swizzle_atoms_and_majors(kind: str, mn_major: bool, atom: int, legal: bool) -> None:
    """ISA table 51 and its notes (transposed .tf32 only with 32-byte atoms, others never); table 55 (those are MN-major)."""
    layout = SmemLayout(0, 16, 1024, 128, atom)
    if legal:
        check_layout(layout, mn_major, kind)
        return
    with pytest.raises(ptxsim.DescriptorError):
        check_layout(layout, mn_major, kind)


def legal_shape(kind: str, group: int, ws: bool, m: int, n: int) -> bool:
    """ISA table 39, dense."""
    if ws:
        return group == 1 and m in (32, 64, 128) and n in (64, 128, 256)
    if group == 1:
        widths = [8, 16, 24, *range(32, 257, 16)] if kind == "i8" else range(8, 257, 8)
        return m in (64, 128) and n in widths
    return m in (128, 256) and n in (range(32, 257, 32) if kind == "i8" else range(16, 257, 16))


@pytest.mark.parametrize(
    ("kind", "types"),
    [
        ("f16", 1 << 4 | 1 << 7 | 1 << 10),
        ("tf32", 1 << 4 | 2 << 7 | 2 << 10),
        ("f8f6f4", 1 << 4 | 3 << 7 | 5 << 10),
        ("i8", 2 << 4),
    ],
)
@pytest.mark.parametrize(("group", "ws"), [(1, False), (2, False), (1, True), (2, True)])
def test_shapes_of_table_39(kind: str, types: int, group: int, ws: bool) -> None:
    for m, n in itertools.product(range(16, 512, 16), range(0, 512, 8)):
        bits = types | n >> 3 << 17 | m >> 4 << 24
        if legal_shape(kind, group, ws, m, n):
            desc = decode_instruction_descriptor(bits, kind, group, ws)
            assert (desc.m, desc.n) == (m, n)
        else:
            with pytest.raises(ptxsim.DescriptorError):
                decode_instruction_descriptor(bits, kind, group, ws)


NAMES = {
    "f16": {0: "f16", 1: "bf16"},
    "tf32": {2: "tf32"},
    "f8f6f4": {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"},
    "i8": {0: "u8", 1: "s8"},
}
OUTPUTS = {"f16": {0: "f16", 1: "f32"}, "tf32": {1: "f32"}, "f8f6f4": {0: "f16", 1: "f32"}, "i8": {2: "s32"}}


@pytest.mark.parametrize("kind", NAMES)
def test_types_of_table_42(kind: str) -> None:
    for d, a, b in itertools.product(range(4), range(8), range(8)):
        bits = d << 4 | a << 7 | b << 10 | 64 >> 3 << 17 | 128 >> 4 << 24
        legal = d in OUTPUTS[kind] and a in NAMES[kind] and b in NAMES[kind]
        # Table 39: D of f16 needs operands of f16 (kind::f16 with bf16 has D of f32 only).
        legal = legal and not (kind == "f16" and d == 0 and (a, b) != (0, 0))
        if legal:
            desc = decode_instruction_descriptor(bits, kind, 1, False)
            assert (desc.out, desc.a_kind, desc.b_kind) == (OUTPUTS[kind][d], NAMES[kind][a], NAMES[kind][b])
        else:
            with pytest.raises(ptxsim.DescriptorError):
                decode_instruction_descriptor(bits, kind, 1, False)


def test_flags_of_table_42() -> None:
    good = 2 << 4 | 64 >> 3 << 17 | 128 >> 4 << 24
    assert decode_instruction_descriptor(good | 1 << 3, "i8", 1, False).saturate
    for bit in (13, 14):
        with pytest.raises(ptxsim.DescriptorError, match="cannot negate"):
            decode_instruction_descriptor(good | 1 << bit, "i8", 1, False)
        assert not decode_instruction_descriptor(GOOD, "f16", 1, False).negate_a
        desc = decode_instruction_descriptor(GOOD | 1 << bit, "f16", 1, False)
        assert (desc.negate_a, desc.negate_b) == (bit == 13, bit == 14)
    # The maximum shift of .ws is a hint; other forms must leave it zero.
    for shift in range(4):
        decode_instruction_descriptor(GOOD | shift << 30, "f16", 1, True)
    for group, step in ((1, 16), (2, 32)):  # table 52
        for n in range(16, 257, 16):
            bits = 1 << 4 | 1 << 16 | n >> 3 << 17 | 128 >> 4 << 24
            if n % step:
                with pytest.raises(ptxsim.DescriptorError, match="transposed"):
                    decode_instruction_descriptor(bits, "f8f6f4", group, False)
            else:
                decode_instruction_descriptor(bits, "f8f6f4", group, False)
    with pytest.raises(ptxsim.DescriptorError, match="transposed"):
        decode_instruction_descriptor(1 << 4 | 1 << 16 | 24 >> 3 << 17 | 128 >> 4 << 24, "f8f6f4", 1, False)


def mask_text(bits: int, m: int, n: int, part: int) -> str:
    """Return a sub-mask's lowest fourteen bits as the ISA prints them: the highest first."""
    size = n * m // 128
    own = zero_columns(bits, m, n)[part * size : part * size + 14]
    return "".join("1" if v else "0" for v in own[::-1])


def test_zero_column_masks_of_the_isa_s_examples() -> None:
    spans = 2 << 40 | 3 << 48
    assert not zero_columns(4 << 40 | 3 << 48, 128, 64).any()  # example 1: the non-zero flag is clear
    some = 1 << 39 | spans
    assert mask_text(some, 128, 64, 0) == "11100001110000"  # example 2
    assert mask_text(some | 1 << 32, 64, 128, 0) == "00001110000111"  # example 3: ... 0000 111 0000 111
    assert mask_text(some | 1 << 32, 64, 128, 1) == "11100001110000"
    four = some | 1 << 24 | 2 << 16 | 1 << 8 | 0b0011 << 32  # example 4
    assert [mask_text(four, 32, 128, part) for part in range(4)] == [
        "0000111" "0000" "111", "10000" "111" "0000" "11", "00111" "0000" "111" "00", "0111" "0000" "111" "000",
    ]  # fmt: skip


@pytest.mark.parametrize("bit", [36, 37, 38, 56, 61, 62, 63])
def test_zero_column_bits_that_are_refused(bit: int) -> None:
    with pytest.raises(ptxsim.DescriptorError):
        zero_columns(1 << 39 | 1 << bit, 128, 64)
