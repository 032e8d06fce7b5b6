"""The element types of the kernels, each described once, and rounding to them in NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from mla_cupy.errors import DTypeError, explain


@dataclass(frozen=True)
class DType:
    """One element type. NumPy, `ml_dtypes` and PyTorch share its name.

    Attributes
    ----------
    name : str
    numpy : numpy.dtype
    tensor_map : int or None
        `CUtensorMapDataType` of a TMA copy; 8-bit floats travel as bytes. None if TMA has no such type.
    unit_roundoff : float
        Largest relative error of rounding a normal number to nearest; 0 for integers.
    """

    name: str
    numpy: np.dtype[Any]
    tensor_map: int | None = None
    unit_roundoff: float = 0.0

    @property
    def nbytes(self) -> int:
        """Size of an element in bytes."""
        return self.numpy.itemsize


#: Every element type by name.
TABLE: dict[str, DType] = {
    row.name: row
    for row in (
        DType("bfloat16", np.dtype(ml_dtypes.bfloat16), 9, 2.0**-8),
        DType("float16", np.dtype(np.float16), 6, 2.0**-11),
        DType("float32", np.dtype(np.float32), 7, 2.0**-24),
        DType("float64", np.dtype(np.float64), 8, 2.0**-53),
        DType("float8_e4m3fn", np.dtype(ml_dtypes.float8_e4m3fn), 0, 2.0**-4),
        DType("float8_e8m0fnu", np.dtype(ml_dtypes.float8_e8m0fnu), 0, 2.0**-1),
        DType("int32", np.dtype(np.int32), 3),
        DType("int64", np.dtype(np.int64), 5),
        DType("uint64", np.dtype(np.uint64), 4),
        DType("uint8", np.dtype(np.uint8), 0),
    )
}
#: The 16-bit types of queries, caches and results.
HALF = ("bfloat16", "float16")
#: The types that results may have before they are merged or added up.
FLOATS = (*HALF, "float32")

_NAMES = {row.numpy: row.name for row in TABLE.values()}


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of an element type: `numpy_dtype("bfloat16")`."""
    if name not in TABLE:
        raise DTypeError(explain("dtype", repr(name), f"one of {', '.join(TABLE)}"))
    return TABLE[name].numpy


def dtype_name(dtype: npt.DTypeLike) -> str:
    """The name of an element type: the inverse of `numpy_dtype`."""
    name = _NAMES.get(np.dtype(dtype))
    if name is None:
        raise DTypeError(explain("dtype", np.dtype(dtype).name, f"one of {', '.join(TABLE)}"))
    return name


def name_of(dtype: Any) -> str:
    """The name of a dtype of any library, of a scalar type, or the name itself; "" for anything else."""
    if isinstance(dtype, str):
        return dtype
    if isinstance(dtype, np.dtype):
        return str(dtype.name)
    name = str(dtype).rpartition(".")[2] if str(type(dtype).__module__).partition(".")[0] == "torch" else ""
    return name or str(getattr(dtype, "__name__", getattr(dtype, "name", "")))


def round_to(x: npt.ArrayLike, name: str) -> npt.NDArray[Any]:
    """Round to the nearest value of an element type, ties to even.

    Parameters
    ----------
    x : array of float32 or float64
        The values to round.
    name : str
        The name of a floating-point type.

    Returns
    -------
    array
        The rounded values, still in the dtype of `x`. Values beyond the largest finite one of the type become
        infinite, or NaN where the type has no infinity; NaN stays NaN.

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
    target = numpy_dtype(name)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        # ml_dtypes converts float64 by way of float32: rounding that step to odd makes the two steps act as one.
        narrow = x if target.kind == "f" and target.itemsize > 1 else _round_to_odd_float32(x)
        return narrow.astype(target).astype(x.dtype)


def _round_to_odd_float32(x: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """float32 towards zero, with the last bit set where anything was cut off."""
    nearest = x.astype(np.float32)
    toward_zero = np.where(np.abs(nearest) > np.abs(x), np.nextafter(nearest, np.float32(0)), nearest)
    inexact = toward_zero != x
    bits: npt.NDArray[np.uint32] = toward_zero.view(np.uint32) | inexact
    return bits.view(np.float32)
