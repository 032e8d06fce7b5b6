"""The indexer of sparse attention (DSA) for vLLM: our scores and our exact selection instead of its operator.

Keys, their quantization and their cache are vLLM's. Among equal scores the lower index is selected, whatever the batch,
so that equal scores give the same selection from run to run. vLLM's own operator handles the cases that ours does not:
FP4 caches, context parallelism, and steps with varying numbers of draft tokens per request.
"""

from __future__ import annotations

import importlib
import inspect
from types import SimpleNamespace
from typing import Any, get_type_hints

import torch
from vllm import _custom_ops as ops
from vllm.config.compilation import CompilationConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers import sparse_attn_indexer as stock
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.worker.workspace import current_workspace_manager

from mla_cupy.integrations.probe import absent
from mla_cupy.ops.indexer.select_paged import indexer_select_paged
from mla_cupy.torch import indexer_logits, indexer_logits_paged, indexer_topk

OPERATOR = "mla_cupy_indexer"
TAKEN = (
    *("hidden_states", "k_cache_prefix", "kv_cache", "q_quant", "q_scale", "k", "weights", "quant_block_size"),
    *("scale_fmt", "topk_tokens", "head_dim", "max_model_len", "total_seq_lens", "topk_indices_buffer"),
    *("skip_k_cache_insert", "use_pcp"),
)
"""Leading parameters of vLLM's operator, which runs where ours cannot."""
FEW = 8
"""Tokens of a step of decode up to which one call selects: on Hopper it is one launch for short block tables."""
CHUNK = (
    *("block_table", "cu_seqlen_ks", "cu_seqlen_ke", "cu_seq_lens", "total_seq_lens", "token_start", "token_end"),
    "skip_kv_gather",
)
DECODE = ("block_table", "seq_lens", "decode_lens", "requires_padding")
"""Fields that are read from a step's metadata: of a chunk of prompts, and of decode."""


class MlaCupyIndexer(SparseAttnIndexer):  # type: ignore[misc]
    """Operator of each layer that selects."""

    def forward_cuda(self, hidden_states: torch.Tensor, q_quant: Any, k: torch.Tensor, weights: torch.Tensor) -> Any:
        """Select the tokens that each query attends to.

        Parameters
        ----------
        hidden_states : tensor, (tokens, ...)
        q_quant : tensor, (tokens, heads, d), float8_e4m3fn
            Its scales are in the weights.
        k : tensor, (tokens, d)
            The tokens' own keys, for the cache.
        weights : tensor, (tokens, heads)

        Returns
        -------
        tensor, (max_tokens, topk), int32
            The layer's buffer; in its first rows the selected tokens, counted from the request's first; then -1.
        """
        if isinstance(q_quant, tuple) or self.use_fp4_cache or self.use_pcp or self.dcp_world_size > 1:
            return super().forward_cuda(hidden_states, q_quant, k, weights)
        cache = self.k_cache
        sizes = (self.quant_block_size, self.scale_fmt, self.topk_tokens, self.head_dim, self.max_model_len)
        name, memory = stock._encode_layer_name(cache.prefix), (self.max_total_seq_len, self.topk_indices_buffer)
        operator = getattr(torch.ops.vllm, OPERATOR)
        return operator(
            hidden_states, name, cache.kv_cache, q_quant, k, weights, *sizes, *memory, self.skip_k_cache_insert
        )


def select(
    hidden_states: torch.Tensor,
    name: stock.LayerNameType,
    cache: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    block: int,
    scale_format: str | None,
    count: int,
    head_dim: int,
    max_model_len: int,
    max_tokens: int,
    selected: torch.Tensor,
    skip_insert: bool,
) -> torch.Tensor:
    """One step of the operator: store the keys, score, select."""
    steps = get_forward_context().attn_metadata
    step = steps[stock._resolve_layer_name(name)] if isinstance(steps, dict) else None
    if step is None or (step.num_decodes and step.decode.requires_padding):
        sizes = (block, scale_format, count, head_dim, max_model_len, max_tokens)
        # None: vLLM measures a step's memory here. Our scores need no more than its own.
        return stock.sparse_attn_indexer(
            hidden_states, name, cache, q, None, k, weights, *sizes, selected, skip_insert, False
        )
    if not skip_insert:
        ops.indexer_k_quant_and_cache(k[: len(step.slot_mapping)], cache, step.slot_mapping, block, scale_format)
    selected[: len(hidden_states)] = -1
    if step.num_prefills:
        spaces = stock._gather_workspace_shapes(max_tokens, head_dim, q.dtype, False)
        keys, scales = current_workspace_manager().get_simultaneous(*spaces)
        for chunk in step.prefill.chunks:
            _select_of_prompts(chunk, cache, q, weights, keys, scales, selected, count)
    if step.num_decode_tokens:
        _select_of_decode(step.decode, step.num_decode_tokens, cache, q, weights, selected, count)
    return selected


def _select_of_prompts(
    chunk: Any,
    cache: torch.Tensor,
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    scales: torch.Tensor,
    selected: torch.Tensor,
    count: int,
) -> None:
    total, rows = chunk.total_seq_lens, slice(chunk.token_start, chunk.token_end)
    if not chunk.skip_kv_gather:
        ops.cp_gather_indexer_k_quant_cache(cache, keys[:total], scales[:total], chunk.block_table, chunk.cu_seq_lens)
    ranges = {"ks": chunk.cu_seqlen_ks, "ke": chunk.cu_seqlen_ke}
    of_keys = scales[:total].view(torch.float32).squeeze(-1)
    logits = indexer_logits(q[rows], keys[:total], weights[rows].float(), **ranges, k_scale=of_keys, clean=False)
    _keep(selected[rows, :count], logits, count, relative=True, **ranges)


def _select_of_decode(
    decode: Any,
    tokens: int,
    cache: torch.Tensor,
    q: torch.Tensor,
    weights: torch.Tensor,
    selected: torch.Tensor,
    count: int,
) -> None:
    b = len(decode.decode_lens)
    seqlens = decode.seq_lens[:b].reshape(b, -1)
    query, of_heads = q[:tokens].unflatten(0, (b, -1)), weights[:tokens].float().unflatten(0, (b, -1))
    scored, indices = (query, cache, of_heads, seqlens, decode.block_table), selected[:tokens, :count]
    if tokens <= FEW:
        indexer_select_paged(*scored, topk=count, slots=False, indices=indices.unflatten(0, (b, -1)))
    else:
        logits = indexer_logits_paged(*scored, clean=False)
        _keep(indices, logits.flatten(0, 1), count, ke=seqlens.reshape(-1))


def _keep(indices: torch.Tensor, logits: torch.Tensor, count: int, **ranges: Any) -> None:
    """Write the selection where the layer's attention reads it."""
    counts = torch.empty(len(indices), dtype=torch.int32, device=indices.device)
    indexer_topk(logits, count, **ranges, return_values=False, indices=indices, counts=counts)


def _fake(hidden_states: torch.Tensor, name: Any, cache: torch.Tensor, *rest: Any) -> Any:
    return rest[-2]


def difference() -> str:
    """Say why the operator does not fit this vLLM; "" if it does."""
    taken = tuple(inspect.signature(stock.sparse_attn_indexer).parameters)
    if taken[: len(TAKEN)] != TAKEN:
        return f"sparse_attn_indexer takes {', '.join(taken)}; ours passes {', '.join(TAKEN)}"
    return (
        absent(_metadata("DeepseekV32IndexerPrefillChunkMetadata"), *CHUNK)
        or absent(_metadata("DeepSeekV32IndexerDecodeMetadata"), *DECODE)
        or absent(SparseAttnIndexer, "register_oot", "forward_cuda")
        or absent(stock, "_gather_workspace_shapes", "_encode_layer_name", "_resolve_layer_name", "LayerNameType")
    )


def _metadata(name: str) -> Any:
    """The fields of a step's description, as attributes."""
    module = importlib.import_module("vllm.v1.attention.backends.mla.indexer")
    return SimpleNamespace(**dict.fromkeys(getattr(module, name).__dataclass_fields__), __name__=name)


def register() -> None:
    """Offer the operator, and the class that calls it, to vLLM; once in a process."""
    if hasattr(torch.ops.vllm, OPERATOR):
        return
    select.__annotations__ = get_type_hints(select)  # the schema is made of types, not of their names
    direct_register_custom_op(OPERATOR, select, mutates_args=["selected"], fake_impl=_fake)
    CompilationConfig._attention_ops.append(f"vllm::{OPERATOR}")  # as vLLM's own: parts of a graph end before it
    SparseAttnIndexer.register_oot(MlaCupyIndexer, name="SparseAttnIndexer")
