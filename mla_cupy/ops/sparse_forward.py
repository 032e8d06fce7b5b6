"""Sparse attention over a flat latent cache, forward."""

from __future__ import annotations

from math import inf
from typing import Any

from mla_cupy.cache_formats import FP8, widths_of
from mla_cupy.kernels.attention.records import READ_FORWARD as READ
from mla_cupy.kernels.sparse_forward import SPARSE_FORWARD
from mla_cupy.kernels.sparse_forward.problem import SparseForwardOptions, SparseForwardProblem
from mla_cupy.ops import combinations
from mla_cupy.ops.call import call
from mla_cupy.ops.checks import (
    check_factor,
    check_flag,
    check_lse,
    check_math,
    check_pieces,
    check_scale,
    explains_scale,
)
from mla_cupy.ops.groups import Fp8, Packed
from mla_cupy.ops.operation import Examined, Operation, Output, Views, like_first_or_float32
from mla_cupy.ops.sparse_inputs import (
    INDICES,
    MIN_SIZES,
    OPTIONAL_INPUTS,
    Q_ROWS_OR_PAGES,
    SIZES,
    aligned,
    check_rows_or_pages,
    check_selection,
    check_sparse_values,
)


@explains_scale
def sparse_mla_forward(
    q: Any,
    kv: Any,
    indices: Any,
    *,
    scale: float,
    topk_length: Any = None,
    attn_sink: Any = None,
    causal: bool = False,
    relative: bool = True,
    packed: Packed | None = None,
    fp8: Fp8 | None = None,
    batch_invariant: bool = False,
    split_tokens: int = 4096,
    lse_base: str = "e",
    empty_lse: float = -inf,
    out: Any = None,
    lse: Any = None,
    max_logits: Any = None,
    workspace: Any = None,
    out_dtype: Any = None,
    kernel: str | None = None,
    stream: Any = None,
) -> tuple[Any, Any, Any]:
    """Attend from each query to the rows of a latent cache that its indices select (absorbed MLA).

    out[i, h] = w[i, h] * sum_j softmax_j(scale * q[i, h] . kv[j]) * kv[j, :512], where j runs over the rows that query
    i selects, and w[i, h] = 1 / (1 + exp(attn_sink[h] - lse[i, h])). Without a sink, w is 1.

    Parameters
    ----------
    q : array, (s_q, h_q, d_qk), bfloat16 or float16
        Absorbed queries, d_qk 576 or 512. The last axis is contiguous; other strides are free (multiples of 16 bytes
        are fastest).
    kv : array, (s_kv, d_qk) or (s_kv, 1, d_qk), dtype of q; or (num_pages, page_size, width), uint8
        Latents; the values are the first 512 elements of the keys. Strides as for q. Or pages in an FP8 format, see
        `cache_append`: a width of 656 is "v32" with a d_qk of 576, or "v32-nope" with 512; 528 bytes of "v32-nope" need
        Fp8(kv_format="v32-nope"); 584 is "v4" with a d_qk of 512 and values that include the RoPE part; 576 is "fp8",
        with Fp8("fp8") only. Rows are then slots, page * page_size + token; tokens of "v32", "v32-nope" and "fp8" need
        no pages, (s_kv, 656). Pages of FP8 formats start at, and step by, multiples of 16 bytes: pages of "v4" with an
        odd number of tokens need a gap of 8 bytes between them.
    indices : array, (s_q, topk) or (s_q, 1, topk), int32
        The rows of each query, in any order, counted from the start of its sequence: see `relative`. Any topk, any
        strides. An entry counts if 0 <= index < limit; all others, usually -1, are skipped. The limit is the sequence's
        length in kv. A row counts as often as it occurs.
    scale : float
        Factor of the scores: finite, above 0. Pass the model's softmax scale: 192**-0.5 for DeepSeek-V3, times YaRN's
        mscale**2 where the model uses it.
    topk_length : array, (s_q,), int32, optional
        Only the first topk_length[i] entries of query i are read; clamped to [0, topk].
    attn_sink : array, (h_q,), float32, optional
        Logits of a key without a value: see w above. -inf has no effect, +inf makes `out` 0.
    causal : bool
        Lower the limit of each query by the number of later queries of its sequence: with equally many queries and
        rows, query i sees rows 0 to i.
    relative : bool
        With `packed`: True if indices count from the first row of the query's sequence; False if they are row numbers
        of kv, as in cuDNN and Megatron, and rows of other sequences are skipped. Pass the same value to
        `indexer_select` (default True) or `indexer_topk` (default False).
    packed : Packed, optional
        Starts of several sequences, both `cu_seqlens_q` and `cu_seqlens_kv`. Default: one sequence. A query outside all
        sequences has no row; a query of several belongs to the first. Values of cu_seqlens_kv are clamped to [0, s_kv],
        and a sequence that ends before it starts is empty.
    fp8 : Fp8, optional
        For pages of "fp8": `math` must be "fp8", and `kv_scale` is a number. Both matmuls run on the FP8 tensor cores
        of Hopper; queries and weights are rounded to e4m3, see `Fp8`.
    batch_invariant : bool
        Give a query the same bits in every call, whatever the other queries, their number and order, and the size of
        the cache. Each list is then split on its own into pieces of `split_tokens`, one thread block per piece; lists
        are not sorted, and FP8 tokens are never converted first (with many queries, `cache_gather` and a call over its
        rows are faster).
    split_tokens : int
        A multiple of 64, and at least 1/256 of topk. Shorter pieces make small batches faster and large ones
        slower. Has no effect without `batch_invariant`.
    lse_base : str
        "e" or "2": base of the logarithm in `lse`.
    empty_lse : float
        The `lse` of a query without a row; its `out` is 0, its `max_logits` -inf.
    out : array, (s_q, h_q, 512), dtype of q or float32, optional
        Memory for the result. The last axis is contiguous; the start and the other strides are multiples of 16 bytes.
        Not for JAX, whose arrays cannot be written.
    lse, max_logits : array, (s_q, h_q), float32, optional
        Memory for these results; any strides.
    workspace : array, (n,), uint8, optional
        Memory for the call, 256-byte aligned, of at least `workspace_bytes(sparse_mla_forward, ...)` bytes.
    out_dtype : str or dtype, optional
        "float32" for results to be merged; default: the dtype of `out`, or of q.
    kernel : str, optional
        Name of the attention kernel to run, see `mla-cupy list`. Default: the fastest that fits.
    stream : int or stream object, optional
        Where to run. Default: the caller's library's current stream.

    Returns
    -------
    out : array, (s_q, h_q, 512)
        Array of the caller's library.
    lse : array, (s_q, h_q), float32
        log(sum_j exp(scale * q . kv[j])), in base `lse_base`, without the sink. An argument of the backward.
    max_logits : array, (s_q, h_q), float32
        max_j scale * q . kv[j].

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched, and `out`, `lse` and `max_logits` are untouched.
    UnsupportedDeviceError
        If no kernel fits the GPU.

    Notes
    -----
    NumPy arrays (and PyTorch tensors on the CPU) are computed on the GPU if there is one, else by the NumPy oracle. FP8
    formats have no backward.

    On Hopper, calls that gather each token of `kv` often (s_q * topk of at least 16 times the tokens with up to 32
    heads, 4 times with more) first convert all of `kv` to rows of q's dtype in the workspace, 2 * d_qk bytes per token.
    Other calls convert nothing in memory; neither do other GPUs, nor calls with the `kernel` of an FP8 format.
    `sparse_forward_sm90_records` rounds latents of "v32" to float16, see `sparse_mla_decode`. With power-of-two scales
    both ways are exact within the range of the dtype. With "plain" scales and bfloat16 queries, converted latents are
    rounded to bfloat16, eight times as coarsely as to float16. The call's sizes decide between the two ways, unless
    `kernel` names one.

    Weights are rounded to 16 bits for the product with the values, and `out` is divided by the sum of the weights
    before rounding: where rows have equal scores, all of `out` may have one common relative error, up to 2^-8 in
    bfloat16, 2^-11 in float16. The CUDA-core fallback does not round weights.

    Rows that a query does not select never reach its result, whatever they contain: NaN, Inf, or unmapped memory (but
    conversion reads all of `kv`). The result does not change from run to run. Within rounding it depends on s_q, on the
    other queries' numbers of rows, and on the rows' places in `kv`, which determine how queries are split over the GPU
    and how lists are sorted; not with `batch_invariant`. Workspace: 4 * s_q * topk bytes for the lists of rows, the
    pieces of split queries, and converted tokens. A call takes 2 * h_q * (d_qk + 512) FLOPs per selected row.

    Examples
    --------
    >>> import numpy as np, mla_cupy
    >>> q = np.ones((2, 16, 576), np.float16)
    >>> kv = np.ones((100, 576), np.float16)
    >>> indices = np.array([[3, 70, -1], [5, -1, -1]], np.int32)
    >>> out, lse, max_logits = mla_cupy.sparse_mla_forward(q, kv, indices, scale=192**-0.5)
    >>> out.shape, float(out[0, 0, 0]), round(float(lse[0, 0]), 3), round(float(max_logits[1, 0]), 3)
    ((2, 16, 512), 1.0, 42.262, 41.569)
    """
    return call(sparse_mla_forward, locals())


def _examine(views: Views, given: SparseForwardOptions) -> Examined:
    record = check_rows_or_pages(views, (*READ, FP8.name), given.kv_format)
    sizes = check_selection(views)
    options = given._replace(
        scale=check_scale(given.scale),
        causal=check_flag("causal", given.causal),
        relative=check_flag("relative", given.relative),
        kv_scale=check_factor("kv_scale", given.kv_scale),
        math=check_math(given.math),
        **check_lse(given.lse_base, given.empty_lse)._asdict(),
    )
    parts = combinations.multiplied(options.math, sizes.dtype) | combinations.held(record)
    combinations.check(combinations.SPARSE_FORWARD, {**parts, "kv_scale": combinations.other_than(1, options.kv_scale)})
    if options.kv_scale != 1:
        check_factor("scale * kv_scale", options.scale * options.kv_scale)
    fast = aligned(views, "q") if record else aligned(views, "q", "kv")
    lists = ("topk", sizes.topk), (f"{sizes.s_q} queries", sizes.s_q)
    tiles = check_pieces(given.batch_invariant, given.split_tokens, *lists)
    return Examined(SparseForwardProblem(*sizes, fast, record, options.math, tiles), options)


OPERATION = Operation(
    "sparse_mla_forward",
    inputs=(*Q_ROWS_OR_PAGES, INDICES, *OPTIONAL_INPUTS),
    outputs=(
        Output("out", "s_q h_q d_v", like_first_or_float32, "out_dtype", "wide"),
        Output("lse", "s_q h_q"),
        Output("max_logits", "s_q h_q"),
    ),
    sizes={**SIZES, "d_kv": (*SIZES["d_qk"], *widths_of(READ))},
    min_sizes=MIN_SIZES,
    options=SparseForwardOptions,
    parallel={"h_q": ()},
    examine=_examine,
    derivative="reverse",
    check_values=check_sparse_values,
    pipeline=SPARSE_FORWARD,
    groups={"packed": Packed, "fp8": Fp8},
)
