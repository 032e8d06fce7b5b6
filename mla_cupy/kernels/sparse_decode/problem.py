"""What the kernels of sparse decode share on the host: the problem and the options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mla_cupy.kernels.attention.kernel import PARAMS as DECODE_PARAMS
from mla_cupy.kernels.spec import ParamLayout
from mla_cupy.shapes import TILE_TOKENS

_KINDS = {name: code.str[1:].replace("<", "") for name, (code, *_) in (DECODE_PARAMS.dtype.fields or {}).items()}

PARAMS = ParamLayout(
    extra_cache="u8",
    extra_indices="u8",
    extra_topk_length="u8",
    **_KINDS,
    indices_stride_s_elems="i8",
    extra_page_stride_bytes="i8",
    extra_token_stride_bytes="i8",
    extra_stride_b_elems="i8",
    extra_stride_s_elems="i8",
    extra_stride_k_elems="i8",
    extra_length_stride_elems="i8",
    queries_of_length="i4",
    extra_num_pages="i4",
    extra_page_size="i4",
    extra_topk="i4",
)
"""Parameters of the attention kernels: a second cache and its lists, beside what all of decode takes."""


@dataclass(frozen=True)
class SparseDecodeProblem:
    """What decides which kernels run and how: no pointers, no device.

    `topk` is that of both lists together. `aligned` says that q starts at, and steps by, multiples of 16 bytes;
    `ragged` that the lengths of lists are in memory.
    """

    queries: int
    h_q: int
    topk: int
    dtype: str
    record: str
    aligned: bool = True
    ragged: bool = False

    @property
    def tiles(self) -> int:
        """The most tiles of a query."""
        return -(-self.topk // TILE_TOKENS)


class SparseDecodeOptions(NamedTuple):
    """The numbers of a call."""

    scale: float
    lse_base: str
    empty_lse: float
