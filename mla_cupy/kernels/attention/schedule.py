"""Host side of `attention/schedule.cu`."""

from __future__ import annotations

from mla_cupy.kernels.attention.split_schedule import MAX_SPLITS, PRICE_SCALE
from mla_cupy.kernels.params import DecodeScheduleParams
from mla_cupy.kernels.pipeline import Launch, LaunchArgs
from mla_cupy.kernels.spec import PLAIN, KernelSpec

POINT_BYTES = 8
"""Size of one cut of the schedule."""

KERNEL: KernelSpec[object] = KernelSpec(
    "attention_schedule",
    "cuts the tiles of a batch into splits, the longest as short as possible",
    "attention/schedule.cu",
    DecodeScheduleParams,
    core=PLAIN,
    facts={"max_splits": MAX_SPLITS, "price_scale": PRICE_SCALE},
)


def nbytes(num_splits: int) -> int:
    """Size of a schedule: the cuts between its splits, and both ends."""
    return POINT_BYTES * (num_splits + 1)


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
