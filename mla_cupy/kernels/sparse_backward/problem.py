"""Problem and options of the sparse backward, which its kernels share on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from mla_cupy.dtypes import HALF
from mla_cupy.kernels.pipeline import Call
from mla_cupy.kernels.sparse_forward.problem import HEAD_DIMS_QK
from mla_cupy.kernels.spec import KernelSpec, Variant, variants
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.runtime.launching import Dim3
from mla_cupy.runtime.tensormap import TensorMapSpec
from mla_cupy.shapes import D_QK


class DkvOrder(IntEnum):
    """Order in which a main kernel keeps the elements of a row of dkv: `sparse_backward/params.cuh`."""

    PLAIN = 0
    SM90 = 1
    SM100 = 2


VARIANTS = variants(dtype=HALF, head_dim_qk=HEAD_DIMS_QK, deterministic=(0, 1))
CORE = variants(dtype=("bfloat16",), head_dim_qk=(D_QK,), deterministic=(0,))


@dataclass(frozen=True)
class SparseBackwardProblem:
    """Sizes and dtypes that decide which kernels run and how: no pointers, no device.

    `aligned`: q, kv, dout and dq start at, and step by, multiples of 16 bytes; `aligned_out`: so does a 16-bit out.
    """

    s_q: int
    s_kv: int
    h_q: int
    topk: int
    d_qk: int
    dtype: str
    has_sink: bool = False
    deterministic: bool = False
    aligned: bool = True
    aligned_out: bool = False
    has_dlse: bool = False


class SparseBackwardOptions(NamedTuple):
    """A call's arguments other than arrays: as passed, then as resolved by the checks."""

    scale: float
    causal: bool
    relative: bool
    lse_base: str
    deterministic: bool
    dkv_dtype: str | None
    kernel: str | None


def plain_variant(problem: SparseBackwardProblem, device: DeviceInfo) -> Variant:
    """The build of a main kernel that has no other choices. `deterministic` is 1 for order-independent sums."""
    return Variant(dtype=problem.dtype, head_dim_qk=problem.d_qk, deterministic=int(problem.deterministic))


@dataclass(frozen=True)
class BackwardKernel(KernelSpec[SparseBackwardProblem]):
    """A main kernel: everything between the statistics of the queries and the sums of dkv.

    Attributes
    ----------
    grid : callable
        `grid(problem, device)`.
    heads_per_addition : int
        Heads summed before each addition to a row of kv.
    dkv_order : DkvOrder
        Order on GPUs with vector reductions, from compute capability 9.0 on; older GPUs use `PLAIN`.
    variant : callable
        `variant(problem, device)`: the build for a problem.
    makes_delta : bool
        Whether it can compute sum(out * dout) itself, of an `aligned_out`.
    pieces_variant : callable, optional
        `pieces_variant(problem, device)`: the build for a piece of a list at a time; None if there is none. A kernel
        with such builds uses `PiecesParams`.
    maps : callable, optional
        `maps(problem, call)`: its tensor maps and their arrays, if it fetches by TMA.
    """

    grid: Callable[[SparseBackwardProblem, DeviceInfo], Dim3] = lambda problem, device: (1, 1, 1)
    heads_per_addition: int = 64
    dkv_order: DkvOrder = DkvOrder.PLAIN
    variant: Callable[[SparseBackwardProblem, DeviceInfo], Variant] = plain_variant
    makes_delta: bool = False
    pieces_variant: Callable[[SparseBackwardProblem, DeviceInfo], Variant | None] | None = None
    maps: Callable[[SparseBackwardProblem, Call], tuple[tuple[str, TensorMapSpec], ...]] | None = None

    def dkv_order_on(self, device: DeviceInfo) -> DkvOrder:
        """Order in which it keeps the elements of a row of dkv on a GPU."""
        return self.dkv_order if device.cc >= (9, 0) else DkvOrder.PLAIN

    def additions(self, problem: SparseBackwardProblem) -> int:
        """Number of additions to an element of dkv per index that selects its row."""
        return -(-problem.h_q // self.heads_per_addition)
