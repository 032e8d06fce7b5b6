"""Prefill of vLLM's MLA layers by `mla_prefill`: keys are not joined, and states are merged in the epilogue.

vLLM itself joins both parts of the keys for every head, attends to cached prefixes chunk by chunk, and merges the
chunks' results and the new tokens' results in separate kernels. Here each call reads both parts in place, and merges
with the earlier result. Gathering cached rows and projecting them up is vLLM's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from vllm import _custom_ops, envs
from vllm.model_executor.layers.attention.mla_attention import MLACommonPrefillMetadata

from mla_cupy.integrations.probe import logger
from mla_cupy.ops.groups import Packed
from mla_cupy.runtime import env
from mla_cupy.shapes import D_QK, D_V
from mla_cupy.torch import mla_prefill

WIDTHS = ((192, 128), (256, 256), (128, 128))
"""Widths of keys and values that `mla_prefill` supports."""
_D_ROPE = D_QK - D_V

_FORMS = {
    "chunks": ("workspace", "chunks"),
    "lists": ("workspace", "cu_seq_lens", "starts", "token_to_seq", "chunk_total_token"),
}
"""Forms of vLLM's metadata of cached prefixes: one object per chunk, or lists with an item per chunk."""


class Chunk(NamedTuple):
    """Part of the cached prefixes of some prefills, which follow one another.

    Attributes
    ----------
    tokens, requests : slice
        Parts of the step's prefills that attend to it.
    queries, keys : tensor, (b + 1,), int32
        Where their tokens, and their rows of the prefixes, begin.
    starts : tensor, (b,), int32
        Token of each prefix at which the chunk begins.
    token_to_seq : tensor, int32
        Request of each row.
    rows : int
    """

    tokens: slice
    requests: slice
    queries: torch.Tensor
    keys: torch.Tensor
    starts: torch.Tensor
    token_to_seq: torch.Tensor
    rows: int


def form() -> str:
    """Name the form in which this vLLM describes cached prefixes: a key of `_FORMS`, or "" if neither."""
    told = getattr(getattr(MLACommonPrefillMetadata, "ChunkedContextMetadata", None), "__annotations__", {})
    return next((name for name, fields in _FORMS.items() if all(x in told for x in fields)), "")


def serves_layer(layer: Any) -> bool:
    """Say whether a layer's prefills are ours: by the environment, the kernels that there are, and vLLM's version.

    Parameters
    ----------
    layer : MLACommonImpl
    """
    widths = layer.qk_nope_head_dim + layer.qk_rope_head_dim, layer.v_head_dim
    if env.get("ENGINE_PREFILL") == "engine" or getattr(envs, "VLLM_BATCH_INVARIANT", False):
        return False  # the bits of `mla_prefill` are not guaranteed to be the same in every batch
    if widths not in WIDTHS or layer.qk_rope_head_dim not in (0, _D_ROPE):
        return False
    if not form():
        logger.warning("mla_cupy: prefill is vLLM's: it describes cached prefixes in a way that the plugin knows not")
        return False
    return True


def serves_step(layer: Any, step: Any, output: torch.Tensor, output_scale: torch.Tensor | None) -> bool:
    """True if a step's prefills are ours: not if results or queries are FP8, or prefixes are spread over ranks.

    Parameters
    ----------
    layer : MLACommonImpl
    step : MLACommonPrefillMetadata
    output : tensor
    output_scale : tensor, optional
    """
    shared = layer.dcp_world_size > 1 and step.chunked_context is not None
    return output_scale is None and step.q_data_type in (None, output.dtype) and not shared


def prefill(
    layer: Any,
    q: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    cache: torch.Tensor,
    step: Any,
    k_scale: torch.Tensor,
    output: torch.Tensor,
) -> None:
    """Attend from a step's prefilled tokens to their cached prefixes, then to themselves.

    Parameters
    ----------
    layer : MLACommonImpl
    q : tensor, (tokens, heads, d_nope + d_rope), bfloat16 or float16
    latent : tensor, (tokens, 512), dtype of q
    rope : tensor, (tokens, 1, d_rope), dtype of q
    cache : tensor, (num_pages, page_size, 512 + d_rope)
    step : MLACommonPrefillMetadata
    k_scale : tensor, float32
        Of a cache in e4m3.
    output : tensor, (tokens, heads * d_v), dtype of q
        Where the result goes.
    """
    tokens, heads, _ = q.shape
    starts, state = step.query_start_loc, None
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=q.device)
    if step.chunked_context is not None:
        state = torch.empty((tokens, heads, layer.v_head_dim), dtype=torch.float32, device=q.device)
        lse.fill_(float("-inf"))  # of a token without a prefix: its state is not read
        for chunk in chunks(step, tokens):
            rows = _gathered(layer, cache, step, chunk, k_scale)
            keys, values = _projected(layer, rows[:, : layer.kv_lora_rank])
            out, part = state[chunk.tokens], lse[chunk.tokens]
            mla_prefill(
                q[chunk.tokens],
                keys,
                values,
                k_rope=_rope(layer, rows[:, layer.kv_lora_rank :]),
                packed=Packed(chunk.queries, chunk.keys),
                state_out=out,
                state_lse=part,
                causal=False,
                scale=layer.scale,
                out=out,
                lse=part,
            )
    keys, values = _projected(layer, latent)
    mla_prefill(
        q,
        keys,
        values,
        k_rope=_rope(layer, rope),
        packed=Packed(starts, starts),
        state_out=state,
        state_lse=None if state is None else lse,
        scale=layer.scale,
        out=output.view(tokens, heads, layer.v_head_dim),
        lse=lse,
    )


def chunks(step: Any, tokens: int) -> Iterator[Chunk]:
    """The chunks of a step's cached prefixes, in either form.

    Parameters
    ----------
    step : MLACommonPrefillMetadata
        With a chunked context.
    tokens : int
        Of the step's prefills.
    """
    context = step.chunked_context
    if hasattr(context, "chunks"):
        for x in context.chunks:
            given = x.query_start_loc, x.cu_seq_lens, x.starts, x.token_to_seq, x.num_context_tokens
            yield Chunk(x.token_slice, x.request_slice, *given)
        return
    lists = context.cu_seq_lens, context.starts, context.token_to_seq, context.chunk_total_token
    for keys, starts, token_to_seq, rows in zip(*lists, strict=True):
        everyone = slice(0, tokens), slice(0, len(starts))
        yield Chunk(*everyone, step.query_start_loc, keys, starts, token_to_seq, int(rows))


def _gathered(layer: Any, cache: torch.Tensor, step: Any, chunk: Chunk, k_scale: torch.Tensor) -> torch.Tensor:
    """Rows of a chunk of cached prefixes, one after the other, in the dtype of the queries."""
    workspace: torch.Tensor = step.chunked_context.workspace
    _custom_ops.gather_and_maybe_dequant_cache(
        src_cache=cache,
        dst=workspace,
        block_table=step.block_table[chunk.requests],
        cu_seq_lens=chunk.keys,
        token_to_seq=chunk.token_to_seq,
        num_tokens=chunk.rows,
        kv_cache_dtype=layer.kv_cache_dtype,
        scale=k_scale,
        seq_starts=chunk.starts,
    )
    return workspace[: chunk.rows]


def _projected(layer: Any, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values per head, as views of one tensor."""
    widths = [layer.qk_nope_head_dim, layer.v_head_dim]
    keys, values = layer.kv_b_proj(latent)[0].view(-1, layer.num_heads, sum(widths)).split(widths, dim=-1)
    return keys, values


def _rope(layer: Any, rope: torch.Tensor) -> torch.Tensor | None:
    return rope if layer.qk_rope_head_dim else None
