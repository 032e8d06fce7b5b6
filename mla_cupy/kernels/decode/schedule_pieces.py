"""Host side of `decode/schedule_pieces.cu`: the batch-invariant schedule."""

from __future__ import annotations

from dataclasses import dataclass

from mla_cupy.kernels.attention.schedule import POINT_BYTES
from mla_cupy.kernels.params import DecodeSchedulePiecesParams
from mla_cupy.kernels.pipeline import Launch, LaunchArgs
from mla_cupy.kernels.spec import PLAIN, KernelSpec

KERNEL: KernelSpec[object] = KernelSpec(
    "decode_schedule_pieces",
    "cuts every request of a batch alone, for results that do not depend on the batch",
    "decode/schedule_pieces.cu",
    DecodeSchedulePiecesParams,
    variants=PLAIN,
    core=PLAIN,
)


@dataclass(frozen=True)
class Pieces:
    """Division of up to `max_b` requests, batch-invariant: pieces of `tiles`, at most `max_pieces` per request."""

    tiles: int
    max_pieces: int
    max_b: int

    @classmethod
    def of(cls, tiles: int, longest: int, requests: int) -> Pieces | None:
        """Pieces of `tiles` of requests of up to `longest`; None where `tiles` is 0."""
        return cls(tiles, max(1, -(-longest // tiles)), requests) if tiles else None

    @property
    def num_splits(self) -> int:
        """Splits of the schedule: a thread block each."""
        return self.max_b * self.max_pieces


def nbytes(pieces: Pieces) -> int:
    """Size of a schedule, and of the first split of each request behind it."""
    return POINT_BYTES * (pieces.max_b * pieces.max_pieces + 1) + 4 * (pieces.max_b + 1)


def launch(
    seqlens: str, stride: int, max_tokens: int, b: int, pieces: Pieces, shard: tuple[int, int] = (1, 0)
) -> Launch:
    """Write the schedule of the batch to the workspace's `schedule`; `shard` is (cp_world, cp_rank)."""
    cp_world, cp_rank = shard
    params = DecodeSchedulePiecesParams(
        seqlens=seqlens,
        schedule="schedule",
        seqlens_stride_elems=stride,
        max_tokens=max_tokens,
        b=b,
        num_splits=b * pieces.max_pieces,
        piece_tiles=pieces.tiles,
        cp_world=cp_world,
        cp_rank=cp_rank,
    )
    return Launch(KERNEL, PLAIN[0], (1, 1, 1), LaunchArgs(params))
