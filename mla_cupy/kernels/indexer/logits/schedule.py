"""Host side of `indexer/logits/schedule.cu`."""

from __future__ import annotations

from mla_cupy.kernels.params import LogitsScheduleParams
from mla_cupy.kernels.spec import KernelSpec, variants

MAX_SHARES = 1023
"""Equal shares of the tiles of all tokens."""
CUT_BYTES = 8


KERNEL: KernelSpec[object] = KernelSpec(
    "indexer_logits_schedule",
    "cuts the tiles of the indexer logits into equal shares",
    "indexer/logits/schedule.cu",
    LogitsScheduleParams,
    variants=variants(tile_keys=(256, 128, 64)),
    facts={"max_splits": MAX_SHARES},
)


def nbytes(num_splits: int) -> int:
    """Size of the cuts."""
    return CUT_BYTES * (num_splits + 1)
