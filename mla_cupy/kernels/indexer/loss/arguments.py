"""The parameter struct of the losses' kernels, by group: attention, indexer, results, a chunk of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from mla_cupy.kernels.attention import row_lists
from mla_cupy.kernels.indexer.loss import heuristics
from mla_cupy.kernels.indexer.loss.problem import LossOptions, LossProblem
from mla_cupy.kernels.params import LossParams
from mla_cupy.kernels.pipeline import Call

Parts = dict[str, Any]
"""Parts of the workspace, by the member that points to them."""
_Members = dict[str, Any]


@dataclass(frozen=True)
class Chunk:
    """Some tokens of a call: `tokens` from `first` on. `copied` if TMA fetches their index queries from a copy."""

    first: int
    tokens: int
    copied: bool = False


def loss_params(
    problem: LossProblem, call: Call, chunk: Chunk, key_splits: int, parts: Parts, heads: int | None = None
) -> LossParams:
    """The members of all kernels, for some tokens; for `heads` see `loss_args`."""
    return LossParams(
        **_sequences(problem, call),
        **_attention(problem, call, problem.heads if heads is None else heads),
        **_indexer(problem, call),
        **_results(problem, call),
        **_chunk(problem, call, chunk),
        key_splits=key_splits,
        min_split_tokens=heuristics.MIN_SPLIT_TOKENS,
        **parts,
    )


def _sequences(problem: LossProblem, call: Call) -> _Members:
    """The sequences, and with them the keys that each token sees."""
    starts = call.views["cu_seqlens_q"]
    return {
        **_vectors(call, "cu_seqlens_q", "cu_seqlens_kv"),
        "ranges": "ranges",
        "rows_stride_elems": 0 if problem.topk is None else row_lists.rows_stride(problem.topk),
        "s_q": problem.s_q,
        "s_kv": problem.s_kv,
        "b": 0 if starts is None else starts.shape[0] - 1,
        "num_keys": problem.keys,
        "causal": cast(LossOptions, call.options).causal,
    }


def _attention(problem: LossProblem, call: Call, heads: int) -> _Members:
    """Arrays and sizes of the attention, for the target.

    Without separate arrays, RoPE columns are the last ones of q and k.
    """
    q_rope, k_rope = call.name("q_rope") or "q", call.name("k_rope") or "k"
    read, written = _log_sum_exps(problem, call)
    options = cast(LossOptions, call.options)
    return {
        **_rows(call, "q", "out"),
        "q_rope": q_rope,
        "q_rope_stride_token_head_elems": call.strides(q_rope, 2),
        "q_rope_column": problem.first_dim if q_rope == "q" else 0,
        "k": "k",
        "k_stride_token_head_elems": _key_strides(call, "k"),
        "k_rope": k_rope,
        "k_rope_stride_token_head_elems": _key_strides(call, k_rope),
        "k_rope_column": problem.first_dim if k_rope == "k" else 0,
        "v": call.name("v"),
        "v_stride_token_head_elems": _key_strides(call, "v"),
        "lse": read[0],
        "lse_stride_token_head_elems": read[1],
        "attention_lse": written[0],
        "attention_lse_stride_token_head_elems": written[1],
        "heads": heads,
        "kv_head_heads": problem.heads // problem.kv_heads,
        "head_dim": problem.head_dim,
        "first_dim": problem.first_dim,
        "value_dim": problem.value_dim,
        "scale": options.scale,
        "target_scale": options.target_scale,
    }


def _indexer(problem: LossProblem, call: Call) -> _Members:
    """Arrays and sizes of the indexer, for the scores."""
    return {
        **_rows(call, "index_q", "weights", "q_scale"),
        **_vectors(call, "index_k", "k_scale"),
        "index_heads": problem.index_heads,
        "index_dim": problem.index_dim,
        "codes": problem.codes,
        "weights_bf16": _is(call, "weights", "bfloat16"),
        "score_unit": problem.score_unit,
    }


def _results(problem: LossProblem, call: Call) -> _Members:
    """Divergences, their weights, and gradients."""
    return {
        **_rows(call, "kl", "mass", "index_lse", "d_index_q", "d_weights"),
        **_vectors(call, "row_weights", "d_index_k", "head_sums"),
        "d_index_q_fp32": _is(call, "d_index_q", "float32"),
        "d_index_k_fp32": _is(call, "d_index_k", "float32"),
        "per_head": problem.per_head,
    }


def _chunk(problem: LossProblem, call: Call, chunk: Chunk) -> _Members:
    """The rows that a chunk has in the workspace. The caller's targets cover all tokens."""
    return {
        "target": "head_sums" if problem.given_sums else "target_rows",
        "target_stride_elems": call.stride("head_sums") if problem.given_sums else problem.row_stride,
        "row_stride_elems": problem.row_stride,
        "first_token": chunk.first,
        "num_tokens": chunk.tokens,
        "first_target": 0 if problem.given_sums else chunk.first,
        "first_fetched": chunk.first if chunk.copied else 0,
        "first_chunk": chunk.first == 0,
        "last_chunk": chunk.first + chunk.tokens >= problem.s_q,
    }


def _rows(call: Call, *names: str) -> _Members:
    """Arrays of rows per token and head, and their strides."""
    strides = {f"{name}_stride_token_head_elems": call.strides(name, 2) for name in names}
    return {**{name: call.name(name) for name in names}, **strides}


def _vectors(call: Call, *names: str) -> _Members:
    """Arrays of rows or numbers per token or key, and their strides."""
    strides = {f"{name}_stride_elems": call.stride(name) for name in names}
    return {**{name: call.name(name) for name in names}, **strides}


def _key_strides(call: Call, name: str) -> tuple[int, int]:
    """Strides of keys, or of their columns; 0 from head to head where all share them."""
    view = call.views.get(name)
    per_head = view is not None and len(view.shape) == 3 and view.shape[1] > 1
    return call.stride(name), call.stride(name, 1) if per_head else 0


_Placed = tuple[str, tuple[int, int]]
"""The name of an array or of a part of the workspace, and its strides."""


def _log_sum_exps(problem: LossProblem, call: Call) -> tuple[_Placed, _Placed]:
    """The attention's log-sum-exps: those that the target is made with, and those that a kernel writes."""
    read: _Placed = call.name("lse"), call.strides("lse", 2)
    written: _Placed = call.name("attention_lse"), call.strides("attention_lse", 2)
    if problem.needs_lse:
        if not problem.value_dim:
            written = written[0] or "own_lse", (problem.heads, 1)
        read = written
    return read, written


def _is(call: Call, name: str, dtype: str) -> bool:
    view = call.views.get(name)
    return view is not None and view.dtype == dtype
