"""Operations without plans: what an export of each fixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from mla_cupy.cache_formats import FORMATS
from mla_cupy.dtypes import FLOATS, HALF
from mla_cupy.errors import ArgumentError, explain
from mla_cupy.export.subject import Subject
from mla_cupy.kernels.attention.records import READ_FORWARD
from mla_cupy.kernels.dense.problem import GEOMETRIES
from mla_cupy.kernels.indexer.logits.problem import HEAD_DIMS
from mla_cupy.ops.cache import APPEND_OPERATION as APPEND
from mla_cupy.ops.checks import sizes_of_results
from mla_cupy.ops.indexer.key_cache import SCALE_BYTES
from mla_cupy.ops.indexer.logits_paged import OPERATION as LOGITS_PAGED
from mla_cupy.ops.indexer.prepare_both import OPERATION as INDEXER_PREPARE
from mla_cupy.ops.indexer.topk import OPERATION as TOPK
from mla_cupy.ops.merge import OPERATION as MERGE
from mla_cupy.ops.prefill import OPERATION as PREFILL
from mla_cupy.ops.preparation import OPERATION as MLA_PREPARE
from mla_cupy.ops.preparation import WIDTHS
from mla_cupy.ops.projection import ABSORB_OPERATION as ABSORB
from mla_cupy.ops.projection import MERGE_OPERATION as MERGE_PROJECT
from mla_cupy.ops.sparse_decode import OPERATION as SPARSE_DECODE
from mla_cupy.ops.sparse_forward import OPERATION as SPARSE_FORWARD
from mla_cupy.shapes import D_HEADS, D_QK, D_ROPE, D_UNABSORBED, D_V

CODES = "float8_e4m3fn"
"""Dtype of queries for math="fp8"."""
D_HEAD = 128
"""Width of a head without RoPE by default."""
FREE_LSE: dict[str, Literal["real"]] = {"empty_lse": "real"}
"""Options of log-sum-exps that an export leaves to its callers."""


def choice(option: str, value: str | None, among: Sequence[str | None]) -> str | None:
    """Check that an option is one of several.

    Raises
    ------
    ArgumentError
    """
    if value not in among:
        raise ArgumentError(explain(option, repr(value), "one of " + ", ".join(each for each in among if each)))
    return value


def merge(*, h_q: int, dtype: str | None = None, out_dtype: str | None = None) -> Subject:
    """Merging partial results of decode, of float32 by default."""
    dtype = choice("--dtype", dtype or "float32", FLOATS) or ""
    out_dtype = choice("--out-dtype", out_dtype or (dtype if dtype in HALF else HALF[0]), FLOATS) or ""
    return Subject(
        MERGE,
        {"h_q": h_q, "d": D_V},
        {"outs": dtype, "lses": "float32", "out": out_dtype, "lse": "float32"},
        free=FREE_LSE,
    )


def cache_append(*, kv_format: str, page_size: int, dtype: str | None = None) -> Subject:
    """Writing tokens to a paged cache of FP8 records, their RoPE part turned before."""
    tokens = _appended(kv_format, page_size, choice("--dtype", dtype or HALF[0], FLOATS) or "")
    return Subject(
        APPEND,
        tokens.sizes,
        tokens.dtypes,
        fixed={**tokens.fixed, "interleaved": True},
        free={"kv_scale": "real"},
        notes={"record": kv_format},
    )


class _Appended(NamedTuple):
    """Sizes of axes, dtypes of arrays, and options that an export fixes of tokens that go to a cache."""

    sizes: dict[str, int]
    dtypes: dict[str, str]
    fixed: dict[str, Any]


def _appended(kv_format: str, page_size: int, dtype: str) -> _Appended:
    """Tokens of a dtype, and the cache of FP8 records that they go to."""
    record = FORMATS[choice("--kv-format", kv_format, tuple(FORMATS)) or ""]
    rope = {"rope": dtype} if record.d_rope else {}
    scales = [name for name in record.scales if name != "none"]
    sizes = {"d_latent": record.d_latent, "d_rope": record.d_rope, "pairs": record.d_rope // 2}
    return _Appended(
        {**sizes, "page_size": page_size, "width": record.width},
        {"latent": dtype, **rope, "cache": record.dtype, "slots": "int64"},
        {"kv_format": record.name, "scales": scales[0] if scales else None},
    )


def mla_prepare(
    *,
    h_q: int,
    d_qk: int | None = None,
    dtype: str | None = None,
    out_dtype: str | None = None,
    kv_format: str | None = None,
    page_size: int | None = None,
    theta: int | None = None,
) -> Subject:
    """Queries for decode, in 16 bits or in e4m3 with a scale for each row; with a record, tokens to its cache, too."""
    dtype = choice("--dtype", dtype or HALF[0], HALF) or ""
    out_dtype = choice("--out-dtype", out_dtype or dtype, (dtype, CODES)) or ""
    width = d_qk or D_QK
    if width not in WIDTHS:
        raise ArgumentError(explain("--d-qk", width, "one of " + ", ".join(map(str, WIDTHS))))
    if (kv_format is None) != (page_size is None):
        raise ArgumentError(explain("--page-size", page_size, "a value with --kv-format, and none without it"))
    quantise, appended = out_dtype == CODES, _appended(kv_format, page_size, dtype) if kv_format and page_size else None
    return Subject(
        MLA_PREPARE,
        {"h": h_q, "d": width, "d_out": width, "d_rope": D_ROPE, "pairs": D_ROPE // 2}
        | (appended.sizes if appended else {}),
        {
            "q": dtype,
            "out": out_dtype,
            **({"q_scales": "float32"} if quantise else {}),
            **({"positions": "int64"} if theta else {}),
            **(appended.dtypes if appended else {}),
        },
        fixed={
            "theta": None if theta is None else float(theta),
            "interleaved": True,
            "quantise": quantise,
            "q_scale": None,
            "return_rope": False,
            **(appended.fixed if appended else {"kv_format": None, "scales": None}),
        },
        free={"kv_scale": "real"},
        notes={"record": kv_format or ""},
    )


def beside_rope(subject: Subject) -> Subject:
    """The subject of `mla_prepare` where the queries' RoPE part, if it is an array of its own, is not in q."""
    if "q_rope" not in subject.dtypes:
        return subject
    return replace(subject, sizes={**subject.sizes, "d": subject.sizes["d"] - D_ROPE})


def absorb(*, h_q: int, d_head: int | None = None, dtype: str | None = None) -> Subject:
    """Queries times W_UK."""
    dtype = choice("--dtype", dtype or HALF[0], HALF) or ""
    sizes = {"h_q": h_q, "d_nope": check_d_head(d_head or D_HEAD), "d_v": D_V, "d_rope": D_ROPE, "d_qk": D_V}
    return Subject(ABSORB, sizes, {"q_nope": dtype, "w_uk": dtype, "out": dtype})


def with_rope(subject: Subject) -> Subject:
    """The subject of `absorb`, with wider results if the queries' RoPE part is passed."""
    return replace(subject, sizes={**subject.sizes, "d_qk": D_QK}) if "q_rope" in subject.dtypes else subject


def merge_project(
    *, h_q: int, d_head: int | None = None, dtype: str | None = None, out_dtype: str | None = None
) -> Subject:
    """Merging partial results of decode, of float32 by default, and their product with W_UV."""
    dtype = choice("--dtype", dtype or "float32", FLOATS) or ""
    half = next((each for each in (dtype, out_dtype) if each in HALF), HALF[0])
    out_dtype = choice("--out-dtype", out_dtype or half, (half, "float32")) or ""
    return Subject(
        MERGE_PROJECT,
        {"h_q": h_q, "d_head": check_d_head(d_head or D_HEAD), "d_v": D_V},
        {"outs": dtype, "w_uv": half, "lses": "float32", "out": out_dtype, "lse": "float32"},
        free=FREE_LSE,
    )


def like_weights(subject: Subject) -> Subject:
    """The subject of `merge_project` with a gate, if it has one, of the dtype of W_UV."""
    if "gate" not in subject.dtypes:
        return subject
    return replace(subject, dtypes={**subject.dtypes, "gate": subject.dtypes["w_uv"]})


def check_d_head(width: int) -> int:
    """Check the width of a head without RoPE.

    Raises
    ------
    ArgumentError
    """
    if width not in D_HEADS:
        raise ArgumentError(explain("--d-head", width, "one of " + ", ".join(map(str, D_HEADS))))
    return width


def sparse_forward(
    *, h_q: int, d_qk: int | None = None, topk: int, dtype: str | None = None, out_dtype: str | None = None
) -> Subject:
    """Attention of each query to the rows that its indices select, of 16 bits."""
    dtype = choice("--dtype", dtype or HALF[0], HALF) or ""
    out_dtype = choice("--out-dtype", out_dtype or dtype, (dtype, "float32")) or ""
    width = d_qk or D_QK
    arrays = {"q": dtype, "kv": dtype, "indices": "int32", "out": out_dtype}
    return Subject(
        SPARSE_FORWARD,
        {"h_q": h_q, "d_qk": width, "d_kv": width, "page_tokens": 1, "topk": topk, "d_v": D_V},
        {**arrays, "lse": "float32", "max_logits": "float32"},
        free={"scale": "real", "causal": "integer", "relative": "integer", **FREE_LSE},
    )


def row_sizes(columns: int, coded: bool) -> dict[str, int]:
    """The width of a row of decode's results, and the number of its scales if it is e4m3 codes."""
    sizes = sizes_of_results(columns)
    return sizes if coded else {"d_head": sizes["d_head"]}


def sparse_decode(
    *,
    h_q: int,
    kv_format: str,
    page_size: int,
    topk: int,
    s_q: int | None = None,
    dtype: str | None = None,
    out_dtype: str | None = None,
) -> Subject:
    """Attention of new tokens to the cached tokens that their indices select, the first `topk_length` of them."""
    record = FORMATS[choice("--kv-format", kv_format, READ_FORWARD) or ""]
    dtype = choice("--dtype", dtype or HALF[0], HALF) or ""
    out_dtype = choice("--out-dtype", out_dtype or dtype, (dtype, "float32", CODES)) or ""
    coded = out_dtype == CODES
    sizes = {"s_q": s_q or 1, "h_q": h_q, "d_qk": record.d_qk, "page_size": page_size, "width": record.width}
    arrays = {"q": dtype, "kv_cache": "uint8", "indices": "int32", "topk_length": "int32"}
    return Subject(
        SPARSE_DECODE,
        {**sizes, "topk": topk, "d_v": D_V, **row_sizes(D_V, coded)},
        {**arrays, "out": out_dtype, "lse": "float32", **({"out_scales": "float32"} if coded else {})},
        fixed={"out_dtype": CODES if coded else None},
        free={"scale": "real", **FREE_LSE},
        notes={"record": record.name},
    )


def logits_paged(*, h_q: int, page_size: int, s_q: int | None = None, d_index: int | None = None) -> Subject:
    """Logits of the lightning indexer over the paged cache of its keys."""
    width = d_index or HEAD_DIMS[0]
    sizes = {"s_q": s_q or 1, "h": h_q, "d": width, "page_size": page_size, "d+4": width + SCALE_BYTES}
    arrays = {"q": "float8_e4m3fn", "cache": "uint8", "weights": "float32", "seqlens": "int32"}
    return Subject(
        LOGITS_PAGED,
        {**sizes, "lengths": 1},
        {**arrays, "block_table": "int32", "logits": "float32"},
        free={"clean": "integer"},
    )


def indexer_prepare(*, h_q: int, d_index: int | None = None, page_size: int | None = None) -> Subject:
    """Index queries and keys of the same tokens, by the rules of DeepSeek-V3.2; with pages, keys go to their cache."""
    width = d_index or HEAD_DIMS[0]
    sizes = {"h": h_q, "d": width}
    arrays = {"q": "bfloat16", "weights": "float32", "k": "bfloat16", "cos": "float32", "sin": "float32"}
    results = {"codes": "uint8", "folded": "float32"}
    if page_size:
        sizes |= {"page_size": page_size, "d+4": width + SCALE_BYTES}
        results |= {"cache": "uint8", "slots": "int64"}
    else:
        results |= {"k_codes": "uint8", "k_scale": "float32"}
    return Subject(
        INDEXER_PREPARE,
        sizes,
        {**arrays, "positions": "int32", **results},
        fixed={
            "interleaved": False,
            "hadamard": True,
            "scales": "power_of_2",
            "reference_rounding": True,
            "accumulate": "float32",
            "return_k": not page_size,
        },
        free={"eps": "real", "independent": "integer"},
    )


def topk(*, topk: int) -> Subject:
    """The exact top-k of the indexer's logits, by the number of keys of each row."""
    return Subject(
        TOPK,
        {"k": topk},
        {"logits": "float32", "ke": "int32", "indices": "int32", "counts": "int32"},
        fixed={"k": topk, "page_size": 1, "return_values": False},
    )


def prefill(
    *,
    h_q: int,
    h_kv: int | None = None,
    d_qk: int | None = None,
    dtype: str | None = None,
    out_dtype: str | None = None,
) -> Subject:
    """Dense attention over prompts that lie one after another, with whole queries and keys, and values, per head."""
    dtype = choice("--dtype", dtype or HALF[0], HALF) or ""
    out_dtype = choice("--out-dtype", out_dtype or dtype, (dtype, "float32")) or ""
    width = d_qk or D_UNABSORBED
    widths = dict(GEOMETRIES)
    if width not in widths:
        raise ArgumentError(explain("--d-qk", width, "one of " + ", ".join(map(str, widths))))
    arrays = {"q": dtype, "k": dtype, "v": dtype, "cu_seqlens_q": "int32", "cu_seqlens_kv": "int32"}
    return Subject(
        PREFILL,
        {"h_q": h_q, "h_kv": h_kv or h_q, "d_q": width, "d_k": width, "d_v": widths[width]},
        {**arrays, "out": out_dtype, "lse": "float32"},
        fixed={"out_dtype": None, "kernel": None},
        free={"causal": "integer", "scale": "real"},
        defaults={"causal": 1, "scale": width**-0.5},
    )
