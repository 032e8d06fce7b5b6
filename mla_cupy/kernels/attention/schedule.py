"""Host side of `attention/schedule.cu`."""

from __future__ import annotations

from mla_cupy.kernels.attention.kernel import MAX_SPLITS
from mla_cupy.kernels.params import DecodeScheduleParams
from mla_cupy.kernels.pipeline import Launch, LaunchArgs
from mla_cupy.kernels.spec import PLAIN, KernelSpec

POINT_BYTES = 8
"""Size of one cut of the schedule."""

PRICE_SCALE = 1 << 14
"""The unit of the cost of a piece: how many there are in a tile."""

MAX_COUNTED_ROWS = 1024

KERNEL: KernelSpec[object] = KernelSpec(
    "attention_schedule",
    "cuts the tiles of a batch into splits, the longest of which is as short as possible",
    "attention/schedule.cu",
    DecodeScheduleParams,
    core=PLAIN,
    facts={"max_splits": MAX_SPLITS, "price_scale": PRICE_SCALE},
)


def nbytes(num_splits: int) -> int:
    """Size of a schedule: the cuts between its splits, and both ends."""
    return POINT_BYTES * (num_splits + 1)


def merge_cost(block_rows: int) -> int:
    """What storing and merging partial results costs a block of that many rows, in tiles: 2 up to 16 rows, 8 for 64."""
    return max(2, min(block_rows, 64) // 8)


def piece_cost(rows: int) -> int:
    """What storing and merging one partial result of `rows` query rows (of all heads) costs, in tiles / PRICE_SCALE.

    6 (1 + rows / 64) / 256 tiles, from times on an H200 with 16, 64 and 128 rows: see "Small batches of many rows" in
    `cuda_src/decode/README.md`.
    """
    return PRICE_SCALE // (256 * 64) * 6 * (64 + min(rows, MAX_COUNTED_ROWS))


def launch(
    seqlens: str,
    stride: int,
    max_tokens: int,
    b: int,
    num_splits: int,
    merge_cost: int,
    shard: tuple[int, int] = (1, 0),
    piece_cost: int = 0,
) -> Launch:
    """Write the cuts of the batch to the workspace's `schedule`; `shard` is (cp_world, cp_rank).

    With a `piece_cost` short splits become longer, so that there are fewer partial results.
    """
    cp_world, cp_rank = shard
    params = DecodeScheduleParams(
        seqlens=seqlens,
        schedule="schedule",
        seqlens_stride_elems=stride,
        max_tokens=max_tokens,
        b=b,
        num_splits=num_splits,
        merge_cost=merge_cost,
        piece_cost=piece_cost,
        cp_world=cp_world,
        cp_rank=cp_rank,
    )
    return Launch(KERNEL, PLAIN[0], (1, 1, 1), LaunchArgs(params))
