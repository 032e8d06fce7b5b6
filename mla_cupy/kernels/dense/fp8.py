"""The kernels of dense attention over e4m3 codes: Hopper's, with FP8 matmuls, and the CUDA-core fallback."""

from __future__ import annotations

from mla_cupy.arrays.view import View
from mla_cupy.kernels.dense.problem import FP8_GEOMETRY, DenseProblem
from mla_cupy.kernels.dense.table import DenseKernel, Maps, persistent_grid, plain_grid
from mla_cupy.kernels.params import PrefillFp8Addresses, PrefillFp8Params, PrefillParams
from mla_cupy.kernels.pipeline import Call
from mla_cupy.kernels.spec import HOPPER, Reason, Variant, needs_alignment, needs_cc
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.runtime.tensormap import TensorMapSpec

TILE_KEYS = 128
"""Keys of a tile; their weights share one maximum."""
QUERIES_AT_ONCE = 64
"""Queries of a warpgroup, which fetches them on its own."""
PANEL_COLUMNS, ROPE_COLUMNS = 128, 64
"""Widths of TMA copies: the span of the swizzle, and the remainder of a row."""
READS_CODES = Reason("reads queries, keys and values in e4m3")

_VARIANT = Variant(dtype="float8_e4m3fn", head_dim_qk=FP8_GEOMETRY[0], head_dim_v=FP8_GEOMETRY[1])
_HOPPER_VARIANT = _VARIANT.extended(tile_keys=TILE_KEYS)


def fp8_params(params: PrefillParams, problem: DenseProblem, call: Call) -> PrefillFp8Params:
    """Parameters of both kernels: dense attention's, the scales, and the starts of sequences."""
    return PrefillFp8Params(
        prefill_fp8_addresses=PrefillFp8Addresses(
            q_scales=call.name("q_scales"),
            k_scales=call.name("k_scales"),
            v_scales=call.name("v_scales"),
            sequences="sequences",
        ),
        prefill_params=params,
        q_scales_stride_b_h_elems=call.strides("q_scales", 2),
        k_scales_stride_b_h_elems=call.strides("k_scales", 2),
        v_scales_stride_b_h_elems=call.strides("v_scales", 2),
        b=problem.sequences,
        out_is_fp16=call.view("out").dtype == "float16",
    )


# ---- Hopper -----------------------------------------------------------------------------------------------------


def hopper_unsupported(problem: DenseProblem, device: DeviceInfo) -> Reason | None:
    """Reason why Hopper's kernel does not support the problem; None if it does."""
    if not problem.coded:
        return READS_CODES
    if device.arch not in HOPPER:
        return needs_cc(device, "9.0")
    return None if problem.aligned else needs_alignment("queries, keys and values")


def row_maps(problem: DenseProblem, call: Call) -> Maps:
    """Queries, their last columns, keys, their last columns, values.

    Without keys these have the queries' maps, which no thread uses.
    """
    q_rope = call.name("q_rope") or "q"
    queries = (("q", PANEL_COLUMNS, QUERIES_AT_ONCE), (q_rope, ROPE_COLUMNS, QUERIES_AT_ONCE))
    keys = "k", call.name("k_rope") or "k"
    boxes = (
        *queries,
        (keys[0], PANEL_COLUMNS, TILE_KEYS),
        (keys[1], ROPE_COLUMNS, TILE_KEYS),
        ("v", PANEL_COLUMNS, TILE_KEYS),
    )
    if not problem.s_kv:
        boxes = (*queries, *queries, queries[0])
    return tuple((name, row_map(call.view(name), columns, rows)) for name, columns, rows in boxes)


def row_map(array: View, columns: int, rows: int) -> TensorMapSpec:
    """An array of (tokens, heads, width) codes, fetched in boxes of `columns` x `rows` tokens of a head."""
    (tokens, heads, width), (token, head) = array.shape, array.strides[:2]
    return TensorMapSpec(
        "uint8",
        array.ptr,
        dims=(width, tokens, heads),
        strides_bytes=(token if tokens > 1 else width, head if heads > 1 else width),
        box=(columns, rows, 1),
        swizzle="128B" if columns == PANEL_COLUMNS else "64B",
    )


SM90_FP8 = DenseKernel(
    "dense_sm90_fp8",
    "dense attention over e4m3 codes with both products in FP8, promoted to float32 by 64 keys",
    "dense/sm90_fp8.cu",
    PrefillFp8Params,
    HOPPER,
    variants=(_HOPPER_VARIANT,),
    unsupported=hopper_unsupported,
    grid=persistent_grid,
    maps=row_maps,
    variant=lambda problem, device: _HOPPER_VARIANT,
)

# ---- Any GPU ----------------------------------------------------------------------------------------------------


def plain_unsupported(problem: DenseProblem, device: DeviceInfo) -> Reason | None:
    """Reason why the fallback does not support the problem; None if it does."""
    return None if problem.coded else READS_CODES


GENERIC_FP8 = DenseKernel(
    "dense_generic_fp8",
    "dense attention over e4m3 codes on CUDA cores, any strides",
    "dense/generic_fp8.cu",
    PrefillFp8Params,
    variants=(_VARIANT,),
    unsupported=plain_unsupported,
    fallback=True,
    grid=plain_grid,
    variant=lambda problem, device: _VARIANT,
)
KERNELS = (GENERIC_FP8, SM90_FP8)
