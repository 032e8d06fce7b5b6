"""Dense decode over a paged latent cache."""

from __future__ import annotations

from dataclasses import replace
from math import inf, prod
from typing import Any

import numpy as np

from mla_cupy.arrays.view import View
from mla_cupy.cache_formats import BYTE_DTYPES, FORMATS, without_heads
from mla_cupy.dtypes import HALF
from mla_cupy.errors import ArgumentError, ShapeError, explain
from mla_cupy.kernels.attention.records import READ_DENSE as READ
from mla_cupy.kernels.decode import DECODE
from mla_cupy.kernels.decode.problem import Batch, DecodeOptions, DecodeProblem, Forms
from mla_cupy.ops import combinations
from mla_cupy.ops.cache import CACHE_AXES, INDEX_DTYPES, check_layout, record_read
from mla_cupy.ops.call import call
from mla_cupy.ops.checks import (
    MATH_OF_DENSE_DECODE,
    STARTS,
    check_all_or_none,
    check_count,
    check_d_v,
    check_drafts,
    check_empty_lse,
    check_factor,
    check_flag,
    check_lse_base,
    check_math,
    check_scale_values,
    check_shard,
    check_terms,
    name_first,
    resolve_scale,
)
from mla_cupy.ops.decode_plan import DecodePlan
from mla_cupy.ops.operation import Arrays, Examined, Input, Operation, Output, Views, like_queries_or_float32, present
from mla_cupy.ops.projection import GATE, W_UV, check_projection
from mla_cupy.ops.schema import steps_by_16_bytes
from mla_cupy.shapes import D_HEADS, D_ROPE, D_V, MAX_INT32, MAX_TOKENS, VALUE_WIDTHS


def mla_decode(
    q: Any,
    kv_cache: Any,
    block_table: Any,
    seqlens: Any,
    *,
    q_rope: Any = None,
    cu_seqlens_q: Any = None,
    tree_mask: Any = None,
    attn_sink: Any = None,
    out_cos: Any = None,
    out_sin: Any = None,
    out_positions: Any = None,
    w_uv: Any = None,
    gate: Any = None,
    q_scales: Any = None,
    kv_scales: Any = None,
    d_v: int = D_V,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    max_seqlen_q: int | None = None,
    cp_world: int = 1,
    cp_rank: int = 0,
    kv_scale: float = 1.0,
    q_scale: float = 1.0,
    math: str = "exact",
    plan: DecodePlan | None = None,
    out: Any = None,
    lse: Any = None,
    workspace: Any = None,
    out_dtype: Any = None,
    lse_base: str = "e",
    empty_lse: float = -inf,
    kernel: str | None = None,
    check: bool = False,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Attend from the newest tokens of each sequence to its paged latent cache (absorbed MLA).

    out[i, h] = sum_j softmax_j(scale * q[i, h] . k[j]) * k[j, :512], where j runs over the tokens that query i sees.

    Parameters
    ----------
    q : array, (b, s_q, h_q, d_qk), bfloat16 or float16; or float8_e4m3fn or uint8
        Absorbed queries; d_qk is 576, or 512 where keys have no RoPE part; or 320 (Mistral Small 4) or 288 (MiniCPM3),
        of which 256 are the latent. With `q_rope`, their first 512 columns. With
        `cu_seqlens_q` those of all sequences, (total_q, h_q, d_qk). The last axis is contiguous; other strides are free
        (multiples of 16 bytes are fastest). In e4m3 with math="fp8" or "fp8x2" only; uint8 holds e4m3 codes, for
        libraries without that dtype.
    kv_cache : array, (num_pages, page_size, d_qk), dtype of q; or uint8
        The pool of pages, which all query heads read; the values are the first `d_v` elements of the keys. Any page
        size; strides as for q. An axis for the one KV head may stand on either side of the tokens: (num_pages,
        page_size, 1, d_qk), or FlashInfer's (num_pages, 1, page_size, d_qk). Or the pages of an FP8 record, see
        `cache_append`: (num_pages, page_size, 656) for "v32", whose d_qk is 576, or (num_pages, page_size, 584) for
        "v4", whose d_qk is 512 and whose values include the RoPE part, or (num_pages, page_size, 528) for "v41", of
        which the same is true, or (num_pages, page_size, 576) for "fp8", with one scale for all. Pages of records start
        at, and step by, multiples of 16 bytes: pages of "v4" with an odd number of tokens need a gap of 8 bytes between
        them.
    block_table : array, (b, max_pages), int32
        The pages of each sequence. Entries past a sequence's end are never read. A page outside [0, num_pages) is
        missing: its tokens are invisible.
    seqlens : array, (b,), int32
        Tokens of each sequence in the cache, the query tokens included; clamped to
        [0, max_pages * page_size * cp_world + cp_rank].
    q_rope : array, (b, s_q, h_q, 64), dtype of q, optional
        The queries' last 64 columns, those of RoPE, where they are an array of their own; (total_q, h_q, 64) with
        `cu_seqlens_q`. Strides as for q.
    cu_seqlens_q : array, (b + 1,), int32, optional
        Queries of varying length: sequence n has those from cu_seqlens_q[n] to cu_seqlens_q[n + 1], its last tokens.
        Read on the device: clamped to [0, total_q], and one below its predecessor is raised to it. Queries of no
        sequence see no token. Without a `tree_mask` or context parallelism.
    tree_mask : array, (b, s_q), uint64 or int64, optional
        For sequences whose last s_q tokens are drafts that form a tree, to be verified in one call: query i sees every
        token before the drafts, and draft j iff bit j of tree_mask[b, i] is set. This takes the place of `causal`. Up
        to 64 drafts; bits from s_q on are ignored. In a sequence of n < s_q tokens these are its last n drafts: token t
        is draft s_q - n + t, and bits of drafts before the sequence's first token have no effect.
    attn_sink : array, (h_q,), float32, optional
        Logits of a key without a value, which only lowers `out`, not `lse`. -inf has no effect, +inf makes `out` 0.
    out_cos, out_sin : array, (max_position, 32), float32, optional
        Turn the last 64 columns of `out` back, as DeepSeek-V4 does, whose values include the key's RoPE part: a pair
        (x, y) of neighbouring columns becomes (x * cos + y * sin, y * cos - x * sin). With a d_qk of 512. The last axis
        is contiguous.
    out_positions : array, (b, s_q), int32 or int64, optional
        The queries' rows of these, clamped to them; (total_q,) with `cu_seqlens_q`. Given with these, or not at all.
    w_uv : array, (h_q, d_head, 512), bfloat16 or float16, optional
        The values' half of kv_b_proj, as it lies in the weights: `kv_b_proj.reshape(h_q, -1, 512)[:, d_nope:]`. Results
        are then multiplied by it, out[.., h, d] = sum_c out[.., h, c] * w_uv[h, d, c], where they are merged, or after.
        Of the dtype that `out` has without it; d_head is 64, 128, 192 or 256. A contiguous last axis, a start and other
        strides that are multiples of 16 bytes. Not with `cu_seqlens_q` or a `window`.
    gate : array, (b, s_q, h_q, d_head), dtype of w_uv, optional
        Its sigmoid is a factor of each element of the result of `w_uv`. Strides as for w_uv.
    q_scales : array, (b, s_q, h_q), float32, optional
        In place of `q_scale`, for queries in e4m3: a scale for each row, such as `mla_prepare` makes, finite and above
        0; any strides, so that one number may serve all rows. (total_q, h_q) with `cu_seqlens_q`.
    kv_scales : array, (1,), float32, optional
        In place of `kv_scale`, with math="fp8" or "fp8x2": the number on the device, finite and above 0, where it may
        change between replays of a CUDA graph.
    d_v : int
        Width of the values: 512, or 256 of keys that are 320 or 288 wide. Those are of 16 bits, without `w_uv`,
        `q_rope`, `cu_seqlens_q`, `window` or a batch-invariant plan.
    scale : float, optional
        Factor of the scores: finite, above 0. Default: d_qk**-0.5.
    causal : bool
        Query i sees token j iff j <= i + seqlen - s_q; if False, it sees all tokens. Leave it out with a `tree_mask`.
        With `cu_seqlens_q`, s_q is the number of queries of the sequence.
    window : int, optional
        Query i sees so many tokens at most: j > i + seqlen - s_q - window. Pages that lie wholly before the windows of
        a sequence's queries are not read, nor their entries of `block_table`. Only causal, and
        without a `tree_mask` or context parallelism.
    max_seqlen_q : int, optional
        With `cu_seqlens_q`: how many queries most sequences have, by which a kernel is chosen; a sequence with more is
        served, too. Default: any number. A plan knows it as `s_q`.
    cp_world, cp_rank : int
        Context parallelism: token j of `kv_cache` and `block_table` is token j * cp_world + cp_rank of the sequence.
        `seqlens` are those of the whole sequences, the same on every rank, and so is the limit of `causal`. The
        results of all ranks are to be merged, see `merge_states`; a row that sees none of a rank's tokens has
        `empty_lse`.
    kv_scale : float
        Scale of the record "fp8", by which its numbers are multiplied.
    q_scale : float
        Scale of queries in e4m3, by which they are multiplied.
    math : str
        "exact" converts the numbers of FP8 records, and multiplies in 16 bits. "fp8", for the record "fp8" on Hopper
        and Blackwell, multiplies in e4m3: weights, and queries in 16 bits, are rounded to it, see the notes. "fp8x2",
        on Hopper, for more than 16 rows (s_q * h_q) and without a `tree_mask`, does so with sums of two numbers
        in e4m3 in place of each, which have about eight bits, as bfloat16 has.
    plan : DecodePlan, optional
        From `plan_decode`, updated for these `seqlens`: saves the scheduling and the allocations of a call.
    out : array, (b, s_q, h_q, 512), dtype of q (bfloat16 where that is e4m3) or float32, optional
        Memory for the result, (b, s_q, h_q, d_head) with a `w_uv`: a contiguous last axis, a start and other strides
        that are multiples of 16 bytes. Not for JAX, whose arrays cannot be written.
    lse : array, (b, h_q, s_q), float32, optional
        Memory for the log-sum-exp; any strides.
    workspace : array, (n,), uint8, optional
        Memory for the call, 256-byte aligned, of at least `workspace_bytes(mla_decode, ...)` bytes. Not with a plan,
        which has its own.
    out_dtype : str or dtype, optional
        "float32" for results to be merged; default: the dtype of `out`, or of q, or bfloat16 where that is e4m3.
    lse_base : str
        "e" or "2": base of the logarithm in `lse`.
    empty_lse : float
        `lse` of a row that sees no token; its `out` is 0.
    kernel : str, optional
        Name of the kernel to run, see `mla-cupy list`. Default: the fastest that fits; the choice depends on b and on
        the tokens that a row of `block_table` has room for, too.
    check : bool
        Look at the values of `block_table`, `seqlens`, `cu_seqlens_q`, `q_scales` and `kv_scales` first, which
        synchronises.
    stream : int or stream object, optional
        Where to run. Default: the caller's library's current stream.

    Returns
    -------
    out : array, (b, s_q, h_q, 512), or (b, s_q, h_q, d_head) with a `w_uv`
        Array of the caller's library; (total_q, h_q, 512) with `cu_seqlens_q`.
    lse : array, (b, h_q, s_q), float32
        log(sum_j exp(scale * q . k[j])), in base `lse_base`; (h_q, total_q) with `cu_seqlens_q`.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError, PlanError
        If an argument does not fit; nothing has been launched, and `out` and `lse` are untouched.
    UnsupportedDeviceError
        If no kernel fits the GPU.

    Notes
    -----
    NumPy arrays (and PyTorch tensors on the CPU) are computed on the GPU if there is one, else by the NumPy oracle.
    A NaN or Inf reaches only the rows that see it. The result does not change from run to run; it depends on how the
    batch is split, that is on the other sequences' lengths, within rounding. With `out`, `lse`, and a plan or a
    `workspace`, a call allocates nothing and can be captured in a CUDA graph. It takes 2 * b * s_q * h_q * seqlen *
    (d_qk + 512) FLOPs.

    Weights are rounded to 16 bits for the product with the values, and `out` is divided by the sum of the
    weights before rounding. Where tokens have equal scores the rounding errors are equal too, so all of `out` may be
    too small or too large by one common factor: up to 2^-8 in bfloat16, 2^-11 in float16. The CUDA-core kernel does not
    round weights.

    A plan requires q, `q_rope` and, without records, `kv_cache` to start at and step by multiples of 16 bytes. Without
    a plan other strides run on a slower kernel.

    FP8 records are read as they are: nothing is converted in memory. On tensor cores latents of "v32" are rounded to
    float16, see `sparse_mla_decode`; those of "fp8" are exact. More than 32 rows (s_q * h_q) are blocks of 64 rows of
    one query token, or of 32 of several; each converts for itself, so that with 128 heads 16-bit rows are faster. "v41"
    has the plain kernel so far.

    No GPU serves these, and the oracle refuses them too: `cu_seqlens_q` or `window` with a d_qk of 320 or 288, and
    `q_rope`, `cu_seqlens_q` or `window` with a `math` other than "exact". A `tree_mask` with `q_rope` or `out_cos` runs
    on CUDA cores.

    With `w_uv`, results of attention are rounded to 16 bits for the product, whose terms are added in float32. From
    5,120 rows of all heads on (b * s_q * h_q; of a plan as many as it has room for), or 65 where d_head is above 128,
    the product is a launch of its own, after the merge. With fewer rows that is slower, and the kernel that merges
    results multiplies them, too; with a batch-invariant plan it always does. Results of several ranks, of which each
    has part of the tokens, may be merged after it as before it.

    With math="fp8", queries in e4m3 are multiplied as they are. A row of q in 16 bits is divided by the smallest power
    of two, of at least 2^-100, that brings its largest magnitude to 448 or below, and rounded to e4m3, ties to even;
    its scores are multiplied by that power. A row with NaN or infinity is NaN, and so are its results. In each tile of
    64 tokens the weights are rounded to e4m3, the largest one being 256: those below 2^-18 of it become 0. `out` is
    divided by the sum of the rounded weights, `lse` and what a sink leaves of `out` are of the weights before. Sums of
    e4m3 products lose low bits in the tensor cores, so each tile's is added in float32: `out` is up to 0.06 % too small
    or too large, and scores lose 0.1 to 0.3 % where their terms have one sign. These percentages assume that no column
    dominates: each term of a sum may lose up to 2^-13 of the largest term. On Hopper, what the splits of a request
    have found is rounded to bfloat16 where `out` is bfloat16, but not in batch-invariant plans. On Blackwell weights
    are rounded against a running maximum: those below 2^-14 of it become 0.

    With math="fp8x2" what the first e4m3 number leaves is rounded to e4m3 as well, in the same units, and both are
    multiplied. Of queries that is exact for elements of bfloat16 down to 2^-9 of the row's largest, else within 2^-9 of
    an element or 2^-17 of the largest. Weights are rounded to float16 before; their two numbers are within 2^-8 of
    them, or 2^-18 of the tile's largest one. The sums lose what those of one number lose.

    Examples
    --------
    >>> import numpy as np, mla_cupy
    >>> q = np.ones((1, 1, 16, 576), np.float16)
    >>> cache = np.ones((4, 64, 576), np.float16)
    >>> out, lse = mla_cupy.mla_decode(q, cache, np.array([[2, 0]], np.int32), np.array([100], np.int32))
    >>> out.shape, float(out[0, 0, 0, 0]), round(float(lse[0, 0, 0]), 3)
    ((1, 1, 16, 512), 1.0, 28.605)
    """
    return call(mla_decode, locals())


def _examine(views: Views, given: DecodeOptions) -> Examined:
    q, kv_cache, block_table = (present(views, name) for name in ("q", "kv_cache", "block_table"))
    b, s_q, h_q, d_qk = _queries(views)
    d_v = check_d_v(given.d_v, d_qk)
    page_size = kv_cache.shape[1]
    cp_world, cp_rank = check_shard(given.cp_world, given.cp_rank)
    options = given._replace(
        scale=resolve_scale(given.scale, d_qk),
        causal=check_flag("causal", given.causal),
        window=_optional_count("window", given.window),
        max_seqlen_q=_optional_count("max_seqlen_q", given.max_seqlen_q),
        lse_base=check_lse_base(given.lse_base),
        empty_lse=check_empty_lse(given.empty_lse),
        cp_world=cp_world,
        cp_rank=cp_rank,
        kv_scale=check_factor("kv_scale", given.kv_scale),
        q_scale=check_factor("q_scale", given.q_scale),
        math=check_math(given.math, MATH_OF_DENSE_DECODE),
    )
    if check_all_or_none(views, "out_cos", "out_sin", "out_positions") and d_qk != D_V:
        raise ShapeError(explain("q.shape[-1]", d_qk, f"{D_V} with out_cos", "other values have no RoPE columns"))
    record = _record(kv_cache, d_qk)
    tree_mask = views["tree_mask"] is not None
    check_drafts(tree_mask, s_q)
    combinations.check(combinations.DECODE, _parts(views, options, record))
    forms = _forms_of(views, options)
    tokens = block_table.shape[1] * page_size
    if tokens > MAX_TOKENS:
        expected = f"at most {MAX_TOKENS} = 2^31 - 64"
        raise ShapeError(explain("max_pages * page_size", tokens, expected, "shorten block_table"))
    factors = ["scale", *(name for name in ("kv_scale", "q_scale") if getattr(options, name) != 1)]
    check_factor(" * ".join(factors), prod(getattr(options, name) for name in factors))
    aligned = _is_aligned(views, record, forms)
    dtype = "float8_e4m3fn" if q.dtype in BYTE_DTYPES else q.dtype
    batch = Batch(b, tokens)
    if forms.cu_seqlens_q:  # what most sequences have decides which kernel runs, and no more
        batch, s_q = Batch(b, tokens, s_q), max(1, min(s_q, options.max_seqlen_q or s_q))
    problem = DecodeProblem(s_q, h_q, dtype, aligned, d_qk, record, tree_mask, options.math, forms, batch=batch)
    check_terms(problem)
    d_head = check_projection(views, problem.half)
    return Examined(replace(problem, d_head=d_head), options, {"d_head": d_head or d_v})


def _queries(views: Views) -> tuple[int, int, int, int]:
    """b, s_q, h_q and d_qk; s_q of packed queries is the number of all of them."""
    q, rope, starts = present(views, "q"), views["q_rope"], views["cu_seqlens_q"]
    *axes, h_q, d_qk = q.shape
    b = present(views, "seqlens").shape[0]
    if starts is not None and starts.shape[0] != b + 1:
        raise ShapeError(explain("cu_seqlens_q.shape[0]", starts.shape[0], f"b+1={b + 1}, b as in block_table"))
    if rope is None:
        return b, axes[-1], h_q, d_qk
    if d_qk != D_V:
        raise ShapeError(explain("q.shape[-1]", d_qk, f"{D_V} with q_rope", "pass whole queries, or their two parts"))
    return b, axes[-1], h_q, d_qk + rope.shape[-1]


def _optional_count(argument: str, given: Any) -> int | None:
    return None if given is None else check_count(argument, given, 1, MAX_INT32)


def _parts(views: Views, options: DecodeOptions, record: str) -> combinations.Parts:
    """Parts of a call, for the table of combinations."""
    return {
        **combinations.given(views, "tree_mask", "q_rope", "cu_seqlens_q", "out_cos", "w_uv", "q_scales", "kv_scales"),
        **combinations.multiplied(options.math, present(views, "q").dtype),
        **combinations.held(record),
        "equal_lengths": "None" if views["cu_seqlens_q"] is None else None,
        "not_causal": lambda: None if options.causal else "False",
        "window": options.window,
        "max_seqlen_q": options.max_seqlen_q,
        "narrow": options.d_v if options.d_v != D_V else None,
        "cp_world": combinations.other_than(1, options.cp_world),
        "kv_scale": combinations.other_than(1, options.kv_scale),
        "q_scale": combinations.other_than(1, options.q_scale),
    }


def _forms_of(views: Views, options: DecodeOptions) -> Forms:
    """The forms of a call."""
    arrays = {name: views[name] is not None for name in ("attn_sink", "q_rope", "cu_seqlens_q", "out_cos")}
    return Forms(**arrays, window=options.window or 0)


def _is_aligned(views: Views, record: str, forms: Forms) -> bool:
    """True if TMA can fetch q and a cache of rows; beside records, forms alone need aligned queries."""
    cache, rope = present(views, "kv_cache"), views["q_rope"]
    if (record and not forms.beyond_sink) or (not record and cache.shape[0] == 0):
        return bool(record)
    return all(map(steps_by_16_bytes, [present(views, "q"), *([rope] if rope else []), *([] if record else [cache])]))


def _record(kv_cache: View, d_qk: int) -> str:
    """The FP8 record of a cache of bytes, "" for 16-bit rows; checks the width, which is not that of the queries."""
    width = kv_cache.shape[-1]
    if kv_cache.dtype not in BYTE_DTYPES:
        if width != d_qk:
            raise ShapeError(explain("kv_cache.shape[-1]", width, f"d_qk={d_qk}, as in q"))
        return ""
    record = record_read(kv_cache, d_qk, READ, "kv_cache", "read it by cache_gather")
    check_layout(record, kv_cache, "kv_cache")
    return record.name


def _check_values(arrays: Arrays, options: DecodeOptions) -> None:
    check_values(arrays, options.cp_world, options.cp_rank)
    starts, total = arrays["cu_seqlens_q"], present(arrays, "q").shape[0]
    if starts is not None:
        bad = (starts < 0) | (starts > total) | (np.diff(starts, prepend=starts[:1]) < 0)
        name_first("cu_seqlens_q", starts, bad, f"ascending starts of 0 to {total}")
    check_scale_values(arrays, ("q_scales", "kv_scales"), zero=False)


def check_values(arrays: Arrays, world: int, rank: int) -> None:
    """Check the lengths of a shard of sequences, and the pages that they take.

    Raises
    ------
    ArgumentError
        That names the first bad one.
    """
    seqlens, table, pool = (present(arrays, name) for name in ("seqlens", "block_table", "kv_cache"))
    num_pages, page_size, _ = without_heads(pool).shape
    capacity = table.shape[1] * page_size * world + rank
    for request, length in enumerate(seqlens.tolist()):
        if not 0 <= length <= capacity:
            tokens = "max_pages * page_size" + " * cp_world + cp_rank" * (world > 1)
            expected = f"0 to {tokens} = {capacity}"
            raise ArgumentError(explain(f"seqlens[{request}]", length, expected))
        pages = table[request, : -(-len(range(rank, length, world)) // page_size)]
        bad = np.flatnonzero((pages < 0) | (pages >= num_pages))
        if bad.size:
            where = f"block_table[{request}, {bad[0]}]"
            raise ArgumentError(explain(where, int(pages[bad[0]]), f"a page from 0 to {num_pages - 1}"))


OPERATION = Operation(
    "mla_decode",
    inputs=(
        Input("q", "b s_q h_q d_qk", (*HALF, *reversed(BYTE_DTYPES)), contiguous=True, packed="total_q h_q d_qk"),
        Input("kv_cache", CACHE_AXES, ("=q", *BYTE_DTYPES), contiguous=True),
        Input("block_table", "b max_pages", ("int32",)),
        Input("seqlens", "b", ("int32",)),
        Input("q_rope", "b s_q h_q d_rope", ("=q",), optional=True, contiguous=True, packed="total_q h_q d_rope"),
        STARTS[0],
        Input("tree_mask", "b s_q", ("uint64", "int64"), optional=True),
        Input("attn_sink", "h_q", ("float32",), optional=True),
        Input("out_cos", "max_position pairs", ("float32",), optional=True, contiguous=True),
        Input("out_sin", "max_position pairs", ("float32",), optional=True, contiguous=True),
        Input("out_positions", "b s_q", INDEX_DTYPES, optional=True, packed="total_q"),
        W_UV,
        GATE,
        Input("q_scales", "b s_q h_q", ("float32",), optional=True, packed="total_q h_q"),
        Input("kv_scales", "num_scales", ("float32",), optional=True),
    ),
    outputs=(
        Output("out", "b s_q h_q d_head", like_queries_or_float32, "out_dtype", "wide", packed="total_q h_q d_head"),
        Output("lse", "b h_q s_q", packed="h_q total_q"),
    ),
    sizes={
        "d_qk": tuple(VALUE_WIDTHS),
        "d_rope": (D_ROPE,),
        "pairs": (D_ROPE // 2,),
        "width": (*VALUE_WIDTHS, *(FORMATS[name].width for name in READ)),
        "d_v": tuple(sorted(set(VALUE_WIDTHS.values()), reverse=True)),
        "d_head": D_HEADS,
        "num_scales": (1,),
    },
    min_sizes={"max_position": 1, "s_q": 1, "h_q": 1, "page_size": 1},
    options=DecodeOptions,
    parallel={"b": (), "h_q": ()},
    examine=_examine,
    check_values=_check_values,
    pipeline=DECODE,
)
