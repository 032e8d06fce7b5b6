"""The kernels of dense attention, backward: statistics, the plain ones for gradients, sums in 16 bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mla_cupy.dtypes import HALF
from mla_cupy.kernels.dense.problem import VARIANTS, DenseBackwardProblem
from mla_cupy.kernels.dense.table import Maps
from mla_cupy.kernels.params import DenseDeltaParams, PrefillBackwardParams
from mla_cupy.kernels.pipeline import Call
from mla_cupy.kernels.spec import (
    DTYPE_VARIANTS,
    KernelSpec,
    Variant,
    variants,
)
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.runtime.launching import Dim3


@dataclass(frozen=True)
class QueriesKernel(KernelSpec[DenseBackwardProblem]):
    """A kernel that makes gradients, after the statistics.

    Attributes
    ----------
    grid : callable
        `grid(problem, device)`.
    maps : callable
        `maps(problem, call)`: its tensor maps and their arrays.
    variant : callable
        `variant(problem)`: the build for a problem.
    """

    grid: Callable[[DenseBackwardProblem, DeviceInfo], Dim3] = lambda problem, device: (1, 1, 1)
    maps: Callable[[DenseBackwardProblem, Call], Maps] = lambda problem, call: ()
    variant: Callable[[DenseBackwardProblem], Variant] = lambda problem: problem.variant


@dataclass(frozen=True)
class KeysKernel(QueriesKernel):
    """A kernel that makes the gradients of keys and values.

    Attributes
    ----------
    queries : QueriesKernel
        Computes the queries' gradient, where this kernel does not.
    sums_dq : callable
        `sums_dq(problem)`: whether it adds the gradients of the queries and the shared last columns of the keys up in
        float32, in an order that varies.
    """

    queries: QueriesKernel = QueriesKernel("", "", "", PrefillBackwardParams)
    sums_dq: Callable[[DenseBackwardProblem], bool] = lambda problem: False


# ---- Before and after -------------------------------------------------------------------------------------------

DK_ROPE_KEYS = 16
"""Keys of a block of the kernel that makes their last columns' gradient."""

DELTA: KernelSpec[DenseBackwardProblem] = KernelSpec(
    "dense_delta",
    "the statistics of each query and head for the backward of dense attention, and zeros for sums",
    "dense/delta.cu",
    DenseDeltaParams,
    variants=VARIANTS,
)
DQ: KernelSpec[DenseBackwardProblem] = KernelSpec(
    "dense_dq",
    "turns float32 sums into the gradients of queries, and of last columns that heads share, of dense attention",
    "dense/dq.cu",
    PrefillBackwardParams,
    variants=variants(dtype=HALF, head_dim_qk=tuple(dict.fromkeys(variant.head_dim_qk for variant in VARIANTS))),
    facts={"keys_per_block": DK_ROPE_KEYS},
)
DK_ROPE: KernelSpec[DenseBackwardProblem] = KernelSpec(
    "dense_dk_rope",
    "turns float32 sums, of all heads or of each, into the gradient of the last columns of keys that heads share",
    "dense/dk_rope.cu",
    PrefillBackwardParams,
    variants=DTYPE_VARIANTS,
    facts={"keys_per_block": DK_ROPE_KEYS},
)

# ---- Any GPU ----------------------------------------------------------------------------------------------------

GENERIC_QUERIES = QueriesKernel(
    "dense_generic_backward_queries",
    "gradient of the queries of dense attention on CUDA cores, any strides",
    "dense/generic_backward_queries.cu",
    PrefillBackwardParams,
    variants=VARIANTS,
    grid=lambda problem, device: (problem.most_tiles, problem.h_q, 1),
)
GENERIC_KEYS = KeysKernel(
    "dense_generic_backward_keys",
    "gradients of keys and values of dense attention on CUDA cores, any strides",
    "dense/generic_backward_keys.cu",
    PrefillBackwardParams,
    variants=VARIANTS,
    fallback=True,
    grid=lambda problem, device: (problem.most_key_tiles, problem.h_kv, 1),
    queries=GENERIC_QUERIES,
)
KERNELS = (DELTA, DQ, DK_ROPE, GENERIC_KEYS, GENERIC_QUERIES)
