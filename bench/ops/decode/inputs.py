"""The arrays of one case: what every implementation reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .cases import DecodeCase
from .costs import D_QK, D_V

DTYPES = ("bfloat16", "float16")


@dataclass(frozen=True)
class InputSet:
    """One set of inputs; the arrays are of the device's library, shared by all implementations and never written.

    `host_table` and `host_seqlens` are the same values in NumPy.
    """

    q: Any  # (b, s_q, h_q, 576)
    kv_cache: Any  # (num_pages, page_size, h_kv, 576)
    block_table: Any  # (b, max_pages) int32
    seqlens: Any  # (b,) int32
    host_table: npt.NDArray[np.int32]
    host_seqlens: npt.NDArray[np.int32]


@dataclass(frozen=True)
class Outputs:
    """What a call wrote: out (b, s_q, h_q, 512), and lse (b, h_q, s_q) in natural log where the caller can have it."""

    out: Any
    lse: Any | None


def shuffled_table(case: DecodeCase, seed: int) -> npt.NDArray[np.int32]:
    """Every page of the cache once, in random order: what a serving engine's tables look like after a while."""
    order = np.random.default_rng(seed).permutation(case.num_pages)
    return order.astype(np.int32).reshape(case.b, case.max_pages)


def q_shape(case: DecodeCase) -> tuple[int, ...]:
    return case.b, case.s_q, case.h_q, D_QK


def cache_shape(case: DecodeCase) -> tuple[int, ...]:
    return case.num_pages, case.page_size, case.h_kv, D_QK


def out_shape(case: DecodeCase) -> tuple[int, ...]:
    return case.b, case.s_q, case.h_q, D_V


def lse_shape(case: DecodeCase) -> tuple[int, ...]:
    return case.b, case.h_q, case.s_q
