"""The part of vLLM's interface that the backends implement: names, parameters, class attributes.

Dense: as of version 0.25. Sparse: as of vLLM's repository in autumn 2026.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from tests.bindings.stand_in import install_modules


class MLACommonBackend:
    pass


@dataclass
class MLACommonDecodeMetadata:
    block_table: Any
    seq_lens: Any
    dcp_tot_seq_lens: Any


class MLACommonMetadata:
    pass


class MLACommonMetadataBuilder:
    def __init__(
        self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any, metadata_cls: Any = None
    ) -> None:
        self.metadata_cls = metadata_cls

    def _build_decode(
        self,
        block_table_tensor: Any,
        seq_lens_device: Any,
        max_seq_len: Any,
        query_start_loc_cpu: Any,
        query_start_loc_device: Any,
        num_decode_tokens: Any,
        dcp_tot_seq_lens_device: Any,
    ) -> Any: ...


class MLACommonImpl:
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: Any,
        sliding_window: Any,
        kv_cache_dtype: str,
        logits_soft_cap: Any,
        attn_type: str,
        kv_sharing_target_layer_name: Any,
        **mla_args: Any,
    ) -> None:
        self.scale, self.sliding_window, self.kv_cache_dtype = scale, sliding_window, kv_cache_dtype
        self.supports_quant_query_input = True  # what vLLM then sends is no query of ours

    def forward_mqa(self, q: Any, kv_c_and_k_pe_cache: Any, attn_metadata: Any, layer: Any) -> Any: ...


class FlashMLASparseBackend:
    supported_kv_cache_dtypes = ("auto", "bfloat16", "fp8_ds_mla")

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int]:
        return [64]


class FlashMLASparseImpl:
    """Numbers the rows of the cache before it calls a kernel; pads the heads to 64 for the 16-bit one."""

    PADDED = 64

    def __init__(self, num_heads: int, scale: float, topk_indices_buffer: Any, kv_cache_dtype: str = "auto") -> None:
        self.num_heads, self.softmax_scale, self.kv_cache_dtype = num_heads, scale, kv_cache_dtype
        self.topk_indices_buffer = topk_indices_buffer

    def forward_mqa(self, q: Any, kv_c_and_k_pe_cache: Any, attn_metadata: Any, layer: Any) -> Any:
        torch = importlib.import_module("torch")
        heads = q[0].shape[1] if isinstance(q, tuple) else q.shape[1]
        is_fp8 = self.kv_cache_dtype == "fp8_ds_mla"
        if isinstance(q, tuple) and is_fp8:
            q = torch.cat(q, dim=-1)
        elif isinstance(q, tuple):
            joined = torch.cat(q, dim=-1)
            q = torch.full((joined.shape[0], self.PADDED, joined.shape[2]), torch.nan, dtype=joined.dtype)
            q[:, :heads] = joined
        tokens = self.topk_indices_buffer[: q.shape[0]]
        pages = attn_metadata.block_table[attn_metadata.req_id_per_token]
        size = attn_metadata.block_size
        rows = torch.gather(pages, 1, (tokens.clamp(min=0) // size).long()) * size + tokens.clamp(min=0) % size
        rows = torch.where(tokens < 0, -1, rows).int()
        if is_fp8:  # all tokens as one batch
            out, lse = self._fp8_flash_mla_kernel(
                q=q.unsqueeze(0),
                kv_c_and_k_pe_cache=kv_c_and_k_pe_cache,
                topk_indices=rows.unsqueeze(0),
                kernel_metadata=None,
            )
            return out.squeeze(0), lse.squeeze(0).transpose(0, 1)
        lengths = attn_metadata.topk_length
        return self._bf16_flash_mla_kernel(q, kv_c_and_k_pe_cache, rows, lengths, heads)

    def _bf16_flash_mla_kernel(
        self, q: Any, kv_c_and_k_pe_cache: Any, topk_indices: Any, topk_length: Any = None, actual_num_heads: Any = None
    ) -> Any: ...

    def _fp8_flash_mla_kernel(
        self, q: Any, kv_c_and_k_pe_cache: Any, topk_indices: Any, kernel_metadata: Any
    ) -> Any: ...


class MultipleOf(int):
    pass


def install(patch: pytest.MonkeyPatch) -> dict[Any, str]:
    """Put the stand-in where vLLM would be; returns its registry."""
    registered: dict[Any, str] = {}
    dense = (
        *(MLACommonBackend, MLACommonDecodeMetadata, MLACommonMetadata),
        *(MLACommonMetadataBuilder, MLACommonImpl),
    )
    modules = {
        "vllm": {"envs": SimpleNamespace(VLLM_BATCH_INVARIANT=False)},
        "vllm.model_executor.layers.attention.mla_attention": {
            **{kind.__name__: kind for kind in dense},
            "QueryLenSupport": SimpleNamespace(UNIFORM="uniform"),
        },
        "vllm.v1.attention.backend": {
            "AttentionCGSupport": SimpleNamespace(UNIFORM_BATCH="uniform batch"),
            "AttentionType": SimpleNamespace(DECODER="decoder"),
            "MultipleOf": MultipleOf,
        },
        "vllm.v1.attention.backends.registry": {
            "AttentionBackendEnum": SimpleNamespace(CUSTOM="CUSTOM"),
            "register_backend": registered.__setitem__,
        },
        "vllm.v1.attention.backends.mla.flashmla_sparse": {
            kind.__name__: kind for kind in (FlashMLASparseBackend, FlashMLASparseImpl)
        },
    }
    install_modules(patch, modules)
    for name in ("vllm_backend", "vllm_sparse_backend"):
        patch.delitem(sys.modules, f"mla_cupy.integrations.{name}", raising=False)
    return registered
