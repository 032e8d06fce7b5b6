"""Host side of `sparse_backward/sm90.cu`."""

from __future__ import annotations

from mla_cupy.dtypes import HALF
from mla_cupy.kernels.params import PiecesParams
from mla_cupy.kernels.sparse_backward.problem import (
    CORE,
    VARIANTS,
    BackwardKernel,
    DkvOrder,
    SparseBackwardProblem,
    plain_variant,
)
from mla_cupy.kernels.spec import HOPPER, Reason, Variant, needs_alignment, needs_cc, variants
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.runtime.launching import Dim3
from mla_cupy.shapes import D_QK

BLOCK_HEADS = 64
_FEW, _FEWEST = 32, 16
"""Up to this many heads dkv needs fewer products: 32 in a separate build, 16 in the build for 64."""


def variant(problem: SparseBackwardProblem, device: DeviceInfo) -> Variant:
    """The build with the fewest matmuls, for up to `max_heads` heads."""
    return plain_variant(problem, device).extended(max_heads=_FEW if _FEWEST < problem.h_q <= _FEW else BLOCK_HEADS)


def _with_heads(builds: tuple[Variant, ...]) -> tuple[Variant, ...]:
    return tuple(build.extended(max_heads=max_heads) for build in builds for max_heads in (BLOCK_HEADS, _FEW))


def unsupported(problem: SparseBackwardProblem, device: DeviceInfo) -> Reason | None:
    """Reason why the kernel does not support the problem; None if it does."""
    if device.arch not in HOPPER:
        return needs_cc(device, "9.0")
    return None if problem.aligned else needs_alignment("q, kv, dout and dq")


def grid(problem: SparseBackwardProblem, device: DeviceInfo) -> Dim3:
    """One block per SM; the blocks share the items, each of 64 heads of a query."""
    items = problem.s_q * -(-problem.h_q // BLOCK_HEADS)
    return (max(1, min(device.sm_count, items)), 1, 1)


_PIECES = variants(dtype=HALF, head_dim_qk=(D_QK,), deterministic=(0,), max_heads=(BLOCK_HEADS,), pieces=(1,))
"""Builds for pieces of lists: keys with RoPE columns, up to 64 heads."""


def pieces_variant(problem: SparseBackwardProblem, device: DeviceInfo) -> Variant | None:
    """The build for pieces of lists; None if there is none."""
    build = plain_variant(problem, device).extended(max_heads=BLOCK_HEADS, pieces=1)
    return build if build in _PIECES and problem.h_q <= BLOCK_HEADS else None


KERNEL = BackwardKernel(
    "sparse_backward_sm90",
    "gradients of sparse attention with WGMMA, 64 heads of a query at a time",
    "sparse_backward/sm90.cu",
    PiecesParams,
    HOPPER,
    (*_with_heads(VARIANTS), *_PIECES),
    _with_heads(CORE),
    facts={"block_heads": BLOCK_HEADS},
    unsupported=unsupported,
    grid=grid,
    heads_per_addition=BLOCK_HEADS,
    dkv_order=DkvOrder.SM90,
    variant=variant,
    makes_delta=True,
    pieces_variant=pieces_variant,
)
