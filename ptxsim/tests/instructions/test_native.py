"""The arithmetic in C does, bit for bit, what that in NumPy does; and NumPy's takes over where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ptxsim
from ptxsim.arithmetic import native
from ptxsim.tensor_cores.mma_form import warp_mma

needs_library = pytest.mark.skipif(not native.available(), reason="no C compiler, or PTXSIM_NATIVE=0")
#: Zeros, subnormals, ones, the largest, infinities, NaNs of both kinds, ties and their neighbours.
PATTERNS = np.array(
    [
        0, 1, 0x7FFFFF, 0x800000, 0xFFFFFF, 0x33800000, 0x3EFFFFFF, 0x3F800000, 0x3F800001, 0x3F808000, 0x3F818000,
        0x4B800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF,
    ],
    "u4",
)  # fmt: skip
SPECIAL = np.concatenate([PATTERNS, PATTERNS | np.uint32(1 << 31)]).view("f4")
MMA_FORMS = [
    (16, 16, "bf16", "bf16", "f32", False), (16, 8, "bf16", "bf16", "f32", False), (16, 16, "f16", "f16", "f32", False),
    (16, 8, "tf32", "tf32", "f32", False), (16, 32, "e4m3", "e5m2", "f32", False), (16, 32, "s8", "u8", "s32", False),
    (16, 16, "u8", "s8", "s32", True), (8, 16, "s8", "s8", "s32", False),
]  # fmt: skip


def same(got: np.ndarray, want: np.ndarray) -> bool:
    bits = f"u{want.itemsize}"
    return got.dtype == want.dtype and bool(np.array_equal(got.view(bits), want.view(bits)))


def floats(rng: np.random.Generator) -> np.ndarray:
    """Any bits, and short numbers, whose sums lie between two float32 often."""
    any_bits = rng.integers(0, 1 << 32, 20_000, dtype="u8").astype("u4").view("f4")
    short = rng.integers(-256, 256, 20_000) * np.exp2(rng.integers(-80, 20, 20_000))
    return np.concatenate([any_bits, short.astype("f4")])


@needs_library
@pytest.mark.parametrize(
    ("name", "operands"), [("fma32", 3), ("flush", 1), ("fmin32", 2), ("fmax32", 2), ("to_bf16", 1)]
)
def test_floats(name: str, operands: int) -> None:
    rng = np.random.default_rng(1)
    every = [x.reshape(-1) for x in np.meshgrid(*[SPECIAL] * operands)]
    values = [np.concatenate([np.ascontiguousarray(x), floats(rng)]) for x in every]
    with np.errstate(all="ignore"):
        assert same(native.FUNCTIONS[name](*values), native.ORACLES[name](*values))


@needs_library
@pytest.mark.parametrize("kind", ["u2", "i2", "u4", "i4", "u8", "i8"])
@pytest.mark.parametrize("name", ["int_div", "int_rem", "shift_left", "shift_right"])
def test_integers(name: str, kind: str) -> None:
    rng = np.random.default_rng(2)
    limits = np.iinfo(kind)
    few = np.array([0, 1, 2, 3, 7, limits.max, limits.min, limits.max - 1], kind)
    few = np.concatenate([few, ~few, rng.integers(limits.min, limits.max, 100, dtype=kind, endpoint=True)])
    a, b = (np.ascontiguousarray(x).reshape(-1) for x in np.meshgrid(few, few))
    amounts = np.resize(np.array([0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 1 << 31, (1 << 32) - 1], "u4"), len(a))
    second = amounts if name.startswith("shift") else b
    assert same(native.FUNCTIONS[name](a, second), native.ORACLES[name](a, second))


@needs_library
@pytest.mark.parametrize("form", MMA_FORMS, ids=str)
def test_products(form: tuple) -> None:
    """Sums of every size of term; registers with gaps between lanes; a NaN leaves the product to NumPy."""
    rng, product = np.random.default_rng(3), warp_mma(*form)
    assert product.native is not None
    compared = 0
    for spread in [0, 3, 30] * 10:
        words = [_words(rng, form[2], spread) for _ in range(product.a_count)]
        words += [_words(rng, form[3], spread) for _ in range(product.b_count)]
        words += [_words(rng, "f32" if form[4] == "f32" else "s8", spread) for _ in range(product.outputs)]
        words[0] = np.repeat(words[0], 2)[::2]
        product.native[1].nan = 0
        got = product.native[0](*words)
        if not product.native[1].nan:
            compared += 1
            assert all(map(same, got, product._by_numpy(words)))
    assert compared >= 10
    if form[4] == "f32":
        words[-1] = np.full(32, 0x7FC12345, "u4")
        assert all(map(same, product._product(words), product._by_numpy(words)))
        assert product.native[1].nan == 0


def _words(rng: np.random.Generator, kind: str, spread: int) -> np.ndarray:
    """A register of 32 lanes: numbers with exponents from -``spread`` to ``spread``."""
    x = rng.standard_normal(64) * np.exp2(rng.integers(-spread, spread + 1, 64))
    if kind in ("f32", "tf32"):
        return x[:32].astype("f4").view("u4")
    if kind == "bf16":
        return (x.astype("f4").view("u4") >> np.uint32(16)).astype("u2").view("u4")
    if kind == "f16":
        return np.clip(x, -60000, 60000).astype("f2").view("u4")
    return rng.integers(0, 1 << 32, 32, dtype="u8").astype("u4") & np.uint32(
        0x77777777 if kind[0] == "e" else 0xFFFFFFFF
    )


CODE = """
import numpy as np
from ptxsim.arithmetic import native
one = np.ones(32, "f4")
print(native.available(), native.FUNCTIONS["fma32"](one, one, one).sum())
"""


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"PTXSIM_NATIVE": "0"}, "False 64.0"),
        ({"CC": "/nowhere/cc"}, "False 64.0"),
        ({"CC": "false"}, "False 64.0"),
        pytest.param({}, "True 64.0", marks=needs_library),
    ],
    ids=["refused", "no compiler", "a compiler that fails", "built anew"],
)
def test_where_it_cannot_be_built(changes: dict[str, str], expected: str, tmp_path: Path) -> None:
    here = {"PYTHONPATH": str(Path(ptxsim.__file__).parents[1]), "XDG_CACHE_HOME": str(tmp_path)}
    environment = {**os.environ, **here, **changes}
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected
