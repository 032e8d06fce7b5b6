"""A backend of vLLM that decodes by the definition, sequence by sequence: what ours is compared with on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonImpl,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)

from tests.engines.cpu.operators import counted, rows_of

LATENT = 512
PAGE_SIZE = 64


class Impl(MLACommonImpl):  # type: ignore[misc]
    """A layer."""

    can_return_lse_for_decode = True

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.supports_quant_query_input = False

    def forward_mqa(self, q: Any, kv_c_and_k_pe_cache: Any, attn_metadata: Any, layer: Any) -> Any:
        """Decode."""
        joined = torch.cat(q, -1) if isinstance(q, tuple) else q
        kv_scale = getattr(layer, "_k_scale_float", 1.0)
        return counted(decode)(joined, kv_c_and_k_pe_cache, attn_metadata, self.scale, kv_scale)


class Builder(MLACommonMetadataBuilder):  # type: ignore[misc]
    """The base class's, for several query tokens."""

    query_len_support = QueryLenSupport.UNIFORM


class Backend(MLACommonBackend):  # type: ignore[misc]
    """The backend that vLLM chooses."""

    supported_kv_cache_dtypes = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3")

    @staticmethod
    def get_impl_cls() -> Any:
        """The layers' class."""
        return Impl

    @staticmethod
    def get_builder_cls() -> Any:
        """The metadata's class."""
        return Builder

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """The page size of ours, so that both run on the same pages."""
        return PAGE_SIZE


def decode(q: Any, cache: Any, metadata: Any, scale: float, kv_scale: float) -> tuple[Any, Any]:
    """Attend from each query to the tokens up to its own."""
    step = metadata.decode
    out = torch.zeros(*q.shape[:2], LATENT, dtype=q.dtype)
    lse = torch.full(q.shape[:2], float("-inf"))
    each = q.shape[0] // metadata.num_decodes
    for number in range(metadata.num_decodes):
        length = int(step.seq_lens[number])
        positions = torch.arange(length)
        blocks = step.block_table[number, (positions // cache.shape[1]).long()]
        rows = rows_of(cache, blocks, positions, kv_scale).float()
        for query in range(each):
            seen = max(0, length - (each - 1 - query))
            scores = q[number * each + query].float() @ rows[:seen].T * scale
            if seen:
                lse[number * each + query] = scores.logsumexp(-1)
                out[number * each + query] = (scores.softmax(-1) @ rows[:seen, :LATENT]).to(q.dtype)
    return out, lse
