"""The arrays of a case: pages of records, and rows of the numbers that they hold, exact in any 16-bit format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import mla_cupy

from ...core.device import Device
from ..dense_decode_fp8.inputs import e4m3_numbers
from ..sparse.inputs import SparseInputs, choose_indices
from .cases import PAGE_SIZE, Fp8ForwardCase


@dataclass(frozen=True)
class Fp8ForwardInputs(SparseInputs):
    """One set of inputs; `kv` has the rows."""

    records: Any  # (num_pages, 64, bytes of a token) uint8
    slots: Any  # (s_kv,) int32: all of them


def make_inputs(case: Fp8ForwardCase, dtype: str, seed: int, device: Device) -> Fp8ForwardInputs:
    """Random queries and latents, quantised with scales that are powers of two, with the case's indices.

    "fp8" has the scale 1, and queries that are numbers of e4m3, so that all compute the same.
    """
    record, pages = case.record, case.s_kv // PAGE_SIZE
    whole = device.empty((pages, record.page_bytes(PAGE_SIZE)), "uint8")
    records = whole[:, : PAGE_SIZE * record.token_bytes].reshape(pages, PAGE_SIZE, record.token_bytes)
    slots = device.upload(np.arange(case.s_kv, dtype=np.int32))
    latent = device.normal((case.s_kv, record.d_latent), dtype, 3 * seed + 2)
    rope = device.normal((case.s_kv, record.d_rope), dtype, 3 * seed + 3)
    with device.current():
        mla_cupy.cache_append(latent, rope, records, slots)
        rows = mla_cupy.cache_gather(records, slots, out_dtype=dtype)
    indices = choose_indices(case, seed)
    return Fp8ForwardInputs(
        q=_queries(case, dtype, 3 * seed + 1, device),
        kv=rows,
        indices=device.upload(indices),
        host_indices=indices,
        records=records,
        slots=slots,
    )


def _queries(case: Fp8ForwardCase, dtype: str, seed: int, device: Device) -> Any:
    """Random queries; over "fp8" numbers of e4m3, rounded as the tokens of a cache are."""
    shape = (case.s_q, case.h_q, case.d_qk)
    queries = device.normal(shape, dtype, seed)
    return e4m3_numbers(queries.reshape(-1, case.d_qk), dtype, device).reshape(shape) if case.fp8_math else queries
