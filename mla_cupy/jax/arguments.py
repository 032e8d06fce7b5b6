"""Checks of the callers' arrays: JAX's, or NumPy's, which JAX's functions accept."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mla_cupy import arrays
from mla_cupy.dtypes import TABLE
from mla_cupy.errors import DTypeError, explain, kind_of
from mla_cupy.ops.schema import narrowed


def as_jax(argument: str, x: Any) -> Any:
    """An array of JAX; None stays None.

    Without `jax_enable_x64` JAX would cut NumPy's 64-bit numbers to 32 bits: integers that fit are taken.

    Raises
    ------
    DTypeError
        If it is no array, or has a dtype that JAX has not.
    ArgumentError
        If an integer does not fit.
    """
    if x is None or isinstance(x, jax.Array):
        return x
    if not isinstance(x, np.ndarray):
        raise DTypeError(explain(argument, kind_of(x), "an array of JAX or NumPy"))
    dtype = arrays.family_of(x, argument).native.view(x, argument).dtype
    if dtype == "int64" and not jax.config.jax_enable_x64:
        return jnp.asarray(narrowed(argument, x))
    if dtype not in TABLE or jax.dtypes.canonicalize_dtype(x.dtype) != x.dtype:
        remedy = f"convert {argument}; JAX has numbers of 64 bits with jax_enable_x64"
        raise DTypeError(explain(f"{argument}.dtype", dtype, "one that JAX has", remedy))
    return jnp.asarray(x)
