"""Host side of `exact_sums/bins.cu`."""

from __future__ import annotations

from mla_cupy.kernels.pipeline import Launch, LaunchArgs
from mla_cupy.kernels.sparse_backward.problem import SparseBackwardProblem
from mla_cupy.kernels.spec import PLAIN, KernelSpec, ParamLayout

ROWS_PER_BLOCK = 256
NUM_BINS = 6
"""Sums of a deterministic backward per element of dkv."""

PARAMS = ParamLayout(selected="u8", largest="u8", extractors="u8", s_kv="i4", additions="i4")

KERNEL: KernelSpec[object] = KernelSpec(
    "exact_sums_bins",
    "for a deterministic backward: the extraction constants of its order-independent (binned) sums",
    "exact_sums/bins.cu",
    PARAMS,
    facts={"rows_per_block": ROWS_PER_BLOCK, "num_bins": NUM_BINS},
)


def launch(problem: SparseBackwardProblem, additions: int) -> Launch:
    """Write the extraction constant of each row, and after them their common bound: (s_kv + 1,)."""
    record = LaunchArgs(KERNEL, ("selected", "largest", "extractors"), (problem.s_kv, additions))
    return Launch(KERNEL, PLAIN[0], (problem.s_kv // ROWS_PER_BLOCK + 1, 1, 1), record, dependent=False)
