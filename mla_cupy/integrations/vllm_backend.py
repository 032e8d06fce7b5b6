"""An MLA backend of vLLM: its own prefill and cache, our decode. Imported by vLLM when it is chosen.

Queries of one length per step, caches of bfloat16, float16, or e4m3 with one scale per layer, pages of any multiple of
16 tokens, full CUDA graphs: the schedule is made on the device, in a workspace that all layers and all replays share.
Where vLLM wants batch invariance, the plans are of that kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, MultipleOf

from mla_cupy.integrations.plans import Plans
from mla_cupy.shapes import D_QK
from mla_cupy.torch import TorchDecodePlan, mla_decode

_BYTES = (torch.uint8, torch.float8_e4m3fn)
"""Dtypes that an FP8 cache has in vLLM: the one of its memory, and the one that layers see."""
_SWITCH = "VLLM_BATCH_INVARIANT"


class MlaCupyBackend(MLACommonBackend):  # type: ignore[misc]
    """Description by which vLLM chooses a backend."""

    supported_dtypes: ClassVar[list[Any]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3"]

    @staticmethod
    def get_name() -> str:
        """The one name that vLLM has for backends from outside."""
        return "CUSTOM"

    @staticmethod
    def get_builder_cls() -> type[MlaCupyMetadataBuilder]:
        """The class that builds the metadata."""
        return MlaCupyMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type[MlaCupyImpl]:
        """The class of the layers."""
        return MlaCupyImpl

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        """Pages."""
        return [MultipleOf(16)]

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Hopper: elsewhere the kernels are not fast yet."""
        return bool(capability.major == 9)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """True if vLLM has the switch `VLLM_BATCH_INVARIANT`."""
        return hasattr(envs, _SWITCH)


def _wants_batch_invariance() -> bool:
    return bool(getattr(envs, _SWITCH, False))


@dataclass
class MlaCupyDecodeMetadata(MLACommonDecodeMetadata):  # type: ignore[misc]
    """The decode part of a step: with the plan, and the number of query heads that it is for."""

    plan: TorchDecodePlan
    plan_heads: int


class MlaCupyMetadataBuilder(MLACommonMetadataBuilder):  # type: ignore[misc]
    """Schedules a step, once for all layers."""

    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[Any] = QueryLenSupport.UNIFORM

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        record = "fp8" if kv_cache_spec.dtype in _BYTES else None
        if record and kv_cache_spec.head_size != D_QK:
            raise NotImplementedError(f"mla_cupy decodes FP8 rows of {D_QK} elements, not {kv_cache_spec.head_size}")
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, MLACommonMetadata)
        parallel = vllm_config.parallel_config
        heads = vllm_config.model_config.get_num_attention_heads(parallel)
        # Under decode context parallelism the queries of all ranks are gathered.
        self._heads = heads * getattr(parallel, "decode_context_parallel_size", 1)
        self._max_b = vllm_config.scheduler_config.max_num_seqs
        self._plans = Plans(
            h_q=self._heads,
            d_qk=kv_cache_spec.head_size,
            record=record,
            page_size=kv_cache_spec.block_size,
            dtype=vllm_config.model_config.dtype,
            batch_invariant=_wants_batch_invariance(),
            device=device,
        )

    def _build_decode(
        self,
        block_table_tensor: torch.Tensor,
        seq_lens_device: torch.Tensor,
        max_seq_len: int,
        query_start_loc_cpu: torch.Tensor,
        query_start_loc_device: torch.Tensor,
        num_decode_tokens: int,
        dcp_tot_seq_lens_device: torch.Tensor | None,
    ) -> MlaCupyDecodeMetadata:
        """Runs before every step, and before a capture: outside of the graph."""
        b, max_pages = block_table_tensor.shape
        longest = int((query_start_loc_cpu[1:] - query_start_loc_cpu[:-1]).max())
        plan = self._plans.get(max(self._max_b, b), max(1, longest), max_pages)
        plan.update(seq_lens_device)
        return MlaCupyDecodeMetadata(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            plan=plan,
            plan_heads=self._heads,
        )


class MlaCupyImpl(MLACommonImpl):  # type: ignore[misc]
    """One layer's attention."""

    can_return_lse_for_decode = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        names = ("alibi_slopes", "sliding_window", "logits_soft_cap")
        asked = [name for name in names if getattr(self, name, None)]
        if asked or getattr(self, "attn_type", AttentionType.DECODER) != AttentionType.DECODER:
            raise NotImplementedError(f"mla_cupy decodes without {', '.join(asked) or 'encoder attention'}")
        if self.kv_cache_dtype not in MlaCupyBackend.supported_kv_cache_dtypes:
            expected = ", ".join(MlaCupyBackend.supported_kv_cache_dtypes)
            raise NotImplementedError(f"mla_cupy decodes caches of {expected}, not {self.kv_cache_dtype}")
        self.supports_quant_query_input = False  # an FP8 cache is read by 16-bit queries

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode.

        Parameters
        ----------
        q : tensor, (tokens, heads, 576), or the two parts of its last axis
        kv_c_and_k_pe_cache : tensor, (num_pages, page_size, 576)
            Of the queries' dtype, or e4m3 to be multiplied by the layer's scale of the keys. A captured graph keeps
            the scale that the layer has when it is captured; vLLM sets scales before.

        Returns
        -------
        out : tensor, (tokens, heads, 512)
        lse : tensor, (tokens, heads), float32
            In the base that vLLM merges it with.
        """
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        tokens, heads, _ = query.shape
        decode = attn_metadata.decode
        plan = decode.plan if heads == decode.plan_heads else None
        if plan is None and _wants_batch_invariance():
            raise NotImplementedError(f"mla_cupy is batch-invariant with {decode.plan_heads} heads, not {heads}")
        out, lse = mla_decode(
            query.unflatten(0, (attn_metadata.num_decodes, -1)),
            kv_c_and_k_pe_cache,
            decode.block_table,
            decode.seq_lens,
            plan=plan,
            scale=self.scale,
            kv_scale=float(layer._k_scale_float) if kv_c_and_k_pe_cache.dtype in _BYTES else 1.0,
            lse_base="2" if getattr(self, "_use_fi_prefill", False) else "e",
        )
        return out.flatten(0, 1), lse.transpose(1, 2).reshape(tokens, heads)

    _forward_decode = forward_mqa  # its name in older versions
