"""The Hopper kernels of dense attention's backward: gradients of keys and values, and of queries."""

from __future__ import annotations

from mla_cupy.kernels.dense.backward_table import KeysKernel, QueriesKernel
from mla_cupy.kernels.dense.problem import TILE_KEYS, VARIANTS, DenseBackwardProblem
from mla_cupy.kernels.dense.table import Maps, row_map
from mla_cupy.kernels.params import PrefillBackwardParams
from mla_cupy.kernels.pipeline import Call
from mla_cupy.kernels.spec import HOPPER, Reason, needs_alignment, needs_cc
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.runtime.launching import Dim3

QUERIES_AT_ONCE = 64
"""Queries per step of the kernel of keys."""
_ROWS_AT_ONCE = _KEYS_AT_ONCE = 64
"""Rows of the kernel of queries: queries per warpgroup, and keys per step."""
_VARIANTS = tuple(variant for variant in VARIANTS if variant.head_dim_v == 128)


def needs_hopper(problem: DenseBackwardProblem, device: DeviceInfo) -> Reason | None:
    """Reason why Hopper's kernels do not support the problem; None if they do."""
    if device.arch not in HOPPER:
        return needs_cc(device, "9.0")
    if problem.d_v != 128:
        return Reason(f"is for (d_qk, d_v) = (192, 128) or (128, 128), not {problem.d_qk, problem.d_v}")
    return None if problem.aligned else needs_alignment("queries, keys, values, dout and the gradients")


def _maps(problem: DenseBackwardProblem, call: Call, query_rows: int, key_rows: int) -> Maps:
    """Queries, keys and values in panels, and dout.

    An operand that is missing has another one's map, which no thread uses.
    """
    queries, keys = bool(problem.s_q), bool(problem.s_kv)
    q, k = "q" if queries else "k", "k" if keys else "q"
    q_rope, k_rope = call.name("q_rope") if queries else "", call.name("k_rope") if keys else ""
    names = (q, q_rope or q, k, k_rope or k, "v" if keys else "q", "dout" if queries else "k")
    rows = (query_rows, query_rows, key_rows, key_rows, key_rows, query_rows)
    return tuple((name, row_map(call.view(name), count)) for name, count in zip(names, rows, strict=True))


def _keys_grid(problem: DenseBackwardProblem, device: DeviceInfo) -> Dim3:
    return min(device.sm_count, problem.most_key_tiles * problem.h_kv), 1, 1


def _queries_grid(problem: DenseBackwardProblem, device: DeviceInfo) -> Dim3:
    return min(device.sm_count, problem.most_tiles * problem.h_q), 1, 1


SM90_QUERIES = QueriesKernel(
    "dense_sm90_backward_queries",
    "gradient of the queries of dense attention with WGMMA and TMA",
    "dense/sm90_backward_queries.cu",
    PrefillBackwardParams,
    HOPPER,
    variants=tuple(variant.extended(tile_keys=_KEYS_AT_ONCE) for variant in _VARIANTS),
    facts={"tile_keys": _KEYS_AT_ONCE},
    unsupported=needs_hopper,
    grid=_queries_grid,
    maps=lambda problem, call: _maps(problem, call, _ROWS_AT_ONCE, _KEYS_AT_ONCE),
    variant=lambda problem: problem.variant.extended(tile_keys=_KEYS_AT_ONCE),
)
SM90_KEYS = KeysKernel(
    "dense_sm90_backward_keys",
    "gradients of keys and values of dense attention with WGMMA and TMA, and sums of the queries'",
    "dense/sm90_backward_keys.cu",
    PrefillBackwardParams,
    HOPPER,
    variants=tuple(variant.extended(sum_dq=sums) for variant in _VARIANTS for sums in (1, 0)),
    facts={"tile_queries": QUERIES_AT_ONCE, "tile_keys": TILE_KEYS},
    unsupported=needs_hopper,
    grid=_keys_grid,
    maps=lambda problem, call: _maps(problem, call, QUERIES_AT_ONCE, TILE_KEYS),
    variant=lambda problem: problem.variant.extended(sum_dq=int(not problem.deterministic)),
    queries=SM90_QUERIES,
    sums_dq=lambda problem: not problem.deterministic,
)
KERNELS = (SM90_KEYS, SM90_QUERIES)
