"""Host side of `indexer/prepare/gather_keys.cu`."""

from __future__ import annotations

from mla_cupy.kernels.params import GatherKeysParams
from mla_cupy.kernels.spec import KernelSpec

KEYS_PER_BLOCK = 16

KERNEL: KernelSpec[object] = KernelSpec(
    "indexer_prepare_gather_keys",
    "reads index keys of a paged cache",
    "indexer/prepare/gather_keys.cu",
    GatherKeysParams,
    facts={"keys_per_block": KEYS_PER_BLOCK},
)
