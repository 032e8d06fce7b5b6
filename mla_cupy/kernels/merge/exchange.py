"""Host side of `merge/exchange.cu`."""

from __future__ import annotations

import zlib
from dataclasses import astuple, dataclass
from typing import NamedTuple

import numpy as np

from mla_cupy.arrays.view import View
from mla_cupy.dtypes import HALF, TABLE
from mla_cupy.kernels.attention.split_schedule import MAX_SPLITS
from mla_cupy.kernels.lse import LseOptions
from mla_cupy.kernels.numbers import to_log2
from mla_cupy.kernels.params import MergeExchangeParams
from mla_cupy.kernels.pipeline import Launch, LaunchArgs
from mla_cupy.kernels.spec import DTYPE_VARIANTS, KernelSpec, Variant

TEAMS = 2
"""Slices of rows that a block works at side by side."""
BLOCKS_PER_SM = 2
MAX_BLOCKS = 1024
MAX_WORLD = 128
CHUNK_BYTES = 16
SLICE_COLUMNS = (64, 128, 256, 512)
"""Widths of a slice. The narrowest that gives no team more than one slice of a rank's heads is used."""
STATE = np.dtype([("epoch", "<u4"), ("tickets", "<u4"), ("failed", "<u4"), ("unused", "<u4")])
REPORT = np.dtype([("failure", "<u8"), ("abort", "<u4"), ("unused", "<u4")])
MAILBOX = np.dtype([("slabs", "<u8"), ("flags", "<u8")])

ADDRESSES = (
    *("outs", "lses", "out", "lse", "schedule", "partial_out", "partial_lse"),
    *("mailboxes", "states", "reports"),
)
"""The names of a launch's addresses, in the order in which `Prepared.enqueue` gets them."""

KERNEL: KernelSpec[object] = KernelSpec(
    "merge_exchange",
    "exchanges and merges the partial results of context-parallel ranks",
    "merge/exchange.cu",
    MergeExchangeParams,
    variants=DTYPE_VARIANTS,
    facts={
        "teams": TEAMS,
        "blocks_per_sm": BLOCKS_PER_SM,
        "max_blocks": MAX_BLOCKS,
        "max_splits": MAX_SPLITS,
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
        Dtype of the partial results that are sent.
    lse_base : str
    max_blocks : int
        Blocks that every rank's GPU holds at once.
    """

    world: int
    b: int
    s_q: int
    heads: int
    d: int
    partial_dtype: str
    lse_base: str
    max_blocks: int = 128

    @property
    def rows(self) -> int:
        """The rows of one rank."""
        return self.b * self.s_q * self.heads

    @property
    def digest(self) -> int:
        """31 bits that differ, almost surely, between calls that do not fit together."""
        return zlib.crc32(repr(astuple(self)).encode()) >> 1

    @property
    def slice_columns(self) -> int:
        """Number of columns of a row that a team works at."""
        teams = TEAMS * self.max_blocks
        fitting = (columns for columns in SLICE_COLUMNS if self.rows * -(-self.d // columns) <= teams)
        return next(fitting, SLICE_COLUMNS[-1])

    @property
    def slices(self) -> int:
        """Slices per row."""
        return -(-self.d // self.slice_columns)

    @property
    def blocks(self) -> int:
        """Thread blocks per rank."""
        return min(self.max_blocks, -(-self.rows * self.slices // TEAMS))

    @property
    def slab_bytes(self) -> int:
        """Bytes that one rank sends another: every slice, and a log-sum-exp behind each."""
        return self.rows * (self.d * TABLE[self.partial_dtype].nbytes + self.slices * CHUNK_BYTES)


class Splits(NamedTuple):
    """A decode that has left the pieces of split requests in its workspace.

    Attributes
    ----------
    schedule, partial_out, partial_lse : int
        Addresses.
    num_splits, continued_index : int
        As the decode had them.
    """

    schedule: int
    partial_out: int
    partial_lse: int
    num_splits: int
    continued_index: int


UNSPLIT = Splits(0, 0, 0, 0, 0)
"""Splits of a decode that has merged everything itself."""


def max_blocks(sm_count: int) -> int:
    """Number of blocks that are resident at once on such a GPU."""
    return min(MAX_BLOCKS, BLOCKS_PER_SM * sm_count)


def slab_bytes(max_rows: int, max_d: int) -> int:
    """Enough for every call of up to `max_rows` rows of `max_d` columns."""
    wide = -(-max_d // SLICE_COLUMNS[-1])
    return max_rows * (4 * max_d + wide * CHUNK_BYTES) + TEAMS * MAX_BLOCKS * CHUNK_BYTES


def slabs_bytes(world: int, slab: int) -> int:
    """All slabs of a rank: each other rank's, twice."""
    return 2 * world * slab


def flags_bytes(world: int) -> int:
    """All flags of a rank."""
    return 2 * world * MAX_BLOCKS * 8


def launch(
    exchange: Exchange,
    views: tuple[View, View, View, View],
    options: LseOptions,
    *,
    slab: int,
    timeout_ns: int,
    rank: int,
    ranks: int = 1,
    splits: Splits = UNSPLIT,
    split_strides: tuple[int, int] = (0, 0),
) -> Launch:
    """One launch for `ranks` ranks from `rank` on, the views' first axis.

    `slab` is the size of a slab in bytes; `options` set the convention of the resulting lse. Of `splits` the numbers
    are used, not the addresses; `split_strides` step from rank to rank, for the schedule and for rows of partial
    results.
    """
    outs, lses, out, lse = views
    assert 0 < exchange.slab_bytes <= slab
    kinds = (outs.dtype, out.dtype)
    params = MergeExchangeParams(
        outs="outs",
        lses="lses",
        out="out",
        lse="lse",
        schedule="schedule",
        partial_out="partial_out",
        partial_lse="partial_lse",
        mailboxes="mailboxes",
        states="states",
        reports="reports",
        outs_stride_r_b_s_h_elems=_four(outs),
        lses_stride_r_b_h_s_elems=_four(lses),
        out_stride_r_b_s_h_elems=_four(out),
        lse_stride_r_b_h_s_elems=_four(lse),
        schedule_stride_r=split_strides[0],
        partial_stride_r_rows=split_strides[1],
        slab_bytes=slab,
        timeout_ns=timeout_ns,
        world=exchange.world,
        rank=rank,
        b=exchange.b,
        s_q=exchange.s_q,
        heads=exchange.heads,
        d=exchange.d,
        slice_columns=exchange.slice_columns,
        slices=exchange.slices,
        num_splits=splits.num_splits,
        continued_index=splits.continued_index,
        call=exchange.digest,
        outs_are_fp32=outs.dtype == "float32",
        out_is_fp32=out.dtype == "float32",
        to_log2=to_log2(exchange.lse_base),
        lse_convention=options.convention,
    )
    half = next((kind for kind in kinds if kind in HALF), HALF[0])  # where all is float32, any will do
    return Launch(KERNEL, Variant(dtype=half), (exchange.blocks, ranks, 1), LaunchArgs(params))


def _four(view: View) -> tuple[int, int, int, int]:
    """The strides of the ranks and of the three axes behind them."""
    ranks, first, second, third, *_ = view.strides
    return ranks, first, second, third
