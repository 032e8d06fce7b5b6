"""The part of vLLM's interface that the backends implement: names, parameters, class attributes.

As of the newest version that `tests/engines` has records of, and held against that record there.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

from tests.bindings.stand_in import install_modules

CONFIG = SimpleNamespace(
    parallel_config=SimpleNamespace(decode_context_parallel_size=1),
    model_config=SimpleNamespace(get_num_attention_heads=lambda parallel: 4, dtype=None, max_model_len=640),
    scheduler_config=SimpleNamespace(max_num_seqs=8),
    cache_config=SimpleNamespace(block_size=16, user_specified_block_size=False),
    device_config=SimpleNamespace(device="cpu"),
    speculative_config=None,
)
"""Configuration that vLLM passes to a layer; `install` sets its dtype."""


class AttentionBackend:
    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return []

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return default_block_size

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [320, 512, 576]

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: Any,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None: ...

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return False


class MLACommonBackend(AttentionBackend):
    @staticmethod
    def get_name() -> str:
        return "TRITON_MLA"

    @staticmethod
    def get_builder_cls() -> Any: ...

    @staticmethod
    def get_impl_cls() -> Any: ...


class MLACommonPrefillMetadata:
    @dataclass
    class ChunkedContextMetadata:
        context_lens: Any
        workspace: Any
        chunks: Any


@dataclass
class MLACommonDecodeMetadata:
    block_table: Any
    seq_lens: Any
    dcp_tot_seq_lens: Any


class MLACommonMetadata:
    pass


class QueryLenSupport(Enum):
    UNIFORM = "uniform"
    VARLEN = "varlen"


class MLACommonMetadataBuilder:
    reorder_batch_threshold = 1
    query_len_support: QueryLenSupport

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: Any,
        vllm_config: Any,
        device: Any,
        metadata_cls: Any = None,
        supports_dcp_with_varlen: bool = False,
    ) -> None:
        self.metadata_cls = metadata_cls
        self.use_pcp = False
        self.num_heads = vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config)
        self.dcp_world_size = vllm_config.parallel_config.decode_context_parallel_size
        if vllm_config.speculative_config is not None:
            drafts = vllm_config.speculative_config.num_speculative_tokens
            self.reorder_batch_threshold = max(self.reorder_batch_threshold, 1 + drafts)
        if self.dcp_world_size > 1:
            self.reorder_batch_threshold = 1

    def _build_decode(
        self,
        block_table_tensor: Any,
        seq_lens_device: Any,
        max_seq_len: Any,
        query_start_loc_cpu: Any,
        query_start_loc_device: Any,
        num_decode_tokens: Any,
        max_query_len: Any,
        dcp_tot_seq_lens_device: Any,
    ) -> Any: ...

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        return self.build(0, common_attn_metadata)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        given = common_attn_metadata
        decodes, tokens = self._split(given)
        decode = decodes and self._build_decode(
            block_table_tensor=given.block_table_tensor[:decodes],
            seq_lens_device=given.seq_lens[:decodes],
            max_seq_len=given.max_seq_len,
            query_start_loc_cpu=given.query_start_loc_cpu[: decodes + 1],
            query_start_loc_device=given.query_start_loc[: decodes + 1],
            num_decode_tokens=tokens,
            max_query_len=given.max_query_len,
            dcp_tot_seq_lens_device=given.dcp_tot_seq_lens,
        )
        return SimpleNamespace(decode=decode or None, num_decodes=decodes, num_decode_tokens=tokens)

    def _split(self, given: Any) -> tuple[int, int]:
        """The first requests that decode, and their tokens: those as long as the first, if lengths must not differ."""
        uniform, starts = self.query_len_support != QueryLenSupport.VARLEN, given.query_start_loc_cpu
        everything = given.num_reqs, given.num_actual_tokens
        if given.max_query_len <= self.reorder_batch_threshold and not uniform and not self.use_pcp:
            return everything
        lengths = starts[1:] - starts[:-1]
        if lengths[0].item() > self.reorder_batch_threshold:
            return 0, 0
        if uniform and not self.use_pcp and bool(((lengths == lengths[0]) | (lengths == 0)).all()):
            return everything
        is_prefill = lengths != lengths[0] if uniform else lengths > self.reorder_batch_threshold
        if self.use_pcp:
            is_prefill = is_prefill | given.is_prefilling
        if not bool(is_prefill.any()):
            return everything
        first = int(is_prefill.int().argmax())
        return first, int(starts[first])


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
        self.num_heads, self.head_size = num_heads, head_size
        self.scale, self.sliding_window, self.kv_cache_dtype = scale, sliding_window, kv_cache_dtype
        self.supports_quant_query_input = True  # what vLLM then sends is no query of ours
        self.kv_lora_rank, self.dcp_world_size = 512, 1
        self.qk_nope_head_dim, self.qk_rope_head_dim = mla_args.get("qk_nope_head_dim", 128), head_size - 512
        self.v_head_dim, self.kv_b_proj = mla_args.get("v_head_dim", 128), mla_args.get("kv_b_proj")
        self.prefilled: list[Any] = []

    def forward_mha(
        self,
        q: Any,
        kv_c_normed: Any,
        k_pe: Any,
        kv_c_and_k_pe_cache: Any,
        attn_metadata: Any,
        k_scale: Any,
        output: Any,
        output_scale: Any = None,
    ) -> None:
        self.prefilled.append((q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, k_scale, output, output_scale))

    def forward_mqa(self, q: Any, kv_c_and_k_pe_cache: Any, attn_metadata: Any, layer: Any) -> Any: ...


class FlashMLASparseBackend(AttentionBackend):
    supported_kv_cache_dtypes = ("auto", "bfloat16", "fp8_ds_mla", "fp8")

    @staticmethod
    def get_name() -> str:
        return "FLASHMLA_SPARSE"

    @staticmethod
    def get_impl_cls() -> Any: ...

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
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
        return self._attend(q, kv_c_and_k_pe_cache, rows, attn_metadata.topk_length, heads)

    def _attend(self, q: Any, cache: Any, rows: Any, lengths: Any, heads: int) -> Any:
        return self._bf16_flash_mla_kernel(q, cache, rows, lengths, heads)

    def _bf16_flash_mla_kernel(
        self,
        q: Any,
        kv_c_and_k_pe_cache: Any,
        topk_indices: Any,
        topk_length: Any = None,
        actual_num_heads: Any = None,
        out: Any = None,
    ) -> tuple[Any, Any]: ...

    def _fp8_flash_mla_kernel(
        self, q: Any, kv_c_and_k_pe_cache: Any, topk_indices: Any, kernel_metadata: Any
    ) -> Any: ...


class OlderSparseImpl(FlashMLASparseImpl):
    """The implementation before version 0.29: its 16-bit kernel accepts unpadded heads, and returns no LSE."""

    PADDED = 4

    def _attend(self, q: Any, cache: Any, rows: Any, lengths: Any, heads: int) -> Any:
        return self._bf16_flash_mla_kernel(q, cache, rows, lengths), None

    def _bf16_flash_mla_kernel(  # type: ignore[override]
        self, q: Any, kv_c_and_k_pe_cache: Any, topk_indices: Any, topk_length: Any = None
    ) -> torch.Tensor:  # noqa: F821  by its name only
        ...


class MultipleOf(int):
    pass


def install(patch: pytest.MonkeyPatch, sparse_impl: type = FlashMLASparseImpl) -> dict[Any, str]:
    """Put the stand-in where vLLM would be; returns its registry."""
    patch.setattr(CONFIG.model_config, "dtype", importlib.import_module("torch").bfloat16)
    registered: dict[Any, str] = {}
    dense = (
        *(MLACommonBackend, MLACommonDecodeMetadata, MLACommonPrefillMetadata, MLACommonMetadata),
        *(MLACommonMetadataBuilder, MLACommonImpl),
    )
    modules = {
        "vllm": {
            "envs": SimpleNamespace(VLLM_BATCH_INVARIANT=False),
            "_custom_ops": importlib.import_module("tests.engines.cpu.operators"),
        },
        "vllm.config": {"get_current_vllm_config": lambda: CONFIG},
        "vllm.model_executor.layers.attention.mla_attention": {
            **{kind.__name__: kind for kind in dense},
            "QueryLenSupport": QueryLenSupport,
        },
        "vllm.v1.attention.backend": {
            "AttentionCGSupport": SimpleNamespace(UNIFORM_BATCH="uniform batch"),
            "AttentionType": SimpleNamespace(DECODER="decoder"),
            "MultipleOf": MultipleOf,
        },
        "vllm.v1.attention.backends.registry": {
            "AttentionBackendEnum": SimpleNamespace(CUSTOM="CUSTOM", FLASHMLA_SPARSE="FLASHMLA_SPARSE"),
            "register_backend": lambda backend, class_path=None, is_mamba=False: registered.update(
                {backend: class_path}
            ),
        },
        "vllm.v1.attention.backends.mla.flashmla_sparse": {
            "FlashMLASparseBackend": FlashMLASparseBackend,
            "FlashMLASparseImpl": sparse_impl,
        },
    }
    install_modules(patch, modules)
    for name in ("vllm_backend", "vllm_prefill", "vllm_sparse_backend"):
        patch.delitem(sys.modules, f"mla_cupy.integrations.{name}", raising=False)
    return registered
