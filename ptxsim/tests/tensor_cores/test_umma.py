# ruff: noqa: E501 (lines of PTX are kept whole)
"""tcgen05.mma against A B^T in NumPy: types, shapes, data paths, layouts, A in tensor memory.

Operands are laid out by ``simtest.umma`` (the ISA's canonical layouts), D is read back by ``simtest.runners.cell_of`` (the ISA's
data paths A to G with CUTLASS's lane formulas).
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import ptxsim
from simtest.mma_case import check
from simtest.umma import TYPES, numbers

SHAPES = {
    "D": {"m": 128, "n": 24},
    "F": {"m": 64, "n": 40},
    "F16": {"m": 64, "n": 8, "half": 16},
    "ws G": {"m": 32, "n": 64, "ws": True},
    "ws E": {"m": 64, "n": 128, "ws": True},
    "ws D": {"m": 128, "n": 64, "ws": True},
    "A": {"m": 256, "n": 32, "group": 2},
    "B": {"m": 128, "n": 64, "group": 2},
}
"""One shape per data path of the ISA's table (9.7.16.10.5)."""


@pytest.mark.parametrize("in_tmem", [False, True], ids=["shared", "tmem"])
@pytest.mark.parametrize("shape", SHAPES)
def test_data_paths(shape: str, in_tmem: bool) -> None:
    check(**SHAPES[shape], in_tmem=in_tmem)


@pytest.mark.parametrize("n", [8, 16, 256])
def test_widths(n: int) -> None:
    check(n=n)


@pytest.mark.parametrize("in_tmem", [False, True], ids=["shared", "tmem"])
@pytest.mark.parametrize(("a", "out"), [("bf16", "f32"), ("f16", "f32"), ("f16", "f16"), ("tf32", "f32"), ("e4m3", "f32"), ("e5m2", "f16"),
                                        ("s8", "s32"), ("u8", "s32"), ("e2m3", "f32"), ("e3m2", "f32"), ("e2m1", "f32"), ("e2m1", "f16")])  # fmt: skip
def test_types(a: str, out: str, in_tmem: bool) -> None:
    check(a=a, out=out, in_tmem=in_tmem)


def test_values_of_the_narrow_types() -> None:
    """The OCP microscaling formats' greatest and least values, from which the formula of ``numbers`` is checked."""
    for name, top, low in (("e2m3", 7.5, 0.125), ("e3m2", 28.0, 0.0625), ("e2m1", 6.0, 0.5)):
        values = numbers(name, np.arange(1 << TYPES[name].bits).astype("u1"))
        assert (values.max(), values.min(), values[values > 0].min()) == (top, -top, low)
        assert len(set(values.tolist())) == len(values) - 1


@pytest.mark.parametrize(
    ("a", "b"), [p for p in itertools.product(("e4m3", "e5m2", "e2m3", "e3m2", "e2m1"), repeat=2) if p[0] != p[1]]
)
def test_mixed_narrow_types(a: str, b: str) -> None:
    check(m=64, n=16, a=a, b=b, a_mode="64B", b_mode="32B")


def test_mixed_signs_and_f16() -> None:
    check(a="s8", b="u8", out="s32", group=2, m=256, n=32)
    check(a="u8", b="s8", out="s32", ws=True, m=32, n=64)
    check(a="f16", b="bf16", in_tmem=True)


@pytest.mark.parametrize("mode", ["none", "32B", "64B", "128B"])
@pytest.mark.parametrize(("a_mn", "b_mn"), [(False, False), (True, False), (False, True), (True, True)])
def test_layouts(mode: str, a_mn: bool, b_mn: bool) -> None:
    check(m=128, n=128, a_mode=mode, b_mode=mode, a_mn=a_mn, b_mn=b_mn)


@pytest.mark.parametrize(
    ("mode", "mn_major"), [*itertools.product(("none", "32B", "64B", "128B"), (False, True)), ("128B/32B", True)]
)
def test_both_strides_count(mode: str, mn_major: bool) -> None:
    """Operands whose pieces do not touch each other: LBO and SBO each have to be used where the ISA says."""
    a = "tf32" if mode == "128B/32B" else "f16"
    check(m=64, n=128, a=a, a_mode=mode, b_mode=mode, a_mn=mn_major, b_mn=mn_major, gaps=(2048, 1024))
    check(m=64, n=128, a=a, a_mode=mode, b_mode=mode, a_mn=mn_major, b_mn=mn_major, gaps=(1024, 0))


@pytest.mark.parametrize("mode", ["none", "32B", "64B", "128B"])
def test_layouts_of_bytes(mode: str) -> None:
    check(m=128, n=64, a="e4m3", a_mode=mode, b_mode=mode, a_mn=True, b_mn=True)
    check(m=64, n=64, a="e2m1", b="e5m2", a_mode=mode, b_mode=mode, a_mn=True)
    check(m=64, n=64, a="s8", out="s32", a_mode=mode, b_mode=mode)


@pytest.mark.parametrize("shape", ["D", "F16", "ws E", "A"])
def test_transposed_tf32_has_32_byte_atoms(shape: str) -> None:
    """Swizzle<2,5,2> over 8 x 4 atoms of 16 bytes (CUTLASS's Layout_MN_SW128_32B_Atom; ISA tables 40 and 55)."""
    shape = SHAPES[shape] | {"n": 64}
    check(**shape, a="tf32", a_mode="128B/32B", b_mode="128B/32B", a_mn=True, b_mn=True)
    check(**shape, a="tf32", a_mode="64B", b_mode="128B/32B", b_mn=True)


@pytest.mark.parametrize(
    ("a_mode", "why"), [("128B", "needs 128-byte swizzling with 32-byte atoms"), ("none", "needs 128-byte")]
)
def test_transposed_tf32_refuses_other_swizzles(a_mode: str, why: str) -> None:
    with pytest.raises(ptxsim.DescriptorError, match=why):
        check(a="tf32", a_mode=a_mode, a_mn=True)


def test_32_byte_atoms_are_for_transposed_tf32_only() -> None:
    with pytest.raises(ptxsim.DescriptorError, match="cannot use 32-byte swizzle atoms"):
        check(a_mode="128B/32B", a_mn=True)
    with pytest.raises(ptxsim.DescriptorError, match="no K-major layout"):
        check(a="tf32", a_mode="128B/32B")


@pytest.mark.parametrize(
    ("mode", "start", "base"), [("128B", 384, 3), ("128B", 896, 7), ("64B", 128, 1), ("64B", 1408, 3), ("32B", 128, 1)]
)
def test_base_offset(mode: str, start: int, base: int) -> None:
    """A swizzle pattern that starts at ``start``: base offset = (start >> 7) & 7 (ISA 9.7.16.4.1)."""
    assert base == start >> 7 & 7
    check(m=64, n=16, a_mode=mode, start=start, base=base)
    check(m=64, n=16, a_mode=mode, start=start, base=base, a_mn=True)


def test_start_inside_a_pattern_needs_no_base_offset() -> None:
    """The pattern is aligned, the matrix begins at its third row of 8: swizzling follows the address."""
    check(m=64, n=16, start=256)
