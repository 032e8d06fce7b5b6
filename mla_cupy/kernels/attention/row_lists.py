"""Host side of `attention/row_lists.cu`."""

from __future__ import annotations

from mla_cupy.kernels.attention import heuristics
from mla_cupy.kernels.param_layout import NULL
from mla_cupy.kernels.params import SparseRowsParams
from mla_cupy.kernels.pipeline import Call, Launch, LaunchArgs
from mla_cupy.kernels.spec import PLAIN, KernelSpec
from mla_cupy.shapes import TILE_TOKENS

ROWS_PER_TILE = TILE_TOKENS
"""The lists are padded to whole tiles."""

KERNEL: KernelSpec[object] = KernelSpec(
    "attention_row_lists",
    "turns indices into lists of valid rows, sorted where the cache does not fit the L2",
    "attention/row_lists.cu",
    SparseRowsParams,
    core=PLAIN,
    facts={"rows_per_tile": ROWS_PER_TILE},
)


def rows_stride(topk: int) -> int:
    """Length of the memory for one list: whole tiles, one at least."""
    return max(1, -(-topk // ROWS_PER_TILE)) * ROWS_PER_TILE


def list_sizes(s_q: int, topk: int) -> dict[str, int]:
    """The parts of a workspace that hold the lists, `rows`, and their lengths, `counts`: name -> bytes."""
    return {"rows": 4 * s_q * rows_stride(topk), "counts": 4 * s_q}


def launch(
    call: Call,
    causal: bool,
    relative: bool = True,
    *,
    ordered: bool,
    selected: str = NULL,
    keys: str = "kv",
    s_kv: int = -1,
) -> Launch:
    """Write the lists and their lengths to the workspace.

    `selected`, unless None, is an array of (s_kv,) zeros; each row's count of entries is added to it. `ordered` lists
    are sorted by the 256th of kv that contains a row; the others keep the order of the indices. `keys` is the array
    with the rows; it has `s_kv` rows if that is not the size of its first axis. `relative` indices count from the first
    row of their sequence, others from the first of all. Indices with three axes belong to sequences, with one
    `topk_length` each.
    """
    indices = call.view("indices")
    *of_axes, topk = indices.shape
    sequences, of_length = of_axes if len(of_axes) > 1 else (*of_axes, 1)
    stride_b, *stride_s, stride_k = indices.strides
    s_q = sequences * of_length
    s_kv = call.view(keys).shape[0] if s_kv < 0 else s_kv
    starts = call.views.get("cu_seqlens_q")
    params = SparseRowsParams(
        indices="indices",
        topk_length=call.name("topk_length"),
        cu_seqlens_q=call.name("cu_seqlens_q"),
        cu_seqlens_kv=call.name("cu_seqlens_kv"),
        rows="rows",
        counts="counts",
        selected=selected,
        indices_stride_b_s_k_elems=(stride_b, sum(stride_s), stride_k),
        topk_length_stride_elems=call.stride("topk_length"),
        cu_seqlens_q_stride_elems=call.stride("cu_seqlens_q"),
        cu_seqlens_kv_stride_elems=call.stride("cu_seqlens_kv"),
        rows_stride_elems=rows_stride(topk),
        s_q=s_q,
        s_kv=s_kv,
        topk=topk,
        b=0 if starts is None else starts.shape[0] - 1,
        causal=causal,
        ordered=ordered,
        relative=relative,
        queries_of_length=of_length,
    )
    return Launch(KERNEL, PLAIN[0], (min(s_q, heuristics.MAX_ROW_LIST_BLOCKS), 1, 1), LaunchArgs(params))
