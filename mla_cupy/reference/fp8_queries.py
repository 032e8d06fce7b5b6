"""Queries in e4m3, as products in FP8 take them: the rule byte by byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mla_cupy.cache_formats import BYTE_DTYPES, MAX_E4M3
from mla_cupy.dtypes import numpy_dtype

Array = npt.NDArray[Any]

_E4M3 = numpy_dtype("float8_e4m3fn")

#: Exponent of the smallest scale: its inverse, and products with both, are normal numbers of float32.
LEAST_EXPONENT = -100


def quantise_queries(q: npt.ArrayLike) -> tuple[Array, Array]:
    """Round rows to e4m3, each beside a scale of its own.

    Parameters
    ----------
    q : array, (..., d)
        Rows of 16-bit elements.

    Returns
    -------
    codes : array of uint8, (..., d)
        e4m3 numbers, rounded to nearest, ties to even. A row with NaN or infinity is 0x7F, the NaN, throughout.
    scales : array of float64, (...)
        What they are to be multiplied by: the smallest power of two, from 2^-100 on, with which the row's largest
        magnitude is at most 448 of its units. Of a row of zeros 2^-100, of one with NaN or infinity NaN.
    """
    rows = np.asarray(q).astype(np.float64)
    with np.errstate(invalid="ignore"):
        largest = np.abs(rows).max(axis=-1, initial=0.0)
        fraction, exponent = np.frexp(largest / MAX_E4M3)
        exponent = np.where(fraction == 0.5, exponent - 1, exponent)  # a power of two itself
        exponent = np.where(largest == 0, LEAST_EXPONENT, exponent)
        scales = np.ldexp(1.0, np.maximum(exponent, LEAST_EXPONENT))
        scales = np.where(np.isfinite(largest), scales, np.nan)
        scaled = (rows / scales[..., None]).astype(np.float32)  # exact, or below what counts
    return np.where(np.isnan(scaled), np.uint8(0x7F), _nearest(scaled)), scales


def dequantised(q: npt.ArrayLike) -> Array:
    """Return the rows that products in FP8 multiply, in float64: the numbers of e4m3 codes, or rounded ones."""
    rows = np.asarray(q)
    if rows.dtype.name in BYTE_DTYPES:
        return _values()[rows.view(np.uint8)]
    codes, scales = quantise_queries(rows)
    rounded: Array = _values()[codes] * scales[..., None]
    return rounded


def _nearest(x: Array) -> Array:
    """The e4m3 codes of numbers of magnitude up to 448, ties to even."""
    with np.errstate(invalid="ignore"):
        return x.astype(_E4M3).view(np.uint8)


def _values() -> Array:
    """The number of each code."""
    values: Array = np.arange(256, dtype=np.uint8).view(_E4M3).astype(np.float64)
    return values
