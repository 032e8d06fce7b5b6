"""Queries in e4m3 for FP8 matmuls: the rule byte by byte."""

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
    """Round rows to e4m3, each with its own scale.

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
    scaled, scales = _scaled(q)
    return _codes(scaled), scales


def quantise_query_terms(q: npt.ArrayLike) -> tuple[Array, Array, Array]:
    """Round rows to sums of two e4m3 numbers each.

    Parameters
    ----------
    q : array, (..., d)
        Rows of 16-bit elements.

    Returns
    -------
    codes : array of uint8, (..., d)
        From `quantise_queries`.
    remainders : array of uint8, (..., d)
        What the numbers of these leave of the elements, in the same units, rounded in the same way.
    scales : array of float64, (...)
        From `quantise_queries`.
    """
    scaled, scales = _scaled(q)
    codes = _codes(scaled)
    return codes, _codes(scaled - _values()[codes].astype(np.float32)), scales


def _scaled(q: npt.ArrayLike) -> tuple[Array, Array]:
    """Rows in units of their scales, as float32, and these."""
    rows = np.asarray(q).astype(np.float64)
    with np.errstate(invalid="ignore"):
        largest = np.abs(rows).max(axis=-1, initial=0.0)
        fraction, exponent = np.frexp(largest / MAX_E4M3)
        exponent = np.where(fraction == 0.5, exponent - 1, exponent)  # a power of two itself
        exponent = np.where(largest == 0, LEAST_EXPONENT, exponent)
        scales = np.ldexp(1.0, np.maximum(exponent, LEAST_EXPONENT))
        scales = np.where(np.isfinite(largest), scales, np.nan)
        return (rows / scales[..., None]).astype(np.float32), scales  # exact, or below what counts


def dequantised(q: npt.ArrayLike, *, terms: int = 1) -> Array:
    """Return the rows that products in FP8 multiply, in float64: the numbers of e4m3 codes, or rounded ones.

    With two `terms` rounded ones are sums of two numbers of e4m3.
    """
    rows = np.asarray(q)
    if rows.dtype.name in BYTE_DTYPES:
        return _values()[rows.view(np.uint8)]
    codes, remainders, scales = quantise_query_terms(rows)
    numbers = _values()[codes] if terms == 1 else _values()[codes] + _values()[remainders]
    rounded: Array = numbers * scales[..., None]
    return rounded


def _codes(x: Array) -> Array:
    """The e4m3 codes of numbers of magnitude up to 448, ties to even; of NaN 0x7F."""
    with np.errstate(invalid="ignore"):
        return np.where(np.isnan(x), np.uint8(0x7F), x.astype(_E4M3).view(np.uint8))


def _values() -> Array:
    """The number of each code."""
    values: Array = np.arange(256, dtype=np.uint8).view(_E4M3).astype(np.float64)
    return values
