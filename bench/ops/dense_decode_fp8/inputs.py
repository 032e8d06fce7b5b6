"""The arrays of a case: records, and rows of the numbers that they hold, which any 16-bit format holds exactly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import mla_cupy
from mla_cupy.shapes import D_ROPE

from ...core.cost import D_QK, D_V
from ...core.device import Device
from ..decode.inputs import InputSet, shuffled_table
from .cases import Fp8DecodeCase


@dataclass(frozen=True)
class Fp8InputSet(InputSet):
    """One set of inputs; `kv_cache` has the rows."""

    records: Any  # (num_pages, page_size, 656), or 576 of "fp8", uint8


def make_inputs(case: Fp8DecodeCase, dtype: str, seed: int, device: Device) -> Fp8InputSet:
    """Random queries and latents, quantised with scales that are powers of two, "fp8" with 1; in shuffled pages."""
    table, seqlens = shuffled_table(case, seed), case.lengths()
    tokens = case.num_pages * case.page_size
    records = device.empty((case.num_pages, case.page_size, case.record.token_bytes), "uint8")
    slots = device.upload(np.arange(tokens, dtype=np.int32))
    latent = device.normal((tokens, D_V), dtype, 3 * seed + 2, *((0.5, 1.0) if case.mean1 else ()))
    rope = device.normal((tokens, D_ROPE), dtype, 3 * seed + 3)
    with device.current():
        mla_cupy.cache_append(latent, rope, records, slots)
        rows = mla_cupy.cache_gather(records, slots, out_dtype=dtype)
    return Fp8InputSet(
        q=_queries(case, dtype, 3 * seed + 1, device),
        kv_cache=rows.reshape(case.num_pages, case.page_size, 1, D_QK),
        block_table=device.upload(table),
        seqlens=device.upload(seqlens),
        host_table=table,
        host_seqlens=seqlens,
        records=records,
    )


def _queries(case: Fp8DecodeCase, dtype: str, seed: int, device: Device) -> Any:
    """Random queries; over "fp8" numbers of e4m3, rounded as the tokens of a cache are, unless they are `wide`."""
    shape = (case.b, case.s_q, case.h_q, D_QK)
    queries = device.normal(shape, dtype, seed)
    if not case.one_scale or case.wide_queries:
        return queries
    return e4m3_numbers(queries.reshape(-1, D_QK), dtype, device).reshape(shape)


def e4m3_numbers(rows: Any, dtype: str, device: Device) -> Any:
    """Rows of 576 numbers, rounded as the tokens of a cache of the record "fp8" are."""
    records = device.empty((len(rows), 1, D_QK), "uint8")
    slots = device.upload(np.arange(len(rows), dtype=np.int32))
    with device.current():
        mla_cupy.cache_append(rows[:, :D_V], rows[:, D_V:], records, slots)
        return mla_cupy.cache_gather(records, slots, out_dtype=dtype)
