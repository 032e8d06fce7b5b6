"""Host side of `exact_sums/bins.cu`."""

from __future__ import annotations

from mla_cupy.kernels.params import BinsParams
from mla_cupy.kernels.pipeline import Launch, LaunchArgs
from mla_cupy.kernels.spec import PLAIN, KernelSpec

ROWS_PER_BLOCK = 256
NUM_BINS = 6
"""Sums of a deterministic backward per element of dkv."""


KERNEL: KernelSpec[object] = KernelSpec(
    "exact_sums_bins",
    "for a deterministic backward: the extraction constants of its order-independent (binned) sums",
    "exact_sums/bins.cu",
    BinsParams,
    facts={"rows_per_block": ROWS_PER_BLOCK, "num_bins": NUM_BINS},
)


def launch(s_kv: int, additions: int, *, dependent: bool = False) -> Launch:
    """Write the extraction constant of each row, and after them their common bound: (s_kv + 1,)."""
    params = BinsParams(selected="selected", largest="largest", extractors="extractors", s_kv=s_kv, additions=additions)
    return Launch(KERNEL, PLAIN[0], (s_kv // ROWS_PER_BLOCK + 1, 1, 1), LaunchArgs(params), dependent)
