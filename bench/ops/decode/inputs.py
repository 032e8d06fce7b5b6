"""The arrays of one decode case, which every implementation reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...core.device import Device
from .cases import DecodeCase


@dataclass(frozen=True)
class InputSet:
    """One set of inputs: arrays of the device's library, shared by all implementations and never written.

    `host_table` and `host_seqlens` are the same values in NumPy.
    """

    q: Any  # (b, s_q, h_q, d_qk)
    kv_cache: Any  # (num_pages, page_size, 1, d_qk)
    block_table: Any  # (b, max_pages) int32
    seqlens: Any  # (b,) int32
    host_table: npt.NDArray[np.int32]
    host_seqlens: npt.NDArray[np.int32]


@dataclass(frozen=True)
class Outputs:
    """Results of a call: out (b, s_q, h_q, d_v), and lse (b, h_q, s_q) in natural log where it is returned."""

    out: Any
    lse: Any | None


def make_inputs(case: DecodeCase, dtype: str, seed: int, device: Device) -> InputSet:
    """Random queries and latents; the keys are in shuffled pages."""
    return inputs_of(case, dtype, seed, device, shuffled_table(case, seed))


def inputs_of(case: DecodeCase, dtype: str, seed: int, device: Device, table: npt.NDArray[np.int32]) -> InputSet:
    """Random queries, and random latents in the pages of this block table."""
    seqlens = case.lengths()
    return InputSet(
        q=device.normal((case.b, case.s_q, case.h_q, case.d_qk), dtype, 2 * seed + 1),
        kv_cache=device.normal((case.num_pages, case.page_size, 1, case.d_qk), dtype, 2 * seed + 2),
        block_table=device.upload(table),
        seqlens=device.upload(seqlens),
        host_table=table,
        host_seqlens=seqlens,
    )


def make_outputs(case: DecodeCase, dtype: str, device: Device) -> Outputs:
    """Arrays for the results, full of NaN."""
    out = device.empty(out_shape(case), dtype)
    return Outputs(out, device.empty((case.b, case.h_q, case.s_q), "float32"))


def out_shape(case: DecodeCase) -> tuple[int, ...]:
    return case.b, case.s_q, case.h_q, case.d_v


def shuffled_table(case: DecodeCase, seed: int) -> npt.NDArray[np.int32]:
    """Every page of the cache once, in random order: what a serving engine's tables look like after a while."""
    order = np.random.default_rng(seed).permutation(case.num_pages)
    return order.astype(np.int32).reshape(case.b, case.max_pages)
