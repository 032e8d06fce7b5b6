"""Results of decode in e4m3 with a scale per 128 columns: the rule byte by byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mla_cupy.cache_formats import BYTE_DTYPES, MAX_E4M3
from mla_cupy.dtypes import name_of, round_to
from mla_cupy.reference.cache import from_e4m3, to_e4m3

Array = npt.NDArray[Any]

#: Columns of a scale.
COLUMNS = 128
#: Least magnitude that a scale serves: a block of zeros has a scale, too.
LEAST_AMAX = 1e-4


def quantise_results(out: npt.ArrayLike, scales: str = "plain") -> tuple[Array, Array]:
    """Round blocks of 128 columns to e4m3, each with its own scale.

    Parameters
    ----------
    out : array, (..., n)
        Numbers that float32 holds; n is a multiple of 128.
    scales : str
        "plain": max(|out|, 1e-4) / 448 of each block, where 1 / 448 and the product are rounded to float32;
        "power_of_2": the least power of two that is not below this.

    Returns
    -------
    codes : array of uint8, (..., n)
        e4m3 numbers of out / scale, rounded to nearest, ties to even; magnitudes above 448 are 448. A block with NaN or
        infinity is 0x7F, the NaN, throughout.
    scales : array of float32, (..., n / 128)
        What the codes are to be multiplied by; NaN for a block with NaN or infinity.
    """
    numbers = np.asarray(out).astype(np.float32)
    blocks = numbers.reshape(*numbers.shape[:-1], -1, COLUMNS)
    with np.errstate(invalid="ignore"):
        largest = np.abs(blocks).max(axis=-1)
        factors = np.maximum(largest, np.float32(LEAST_AMAX)) * np.float32(1 / MAX_E4M3)
        if scales == "power_of_2":
            fraction, exponent = np.frexp(factors)
            factors = np.ldexp(np.float32(1), exponent - (fraction == 0.5))
        factors = np.where(np.isfinite(largest), factors, np.float32(np.nan))
        codes = to_e4m3(blocks / factors[..., None])
    return codes.reshape(numbers.shape), factors


def with_fp8(out: Array, lse: Array, half: str, out_dtype: Any, scales: str) -> tuple[Array, ...]:
    """The results of a call: with an FP8 `out_dtype`, `out` is rounded to 16 bits, then to e4m3, and scales follow."""
    if out_dtype is None or name_of(out_dtype) not in BYTE_DTYPES:
        return out, lse
    codes, factors = quantise_results(round_to(out, half), scales)
    return from_e4m3(codes).astype(np.float64), lse, factors.astype(np.float64)
