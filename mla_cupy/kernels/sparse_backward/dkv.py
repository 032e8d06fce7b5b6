"""Host side of `sparse_backward/dkv.cu`."""

from __future__ import annotations

from mla_cupy.kernels.params import DkvParams
from mla_cupy.kernels.pipeline import Call, Launch, LaunchArgs
from mla_cupy.kernels.sparse_backward.problem import DkvOrder, SparseBackwardProblem
from mla_cupy.kernels.spec import DTYPE_VARIANTS, KernelSpec, Variant

ROWS_PER_BLOCK = 8

KERNEL: KernelSpec[object] = KernelSpec(
    "sparse_backward_dkv",
    "turns the float32 sums of dkv, in the main kernel's order and bins, into the gradient",
    "sparse_backward/dkv.cu",
    DkvParams,
    variants=DTYPE_VARIANTS,
    core=DTYPE_VARIANTS,
    facts={"rows_per_block": ROWS_PER_BLOCK},
)


def launch(problem: SparseBackwardProblem, call: Call, num_bins: int, order: DkvOrder) -> Launch:
    """Write dkv."""
    params = DkvParams(
        sums="sums",
        dkv="dkv",
        dkv_stride_s_elems=call.stride("dkv"),
        s_kv=problem.s_kv,
        d_qk=problem.d_qk,
        num_bins=num_bins,
        order=order,
        dkv_is_fp32=call.view("dkv").dtype == "float32",
    )
    blocks = -(-problem.s_kv // ROWS_PER_BLOCK)
    return Launch(KERNEL, Variant(dtype=problem.dtype), (blocks, 1, 1), LaunchArgs(params), dependent=False)
