"""The arrays of a case."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

import mla_cupy

from ...core.device import Device
from .cases import D_ROPE, LossCase

Array = npt.NDArray[Any]
POOL = 8192  # vectors that are drawn; more than these repeat them in random order


@dataclass(frozen=True)
class LossInputs:
    """One set of inputs: the arrays of the oracle's call by name, on the device and in NumPy."""

    arguments: dict[str, Any]
    host: dict[str, Array]

    @property
    def call(self) -> dict[str, Any]:
        """The arguments of the public call."""
        starts = ("cu_seqlens_q", "cu_seqlens_kv")
        others = {name: x for name, x in self.arguments.items() if name not in starts}
        return {**others, "packed": mla_cupy.Packed(*(self.arguments[name] for name in starts))}


@dataclass(frozen=True)
class LossOutputs:
    """Results of a call. `kl` is None for implementations that only have gradients; what is no loss at all has but one
    array, for its time to be compared.
    """

    kl: Any
    d_index_q: Any
    d_index_k: Any
    d_weights: Any


def make_inputs(case: LossCase, dtype: str, seed: int, device: Device) -> LossInputs:
    """Normal numbers in bfloat16, whatever `dtype` is. The log-sum-exps are near those of the attention, which would
    take as long as the loss; targets are normalised anyway.
    """
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> Array:
        vectors = math.prod(shape[:-1])
        pool = rng.standard_normal((min(POOL, vectors), shape[-1]), np.float32).astype(ml_dtypes.bfloat16)
        made: Array = pool.reshape(shape) if vectors <= POOL else pool[rng.integers(0, POOL, shape[:-1])]
        return made

    starts = (case.s * np.arange(case.b + 1)).astype(np.int32)
    position = np.arange(case.tokens) % case.s
    counts = np.minimum(position + 1, case.topk or case.s)
    lse = np.log(counts)[:, None] + rng.uniform(0.4, 0.6, (case.tokens, case.h))
    host = {
        "q": normal(case.tokens, case.h, case.d),
        **_keys(case, normal),
        "index_q": normal(case.tokens, case.h_i, case.d_i),
        "index_k": normal(case.tokens, case.d_i),
        "weights": rng.standard_normal((case.tokens, case.h_i), np.float32),
        **({} if case.per_head else {"lse": lse.astype(np.float32)}),
        "cu_seqlens_q": starts,
        "cu_seqlens_kv": starts,
    }
    if case.fp8:
        host |= _codes(host)
    if case.per_head:
        host["v"] = normal(case.tokens, case.d)
    if case.topk:
        host["indices"] = np.full((case.tokens, case.topk), -1, np.int32)
        for row, last, count in zip(host["indices"], position, counts, strict=True):
            row[:count] = np.sort(rng.choice(last + 1, count, replace=False, shuffle=False))
    arguments = {name: device.upload(x) for name, x in host.items()}
    if case.mha:
        for arrays in (arguments, host):
            arrays["k"] = arrays["k"][..., : case.d - D_ROPE]
    return LossInputs(arguments, host)


def _keys(case: LossCase, normal: Callable[..., Array]) -> dict[str, Array]:
    """Keys of all heads, or of each: half of a projection's output, beside the values, and the last columns."""
    if not case.mha:
        return {"k": normal(case.tokens, case.d)}
    return {"k": normal(case.tokens, case.h, 2 * (case.d - D_ROPE)), "k_rope": normal(case.tokens, D_ROPE)}


def _codes(host: dict[str, Array]) -> dict[str, Array]:
    """Index queries and keys as e4m3, times 64 before they are rounded; weights with all factors."""
    _, h_i, d_i = host["index_q"].shape
    codes = {
        name: (host[name].astype(np.float32) * 64).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        for name in ("index_q", "index_k")
    }
    folded = host["weights"] * np.float32((h_i * d_i) ** -0.5 / 64)
    scales = {
        "q_scale": np.full(folded.shape, 1 / 64, np.float32),
        "k_scale": np.full(len(codes["index_k"]), 1 / 64, np.float32),
    }
    return {**codes, "weights": folded, **scales}
