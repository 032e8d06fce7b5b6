"""What the kernels of sparse decode share on the host: the problem and the options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mla_cupy.kernels.spec import Variant

RECORDS = ("v32", "v4")
"""Names of the records that the kernels read."""


@dataclass(frozen=True)
class SparseDecodeProblem:
    """What decides which kernels run and how: no pointers, no device.

    `topk` is that of both lists together. `aligned` says that q starts at, and steps by, multiples of 16 bytes.
    """

    queries: int
    h_q: int
    topk: int
    dtype: str
    record: str
    aligned: bool = True


class SparseDecodeOptions(NamedTuple):
    """The numbers of a call."""

    scale: float
    lse_base: str
    empty_lse: float


@dataclass(frozen=True)
class RecordVariant(Variant):
    """A kernel that is compiled per dtype of the queries and record of the cache."""

    dtype: str
    record: str
