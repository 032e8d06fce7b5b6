"""Host side of `sparse_decode/turn_results.cu`."""

from __future__ import annotations

from mla_cupy.dtypes import TABLE
from mla_cupy.kernels.params import SparseDecodeTurnParams
from mla_cupy.kernels.pipeline import Call, Launch, LaunchArgs
from mla_cupy.kernels.spec import PLAIN, KernelSpec

HEADS_PER_WARP = 4
_WARPS = 8

KERNEL: KernelSpec[object] = KernelSpec(
    "sparse_decode_turn_results",
    "turns the last columns of results of sparse decode back, by the queries' RoPE",
    "sparse_decode/turn_results.cu",
    SparseDecodeTurnParams,
    core=PLAIN,
    facts={"heads_per_warp": HEADS_PER_WARP},
)


def launch(call: Call, of_query: int) -> Launch:
    """Turn `out`, with the queries on axis `of_query`."""
    out, cos, positions = call.view("out"), call.view("out_cos"), call.view("out_positions")
    b, s_q, h_q = out.shape[:3]
    position_bytes = TABLE[positions.dtype].nbytes
    params = SparseDecodeTurnParams(
        out=call.name("out"),
        cos="out_cos",
        sin="out_sin",
        positions="out_positions",
        out_stride_query_h_elems=(call.stride("out", of_query), call.stride("out", 2)),
        cos_stride_elems=call.stride("out_cos"),
        sin_stride_elems=call.stride("out_sin"),
        positions_stride_b_s_bytes=(position_bytes * positions.strides[0], position_bytes * positions.strides[1]),
        queries=b * s_q,
        s_q=s_q,
        h_q=h_q,
        max_position=cos.shape[0],
        positions_are_64=positions.dtype == "int64",
        out_is_fp32=out.dtype == "float32",
        out_is_bf16=out.dtype == "bfloat16",
    )
    warps = b * s_q * -(-h_q // HEADS_PER_WARP)
    return Launch(KERNEL, PLAIN[0], (-(-warps // _WARPS), 1, 1), LaunchArgs(params))
