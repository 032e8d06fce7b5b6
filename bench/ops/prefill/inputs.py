"""The arrays of a case of un-absorbed prefill: as projections leave them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

import mla_cupy

from ...core.device import Device
from .cases import D_ROPE, PrefillCase

SELECTION_BYTES = 1 << 28
"""Bytes of random numbers from which a selection is made at once."""


@dataclass(frozen=True)
class PrefillInputs:
    """One set of inputs; `kv` holds keys, but for their last 64 columns, and values."""

    q: Any  # (b s_q, h_q, d_qk)
    kv: Any  # (b s_kv, h_kv, d_qk - 64 + d_v)
    k_rope: Any  # (b s_kv, 64)
    starts_q: Any  # (b + 1,) int32
    starts_kv: Any
    state_out: Any  # (b s_q, h_q, d_v) float32; None without a state
    state_lse: Any  # (b s_q, h_q)
    indices: Any  # (b s_q, topk) int32, ascending, of the query's sequence; None without a selection
    mask: Any  # (b s_q, mask_bytes) uint8, for what indices are made into


@dataclass(frozen=True)
class PrefillOutputs:
    """Results of a call; `lse` is (b s_q, h_q), natural, or None."""

    out: Any
    lse: Any


def make_inputs(case: PrefillCase, dtype: str, seed: int, device: Device) -> PrefillInputs:
    """Random operands."""
    queries, keys = case.b * case.s_q, case.b * case.s_kv
    state_out = state_lse = None
    if case.state:
        rng = np.random.default_rng(seed)
        state_out = device.upload(rng.standard_normal((queries, case.h_q, case.d_v), np.float32))
        state_lse = device.upload(rng.standard_normal((queries, case.h_q), np.float32) + np.float32(8))
    shapes = (
        (queries, case.h_q, case.d_qk),
        (keys, case.heads_kv, case.d_qk - D_ROPE + case.d_v),
        (keys, D_ROPE),
    )
    q, kv, k_rope = (
        _normal_codes(device, shape, 3 * seed + i) if case.fp8 else device.normal(shape, dtype, 3 * seed + i)
        for i, shape in enumerate(shapes, 1)
    )
    return PrefillInputs(
        q=q,
        kv=kv,
        k_rope=k_rope,
        starts_q=device.upload(np.arange(0, queries + 1, case.s_q, dtype=np.int32)),
        starts_kv=device.upload(np.arange(0, keys + 1, case.s_kv, dtype=np.int32)),
        state_out=state_out,
        state_lse=state_lse,
        indices=choose_indices(case, seed, device) if case.topk else None,
        mask=device.empty((queries, mask_bytes(case)), "uint8") if case.topk else None,
    )


def _normal_codes(device: Device, shape: tuple[int, ...], seed: int) -> Any:
    """Random e4m3 codes of deviation 1, as bytes: those of the nearest numbers to bfloat16 ones, by a table."""
    all_bfloat16 = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        table = all_bfloat16.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return device.upload(table)[device.normal(shape, "bfloat16", seed).view(np.uint16)]


def mask_bytes(case: PrefillCase) -> int:
    """Bytes of a row of the mask."""
    return 16 * -(-case.s_kv // 128)


def choose_indices(case: PrefillCase, seed: int, device: Device) -> Any:
    """A random selection of what each query sees, as the indexer makes it: all, if that is fewer than topk."""
    queries = np.arange(case.s_q, dtype=np.int32)
    ends = (
        np.clip(case.s_kv - case.s_q + 1 + queries, 0, case.s_kv) if case.causal else np.full_like(queries, case.s_kv)
    )
    indices = device.empty((case.b * case.s_q, case.topk), "int32")
    rows = max(1, SELECTION_BYTES // (2 * case.s_kv))
    for begin in range(0, case.b * case.s_q, rows):
        some = np.arange(begin, min(begin + rows, case.b * case.s_q))
        logits = device.normal((len(some), case.s_kv), "bfloat16", 7 * seed + begin)
        ke = device.upload(ends[some % case.s_q].astype(np.int32))
        mla_cupy.indexer_topk(logits, case.topk, ke=ke, return_values=False, indices=indices[some[0] : some[-1] + 1])
    return indices
