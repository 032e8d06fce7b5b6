"""Launcher of `sm100/sparse_backward.cu`, with tiles of 32 keys; what its variations share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mla_cupy.launchers import sparse_problem
from mla_cupy.launchers.sparse_problem import SparseBackwardProblem, SparseBackwardVariant
from mla_cupy.launchers.spec import KernelSpec, only_sm100a
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.runtime.driver import Dim3
from mla_cupy.runtime.tensormap import TensorMapSpec

if TYPE_CHECKING:
    from mla_cupy.launchers.sparse_backward_sequence import BackwardPointers, Strided

TILE_KEYS = 32
HEADS_PER_ADDITION = 64
"""Heads whose contributions to a row of kv are summed before they are added to it."""
DKV_ORDER = sparse_problem.DKV_ORDER_SM100
_SLAB_COLUMNS = 64


@dataclass(frozen=True)
class TiledVariant(SparseBackwardVariant):
    """Of a main kernel that can be built for several sizes of a tile of keys."""

    tile_keys: int


def tiled_variant(problem: SparseBackwardProblem, tile_keys: int) -> TiledVariant:
    """The build for a problem."""
    return TiledVariant(problem.dtype, problem.d_qk, int(problem.deterministic), tile_keys)


SPEC = KernelSpec(
    "sparse_backward_sm100",
    "sm100/sparse_backward.cu",
    variants=tuple(
        TiledVariant(v.dtype, v.head_dim_qk, v.deterministic, keys)
        for keys in (TILE_KEYS, 64)
        for v in sparse_problem.VARIANTS
    ),
    core=tuple(TiledVariant(v.dtype, v.head_dim_qk, v.deterministic, TILE_KEYS) for v in sparse_problem.CORE),
    supports_arch=only_sm100a,
    params=sparse_problem.PARAMS,
)


def unsupported(problem: SparseBackwardProblem, device: DeviceInfo) -> str:
    """Why the kernel cannot take the problem; empty if it can."""
    if not only_sm100a(device.arch):
        return f"needs compute capability 10.0 or 10.3, {device.name} has {device.cc[0]}.{device.cc[1]}"
    if not problem.aligned:
        return "needs q, kv, dout and dq that start at, and step by, multiples of 16 bytes"
    return ""


def variant(problem: SparseBackwardProblem) -> TiledVariant:
    """The build that it takes."""
    return tiled_variant(problem, TILE_KEYS)


def geometry(problem: SparseBackwardProblem, device: DeviceInfo) -> Dim3:
    """The grid: a block for each 64 heads of a query."""
    return (problem.s_q * -(-problem.h_q // HEADS_PER_ADDITION), 1, 1)


def tensor_maps(problem: SparseBackwardProblem, pointers: BackwardPointers) -> tuple[TensorMapSpec, ...]:
    """Of kv, whose rows are gathered four at a time, and of q, dout and dq, in boxes of 64 columns x 64 heads."""
    # Without a row nothing is fetched, but a map needs an address.
    kv = pointers.kv if problem.s_kv > 0 else pointers.dq
    row_bytes = 2 * kv.strides[0] if problem.s_kv > 1 else 2 * problem.d_qk
    rows = TensorMapSpec(
        problem.dtype,
        kv.ptr,
        dims=(problem.d_qk, max(1, problem.s_kv)),
        strides_bytes=(row_bytes,),
        box=(_SLAB_COLUMNS, 1),
    )
    return (
        rows,
        _heads_map(problem, pointers.q, problem.d_qk),
        _heads_map(problem, pointers.dout, sparse_problem.HEAD_DIM_V),
        _heads_map(problem, pointers.dq, problem.d_qk),
    )


def _heads_map(problem: SparseBackwardProblem, array: Strided, columns: int) -> TensorMapSpec:
    """(s_q, h_q, columns); strides of axes of size 1 mean nothing, and may be what the driver refuses."""
    query, head = (2 * stride for stride in array.strides)
    return TensorMapSpec(
        problem.dtype,
        array.ptr,
        dims=(columns, problem.h_q, problem.s_q),
        strides_bytes=(head if problem.h_q > 1 else 2 * columns, query if problem.s_q > 1 else 2 * columns),
        box=(_SLAB_COLUMNS, HEADS_PER_ADDITION, 1),
    )
