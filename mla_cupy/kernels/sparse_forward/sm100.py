"""The kernels of the sparse forward over 16-bit rows on Blackwell."""

from __future__ import annotations

from mla_cupy.dtypes import HALF
from mla_cupy.kernels.attention.gather_maps import heads_map, rows_map
from mla_cupy.kernels.attention.kernel import READS_ROWS, narrowest
from mla_cupy.kernels.params import DecodeParams
from mla_cupy.kernels.pipeline import Call
from mla_cupy.kernels.sparse_forward.problem import HEAD_DIMS_QK, MappedKernel, NamedMaps, SparseForwardProblem
from mla_cupy.kernels.spec import BLACKWELL, Reason, Variant, needs_alignment, needs_cc, variants
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.shapes import TILE_TOKENS

BLOCK_HEADS = (16, 32, 64)
"""Heads of a block, a build each."""
JOINT_BLOCKS = 2


def unsupported(problem: SparseForwardProblem, device: DeviceInfo) -> Reason | None:
    """Reason why the kernel does not support the problem; None if it does."""
    if device.arch not in BLACKWELL:
        return needs_cc(device, "10.0", "10.3")
    if problem.record:
        return READS_ROWS
    return None if problem.aligned else needs_alignment("q and kv")


def block_heads(problem: SparseForwardProblem) -> int:
    """Heads of a block."""
    return narrowest(BLOCK_HEADS, problem.h_q)


def variant(problem: SparseForwardProblem, device: DeviceInfo) -> Variant:
    """The build for the heads: the narrowest that holds them, or several blocks of the widest."""
    return Variant(dtype=problem.dtype, head_dim_qk=problem.d_qk, block_heads=block_heads(problem))


def maps(problem: SparseForwardProblem, kv: str, call: Call) -> NamedMaps:
    """Tensor maps: kv, gathered four rows at a time; q, in boxes of 64 columns x the heads of a block."""
    sizes = (problem.s_q, problem.h_q, problem.d_qk)
    return (
        # Without a row nothing is fetched, but a map needs an address.
        (kv if problem.s_kv > 0 else "q", rows_map(call, kv, problem.dtype, problem.s_kv, problem.d_qk)),
        ("q", heads_map(call, "q", problem.dtype, sizes, block_heads(problem))),
    )


KERNEL = MappedKernel(
    "sparse_forward_sm100",
    "sparse forward with tcgen05, with swapped operands: blocks of 16, 32 or 64 heads; simulated, not yet run",
    "sparse_forward/sm100.cu",
    DecodeParams,
    BLACKWELL,
    variants(dtype=HALF, head_dim_qk=HEAD_DIMS_QK, block_heads=BLOCK_HEADS),
    facts={"tile_tokens": TILE_TOKENS},
    unsupported=unsupported,
    variant=variant,
    block_rows=BLOCK_HEADS[-1],
    unproven=True,
    maps=maps,
)


def _not_jointly(problem: SparseForwardProblem, device: DeviceInfo) -> Reason | None:
    """Reason why the kernel does not support the problem; None if it does."""
    if reason := unsupported(problem, device):
        return reason
    least, most = BLOCK_HEADS[-1] + 1, JOINT_BLOCKS * BLOCK_HEADS[-1]
    return None if least <= problem.h_q <= most else Reason(f"takes {least} to {most} heads")


JOINT = MappedKernel(
    "sparse_forward_sm100_joint",
    "sparse forward with tcgen05 for 65 to 128 heads: two SMs multiply together; simulated, not yet run",
    "sparse_forward/sm100_joint.cu",
    DecodeParams,
    BLACKWELL,
    variants(dtype=HALF, head_dim_qk=HEAD_DIMS_QK),
    facts={"tile_tokens": TILE_TOKENS, "block_heads": BLOCK_HEADS[-1], "cluster": JOINT_BLOCKS},
    unsupported=_not_jointly,
    variant=lambda problem, device: Variant(dtype=problem.dtype, head_dim_qk=problem.d_qk),
    block_rows=BLOCK_HEADS[-1],
    unproven=True,
    maps=maps,
)


KERNELS = (JOINT, KERNEL)
