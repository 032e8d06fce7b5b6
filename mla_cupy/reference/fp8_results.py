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


def quantise_results(out: npt.ArrayLike) -> tuple[Array, Array]:
    """Round blocks of 128 columns to e4m3, each with its own scale.

    Parameters
    ----------
    out : array, (..., n)
        Numbers that float32 holds; n is a multiple of 128.

    Returns
    -------
    codes : array of uint8, (..., n)
        e4m3 numbers of out / scale, rounded to nearest, ties to even; magnitudes above 448 are 448. A block with NaN or
        infinity is 0x7F, the NaN, throughout.
    scales : array of float32, (..., n / 128)
        max(|out|, 1e-4) / 448 of each block, where 1 / 448 and the product are rounded to float32; NaN for a block with
        NaN or infinity.
    """
    numbers = np.asarray(out).astype(np.float32)
    blocks = numbers.reshape(*numbers.shape[:-1], -1, COLUMNS)
    with np.errstate(invalid="ignore"):
        largest = np.abs(blocks).max(axis=-1)
        scales = np.maximum(largest, np.float32(LEAST_AMAX)) * np.float32(1 / MAX_E4M3)
        scales = np.where(np.isfinite(largest), scales, np.float32(np.nan))
        codes = to_e4m3(blocks / scales[..., None])
    return codes.reshape(numbers.shape), scales


def with_fp8(out: Array, lse: Array, half: str, out_dtype: Any) -> tuple[Array, ...]:
    """The results of a call: with an FP8 `out_dtype`, `out` is rounded to 16 bits, then to e4m3, and scales follow."""
    if out_dtype is None or name_of(out_dtype) not in BYTE_DTYPES:
        return out, lse
    codes, scales = quantise_results(round_to(out, half))
    return from_e4m3(codes).astype(np.float64), lse, scales.astype(np.float64)
