"""Dense decode over a paged latent cache."""

from __future__ import annotations

from dataclasses import replace
from math import inf, prod
from typing import Any

import numpy as np

from mla_cupy.arrays.view import View
from mla_cupy.cache_formats import BYTE_DTYPES, widths_of, without_heads
from mla_cupy.dtypes import HALF
from mla_cupy.errors import ArgumentError, ShapeError, explain
from mla_cupy.kernels.attention.records import READ_DENSE as READ
from mla_cupy.kernels.decode import DECODE
from mla_cupy.kernels.decode.problem import Batch, DecodeOptions, DecodeProblem, Forms
from mla_cupy.ops import combinations
from mla_cupy.ops.cache import CACHE_AXES, INDEX_DTYPES, check_layout, check_no_format, record_read
from mla_cupy.ops.call import call
from mla_cupy.ops.checks import (
    MATH_OF_DENSE_DECODE,
    STARTS,
    check_all_or_none,
    check_codes,
    check_count,
    check_drafts,
    check_dtype,
    check_factor,
    check_flag,
    check_lse,
    check_math,
    check_scale,
    check_scale_values,
    check_scales_of_results,
    check_shard,
    check_terms,
    explains_scale,
    is_e4m3,
    name_first,
    sizes_of_results,
)
from mla_cupy.ops.decode_plan import DecodePlan
from mla_cupy.ops.groups import Fp8, OutRope, Packed, Project, Shard
from mla_cupy.ops.operation import (
    Arrays,
    Examined,
    Input,
    Operation,
    Output,
    Views,
    like_queries_or_float32,
    present,
    with_scales,
)
from mla_cupy.ops.projection import GATE, W_UV, check_projection
from mla_cupy.ops.schema import steps_by_16_bytes
from mla_cupy.shapes import D_HEADS, D_ROPE, D_V, MAX_INT32, MAX_TOKENS, VALUE_WIDTHS


@explains_scale
def mla_decode(
    q: Any,
    kv_cache: Any,
    block_table: Any,
    seqlens: Any,
    *,
    scale: float,
    q_rope: Any = None,
    packed: Packed | None = None,
    causal: bool = True,
    window: int | None = None,
    tree_mask: Any = None,
    attn_sink: Any = None,
    out_rope: OutRope | None = None,
    project: Project | None = None,
    fp8: Fp8 | None = None,
    shard: Shard | None = None,
    plan: DecodePlan | None = None,
    out: Any = None,
    lse: Any = None,
    out_scales: Any = None,
    workspace: Any = None,
    out_dtype: Any = None,
    scales: str = "plain",
    lse_base: str = "e",
    empty_lse: float = -inf,
    kernel: str | None = None,
    stream: Any = None,
) -> tuple[Any, ...]:
    """Attend from the newest tokens of each sequence to its paged latent cache (absorbed MLA).

    out[i, h] = sum_j softmax_j(scale * q[i, h] . k[j]) * k[j, :512], where j runs over the tokens that query i sees.

    Parameters
    ----------
    q : array, (b, s_q, h_q, d_qk), bfloat16, float16, float8_e4m3fn or uint8
        Absorbed queries; (total_q, h_q, d_qk) with `packed`. d_qk is 576; or 512 for keys without RoPE columns; or 320
        (Mistral Small 4) or 288 (MiniCPM3), with values of width 256 and without `q_rope`, `packed`, `window` and
        `project`. e4m3, or its codes in uint8, requires `fp8`. The last axis is contiguous.
    kv_cache : array, (num_pages, page_size, d_qk), dtype of q; or (num_pages, page_size, bytes), uint8
        Pages that all query heads read; the first 512 (or 256) columns of a key are its value. Any page size. An axis
        of size 1 for the KV head may stand on either side of the tokens. uint8 holds tokens in the FP8 format "v32"
        (656 bytes), "v32-nope" (656 or, by `Fp8(kv_format=...)`, 528), "v4" (584), "v41" (528) or "fp8" (576); these
        pages start at and step by multiples of 16 bytes.
    block_table : array, (b, max_pages), int32
        Pages of each sequence. Entries past its end are never read; a page outside [0, num_pages) hides its tokens.
    seqlens : array, (b,), int32
        Tokens of each sequence in the cache, the query tokens included; clamped to its pages.
    scale : float
        Factor of the scores: finite, above 0. Pass the model's softmax scale: 192**-0.5 for DeepSeek-V3, times YaRN's
        mscale**2 where the model uses it.
    q_rope : array, (b, s_q, h_q, 64), dtype of q, optional
        RoPE columns of the queries, where they are a separate array; q then has 512 columns.
    packed : Packed, optional
        Queries of varying length, the last tokens of their sequences. `cu_seqlens_q` is clamped to [0, total_q];
        queries of no sequence see no token. Excludes `tree_mask`, `project` and `shard`.
    causal : bool
        Query i sees token j if j <= i + seqlen - s_q. If False, it sees all tokens.
    window : int, optional
        Number of most recent tokens each query sees, itself included. Pages before the window are never read. Requires
        `causal`; excludes `tree_mask`, `project` and `shard`.
    tree_mask : array, (b, s_q), uint64 or int64, optional
        The last s_q <= 64 tokens are drafts of a tree: query i sees all tokens before them, and draft j if bit j of
        tree_mask[b, i] is set. Replaces `causal`. A sequence of n < s_q tokens holds the last n drafts.
    attn_sink : array, (h_q,), float32, optional
        Logits of a key without a value. They lower `out`, not `lse`. -inf has no effect, +inf makes `out` 0.
    out_rope : OutRope, optional
        Undo RoPE in the last 64 columns of `out`. Requires a d_qk of 512.
    project : Project, optional
        Multiply results by W_UV, and by the sigmoid of a gate.
    fp8 : Fp8, optional
        Scales of a cache in the format "fp8" and of e4m3 queries, and whether matmuls run in FP8.
    shard : Shard, optional
        The cache holds one rank's share of the tokens, and `seqlens` count all of them; see `merge_states`.
    plan : DecodePlan, optional
        From `plan_decode`, updated for these `seqlens`: saves the call's scheduling and allocations.
    out : array, (b, s_q, h_q, 512), dtype of q (bfloat16 for e4m3), float32 or `out_dtype`, optional
        Memory for the result: a contiguous last axis; start and other strides are multiples of 16 bytes. Not for JAX,
        whose arrays cannot be written.
    lse : array, (b, h_q, s_q), float32, optional
        Memory for the log-sum-exp; any strides.
    out_scales : array, (b, s_q, h_q, 4), float32, optional
        Memory for the scales of e4m3 results; any strides.
    workspace : array, (n,), uint8, optional
        Memory for the call, 256-byte aligned, of `workspace_bytes(mla_decode, ...)` bytes. Excludes `plan`.
    out_dtype : str or dtype, optional
        "float32" for results to be merged; "float8_e4m3fn", or "uint8" for its codes, for a following FP8 GEMM, see
        `conventions.md`. Default: the dtype of `out`, or of q, or bfloat16 for e4m3.
    scales : str
        Rule of `out_scales`: "plain", largest magnitude / 448; or "power_of_2", the next power of two from there.
    lse_base, empty_lse : str, float
        Base of the logarithm in `lse`, "e" or "2"; and the `lse` of a row that sees no token (its `out` is 0).
    kernel : str, optional
        Kernel to run, see `mla-cupy list`. Default: the fastest that fits.
    stream : int or stream object, optional
        Where to run. Default: the caller's library's current stream.

    Returns
    -------
    out : array, (b, s_q, h_q, 512)
        (total_q, h_q, 512) with `packed`; the last axis is d_head with `project`.
    lse : array, (b, h_q, s_q), float32
        log(sum_j exp(scale * q . k[j])), in base `lse_base`; (h_q, total_q) with `packed`.
    out_scales : array, (b, s_q, h_q, 4), float32
        Only with an FP8 `out_dtype`: one per 128 columns of `out`, so d_head / 128 per row with `project`.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError, PlanError, UnsupportedDeviceError
        If an argument does not fit, or no kernel fits the GPU. Nothing has been launched or written.

    Notes
    -----
    A NaN or Inf reaches only the rows that see it. Results are the same in every run. They depend on the lengths of the
    other sequences within rounding, unless `plan_decode(batch_invariant=True)`. Weights are rounded to 16 bits: where
    tokens have equal scores, `out` may have one common relative error, up to 2^-8 (bfloat16) or 2^-11 (float16).
    Latents of "v32" are rounded to float16. Results in e4m3 are rounded to 16 bits first. `conventions.md` lists all
    limits, including the size of scores.

    Examples
    --------
    >>> import numpy as np, mla_cupy
    >>> q, cache = np.ones((1, 1, 16, 576), np.float16), np.ones((4, 64, 576), np.float16)
    >>> table, seqlens = np.array([[2, 0]], np.int32), np.array([100], np.int32)
    >>> out, lse = mla_cupy.mla_decode(q, cache, table, seqlens, scale=192**-0.5)
    >>> out.shape, float(out[0, 0, 0, 0]), round(float(lse[0, 0, 0]), 3)
    ((1, 1, 16, 512), 1.0, 46.174)
    """
    return call(mla_decode, locals())


def _examine(views: Views, given: DecodeOptions) -> Examined:
    q, kv_cache, block_table = (present(views, name) for name in ("q", "kv_cache", "block_table"))
    b, s_q, h_q, d_qk = _queries(views)
    d_v = VALUE_WIDTHS[int(d_qk)]  # a symbol of a compiler has no hash; as a number it is known
    page_size = kv_cache.shape[1]
    cp_world, cp_rank = check_shard(given.cp_world, given.cp_rank)
    options = given._replace(
        scale=check_scale(given.scale),
        causal=check_flag("causal", given.causal),
        window=_optional_count("window", given.window),
        max_seqlen_q=_optional_count("max_seqlen_q", given.max_seqlen_q),
        cp_world=cp_world,
        cp_rank=cp_rank,
        kv_scale=check_factor("kv_scale", given.kv_scale),
        q_scale=check_factor("q_scale", given.q_scale),
        math=check_math(given.math, MATH_OF_DENSE_DECODE),
        out_dtype=check_dtype("out_dtype", given.out_dtype),
        scales=check_scales_of_results(given.scales, is_e4m3(given.out_dtype)),
        **check_lse(given.lse_base, given.empty_lse)._asdict(),
    )
    turns = check_all_or_none(views, *OutRope.absent, group="out_rope=OutRope(cos, sin, positions)")
    if turns and d_qk != D_V:
        raise ShapeError(
            explain("q.shape[-1]", d_qk, f"{D_V} with out_rope", "drop out_rope: other values have no RoPE columns")
        )
    record = _record(kv_cache, d_qk, options.kv_format)
    tree_mask = views["tree_mask"] is not None
    check_drafts(tree_mask, s_q)
    combinations.check(combinations.DECODE, _parts(views, options, record, d_qk))
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
    if forms.packed:  # what most sequences have decides which kernel runs, and no more
        batch, s_q = Batch(b, tokens, s_q), max(1, min(s_q, options.max_seqlen_q or s_q))
    problem = DecodeProblem(s_q, h_q, dtype, aligned, d_qk, record, tree_mask, options.math, forms, batch=batch)
    check_terms(problem)
    d_head = check_projection(views, problem.half)
    problem = replace(problem, d_head=d_head, fp8_out=check_codes(options.out_dtype, d_head))
    return Examined(problem, options, sizes_of_results(d_head or d_v))


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
        raise ShapeError(explain("q.shape[-1]", d_qk, f"{D_V} with q_rope", "pass whole queries, or q and q_rope"))
    return b, axes[-1], h_q, d_qk + rope.shape[-1]


def _optional_count(argument: str, given: Any) -> int | None:
    return None if given is None else check_count(argument, given, 1, MAX_INT32)


def _parts(views: Views, options: DecodeOptions, record: str, d_qk: int) -> combinations.Parts:
    """Parts of a call, for the table of combinations."""
    return {
        **combinations.given(views, "tree_mask", "q_rope", "cu_seqlens_q", "out_cos", "w_uv", "kv_scales"),
        "row_scales": None if views["q_scales"] is None else "an array",
        **combinations.multiplied(options.math, present(views, "q").dtype),
        **combinations.held(record),
        "equal_lengths": "None" if views["cu_seqlens_q"] is None else None,
        "not_causal": lambda: None if options.causal else "False",
        "window": options.window,
        "max_seqlen_q": options.max_seqlen_q,
        "narrow": d_qk if VALUE_WIDTHS[int(d_qk)] != D_V else None,
        "fp8_out": options.out_dtype if is_e4m3(options.out_dtype) else None,
        "cp_world": combinations.other_than(1, options.cp_world),
        "kv_scale": combinations.other_than(1, options.kv_scale),
        "q_scale": combinations.other_than(1, options.q_scale),
    }


def _forms_of(views: Views, options: DecodeOptions) -> Forms:
    """The forms of a call."""
    attn_sink, q_rope, packed, out_rope = (
        views[name] is not None for name in ("attn_sink", "q_rope", "cu_seqlens_q", "out_cos")
    )
    return Forms(attn_sink, q_rope, packed, out_rope, options.window or 0)


def _is_aligned(views: Views, record: str, forms: Forms) -> bool:
    """True if TMA can fetch q and a cache of rows. With FP8 formats only optional inputs need aligned queries."""
    cache, rope = present(views, "kv_cache"), views["q_rope"]
    if (record and not forms.beyond_sink) or (not record and cache.shape[0] == 0):
        return bool(record)
    return all(map(steps_by_16_bytes, [present(views, "q"), *([rope] if rope else []), *([] if record else [cache])]))


def _record(kv_cache: View, d_qk: int, name: object) -> str:
    """The FP8 format of a cache of bytes, "" for 16-bit rows; checks the width, not the queries'."""
    width = kv_cache.shape[-1]
    if kv_cache.dtype not in BYTE_DTYPES:
        if width != d_qk:
            raise ShapeError(explain("kv_cache.shape[-1]", width, f"d_qk={d_qk}, as in q"))
        check_no_format(name)
        return ""
    record = record_read(kv_cache, d_qk, READ, "kv_cache", "read it by cache_gather", name)
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
    """Check the lengths of a shard of sequences, and the pages that they use.

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
            tokens = "max_pages * page_size" + " * shard.world + shard.rank" * (world > 1)
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
        Output(
            "out",
            "b s_q h_q d_head",
            like_queries_or_float32,
            "out_dtype",
            "wide",
            coded="out_dtype",
            packed="total_q h_q d_head",
        ),
        Output("lse", "b h_q s_q", packed="h_q total_q"),
        Output("out_scales", "b s_q h_q row_scales", when="out_dtype", packed="total_q h_q row_scales"),
    ),
    sizes={
        "d_qk": tuple(VALUE_WIDTHS),
        "d_rope": (D_ROPE,),
        "pairs": (D_ROPE // 2,),
        "width": (*VALUE_WIDTHS, *widths_of(READ)),
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
    returns=with_scales,
    groups={"packed": Packed, "out_rope": OutRope, "project": Project, "fp8": Fp8, "shard": Shard},
)
