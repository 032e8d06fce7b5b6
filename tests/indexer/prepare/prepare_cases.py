"""Index queries and keys with everything that is hard to round, and what becomes of them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from mla_cupy import reference
from mla_cupy.ops.backend import rounded

Array = np.ndarray[Any, Any]
POSITIONS = 40


def arrays(name: str, d: int, pairs: int = 0, tokens: int = 5, heads: int = 3, seed: int = 0) -> dict[str, Array]:
    """The inputs of `indexer_prepare_q` or `indexer_prepare_k`; half of each vector turns, by default."""
    rng = np.random.default_rng(seed)
    pairs = pairs or d // 4
    angles = np.arange(POSITIONS)[:, None] * 1000.0 ** -(np.arange(pairs) / pairs)
    positions = rng.integers(0, POSITIONS, tokens).astype(np.int32)
    positions[:2] = -3, 2**31 - 1
    shape = (tokens, heads, d) if name == "prepare_q" else (tokens, d)
    x = rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 4, (*shape[:-1], 1))
    flat = x.reshape(-1, d)
    flat[0], flat[1], flat[2] = 0, 448, 2.0**-130
    flat[3, 1:], flat[4, ::2] = 0, 3e38
    named = {"q": x, "weights": rng.standard_normal(shape[:-1])} if name == "prepare_q" else {"k": x}
    tables = {"cos": np.cos(angles), "sin": np.sin(angles)}
    found: dict[str, Array] = {key: value.astype(np.float32) for key, value in (*named.items(), *tables.items())}
    for key in ("q", "k"):
        if key in found:
            found[key] = found[key].astype(ml_dtypes.bfloat16)
    return {**found, "positions": positions}


def norm(d: int, seed: int = 9) -> dict[str, Array]:
    """The weights of a LayerNorm."""
    weight, bias = np.random.default_rng(seed).standard_normal((2, d), np.float32)
    return {"norm_weight": weight, "norm_bias": bias}


def both(d: int, pairs: int = 0, tokens: int = 5, heads: int = 3) -> dict[str, Array]:
    """The inputs of `indexer_prepare`: queries and keys of the same tokens, a mean among the keys, and their norm."""
    inputs = arrays("prepare_q", d, pairs, tokens, heads)
    k = arrays("prepare_k", d, pairs, tokens, seed=1)["k"]
    k[-1] = (k[-1].astype(np.float32) + 100).astype(k.dtype)
    return {**inputs, "k": k, **norm(d)}


def expected(name: str, inputs: dict[str, Array], **options: Any) -> list[Array]:
    """The oracle's codes, as bytes, and its weights or scales; for "prepare" also the keys'."""
    results = getattr(reference, f"indexer_{name}")(**inputs, **options)
    return rounded(results, ("uint8", "float32") * (len(results) // 2))
