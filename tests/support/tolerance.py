"""The tolerance rule: a kernel may err twice as much as the oracle that makes the kernel's roundings.

Errors of `out` are measured in units of the largest value of their row (the last axis), so that a row of small values
is held to as many digits as a row of large ones; errors of `lse` as they are. A result passes if

- it is infinite and NaN exactly where the exact one is,
- its largest error is at most twice the largest one of the rounded oracle (of several seeds, see `error_of`), and what
  goes beyond is at most `OUT_FLOOR_ULPS` units in the last place of the value,
- no row's cosine distance is more than four times the largest one of the rounded oracle (it is quadratic in the error).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mla_cupy import dtypes

Array = npt.NDArray[Any]

SLACK = 2.0
OUT_FLOOR_ULPS = 1.0
#: float32 sums in another order: tensor cores cut off bits at each of the 36 steps of a 576-wide dot product.
LSE_FLOOR_ULPS = 32.0


def check_out(
    got: Array,
    exact: Array,
    rounded: Array,
    dtype: str,
    *,
    budget: float = 0.0,
    least_unit: Array | float = 0.0,
    direction: float = 0.0,
    name: str = "out",
) -> None:
    """Assert the rule for `out`, stored as `dtype`; `budget` is the largest `error_of` other seeds, if known.

    Rows whose largest value is below `least_unit` (a number for each row) are what is left when large terms cancel:
    their errors are measured in that unit, and their directions say nothing. `direction` is an angle by which any row
    may be off besides, in radians.
    """
    peak = _row_peak(exact)
    unit = np.maximum(peak, least_unit)
    got = _comparable(name, got, exact)
    floor = OUT_FLOOR_ULPS * _ulp(exact, dtype) / unit
    expected = max(budget, _largest(_errors(rounded, exact, unit)))
    _check_errors(name, got, exact, unit, expected, floor)
    rows = (peak >= least_unit)[..., 0]
    angle = max(direction, float(_ulp(np.ones(1), dtype)[0]))
    _check_directions(name, got[rows], exact[rows], np.asarray(rounded, np.float64)[rows], angle)


def check_lse(got: Array, exact: Array, rounded: Array, *, budget: float = 0.0) -> None:
    """Assert the rule for `lse`."""
    got = _comparable("lse", got, exact)
    finite = np.where(np.isfinite(exact), exact, 0.0)
    unit = np.ones_like(finite)
    floor = LSE_FLOOR_ULPS * _ulp(np.maximum(np.abs(finite), 1.0), "float32")
    _check_errors("lse", got, exact, unit, max(budget, _largest(_errors(rounded, exact, unit))), floor)


def check(got: tuple[Array, Array], exact: tuple[Array, Array], rounded: tuple[Array, Array], dtype: str) -> None:
    """Assert the rule for (out, lse)."""
    check_out(got[0], exact[0], rounded[0], dtype)
    check_lse(got[1], exact[1], rounded[1])


def error_of(rounded: Array, exact: Array) -> float:
    """The largest error of the rounded oracle's `out`: the `budget` of a case is its maximum over seeds."""
    return _largest(_errors(rounded, exact, _row_peak(exact)))


def _comparable(name: str, got: Array, exact: Array) -> Array:
    """`got` in float64, once its shape, infinities and NaN are known to be correct."""
    got = np.asarray(got).astype(np.float64)
    if got.shape != exact.shape:
        raise AssertionError(f"{name}: shape {got.shape}, expected {exact.shape}")
    odd = (~np.isfinite(got) | ~np.isfinite(exact)) & ~((got == exact) | (np.isnan(got) & np.isnan(exact)))
    if odd.any():
        where = tuple(map(int, np.argwhere(odd)[0]))
        raise AssertionError(
            f"{name}: infinity or NaN at the wrong place in {int(odd.sum())} of {odd.size} elements, "
            f"the first at {where}: got {got[where]}, exact {exact[where]}"
        )
    return got


def _check_errors(name: str, got: Array, exact: Array, unit: Array, expected: float, floor: Array) -> None:
    errors = _errors(got, exact, unit)
    excess = errors - np.where(np.isfinite(floor), floor, 0.0) - SLACK * expected
    if errors.size and excess.max() > 0:
        where = tuple(map(int, np.unravel_index(np.argmax(excess), excess.shape)))
        raise AssertionError(
            f"{name}: error {errors[where]:.3e} at {where}, got {got[where]:.9g}, exact {exact[where]:.9g}; "
            f"allowed {SLACK:g} x {expected:.3e} (the rounded oracle's largest) + {floor[where]:.3e}; "
            f"{int((excess > 0).sum())} of {excess.size} elements are out"
        )


def _check_directions(name: str, got: Array, exact: Array, rounded: Array, angle: float) -> None:
    distance = _cosine_distance(got, exact)
    allowed = SLACK**2 * _largest(_cosine_distance(rounded, exact)) + angle**2
    if distance.size and distance.max() > allowed:
        where = tuple(map(int, np.unravel_index(np.argmax(distance), distance.shape)))
        raise AssertionError(f"{name}: cosine distance {distance[where]:.3e} of row {where}, allowed {allowed:.3e}")


def _errors(got: Array, exact: Array, unit: Array) -> Array:
    """|got - exact| / unit; 0 where the exact value is infinite or NaN."""
    finite = np.isfinite(exact)
    difference = np.asarray(got).astype(np.float64) - np.where(finite, exact, 0.0)
    return np.where(finite, np.abs(np.where(finite, difference, 0.0)) / unit, 0.0)


def _row_peak(exact: Array) -> Array:
    """The largest finite magnitude of each row, kept as an axis; next to nothing for a row of zeros (it must be 0)."""
    peak = np.where(np.isfinite(exact), np.abs(exact), 0.0).max(axis=-1, keepdims=True, initial=0.0)
    return np.where(peak == 0, 1e-30, peak)


def _cosine_distance(got: Array, exact: Array) -> Array:
    """1 - cos of the rows, from their normalised difference (exact also where they nearly agree); 0 for zero rows."""
    finite = np.isfinite(exact)
    directions = []
    for x in (got, exact):
        x = np.where(finite, x, 0.0)
        norm = np.linalg.norm(x, axis=-1, keepdims=True)
        directions.append(x / np.where(norm == 0, 1.0, norm))
    distance = np.sum((directions[0] - directions[1]) ** 2, axis=-1) / 2
    return np.where(np.any(exact != 0, axis=-1), distance, 0.0)


def _ulp(x: Array, dtype: str) -> Array:
    """The distance from |x| to the next value of the format."""
    magnitude = np.where(np.isfinite(x), np.abs(x), 0.0).astype(dtypes.numpy_dtype(dtype))
    spacing: Array = np.spacing(magnitude)
    return spacing.astype(np.float64)


def _largest(errors: Array) -> float:
    return float(errors.max(initial=0.0))
