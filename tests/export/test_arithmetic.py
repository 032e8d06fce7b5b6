"""The arithmetic of exported modules: Python's, at the ends of 64 bits too."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from mla_cupy.export import c_module
from mla_cupy.export import expressions as ex
from mla_cupy.export.c_expressions import c
from mla_cupy.export.numbers import CannotRecordError
from tests.export import library

LEAST, MOST = -(2**63), 2**63 - 1
ENDS = (LEAST, LEAST + 1, -(2**62), -17, -16, -1, 0, 1, 2, 15, 16, 2**31, 2**62, MOST - 1, MOST)


def clamped(x: int) -> int:
    return max(LEAST, min(MOST, x))


FUNCTIONS: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: clamped(a + b),
    "subtract": lambda a, b: clamped(a - b),
    "multiply": lambda a, b: clamped(a * b),
    "floor_divide": lambda a, b: a // b,
    "ceiling_divide": lambda a, b: -(-a // b),
    "modulo": lambda a, b: a % b,
    "least": min,
    "greatest": max,
}


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The functions of the fixed part, each with a name from outside."""
    folder = tmp_path_factory.mktemp("arithmetic")
    text = c_module.fixed_part().partition("// ---- Arithmetic")[2].partition("\n")[2]
    heads = [f"int64_t test_{name}(int64_t a, int64_t b) {{ return {name}(a, b); }}" for name in FUNCTIONS]
    source = folder / "arithmetic.c"
    source.write_text("\n".join(["#include <stdint.h>", text, *heads]) + "\n")
    sanitised = ("-fsanitize=undefined", "-fno-sanitize-recover=all", "-static-libubsan")
    return ctypes.CDLL(str(library.compiled(folder / "arithmetic.so", [source], "-shared", "-fPIC", *sanitised)))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_at_the_ends(functions: ctypes.CDLL, name: str) -> None:
    function = functions[f"test_{name}"]
    function.restype, function.argtypes = ctypes.c_int64, (ctypes.c_int64, ctypes.c_int64)
    divides = name in ("floor_divide", "ceiling_divide", "modulo")
    for a, b in itertools.product(ENDS, ENDS):
        if not divides or b > 0:  # all that is recorded divides by numbers above 0
            assert function(a, b) == FUNCTIONS[name](a, b), (a, b)


def test_what_may_leave_64_bits_saturates() -> None:
    small, large = ex.variable("small", 0, 100), ex.variable("large", 0, 2**62)
    assert c(ex.make(ex.ADD, small, small)) == "(small + small)"
    assert c(ex.make(ex.ADD, large, ex.make(ex.MULTIPLY, large, small))) == "add(large, multiply(large, small))"
    assert c(ex.make(ex.MODULO, small, ex.integer(16))) == "(small % 16)"
    with pytest.raises(CannotRecordError, match="64 bits"):
        c(ex.make(ex.MODULO, ex.make(ex.MULTIPLY, large, small), ex.integer(16)))
    with pytest.raises(CannotRecordError, match="64 bits"):
        c(ex.integer(2**63))


def test_remainders_without_multiples() -> None:
    """An address and an offset in steps of 256 bytes, whose sum may leave 64 bits."""
    address, count = ex.variable("address", 0, 2**63 - 1), ex.variable("count", 0, 100)
    steps = ex.make(ex.MULTIPLY, count, ex.integer(256))
    place = ex.make(ex.ADD, address, ex.make(ex.ADD, steps, ex.integer(512)))
    assert c(ex.make(ex.MODULO, place, ex.integer(16))) == "(address % 16)"
    assert ex.make(ex.MODULO, steps, ex.integer(16)).value == 0
    assert c(ex.make(ex.MODULO, ex.make(ex.ADD, count, ex.integer(8)), ex.integer(16))) == "((count + 8) % 16)"
    with pytest.raises(CannotRecordError, match="64 bits"):
        c(ex.make(ex.MODULO, place, ex.integer(1024)))


def test_real_numbers_keep_their_bits() -> None:
    found = {x: c(ex.real(x)) for x in (0.1, -2.5, float("inf"), float("-inf"))}
    assert float.fromhex(found[0.1]) == 0.1
    assert found[float("inf")] == "INFINITY"
    assert found[float("-inf")] == "(-INFINITY)"
    assert Path(library.STUB).exists()
