"""Host side of `merge/exchange.cu`."""

from __future__ import annotations

import zlib
from dataclasses import astuple, dataclass

import numpy as np

from mla_cupy.arrays.view import View
from mla_cupy.dtypes import HALF, TABLE
from mla_cupy.kernels.merge.pipeline import MergeOptions
from mla_cupy.kernels.numbers import from_log2, to_log2
from mla_cupy.kernels.pipeline import Launch, Record
from mla_cupy.kernels.spec import DTYPE_VARIANTS, DtypeVariant, Kernel, Params

ROWS_PER_BLOCK = 4
MAX_BLOCKS = 128
MAX_WORLD = 128
CHUNK_BYTES = 16
STATE = np.dtype([("epoch", "<u4"), ("tickets", "<u4"), ("failed", "<u4"), ("unused", "<u4")])
REPORT = np.dtype([("failure", "<u8"), ("abort", "<u4"), ("unused", "<u4")])
MAILBOX = np.dtype([("slabs", "<u8"), ("flags", "<u8")])

ADDRESSES = ("outs", "lses", "out", "lse", "mailboxes", "states", "reports")
PARAMS = Params(
    **dict.fromkeys(ADDRESSES, "u8"),
    outs_stride_r_elems="i8",
    outs_stride_b_elems="i8",
    outs_stride_s_elems="i8",
    outs_stride_h_elems="i8",
    lses_stride_r_elems="i8",
    lses_stride_b_elems="i8",
    lses_stride_h_elems="i8",
    lses_stride_s_elems="i8",
    out_stride_r_elems="i8",
    out_stride_b_elems="i8",
    out_stride_s_elems="i8",
    out_stride_h_elems="i8",
    lse_stride_r_elems="i8",
    lse_stride_b_elems="i8",
    lse_stride_h_elems="i8",
    lse_stride_s_elems="i8",
    slab_bytes="i8",
    timeout_ns="i8",
    world="i4",
    rank="i4",
    b="i4",
    s_q="i4",
    heads="i4",
    d="i4",
    call="i4",
    outs_are_fp32="i4",
    out_is_fp32="i4",
    to_log2="f4",
    lse_factor="f4",
    empty_lse="f4",
)

KERNEL: Kernel[object] = Kernel(
    "merge_exchange",
    "exchanges and merges the partial results of context-parallel ranks",
    "merge/exchange.cu",
    PARAMS,
    variants=DTYPE_VARIANTS,
    facts={
        "rows_per_block": ROWS_PER_BLOCK,
        "max_blocks": MAX_BLOCKS,
        "max_world": MAX_WORLD,
        "chunk_bytes": CHUNK_BYTES,
        "state_bytes": STATE.itemsize,
        "report_bytes": REPORT.itemsize,
    },
)


@dataclass(frozen=True)
class Exchange:
    """A call, as all ranks must make it alike.

    Attributes
    ----------
    world, b, s_q, heads, d : int
        `heads` is the number of one rank.
    partial_dtype : str
        Of the partial results, which travel.
    lse_base : str
    """

    world: int
    b: int
    s_q: int
    heads: int
    d: int
    partial_dtype: str
    lse_base: str

    @property
    def rows(self) -> int:
        """The rows of one rank."""
        return self.b * self.s_q * self.heads

    @property
    def digest(self) -> int:
        """31 bits that differ, almost surely, between calls that do not fit together."""
        return zlib.crc32(repr(astuple(self)).encode()) >> 1

    @property
    def blocks(self) -> int:
        """Of each rank."""
        return min(MAX_BLOCKS, -(-self.rows // ROWS_PER_BLOCK))


def slab_bytes(rows: int, d: int, partial_dtype: str) -> int:
    """What one rank sends another at a time."""
    return rows * (d * TABLE[partial_dtype].nbytes + CHUNK_BYTES)


def slabs_bytes(world: int, slab: int) -> int:
    """All slabs of a rank: each other rank's, twice."""
    return 2 * world * slab


def flags_bytes(world: int) -> int:
    """All flags of a rank."""
    return 2 * world * MAX_BLOCKS * 8


def launch(
    exchange: Exchange,
    views: tuple[View, View, View, View],
    options: MergeOptions,
    *,
    slab: int,
    timeout_ns: int,
    rank: int,
    ranks: int = 1,
) -> Launch:
    """One launch for `ranks` ranks from `rank` on; the views' first axis is that of those ranks.

    `slab` is the room of a slab in bytes, `options` say what the resulting lse is like.
    """
    outs, lses, out, lse = views
    assert 0 < slab_bytes(exchange.rows, exchange.d, exchange.partial_dtype) <= slab
    kinds = (outs.dtype, out.dtype)
    values = (
        *(*outs.strides[:4], *lses.strides[:4], *out.strides[:4], *lse.strides[:4]),
        *(slab, timeout_ns, exchange.world, rank),
        *(exchange.b, exchange.s_q, exchange.heads, exchange.d, exchange.digest),
        *(kind == "float32" for kind in kinds),
        *(to_log2(exchange.lse_base), from_log2(options.lse_base), options.empty_lse),
    )
    half = next((kind for kind in kinds if kind in HALF), HALF[0])  # where all is float32, any will do
    return Launch(KERNEL, DtypeVariant(half), (exchange.blocks, ranks, 1), Record(KERNEL, ADDRESSES, values))
