"""One call of every operation, with dense arrays: what the tests of all bindings run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mla_cupy
from mla_cupy import ops
from mla_cupy.cache_formats import FORMATS
from mla_cupy.ops.checks import is_e4m3
from mla_cupy.ops.operation import Operation
from tests.indexer.prepare import prepare_cases
from tests.support import (
    cases,
    dense_cases,
    dense_gradients,
    indexer_cases,
    loss_cases,
    sparse_cases,
    sparse_loss_cases,
)
from tests.support.flat import flat

Array = np.ndarray[Any, Any]
SCALE = 576**-0.5
"""Scale of the scores of absorbed queries: it keeps them of one size."""


@dataclass(frozen=True)
class BoundCall:
    """A call with the arrays by name, optional ones among them, and options."""

    id: str
    operation: str
    arrays: dict[str, Array] = field(repr=False)
    options: dict[str, Any]

    @property
    def record(self) -> Operation:
        """The operation's."""
        return ops.BOUND_OPERATIONS[self.operation]

    @property
    def outputs(self) -> tuple[str, ...]:
        """Possible results; scales only of results in e4m3."""
        coded = is_e4m3(self.options.get("out_dtype"))
        return tuple(output.name for output in self.record.outputs if coded or output.when != "out_dtype")

    @property
    def changed(self) -> tuple[str, ...]:
        """The inputs that it changes in place."""
        return self.record.written[len(self.record.outputs) :]

    def eager(self) -> tuple[Any, ...]:
        """Results of the public function for these arrays, then the arrays that it has changed; None if there are
        none.
        """
        changed = {name: self.arrays[name].copy() if name in self.arrays else None for name in self.changed}
        made = as_tuple(flat(getattr(mla_cupy, self.operation))(**{**self.arrays, **changed}, **self.options))
        return (*made, *changed.values())

    def of_operator(self) -> tuple[Any, ...]:
        """Like `eager`, with None for scales that there are not: an operator returns a tensor for every result."""
        found, at = self.eager(), len(self.outputs)
        return (*found[:at], *[None] * (len(self.record.outputs) - at), *found[at:])


def as_tuple(results: Any) -> tuple[Any, ...]:
    """A single result is returned bare, and none as None."""
    if results is None:
        return ()
    return results if isinstance(results, (tuple, list)) else (results,)


def _dense(**arrays: Array | None) -> dict[str, Array]:
    return {name: np.ascontiguousarray(x) for name, x in arrays.items() if x is not None}


def decode(h_q: int = 4, **options: Any) -> BoundCall:
    inputs = cases.make(cases.DecodeCase(b=3, s_q=2, h_q=h_q, seqlens="ragged-90", dtype="bfloat16"))
    names = ("q", "kv_cache", "block_table", "seqlens")
    arrays = _dense(**dict(zip(names, inputs.arguments, strict=True)))
    return BoundCall(_id("decode", options), "mla_decode", arrays, {"scale": 576**-0.5, **options})


def decode_and_project(**options: Any) -> BoundCall:
    plain = decode()
    arrays = plain.arrays | _projection(3, 2, 4)
    return BoundCall(_id("decode_and_project", options), "mla_decode", arrays, {**plain.options, **options})


def decode_in_fp8(queries: str, **options: Any) -> BoundCall:
    changes: dict[str, Any] = {"record": "fp8", "math": "fp8", "kv_scale": 0.1, "queries": queries}
    inputs = cases.make(cases.DecodeCase(b=2, s_q=2, h_q=4, seqlens=(70, 3), dtype="bfloat16", **changes))
    names = ("q", "kv_cache", "block_table", "seqlens")
    arrays = _dense(**dict(zip(names, inputs.arguments, strict=True)))
    options = {"kv_scale": 0.1, "math": "fp8", **options}
    return BoundCall(_id(f"decode-{queries or 'half'}", options), "mla_decode", arrays, {"scale": 576**-0.5, **options})


def decode_with_scales() -> BoundCall:
    """Scales of rows and of the cache in arrays."""
    call = decode_in_fp8("uint8", kv_scale=1.0)
    scales = np.random.default_rng(7).uniform(0.5, 2.0, call.arrays["q"].shape[:3]).astype(np.float32)
    arrays = {**call.arrays, "q_scales": scales, "kv_scales": np.full(1, 0.1, np.float32)}
    return replace(call, id="decode-scales", arrays=arrays)


def decode_with_drafts() -> BoundCall:
    masks = np.array([[1, 2], [1, 3], [0, 2]], np.int64)
    return replace(decode(), id="decode-drafts", arrays={**decode().arrays, "tree_mask": masks})


def decode_with_forms(*forms: str, **options: Any) -> BoundCall:
    """Queries in two arrays, of varying number, with a sink: as far as they are named."""
    call = decode(**options)
    arrays = dict(call.arrays)
    rng = np.random.default_rng(5)
    if "cu_seqlens_q" in forms:
        arrays["q"] = np.ascontiguousarray(arrays["q"].reshape(6, 4, 576)[:5])
        arrays["cu_seqlens_q"] = np.array([0, 3, 3, 5], np.int32)
    if "q_rope" in forms:
        q = arrays["q"]
        arrays |= {"q": np.ascontiguousarray(q[..., :512]), "q_rope": np.ascontiguousarray(q[..., 512:])}
    if "attn_sink" in forms:
        arrays["attn_sink"] = rng.normal(1.0, 2.0, 4).astype(np.float32)
    return replace(call, id="-".join((call.id, *forms)), arrays=arrays)


def sparse_inputs(**changes: Any) -> sparse_cases.SparseInputs:
    sizes = {"s_q": 5, "s_kv": 40, "h_q": 4, "topk": 12, "strides": "dense"}
    return sparse_cases.make(sparse_cases.SparseCase(**{**sizes, **changes}))


def forward(changes: dict[str, Any] | None = None, **options: Any) -> BoundCall:
    inputs = sparse_inputs(**(changes or {}))
    arrays = _dense(q=inputs.q, kv=inputs.kv, indices=inputs.indices, **inputs.optional)
    options = {"scale": SCALE, "causal": inputs.case.causal, **options}
    return BoundCall(_id("forward", {**(changes or {}), **options}), "sparse_mla_forward", arrays, options)


def forward_in_fp8(**options: Any) -> BoundCall:
    call = forward()
    codes = call.arrays["kv"].astype(np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    options = {**call.options, "kv_scale": 0.5, "math": "fp8", **options}
    return replace(call, id=_id("forward", options), arrays=call.arrays | {"kv": codes}, options=options)


def backward(changes: dict[str, Any] | None = None, **options: Any) -> BoundCall:
    inputs = sparse_inputs(**(changes or {}))
    names = ("q", "kv", "out", "dout", "lse", "indices")
    arrays = _dense(**dict(zip(names, inputs.backward_arguments, strict=True)), **inputs.optional, dlse=inputs.dlse)
    options = {"scale": SCALE, "causal": inputs.case.causal, **options}
    return BoundCall(_id("backward", {**(changes or {}), **options}), "sparse_mla_backward", arrays, options)


def prefill(changes: dict[str, Any] | None = None, **options: Any) -> BoundCall:
    sizes = {"sequences": ((2, 3), (3, 3)), "h_q": 4, "h_kv": 2}
    inputs = dense_cases.make(dense_cases.DenseCase(**{**sizes, **(changes or {})}))
    causal = inputs.options.pop("causal")
    arrays = _dense(q=inputs.q, k=inputs.k, v=inputs.v, **inputs.options)
    options = {"causal": causal, **options}
    return BoundCall(_id("prefill", {**(changes or {}), **options}), "mla_prefill", arrays, options)


def prefill_backward(changes: dict[str, Any] | None = None, dlse: bool = False, **options: Any) -> BoundCall:
    sizes = {"sequences": ((2, 3), (3, 3)), "h_q": 4, "h_kv": 2}
    case = dense_cases.DenseCase(**{**sizes, **(changes or {})})
    inputs = dense_gradients.make_gradients(case, dlse=dlse)
    causal = inputs.options.pop("causal")
    arrays = _dense(**dict(zip(("q", "k", "v", "out", "dout", "lse"), inputs.arguments, strict=True)), **inputs.options)
    options = {"causal": causal, **options}
    return BoundCall(_id("prefill_backward", {**(changes or {}), **options}), "mla_prefill_backward", arrays, options)


def mask(**options: Any) -> BoundCall:
    indices = np.random.default_rng(1).integers(-1, 9, (5, 4)).astype(np.int32)
    starts = {"cu_seqlens_q": np.array([0, 2, 5], np.int32), "cu_seqlens_kv": np.array([0, 3, 9], np.int32)}
    return BoundCall(_id("mask", options), "prefill_mask", {"indices": indices, **starts}, options)


def segments(*, of_keys: bool) -> BoundCall:
    ids = {"segment_ids_q": np.array([1, 1, 0, 3, 2], np.int32)}
    ids |= {"segment_ids_kv": np.array([1, 3, 3, 4, 0, 2, 2], np.int32)} if of_keys else {}
    return BoundCall(_id("segments", {"of_keys": of_keys}), "prefill_segments", ids, {"max_segments": 5})


def absorb(rope: bool) -> BoundCall:
    rng = np.random.default_rng(8)
    whole = rng.standard_normal((3, 2, 192), np.float32).astype(ml_dtypes.bfloat16)
    arrays = {"q_nope": whole[..., :128].copy()}
    arrays["w_uk"] = (rng.standard_normal((2, 128, 512), np.float32) * 0.05).astype(ml_dtypes.bfloat16)
    if rope:
        arrays["q_rope"] = whole[..., 128:].copy()
    return BoundCall(_id("absorb", {"rope": rope}), "absorb", arrays, {})


def _projection(b: int, s_q: int, h_q: int) -> dict[str, Array]:
    """W_UV and a gate."""
    rng = np.random.default_rng(9)
    w_uv = (rng.standard_normal((h_q, 128, 512), np.float32) * 0.05).astype(ml_dtypes.bfloat16)
    return {"w_uv": w_uv, "gate": rng.standard_normal((b, s_q, h_q, 128), np.float32).astype(w_uv.dtype)}


def merge_project(n: int, **options: Any) -> BoundCall:
    rng = np.random.default_rng(10)
    arrays = {"outs": rng.standard_normal((n, 2, 1, 3, 512), np.float32), **_projection(2, 1, 3)}
    if n > 1:
        arrays["lses"] = rng.standard_normal((n, 2, 3, 1), np.float32)
    return BoundCall(_id(f"merge_project-{n}", options), "merge_project", arrays, options)


def merge(**options: Any) -> BoundCall:
    rng = np.random.default_rng(0)
    outs = rng.standard_normal((3, 2, 1, 4, 8), np.float32)
    lses = rng.standard_normal((3, 2, 4, 1), np.float32)
    return BoundCall(_id("merge", options), "merge_states", {"outs": outs, "lses": lses}, options)


def logits(case: indexer_cases.LogitsCase, **options: Any) -> BoundCall:
    return BoundCall(_id("logits", options), "indexer_logits", indexer_cases.logits_inputs(case), options)


def logits_paged(**options: Any) -> BoundCall:
    inputs = indexer_cases.paged_inputs(indexer_cases.PagedCase(s_q=2, d=32, page_size=16, seqlens=(40, 20)))
    return BoundCall(_id("paged", options), "indexer_logits_paged", _dense(**inputs), options)


def topk(**options: Any) -> BoundCall:
    rng = np.random.default_rng(0)
    logits = rng.integers(-9, 10, (4, 40)).astype(np.float32)
    arrays = {"logits": logits, "ke": np.array([40, 3, 0, 20], np.int32)}
    return BoundCall(_id("topk", options), "indexer_topk", arrays, {"k": 7, **options})


def prepare(name: str, **options: Any) -> BoundCall:
    arrays = prepare_cases.arrays(name, d=64)
    x = arrays[name[-1]]
    x[np.abs(x.astype(np.float32)) < 1e-30] = 0  # XLA's threads on the CPU flush what is denormal, to zeros of one sign
    return BoundCall(_id(name, options), f"indexer_{name}", _dense(**arrays), options)


def prepare_both(pages: bool, **options: Any) -> BoundCall:
    """Prepare queries and keys with the keys' norm, to pages or to arrays."""
    arrays = prepare_cases.both(32)
    for name in ("q", "k"):
        x = arrays[name]
        x[np.abs(x.astype(np.float32)) < 1e-30] = 0  # as above
    if pages:
        arrays |= {"cache": np.zeros((3, 4, 36), np.uint8), "slots": np.array([7, -1, 0, 11, 3], np.int32)}
    return BoundCall(_id(f"prepare_both-{pages}", options), "indexer_prepare", _dense(**arrays), options)


def warmup_loss(case: loss_cases.LossCase, **options: Any) -> BoundCall:
    chosen = {"scale": case.d**-0.5, "causal": case.causal, "target": case.target, **options}
    return BoundCall(_id("loss", chosen), "indexer_warmup_loss", _dense(**loss_cases.loss_inputs(case)), chosen)


def sparse_loss(case: sparse_loss_cases.SparseLossCase, **options: Any) -> BoundCall:
    chosen = {"scale": case.d**-0.5, "causal": case.causal, **options}
    arrays = _dense(**sparse_loss_cases.sparse_loss_inputs(case))
    return BoundCall(_id("sparse_loss", chosen), "indexer_sparse_loss", arrays, chosen)


def head_sums(case: loss_cases.LossCase | sparse_loss_cases.SparseLossCase, **options: Any) -> BoundCall:
    if isinstance(case, loss_cases.LossCase):
        inputs = loss_cases.loss_inputs(case)
    else:
        inputs = sparse_loss_cases.sparse_loss_inputs(case)
    names = ("q", "k", "q_rope", "k_rope", "lse", "indices", "topk_length", "cu_seqlens_q", "cu_seqlens_kv")
    arrays = _dense(**{name: inputs.get(name) for name in names})
    name = _id("head_sums", {"indices": "indices" in arrays, **options})
    return BoundCall(name, "indexer_head_sums", arrays, {"scale": case.d**-0.5, "causal": case.causal, **options})


def append(record: str, rotated: bool = False, **options: Any) -> BoundCall:
    """Five tokens, one with no place, to a cache with contents."""
    kept = FORMATS[record]
    rng = np.random.default_rng(3)
    dtype = ml_dtypes.bfloat16
    cache = rng.integers(0, 100, (3, 4, kept.token_bytes), np.uint8)
    arrays = {
        "cache": cache if kept.dtype == "uint8" else cache.view(dtype),
        "slots": np.array([3, 9, -1, 0, 5], np.int32),
    }
    arrays |= {"latent": rng.standard_normal((5, kept.d_latent)).astype(dtype)}
    if kept.d_rope:
        arrays |= {"rope": rng.standard_normal((5, kept.d_rope)).astype(dtype)}
    if rotated:
        arrays |= {name: rng.standard_normal((9, kept.d_rope // 2), np.float32) for name in ("cos", "sin")}
        arrays["positions"] = np.array([8, 0, 3, 3, 1], np.int32)
    return BoundCall(_id(f"append-{record}", options), "cache_append", arrays, {"kv_format": record, **options})


def kept_tokens(record: str) -> Array:
    """The cache of `append`."""
    arrays = append(record).arrays
    cache: Array = arrays["cache"].copy()
    mla_cupy.cache_append(arrays["latent"], arrays.get("rope"), cache, arrays["slots"], kv_format=record)
    return cache


def mla_prepare(record: str = "", **options: Any) -> BoundCall:
    """Queries of five tokens, which are turned by tables, or by `theta`; and the tokens, to a cache of `record`."""
    rng = np.random.default_rng(7)
    arrays: dict[str, Array] = {"q": rng.standard_normal((5, 3, 64)).astype(ml_dtypes.bfloat16)}
    if record:
        arrays |= append(record, rotated="theta" not in options).arrays
    arrays["positions"] = np.array([8, 0, 3, 3, 1], np.int32)
    if options.get("return_rope"):
        arrays["rope"] = rng.standard_normal((5, 64)).astype(ml_dtypes.bfloat16)
    return BoundCall(_id(f"prepare-{record}", options), "mla_prepare", arrays, options)


def prepare_without_rope() -> BoundCall:
    """Queries of five tokens times W_UK, and the tokens, of a model without RoPE."""
    q = np.random.default_rng(5).standard_normal((5, 2, 128), np.float32).astype(ml_dtypes.bfloat16)
    arrays = {"q": q, "w_uk": absorb(rope=False).arrays["w_uk"], **append("bf16-nope").arrays}
    return BoundCall("prepare-nope", "mla_prepare", arrays, {"kv_format": "bf16-nope"})


def gather(record: str, **options: Any) -> BoundCall:
    arrays = {"cache": kept_tokens(record), "slots": np.array([5, -1, 0], np.int32)}
    return BoundCall(_id(f"gather-{record}", options), "cache_gather", arrays, {"kv_format": record, **options})


def copy_pages() -> BoundCall:
    pool = np.arange(2 * 4 * 16, dtype=np.uint8).reshape(2, 4, 16)
    pairs = np.array([[0, 3], [-1, -1], [2, 1]], np.int32)
    return BoundCall("copy_pages", "cache_copy_pages", {"pool": pool, "pairs": pairs}, {})


def slots(**options: Any) -> BoundCall:
    """Three sequences, one of them with a page that is none, and more than there are slots for."""
    arrays = {
        "block_table": np.array([[4, 1], [-1, 2], [0, 9]], np.int32),
        "starts": np.array([3, 0, 6], np.int32),
        "lengths": np.array([4, -1, 8], np.int32),
    }
    return BoundCall(_id("slots", options), "cache_slots", arrays, {"page_size": 4, "max_tokens": 11, **options})


def append_keys(**options: Any) -> BoundCall:
    k = np.random.default_rng(5).standard_normal((4, 32)).astype(ml_dtypes.bfloat16)
    arrays = {"k": k, "cache": np.zeros((3, 4, 36), np.uint8), "slots": np.array([7, -1, 0, 11], np.int32)}
    return BoundCall(_id("append_keys", options), "indexer_cache_append", arrays, options)


def gather_keys(**options: Any) -> BoundCall:
    cache = np.random.default_rng(6).integers(0, 127, (3, 4, 68)).astype(np.uint8)
    arrays = {"cache": cache if options else append_keys().eager()[0], "slots": np.array([7, -1, 2], np.int32)}
    return BoundCall(_id("gather_keys", options), "indexer_cache_gather", arrays, options)


def sparse_decode(record: str, extra: bool = False, **options: Any) -> BoundCall:
    rng = np.random.default_rng(6)
    cache = kept_tokens(record)
    q = rng.standard_normal((2, 1, 4, FORMATS[record].d_qk)).astype(ml_dtypes.bfloat16)
    written = np.array([3, 9, 0, 5, -1], np.int32)  # elsewhere there is anything, NaN too
    arrays = {"q": q, "kv_cache": cache, "indices": rng.choice(written, (2, 1, 6))}
    if extra:
        arrays |= {"extra_kv_cache": cache, "extra_indices": rng.choice(written, (2, 1, 3))}
        arrays |= {"attn_sink": np.zeros(4, np.float32), "topk_length": np.array([5, 0], np.int32)}
        tables = rng.standard_normal((2, 6, 32)).astype(np.float32)
        arrays |= {"out_cos": tables[0], "out_sin": tables[1], "out_positions": np.array([[4], [0]], np.int32)}
    options = {"scale": SCALE, **options}
    return BoundCall(_id(f"sparse_decode-{record}", options), "sparse_mla_decode", arrays, options)


def shorter(call: BoundCall) -> BoundCall:
    """Of tokens without RoPE, those that have no reserved bytes."""
    cache = call.arrays["kv_cache"][..., :528].copy()
    return replace(call, id=f"{call.id}-528", arrays={**call.arrays, "kv_cache": cache})


def _id(name: str, options: dict[str, Any]) -> str:
    return "-".join([name, *(f"{key}={value}" for key, value in options.items() if value)]).replace(" ", "")


ALL = {"lengths": True, "sink": True, "sequences": ((2, 15), (3, 20))}
CALLS = [
    decode(),
    decode(out_dtype="float32", lse_base="2", empty_lse=-7.0, causal=False, scale=0.02),
    decode(cp_world=3, cp_rank=1),
    decode_and_project(out_dtype="float32"),
    decode_and_project(out_dtype="float8_e4m3fn"),
    decode_in_fp8(""),
    decode_in_fp8("uint8", q_scale=0.5),
    decode_in_fp8("float8_e4m3fn", q_scale=2.0, out_dtype="float32"),
    decode_with_scales(),
    decode_with_drafts(),
    decode_with_forms("attn_sink", window=20),
    decode_with_forms("cu_seqlens_q", "q_rope", max_seqlen_q=2),
    decode_with_forms("cu_seqlens_q", out_dtype="uint8"),
    forward(),
    forward({**ALL, "causal": True}, out_dtype="float32", lse_base="2"),
    forward({"dtype": "float16", "head_axis": True, "d_qk": 512}),
    forward_in_fp8(),
    backward(),
    backward({**ALL, "causal": True}, deterministic=True, dkv_dtype="float32"),
    backward({"sink": True, "head_axis": True, "dlse": True}),
    prefill(),
    prefill({"state": "float32", "q_pair": True, "k_rope": "per_head"}, out_dtype="float32", scale=0.1),
    prefill({"mask": 0.5}),
    prefill({"dtype": "float8_e4m3fn", "scales": "qk"}, out_dtype="float16"),
    prefill({"dtype": "uint8", "q_pair": True}),
    mask(max_keys=140, relative=True),
    segments(of_keys=False),
    segments(of_keys=True),
    prefill({"d_qk": 256, "d_v": 256, "k_rope": "within", "starts": False, "causal": False, "dtype": "float16"}),
    prefill_backward(),
    prefill_backward({"q_pair": True, "k_rope": "per_head"}, dlse=True, scale=0.1, deterministic=True),
    prefill_backward({"d_qk": 256, "d_v": 256, "k_rope": "within", "starts": False, "dtype": "float16"}),
    absorb(rope=False),
    absorb(rope=True),
    merge_project(1),
    merge_project(3, lse_base="2", out_dtype="float32"),
    merge(),
    merge(out_dtype="bfloat16", lse_base="2", empty_lse=0.0),
    logits(indexer_cases.LogitsCase(s_q=4, s_kv=30, d=32, dtype="bfloat16", scales=False)),
    logits(indexer_cases.LogitsCase(s_q=4, s_kv=30, d=32), out_dtype="bfloat16"),
    logits(indexer_cases.LogitsCase(s_q=4, s_kv=30, d=32, float16=True), accumulate="float16"),
    logits_paged(),
    prepare("prepare_q"),
    prepare("prepare_k", interleaved=True, scales="plain"),
    prepare_both(pages=True),
    prepare_both(pages=False, return_k=True, hadamard=False),
    topk(),
    topk(order="value", return_values=False),
    warmup_loss(loss_cases.LossCase(d_v=8)),
    warmup_loss(loss_cases.LossCase(h_i=3, target="per_head"), gradients=False),
    warmup_loss(loss_cases.LossCase(h=4, d=72, h_kv=2, d_v=8, pairs="qk", codes="uint8", lse=True)),
    sparse_loss(sparse_loss_cases.SparseLossCase(lse=True), deterministic=True),
    sparse_loss(sparse_loss_cases.SparseLossCase(causal=True, lengths=True), gradients=False),
    head_sums(loss_cases.LossCase(lse=True, sequences=((2, 3), (2, 5)))),
    head_sums(loss_cases.LossCase(d=72, h_kv=3, pairs="qK")),
    head_sums(sparse_loss_cases.SparseLossCase(lengths=True), scale=0.3, causal=True),
    append("v32"),
    append("v4", rotated=True),
    append("fp8", kv_scale=0.1),
    append("bf16"),
    mla_prepare(theta=1e4, return_rope=True),
    mla_prepare("fp8", quantise=True, kv_scale=0.1, interleaved=False),
    mla_prepare("bf16", quantise=True, q_scale=0.5, return_rope=True),
    prepare_without_rope(),
    gather("v32"),
    gather("v32-nope"),
    gather("fp8", kv_scale=0.1, out_dtype="float32"),
    copy_pages(),
    slots(),
    slots(num_pages=3),
    append_keys(),
    append_keys(hadamard=False, scales="plain"),
    gather_keys(),
    gather_keys(d=128),
    sparse_decode("v32"),
    sparse_decode("v32", out_dtype="float8_e4m3fn", scales="power_of_2"),
    sparse_decode("v32-nope", kv_format="v32-nope"),
    shorter(sparse_decode("v32-nope", kv_format="v32-nope")),
    sparse_decode("v4", extra=True, lse_base="2", out_dtype="float32"),
]


def test_every_operation_has_a_call() -> None:
    assert {call.operation for call in CALLS} == set(ops.BOUND_OPERATIONS)


#: Calls that JAX takes with its defaults: without 64-bit numbers.
CALLS_OF_JAX = [call for call in CALLS if all(x.dtype.itemsize < 8 for x in call.arrays.values())]
every_call_of_jax = pytest.mark.parametrize("call", CALLS_OF_JAX, ids=[call.id for call in CALLS_OF_JAX])
every_call = pytest.mark.parametrize("call", CALLS, ids=[call.id for call in CALLS])
ONE_OF_EACH = list({call.operation: call for call in reversed(CALLS)}.values())
"""A call of each operation."""
