"""Sparse decode straight from the FP8 records of a paged cache."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

from mla_cupy.cache_formats import BYTE_DTYPES, FORMATS, FP8, format_of
from mla_cupy.dtypes import HALF
from mla_cupy.errors import ArgumentError, ShapeError, explain
from mla_cupy.kernels.attention.records import COMPACT, READ_SPARSE
from mla_cupy.kernels.sparse_decode import SPARSE_DECODE
from mla_cupy.kernels.sparse_decode.problem import SparseDecodeOptions, SparseDecodeProblem
from mla_cupy.ops import combinations
from mla_cupy.ops.cache import INDEX_DTYPES, check_layout, record_read
from mla_cupy.ops.call import call
from mla_cupy.ops.checks import (
    check_all_or_none,
    check_codes,
    check_dtype,
    check_factor,
    check_lse,
    check_math,
    check_pieces,
    check_scale,
    check_scales_of_results,
    explains_scale,
    is_e4m3,
    sizes_of_results,
)
from mla_cupy.ops.groups import Fp8, OutRope, Project
from mla_cupy.ops.operation import (
    Examined,
    Input,
    Operation,
    Output,
    Views,
    like_first_or_float32,
    present,
    with_scales,
)
from mla_cupy.ops.projection import GATE, W_UV, check_projection
from mla_cupy.ops.schema import check_even, steps_by_16_bytes
from mla_cupy.shapes import D_HEADS, D_ROPE, D_V, MAX_TOKENS


@explains_scale
def sparse_mla_decode(
    q: Any,
    kv_cache: Any,
    indices: Any,
    *,
    scale: float,
    topk_length: Any = None,
    attn_sink: Any = None,
    extra_kv_cache: Any = None,
    extra_indices: Any = None,
    extra_topk_length: Any = None,
    out_rope: OutRope | None = None,
    project: Project | None = None,
    fp8: Fp8 | None = None,
    batch_invariant: bool = False,
    split_tokens: int = 4096,
    lse_base: str = "e",
    empty_lse: float = -inf,
    out: Any = None,
    lse: Any = None,
    out_scales: Any = None,
    workspace: Any = None,
    out_dtype: Any = None,
    scales: str = "plain",
    kernel: str | None = None,
    stream: Any = None,
) -> tuple[Any, ...]:
    """Attend from each query to the tokens of a paged FP8 cache that its indices select (absorbed MLA).

    Parameters
    ----------
    q : array, (b, s_q, h_q, d_qk), bfloat16 or float16
        Absorbed queries: d_qk is 576 for the formats "v32" and "fp8", 512 for "v32-nope", "v4" and "v41". The last axis
        is contiguous, and the first two step evenly.
    kv_cache : array, (num_pages, page_size, 656, 584, 528, 288 or 576), uint8
        An axis of size 1 may stand on either side of the tokens, as for `mla_decode`. Pages of "v32", "v32-nope",
        "v4", "v41", "v41-fp4" or, with Fp8("fp8") only, "fp8": see `cache_append`; "v32-nope" with 528 bytes per token
        needs Fp8(kv_format="v32-nope"). The values are the first 512 elements of the keys, which include the RoPE part
        for "v4" and "v41". Pages start at, and step by, multiples of 16 bytes: pages of "v4" with an odd number of
        tokens need a gap of 8 bytes between them.
    indices : array, (b, s_q, topk), int32
        Slots, page * page_size + token, in any order. Any topk, any strides. Slots outside the cache, usually -1, are
        skipped; a slot counts as often as it occurs.
    scale : float
        Factor of the scores: finite, above 0. Pass the model's softmax scale: 192**-0.5 for DeepSeek-V3, times YaRN's
        mscale**2 where the model uses it.
    topk_length : array, (b,), int32, optional
        Only the first topk_length[i] entries of the lists of sequence i are read; clamped to [0, topk].
    attn_sink : array, (h_q,), float32, optional
        Logits of a key without a value. It only lowers `out`. -inf has no effect, +inf makes `out` 0.
    extra_kv_cache, extra_indices, extra_topk_length : array, optional
        A second cache in the same format, or in "v41-fp4" with "v41", with pages of any size, and lists of further keys
        in it under the same softmax. Pass cache and indices together. Not supported with "fp8" and "v41-fp4".
    out_rope : OutRope, optional
        Undo RoPE in the last 64 columns of `out`, for "v4" and "v41", where values include the keys' RoPE part.
        Excludes `project`. A separate launch rounds these columns of a 16-bit `out` a second time, in place.
    project : Project, optional
        Multiply results by W_UV, and by the sigmoid of a gate, during the merge or after it. The first two axes of a
        gate step evenly.
    fp8 : Fp8, optional
        For pages of "fp8": `math` must be "fp8", and `kv_scale` is a number. Both matmuls run on the FP8 tensor cores
        of Hopper; queries and weights are rounded to e4m3, see `Fp8`.
    batch_invariant : bool
        Give a query the same bits in every call, whatever the other queries, their number and order, and the size of
        the cache. Each list is then split on its own into pieces of `split_tokens`, one thread block per piece.
    split_tokens : int
        A multiple of 64, and at least 1/256 of topk of both lists together. Shorter pieces make small batches faster
        and large ones slower. Has no effect without `batch_invariant`.
    lse_base : str
        "e" or "2": base of the logarithm in `lse`.
    empty_lse : float
        The `lse` of a query without a token; its `out` is 0.
    out : array, (b, s_q, h_q, 512), dtype of q, float32 or `out_dtype`, optional
        Memory for the result, (b, s_q, h_q, d_head) with `project`. The last axis is contiguous, the start and the
        other strides are multiples of 16 bytes, and the first two axes step evenly.
    lse : array, (b, s_q, h_q), float32, optional
        Memory for the log-sum-exp; the first two axes step evenly.
    out_scales : array, (b, s_q, h_q, 4), float32, optional
        Memory for the scales of e4m3 results; any strides.
    workspace : array, (n,), uint8, optional
        Memory for the call, 256-byte aligned, of at least `workspace_bytes(sparse_mla_decode, ...)` bytes.
    out_dtype : str or dtype, optional
        "float32" for results to be merged; "float8_e4m3fn", or "uint8" for its codes, for a following FP8 GEMM, as for
        `mla_decode`. Default: the dtype of `out`, or of q.
    scales : str
        Rule of `out_scales`, as for `mla_decode`: "plain" or "power_of_2".
    kernel : str, optional
        Name of the attention kernel to run, see `mla-cupy list`. Default: the fastest that fits.
    stream : int or stream object, optional
        Where to run. Default: the caller's library's current stream.

    Returns
    -------
    out : array, (b, s_q, h_q, 512), or (b, s_q, h_q, d_head) with `project`
    lse : array, (b, s_q, h_q), float32
        log(sum_j exp(scale * q . k[j])), in base `lse_base`, without the sink.
    out_scales : array, (b, s_q, h_q, 4), float32
        Only with an FP8 `out_dtype`: one per 128 columns of `out`, so d_head / 128 per row with `project`.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched.
    UnsupportedDeviceError
        If no kernel fits the GPU.

    Notes
    -----
    Any number of heads. Tokens that a query does not select never reach its result. The result does not change from run
    to run. Workspace: the pieces of split queries and, with Fp8("fp8"), lists of the valid slots, 4 * topk bytes per
    query.

    Weights are rounded to 16 bits for the product with the values, and `out` is divided by the sum of the weights
    before rounding: where tokens have equal scores, all of `out` may have one common relative error, up to 2^-8 in
    bfloat16, 2^-11 in float16. The CUDA-core fallback does not round weights.

    On tensor cores keys are rounded to 16 bits: latents of "v32" and "v32-nope" to float16, whatever the dtype of q,
    and all of "v4" and "v41" to the dtype of q. With power-of-two scales, in float16 from 2^-15 to 2^7, latents are
    then exact; latents of "v41-fp4" always are. In float16 elements beyond 65504 overflow, and elements with a scale
    below 2^-25 become 0. The CUDA-core fallback does not round latents, and neither do the mma.sync kernels for "v32"
    and "v32-nope", which round weights and scales to float16 and lose 2e-4 of a result, or 5e-4 where scales are no
    powers of two.

    Examples
    --------
    >>> import numpy as np, mla_cupy
    >>> cache = np.zeros((4, 64, 656), np.uint8)
    >>> latent, rope = np.ones((2, 512), np.float16), np.zeros((2, 64), np.float16)
    >>> mla_cupy.cache_append(latent, rope, cache, np.array([70, 5]))
    >>> q, indices = np.ones((1, 1, 8, 576), np.float16), np.array([[[5, -1, 70]]], np.int32)
    >>> out, lse = mla_cupy.sparse_mla_decode(q, cache, indices, scale=192**-0.5)
    >>> out.shape, float(out[0, 0, 0, 0]), round(float(lse[0, 0, 0]), 3)
    ((1, 1, 8, 512), 1.0, 37.644)
    """
    return call(sparse_mla_decode, locals())


_READ = (*READ_SPARSE, *COMPACT.values(), FP8.name)
_DECODED = {compact: name for name, compact in COMPACT.items()}
"""Formats that the kernels of another one read as its second list."""


def _check_extra(views: Views, record: str) -> bool:
    """Check the second cache; returns whether it has the compact record."""
    check_all_or_none(views, "extra_kv_cache", "extra_indices")
    cache = views["extra_kv_cache"]
    if views["extra_topk_length"] is not None and cache is None:
        raise ArgumentError(explain("extra_topk_length", "an array", "None: there are no extra_indices"))
    if cache is None:
        return False
    if record in COMPACT.values():
        remedy = "pass it as extra_kv_cache, and the cache of v41 as kv_cache"
        raise ArgumentError(explain("extra_kv_cache", "an array", f"None beside a kv_cache of {record}", remedy))
    if record == FP8.name:
        remedy = "append its tokens to kv_cache"
        raise ArgumentError(explain("extra_kv_cache", "an array", f"None beside a kv_cache of {record}", remedy))
    allowed = [name for name in (record, COMPACT.get(record)) if name]
    name = record if cache.shape[2] in FORMATS[record].other_widths else None
    extra = format_of(cache.dtype, cache.shape[2], "extra_kv_cache", name, allowed, FORMATS[record].d_qk)
    if extra.name not in allowed:
        expected = " or ".join(allowed) + f" beside a kv_cache of {record}"
        raise ShapeError(explain("extra_kv_cache", f"pages of {extra.name}", expected))
    check_layout(extra, cache, "extra_kv_cache")
    return extra.name != record


def _parts(views: Views, options: SparseDecodeOptions, record: str) -> combinations.Parts:
    """Parts of a call, for the table of combinations."""
    return {
        **combinations.given(views, "w_uv", "out_cos"),
        **combinations.multiplied(options.math, present(views, "q").dtype),
        **combinations.held(_DECODED.get(record, record)),
        "kv_scale": combinations.other_than(1, options.kv_scale),
    }


def _examine(views: Views, given: SparseDecodeOptions) -> Examined:
    q, cache, indices = (present(views, name) for name in ("q", "kv_cache", "indices"))
    extra = views["extra_indices"]
    b, s_q, h_q, d_qk = q.shape
    record = record_read(cache, d_qk, _READ, "kv_cache", "read 16-bit rows with sparse_mla_forward", given.kv_format)
    check_layout(record, cache, "kv_cache")
    options = given._replace(
        scale=check_scale(given.scale),
        kv_scale=check_factor("kv_scale", given.kv_scale),
        math=check_math(given.math),
        out_dtype=check_dtype("out_dtype", given.out_dtype),
        scales=check_scales_of_results(given.scales, is_e4m3(given.out_dtype)),
        **check_lse(given.lse_base, given.empty_lse)._asdict(),
    )
    combinations.check(combinations.SPARSE_DECODE, _parts(views, options, record.name))
    if options.kv_scale != 1:
        check_factor("scale * kv_scale", options.scale * options.kv_scale)
    compact = _check_extra(views, record.name) or record.name in _DECODED
    check_even("q", q)
    topk = indices.shape[2] + (0 if extra is None else extra.shape[2])
    if topk > MAX_TOKENS or b * s_q > MAX_TOKENS:
        raise ShapeError(explain("indices.shape", indices.shape, f"at most {MAX_TOKENS} queries, and keys of each"))
    ragged = any(views[name] is not None for name in ("topk_length", "extra_topk_length"))
    d_head = check_projection(views, q.dtype)
    tables = ("out_cos", "out_sin", "out_positions")
    turns = check_all_or_none(views, *tables, group="out_rope=OutRope(cos, sin, positions)")
    if turns and d_qk != D_V:
        raise ShapeError(
            explain("q.shape[-1]", d_qk, f"{D_V} with out_rope", "drop out_rope: other values have no RoPE columns")
        )
    tiles = check_pieces(given.batch_invariant, given.split_tokens, ("topk", topk), (f"{b * s_q} queries", b * s_q))
    sizes = (b * s_q, h_q, topk, q.dtype, _DECODED.get(record.name, record.name))
    problem = SparseDecodeProblem(*sizes, steps_by_16_bytes(q), ragged, d_head, compact, options.math, tiles)
    problem = replace(problem, fp8_out=check_codes(options.out_dtype, d_head))
    return Examined(problem, options, sizes_of_results(d_head or D_V))


OPERATION = Operation(
    "sparse_mla_decode",
    inputs=(
        Input("q", "b s_q h_q d_qk", HALF, contiguous=True),
        Input("kv_cache", "num_pages page_size 1? width", BYTE_DTYPES, contiguous=True),
        Input("indices", "b s_q topk", ("int32",)),
        Input("topk_length", "b", ("int32",), optional=True),
        Input("attn_sink", "h_q", ("float32",), optional=True),
        Input(
            "extra_kv_cache", "extra_pages extra_page_size 1? extra_width", BYTE_DTYPES, optional=True, contiguous=True
        ),
        Input("extra_indices", "b s_q extra_topk", ("int32",), optional=True),
        Input("extra_topk_length", "b", ("int32",), optional=True),
        Input("out_cos", "max_position pairs", ("float32",), optional=True, contiguous=True),
        Input("out_sin", "max_position pairs", ("float32",), optional=True, contiguous=True),
        Input("out_positions", "b s_q", INDEX_DTYPES, optional=True),
        W_UV,
        replace(GATE, even=True),
    ),
    outputs=(
        Output("out", "b s_q h_q d_head", like_first_or_float32, "out_dtype", "wide", even=True, coded="out_dtype"),
        Output("lse", "b s_q h_q", even=True),
        Output("out_scales", "b s_q h_q row_scales", when="out_dtype"),
    ),
    sizes={"d_v": (D_V,), "d_head": D_HEADS, "pairs": (D_ROPE // 2,)},
    min_sizes={"h_q": 1, "page_size": 1, "extra_page_size": 1, "max_position": 1},
    options=SparseDecodeOptions,
    parallel={"b": (), "h_q": ()},
    examine=_examine,
    pipeline=SPARSE_DECODE,
    on_pages=True,
    returns=with_scales,
    groups={"out_rope": OutRope, "project": Project, "fp8": Fp8},
)
