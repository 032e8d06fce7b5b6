"""The table of element types, and rounding to them.

Against every value of the 16-bit types and of e4m3, against ml_dtypes, and on ties chosen by hand.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from mla_cupy.dtypes import TABLE, dtype_name, name_of, numpy_dtype, round_to
from mla_cupy.errors import DTypeError

SIXTEEN_BIT = ("bfloat16", "float16")


def finite_values(name: str) -> np.ndarray:
    """Every finite value of a narrow type, in order, without -0."""
    dtype = numpy_dtype(name)
    with np.errstate(invalid="ignore"):  # some of the patterns are signalling NaN
        values = np.arange(1 << 8 * dtype.itemsize).astype(f"u{dtype.itemsize}").view(dtype).astype(np.float64)
    return np.unique(values[np.isfinite(values)])


def test_names_and_dtypes_are_inverse() -> None:
    for name, row in TABLE.items():
        assert dtype_name(numpy_dtype(name)) == name == row.name
        assert name_of(row.numpy) == name_of(row.numpy.type) == name_of(name) == name
        assert row.nbytes == np.zeros(1, row.numpy).nbytes
    assert dtype_name(ml_dtypes.bfloat16) == "bfloat16"
    assert dtype_name(np.float16) == "float16"


def test_the_table_has_what_the_kernels_and_the_next_ones_take() -> None:
    assert {"bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e8m0fnu", "int32", "uint8"} <= set(TABLE)


@pytest.mark.parametrize("name", [name for name, row in TABLE.items() if row.unit_roundoff])
def test_unit_roundoff(name: str) -> None:
    """The spacing of the numbers from 1 on, halved: rounding to nearest errs by no more."""
    row = TABLE[name]
    assert row.unit_roundoff == float(ml_dtypes.finfo(row.numpy).eps) / 2


def test_unknown_types_are_refused() -> None:
    with pytest.raises(DTypeError, match="int8"):
        numpy_dtype("int8")
    with pytest.raises(DTypeError, match="int16"):
        dtype_name(np.int16)
    with pytest.raises(DTypeError, match="float32 or float64"):
        round_to(np.arange(3), "bfloat16")


@pytest.mark.parametrize("name", [*SIXTEEN_BIT, "float8_e4m3fn", "float8_e8m0fnu"])
def test_values_of_the_type_stay(name: str) -> None:
    values = finite_values(name)
    assert np.array_equal(round_to(values, name), values)


@pytest.mark.parametrize("name", [*SIXTEEN_BIT, "float8_e4m3fn"])
def test_midpoints_go_to_even_and_their_neighbours_to_the_nearer(name: str) -> None:
    values = finite_values(name)
    low, high = values[:-1], values[1:]
    middle = (low + high) / 2  # exact in float64
    dtype = numpy_dtype(name)
    even_is_low = low.astype(dtype).view(f"u{dtype.itemsize}") % 2 == 0
    assert np.array_equal(round_to(middle, name), np.where(even_is_low, low, high))
    # The nearest float64 on either side of a tie: float32 on the way would round both back onto the tie.
    assert np.array_equal(round_to(np.nextafter(middle, -np.inf), name), low)
    assert np.array_equal(round_to(np.nextafter(middle, np.inf), name), high)


@pytest.mark.parametrize("name", SIXTEEN_BIT)
def test_float32_agrees_with_ml_dtypes_and_numpy(name: str) -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 200_000, dtype=np.uint32)
    x = bits.view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = x.astype(numpy_dtype(name)).astype(np.float32)
    rounded = round_to(x, name)
    assert rounded.dtype == np.float32
    assert np.isnan(x).any()
    assert np.array_equal(rounded, expected, equal_nan=True)


@pytest.mark.parametrize(
    ("name", "x", "expected"),
    [
        ("bfloat16", 1 + 2**-8, 1.0),
        ("bfloat16", 1 + 3 * 2**-8, 1 + 2**-6),
        ("bfloat16", -(1 + 2**-8 + 2**-50), -(1 + 2**-7)),
        ("bfloat16", 2.0**-134, 0.0),  # half of the least subnormal
        ("bfloat16", 2.0**-134 * (1 + 2**-50), 2.0**-133),
        ("bfloat16", 1e-320, 0.0),
        ("bfloat16", 1e300, np.inf),
        ("bfloat16", -(2.0**128 - 2.0**119), -np.inf),  # the tie between the largest value and infinity
        ("bfloat16", 2.0**128 - 2.0**119 - 2.0**80, 2.0**128 - 2.0**120),
        ("bfloat16", np.inf, np.inf),
        ("float16", 1 + 2**-11, 1.0),
        ("float16", 1 + 2**-11 + 2**-45, 1 + 2**-10),
        ("float16", 65519.99, 65504.0),
        ("float16", 65520.0, np.inf),
        ("float16", 2.0**-25, 0.0),
        ("float16", -np.inf, -np.inf),
        ("float8_e4m3fn", 1 + 2**-4, 1.0),
        ("float8_e4m3fn", 1 + 2**-4 + 2**-50, 1 + 2**-3),
        ("float8_e4m3fn", 464.0, 448.0),  # a tie with what would be the next value: to even
        ("float8_e4m3fn", -(2.0**-10), 0.0),  # half of the least subnormal
        ("float32", 1 + 2**-24, 1.0),
        ("float32", 1 + 3 * 2**-24, 1 + 2**-22),
        ("float64", 1 + 2**-52, 1 + 2**-52),
    ],
)
def test_by_hand(name: str, x: float, expected: float) -> None:
    assert float(round_to(x, name)) == expected


def test_e4m3_has_no_infinity() -> None:
    assert np.isnan(round_to(np.array([464.001, -1e300, np.inf, np.nan]), "float8_e4m3fn")).all()


@pytest.mark.parametrize("name", [*SIXTEEN_BIT, "float8_e4m3fn", "float32"])
def test_nan_and_the_sign_of_zero_stay(name: str) -> None:
    rounded = round_to(np.array([np.nan, -0.0, 0.0]), name)
    assert np.isnan(rounded[0])
    assert np.array_equal(np.signbit(rounded[1:]), [True, False])
