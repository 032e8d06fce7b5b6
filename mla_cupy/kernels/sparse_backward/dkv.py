"""Host side of `sparse_backward/dkv.cu`."""

from __future__ import annotations

from mla_cupy.kernels.pipeline import Call, Launch, LaunchArgs
from mla_cupy.kernels.sparse_backward.problem import DkvOrder, SparseBackwardProblem
from mla_cupy.kernels.spec import DTYPE_VARIANTS, DtypeVariant, KernelSpec, ParamLayout

ROWS_PER_BLOCK = 8

PARAMS = ParamLayout(
    sums="u8",
    dkv="u8",
    dkv_stride_s_elems="i8",
    s_kv="i4",
    d_qk="i4",
    num_bins="i4",
    order="i4",
    dkv_is_fp32="i4",
)

KERNEL: KernelSpec[object] = KernelSpec(
    "sparse_backward_dkv",
    "turns the float32 sums of dkv, in the main kernel's order and bins, into the gradient",
    "sparse_backward/dkv.cu",
    PARAMS,
    variants=DTYPE_VARIANTS,
    core=DTYPE_VARIANTS,
    facts={"rows_per_block": ROWS_PER_BLOCK},
)


def launch(problem: SparseBackwardProblem, call: Call, num_bins: int, order: DkvOrder) -> Launch:
    """Write dkv."""
    is_fp32 = call.view("dkv").dtype == "float32"
    values = (call.strides("dkv", 1)[0], problem.s_kv, problem.d_qk, num_bins, order, is_fp32)
    record = LaunchArgs(KERNEL, ("sums", "dkv"), values)
    blocks = -(-problem.s_kv // ROWS_PER_BLOCK)
    return Launch(KERNEL, DtypeVariant(problem.dtype), (blocks, 1, 1), record, dependent=False)
