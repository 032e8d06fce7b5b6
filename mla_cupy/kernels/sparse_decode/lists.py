"""Host side of `sparse_decode/lists.cu`."""

from __future__ import annotations

from mla_cupy.arrays.view import View
from mla_cupy.kernels.cache import layout
from mla_cupy.kernels.decode.problem import MAX_SPLITS
from mla_cupy.kernels.pipeline import Call, Launch, Record
from mla_cupy.kernels.sparse_decode.problem import SparseDecodeProblem
from mla_cupy.kernels.spec import PLAIN, Kernel, Params
from mla_cupy.records import RECORDS

ENTRY_BYTES = 16

KERNEL: Kernel[object] = Kernel(
    "sparse_decode_lists",
    "turns the indices of sparse decode into lists of tokens, and cuts these into splits",
    "sparse_decode/lists.cu",
    Params(
        cache="u8",
        indices="u8",
        topk_length="u8",
        extra_cache="u8",
        extra_indices="u8",
        extra_topk_length="u8",
        lists="u8",
        counts="u8",
        schedule="u8",
        page_stride_bytes="i8",
        token_stride_bytes="i8",
        extra_page_stride_bytes="i8",
        extra_token_stride_bytes="i8",
        indices_stride_b_elems="i8",
        indices_stride_s_elems="i8",
        indices_stride_k_elems="i8",
        extra_stride_b_elems="i8",
        extra_stride_s_elems="i8",
        extra_stride_k_elems="i8",
        topk_length_stride_elems="i8",
        extra_topk_length_stride_elems="i8",
        list_stride="i8",
        queries="i4",
        s_q="i4",
        topk="i4",
        extra_topk="i4",
        num_splits="i4",
        merge_cost="i4",
        num_pages="i4",
        page_size="i4",
        scales_offset="i4",
        scales_stride="i4",
        extra_num_pages="i4",
        extra_page_size="i4",
        extra_scales_offset="i4",
        extra_scales_stride="i4",
    ),
    facts={"entry_bytes": ENTRY_BYTES, "max_splits": MAX_SPLITS},
)


def list_stride(topk: int) -> int:
    """Entries of memory per list."""
    return max(1, topk)


def launch(call: Call, problem: SparseDecodeProblem, num_splits: int, merge_cost: int) -> Launch:
    """Write the lists, their lengths and the schedule to the workspace."""
    queries = problem.queries
    indices, extra = call.view("indices"), call.views["extra_indices"]
    caches = (call.view("kv_cache"), call.views["extra_kv_cache"])
    pages, shapes = zip(*(_pages(problem.record, cache) for cache in caches), strict=True)
    names = ("indices", "topk_length", "extra_kv_cache", "extra_indices", "extra_topk_length")
    values = (
        *(*pages[0], *pages[1]),
        *(*indices.strides, *call.strides("extra_indices", 3)),
        *(*call.strides("topk_length", 1), *call.strides("extra_topk_length", 1), list_stride(problem.topk)),
        *(queries, indices.shape[1], indices.shape[2], 0 if extra is None else extra.shape[2]),
        *(num_splits, merge_cost),
        *(*shapes[0], *shapes[1]),
    )
    addresses = ("kv_cache", *(call.name(name) for name in names), "lists", "counts", "schedule")
    return Launch(KERNEL, PLAIN[0], (1 + queries, 1, 1), Record(KERNEL, addresses, values))


def _pages(name: str, cache: View | None) -> tuple[tuple[int, int], tuple[int, int, int, int]]:
    """(page stride, token stride) in bytes, then pages, page size, and where the scales are."""
    if cache is None:
        return (0, 0), (0, 1, 0, 0)
    record, (num_pages, page_size, _) = RECORDS[name], cache.shape
    page, token = layout.page_and_token_bytes(record, cache)
    members = dict(zip(layout.MEMBERS, layout.values(record, page_size, token, 1.0), strict=True))
    return (page, token), (num_pages, page_size, int(members["scales_offset"]), int(members["scales_stride"]))
