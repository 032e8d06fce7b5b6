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

    `aligned` says that q, kv, dout and dq start at, and step by, multiples of 16 bytes; `aligned_out` that out, of 16
    bits, does.
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
    """The arguments of a call beside its arrays: the caller's, then what the checks make of them."""

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
        Heads whose contributions to a row of kv are summed before they are added to it.
    dkv_order : DkvOrder
        On GPUs with vector reductions, from compute capability 9.0 on; before, those kernels that run there have
        `PLAIN`.
    variant : callable
        `variant(problem, device)`: the build that it takes.
    makes_delta : bool
        Whether it can compute sum(out * dout) itself, of an `aligned_out`.
    pieces_variant : callable, optional
        `pieces_variant(problem, device)`: the build that takes a piece of a list at a time; None if there is none. A
        kernel with such builds takes `PiecesParams`.
    maps : callable, optional
        `maps(problem, call)`: its tensor maps and the arrays that they are of, if it fetches by TMA.
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
