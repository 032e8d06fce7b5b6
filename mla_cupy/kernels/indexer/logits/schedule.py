"""Host side of `indexer/logits/schedule.cu`."""

from __future__ import annotations

from dataclasses import dataclass

from mla_cupy.kernels.spec import KernelSpec, ParamLayout, Variant

MAX_SPLITS = 1023
CUT_BYTES = 8
PARAMS = ParamLayout(
    begins="u8",
    ends="u8",
    cuts="u8",
    begins_stride_elems="i8",
    ends_stride_block_elems="i8",
    ends_stride_token_elems="i8",
    num_tokens="i4",
    num_blocks="i4",
    block_tokens="i4",
    num_keys="i4",
    end_of_last="i4",
    num_splits="i4",
)


@dataclass(frozen=True)
class ScheduleVariant(Variant):
    """Keys of a tile of the kernel that it schedules."""

    tile_keys: int


VARIANTS = tuple(ScheduleVariant(keys) for keys in (256, 128, 64))

KERNEL: KernelSpec[object] = KernelSpec(
    "indexer_logits_schedule",
    "cuts the tiles of the indexer logits into equal shares",
    "indexer/logits/schedule.cu",
    PARAMS,
    variants=VARIANTS,
    facts={"max_splits": MAX_SPLITS},
)


def nbytes(num_splits: int) -> int:
    """Size of the cuts."""
    return CUT_BYTES * (num_splits + 1)
