"""Host side of `exact_sums/norms.cu`."""

from __future__ import annotations

from mla_cupy.kernels.pipeline import Call, Launch, LaunchArgs
from mla_cupy.kernels.sparse_backward.problem import SparseBackwardProblem
from mla_cupy.kernels.spec import DTYPE_VARIANTS, DtypeVariant, KernelSpec, ParamLayout

ROWS_PER_BLOCK = 8

PARAMS = ParamLayout(kv="u8", selected="u8", norms="u8", kv_stride_s_elems="i8", s_kv="i4")

KERNEL: KernelSpec[object] = KernelSpec(
    "exact_sums_norms",
    "for a deterministic backward: L2 norms of the selected rows",
    "exact_sums/norms.cu",
    PARAMS,
    variants=DTYPE_VARIANTS,
    facts={"rows_per_block": ROWS_PER_BLOCK},
)


def launch(problem: SparseBackwardProblem, call: Call) -> Launch:
    """Write the norm of the value part of each row that is selected."""
    record = LaunchArgs(KERNEL, ("kv", "selected", "norms"), (call.strides("kv", 1)[0], problem.s_kv))
    blocks = -(-problem.s_kv // ROWS_PER_BLOCK)
    return Launch(KERNEL, DtypeVariant(problem.dtype), (blocks, 1, 1), record, dependent=False)
