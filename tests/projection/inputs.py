"""Inputs of projections: weights as they lie in kv_b_proj, partial results with gaps, means, giants and poison."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mla_cupy import dtypes
from tests.support.calls import Array

D_NOPE = 128


class States(NamedTuple):
    """Partial results, and what they are multiplied by."""

    outs: Array
    w_uv: Array
    lses: Array
    gate: Array

    @property
    def arrays(self) -> dict[str, Any]:
        """Arrays by name."""
        return self._asdict()


def kv_b_proj(rng: np.random.Generator, h: int, d_nope: int, d_head: int, dtype: str) -> tuple[Array, Array]:
    """Views of the two halves of a matrix with a mean."""
    rows = rng.standard_normal((h, d_nope + d_head, 512), np.float32) * 0.05 + 0.01
    whole = rows.astype(dtypes.numpy_dtype(dtype))
    return whole[:, :d_nope], whole[:, d_nope:]


def states(
    n: int,
    b: int = 2,
    s_q: int = 1,
    h: int = 2,
    d_head: int = 128,
    dtype: str = "bfloat16",
    outs_dtype: str = "float32",
    seed: int = 0,
) -> States:
    """A quarter of the states is empty, with NaN for outputs; the first row is empty in all of them."""
    rng = np.random.default_rng(seed)
    whole = np.full((n, b, s_q, h, 512 + 8), np.nan, dtypes.numpy_dtype(outs_dtype))
    outs = whole[..., :512]
    outs[...] = rng.standard_normal(outs.shape, np.float32) + 0.25
    lses = np.full((n, b, h, 2 * s_q), np.nan, np.float32)[..., ::2]
    lses[...] = 3 * rng.standard_normal(lses.shape, np.float32)
    empty = rng.random(lses.shape) < 0.25
    empty[:, 0, 0, 0] = True
    lses[empty] = rng.choice(np.array([-np.inf, np.inf], np.float32), int(empty.sum()))
    outs[np.swapaxes(empty, -1, -2)] = np.nan
    _, w_uv = kv_b_proj(rng, h, D_NOPE, d_head, dtype)
    gates = rng.standard_normal((b, s_q, h, d_head + 16), np.float32).astype(w_uv.dtype)
    gates[..., 0] = 300  # a gate that is open, and one that is shut
    gates[..., 1] = -300
    return States(outs, w_uv, lses, gates[..., :d_head])
