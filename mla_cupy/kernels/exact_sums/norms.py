"""Host side of `exact_sums/norms.cu`."""

from __future__ import annotations

from mla_cupy.kernels.params import NormsParams
from mla_cupy.kernels.pipeline import Call, Launch, LaunchArgs
from mla_cupy.kernels.sparse_backward.problem import SparseBackwardProblem
from mla_cupy.kernels.spec import DTYPE_VARIANTS, KernelSpec, Variant

ROWS_PER_BLOCK = 8


KERNEL: KernelSpec[object] = KernelSpec(
    "exact_sums_norms",
    "for a deterministic backward: L2 norms of the selected rows",
    "exact_sums/norms.cu",
    NormsParams,
    variants=DTYPE_VARIANTS,
    facts={"rows_per_block": ROWS_PER_BLOCK},
)


def launch(problem: SparseBackwardProblem, call: Call) -> Launch:
    """Write the norm of the value part of each row that is selected."""
    params = NormsParams(
        kv="kv", selected="selected", norms="norms", kv_stride_s_elems=call.stride("kv"), s_kv=problem.s_kv
    )
    blocks = -(-problem.s_kv // ROWS_PER_BLOCK)
    return Launch(KERNEL, Variant(dtype=problem.dtype), (blocks, 1, 1), LaunchArgs(params), dependent=False)
