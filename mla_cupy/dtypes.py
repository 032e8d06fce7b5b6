"""The number formats of the kernels, and rounding to them in NumPy (`ml_dtypes` supplies what NumPy lacks)."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from mla_cupy.errors import DTypeError, explain

#: The formats by name.
DTYPES: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a format: `numpy_dtype("bfloat16")`."""
    if name not in DTYPES:
        raise DTypeError(explain("dtype", repr(name), f"one of {', '.join(DTYPES)}"))
    return DTYPES[name]


def dtype_name(dtype: npt.DTypeLike) -> str:
    """The name of a format: the inverse of `numpy_dtype`."""
    name = _NAMES.get(np.dtype(dtype))
    if name is None:
        raise DTypeError(explain("dtype", np.dtype(dtype).name, f"one of {', '.join(DTYPES)}"))
    return name


def round_to(x: npt.ArrayLike, name: str) -> npt.NDArray[Any]:
    """Round to the nearest value of a format, ties to even.

    Parameters
    ----------
    x : array of float32 or float64
        The values to round.
    name : str
        "bfloat16", "float16", "float32" or "float64".

    Returns
    -------
    array
        The rounded values, still in the dtype of `x`. Values beyond the largest finite one of the format become
        infinite; NaN stays NaN.

    Examples
    --------
    >>> float(round_to(1 + 2**-8, "bfloat16"))  # a tie between 1 and 1 + 2**-7
    1.0
    >>> float(round_to(1 + 2**-8 + 2**-40, "bfloat16"))  # above the tie
    1.0078125
    """
    x = np.asarray(x)
    if x.dtype not in (np.float32, np.float64):
        raise DTypeError(explain("x", x.dtype.name, "float32 or float64"))
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        # ml_dtypes converts float64 by way of float32: rounding that step to odd makes the two steps act as one.
        narrow = _round_to_odd_float32(x) if name == "bfloat16" else x
        return narrow.astype(numpy_dtype(name)).astype(x.dtype)


def _round_to_odd_float32(x: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """float32 towards zero, with the last bit set where anything was cut off."""
    nearest = x.astype(np.float32)
    toward_zero = np.where(np.abs(nearest) > np.abs(x), np.nextafter(nearest, np.float32(0)), nearest)
    inexact = toward_zero != x
    bits: npt.NDArray[np.uint32] = toward_zero.view(np.uint32) | inexact
    return bits.view(np.float32)
