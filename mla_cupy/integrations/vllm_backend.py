"""An MLA backend of vLLM: its own cache, our decode and prefill. Imported by vLLM when it is chosen.

Supports queries of one length per step, short ones on long prefixes included; caches of bfloat16, float16, or e4m3 with
one scale per layer; pages of any multiple of 16 tokens, 64 unless the user says otherwise; full CUDA graphs: the
schedule is made on the device, in a workspace that all layers and all replays share. If vLLM requests batch invariance,
the plans are batch-invariant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, MultipleOf

from mla_cupy.integrations.plans import claim, math_of, set_aside
from mla_cupy.integrations.vllm_prefill import prefill, serves_layer, serves_step
from mla_cupy.ops.groups import Fp8
from mla_cupy.shapes import D_QK, D_V
from mla_cupy.torch import TorchDecodePlan, mla_decode

_BYTES = (torch.uint8, torch.float8_e4m3fn)
"""Dtypes that an FP8 cache has in vLLM: the one of its memory, and the one that layers see."""
_SWITCH = "VLLM_BATCH_INVARIANT"
_PAGE_SIZE = 64
"""Requested tokens per page: with vLLM's default of 16 a tile of 64 keys takes four copies."""
_LONGEST_QUERY = 128
"""Up to here queries on a cached prefix are decoded, as in vLLM's FlashMLA backend: prefill projects the prefix up."""


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
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Page sizes that the kernels support; newer versions of vLLM pass the kind of cache."""
        return [MultipleOf(16)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Default page size."""
        return _PAGE_SIZE

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Widths of the keys: 512, with or without a RoPE part of 64."""
        return [D_V, D_QK]

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: Any, kv_cache_dtype: str | None, *_: Any, **__: Any
    ) -> str | None:
        """Explain which options cannot be combined; None if all can."""
        if str(kv_cache_dtype).startswith("fp8") and head_size != D_QK:
            return f"mla_cupy decodes FP8 rows of {D_QK} elements, not {head_size}"
        return None

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
    """The decode part of a step: with the plan, its query heads, and whether queries are in one array or two."""

    plan: TorchDecodePlan | None
    plan_heads: int
    in_parts: bool
    math: str
    first: Any = None

    def schedule(self, layer: Any) -> None:
        """Enqueue the schedule before the first layer that uses the plan, whenever that layer runs.

        A captured graph then holds it, and a replay makes its own: the host does nothing for it before each step. The
        first layer is known by itself, since the same metadata may serve a run that warms up and the capture after it.
        """
        if self.first is None:
            self.first = layer
        if self.first is layer and self.plan is not None:
            self.plan.update(self.seq_lens)


def _in_parts(head_size: int, record: str | None, ranks: int) -> bool:
    """True if queries are decoded from the two arrays that vLLM has them in.

    Kernels for FP8 tokens need one array, and so does vLLM where ranks share the cache and gather their queries.
    """
    return head_size == D_QK and record is None and ranks == 1


def _sizes(
    heads: int, head_size: int, record: str | None, page_size: int, dtype: Any, device: Any, ranks: int
) -> dict[str, Any]:
    """Sizes that all plans of a group of layers have in common."""
    place = torch.device(device)
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", torch.cuda.current_device())
    math = math_of(record)
    return {
        "h_q": heads,
        "d_qk": head_size,
        "kv_format": record,
        "page_size": page_size,
        "dtype": torch.float8_e4m3fn if math == "fp8" else dtype,
        "math": math,
        "q_rope": _in_parts(head_size, record, ranks),
        "batch_invariant": _wants_batch_invariance(),
        "device": place,
    }


def _planned_lengths(config: Any) -> tuple[int, ...]:
    """Query tokens per sequence of recurring steps: one, and one plus drafts."""
    drafts = getattr(config.speculative_config, "num_speculative_tokens", None) or 0
    return tuple({1: None, 1 + drafts: None})


class MlaCupyMetadataBuilder(MLACommonMetadataBuilder):  # type: ignore[misc]
    """Finds a step's plan, by which the first layer schedules it for all."""

    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: Any = QueryLenSupport.UNIFORM

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        record = "fp8" if kv_cache_spec.dtype in _BYTES else None
        if record and kv_cache_spec.head_size != D_QK:
            raise NotImplementedError(f"mla_cupy decodes FP8 rows of {D_QK} elements, not {kv_cache_spec.head_size}")
        if not _wants_batch_invariance():  # which has a plan for every step, and each takes memory
            self.reorder_batch_threshold = _LONGEST_QUERY  # the base class lowers it again where ranks share the cache
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, MLACommonMetadata)
        # Ranks that share the cache gather the queries of all ranks.
        self._heads = self.num_heads * self.dcp_world_size
        self._max_b = vllm_config.scheduler_config.max_num_seqs
        self._planned = set(_planned_lengths(vllm_config))
        page_size, dtype = kv_cache_spec.block_size, vllm_config.model_config.dtype
        ranks = self.dcp_world_size
        self._plans = claim(**_sizes(self._heads, kv_cache_spec.head_size, record, page_size, dtype, device, ranks))

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """Prepare a step; where all queries are known to be of one length, without comparing them.

        The base class compares lengths unless they may differ, with ten operations on tensors of the host, more than
        the rest of a decode step's preparation takes.
        """
        if not self._has_one_length(common_attn_metadata):
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        self.query_len_support = QueryLenSupport.VARLEN  # this builder's, for this step
        try:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        finally:
            del self.query_len_support

    def _has_one_length(self, step: Any) -> bool:
        """True if numbers show it: no query is longer than one token, or all are as long as the longest.

        With prefill shared by ranks vLLM checks more than lengths, and compares.
        """
        longest = step.max_query_len
        one = longest <= 1 or step.num_actual_tokens == step.num_reqs * longest
        return bool(one and not getattr(self, "use_pcp", False))

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        """Prepare a step that is about to be captured: those that replay it have a plan, whatever their length."""
        self._planned.add(common_attn_metadata.max_query_len)
        return super().build_for_cudagraph_capture(common_attn_metadata)

    def _build_decode(
        self,
        block_table_tensor: torch.Tensor,
        seq_lens_device: torch.Tensor,
        max_seq_len: int,
        query_start_loc_cpu: torch.Tensor,
        query_start_loc_device: torch.Tensor,
        num_decode_tokens: int,
        *newer: Any,
        dcp_tot_seq_lens_device: torch.Tensor | None = None,
        **ignored: Any,
    ) -> MlaCupyDecodeMetadata:
        """Runs before every step, replays included, and before a capture: outside of the graph, and on the host alone.

        vLLM adds parameters before the last one; ours are the first six and that.
        """
        b, max_pages = block_table_tensor.shape
        s_q = max(1, num_decode_tokens // b)  # all have one length; rows that fill up a graph's batch count
        plan = None
        if s_q in self._planned or _wants_batch_invariance():
            plan = self._plans.get(max(self._max_b, b), s_q, max_pages)
        return MlaCupyDecodeMetadata(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            dcp_tot_seq_lens=newer[-1] if newer else dcp_tot_seq_lens_device,
            plan=plan,
            plan_heads=self._heads,
            in_parts=self._plans.sizes["q_rope"],
            math=self._plans.sizes["math"],
        )


class MlaCupyImpl(MLACommonImpl):  # type: ignore[misc]
    """One layer's attention."""

    can_return_lse_for_decode = True
    supports_dcp = True
    lse_base_on_e = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        names = ("alibi_slopes", "sliding_window", "logits_soft_cap")
        asked = [name for name in names if getattr(self, name, None)]
        if asked or getattr(self, "attn_type", AttentionType.DECODER) != AttentionType.DECODER:
            raise NotImplementedError(f"mla_cupy decodes without {', '.join(asked) or 'encoder attention'}")
        if self.kv_cache_dtype not in MlaCupyBackend.supported_kv_cache_dtypes:
            expected = ", ".join(MlaCupyBackend.supported_kv_cache_dtypes)
            raise NotImplementedError(f"mla_cupy decodes caches of {expected}, not {self.kv_cache_dtype}")
        record = "fp8" if self.kv_cache_dtype.startswith("fp8") else None
        self.supports_quant_query_input = math_of(record) == "fp8"  # else an FP8 cache is read by 16-bit queries
        self._prefills = serves_layer(self)
        self._set_plans_aside()

    def _set_plans_aside(self) -> None:
        """Load kernels and allocate memory while the model is loaded: vLLM sizes the cache by the remaining memory."""
        config = get_current_vllm_config()
        cache = config.cache_config
        page_size = cache.block_size if cache.user_specified_block_size else _PAGE_SIZE
        ranks = config.parallel_config.decode_context_parallel_size
        record = "fp8" if self.kv_cache_dtype.startswith("fp8") else None
        dtype, device = config.model_config.dtype, config.device_config.device
        sizes = _sizes(self.num_heads * ranks, self.head_size, record, page_size, dtype, device, ranks)
        limits = config.scheduler_config.max_num_seqs, _planned_lengths(config), config.model_config.max_model_len
        set_aside(*limits, **sizes)

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """Prefill, by `mla_prefill` where it can and `MLA_CUPY_ENGINE_PREFILL` does not say "engine".

        Parameters
        ----------
        q : tensor, (tokens, heads, d_nope + d_rope)
        kv_c_normed : tensor, (tokens, 512)
        k_pe : tensor, (tokens, 1, d_rope)
        kv_c_and_k_pe_cache : tensor, (num_pages, page_size, 512 + d_rope)
        attn_metadata : MLACommonMetadata
        k_scale : tensor
        output : tensor, (tokens, heads * d_v)
            Where the result goes.
        output_scale : tensor, optional
            For results in FP8, which are vLLM's.
        """
        step = attn_metadata.prefill
        if self._prefills and serves_step(self, step, output, output_scale):
            prefill(self, q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, step, k_scale, output)
            return
        super().forward_mha(
            q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, k_scale, output=output, output_scale=output_scale
        )

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
            Of the queries' dtype, or e4m3 to be multiplied by the layer's scale of the keys. With exact products a
            captured graph keeps the scale that the layer has when it is captured; vLLM sets scales before. With
            products in FP8 both scales are read on the device.

        Returns
        -------
        out : tensor, (tokens, heads, 512)
        lse : tensor, (tokens, heads), float32
            Natural; -inf for a sequence without tokens.
        """
        decode = attn_metadata.decode
        query, rope = _parts(q) if decode.in_parts else (_joined(q), None)
        tokens, heads, _ = query.shape
        fits = heads == decode.plan_heads and (decode.math == "exact" or query.dtype in _BYTES)
        plan = decode.plan if fits else None
        if plan is None and _wants_batch_invariance():
            raise NotImplementedError(f"mla_cupy is batch-invariant with {decode.plan_heads} heads, not {heads}")
        if plan is not None:
            decode.schedule(self)
        query = query.unflatten(0, (attn_metadata.num_decodes, -1))
        out, lse = mla_decode(
            query,
            kv_c_and_k_pe_cache,
            decode.block_table,
            decode.seq_lens,
            q_rope=None if rope is None else rope.unflatten(0, (attn_metadata.num_decodes, -1)),
            plan=plan,
            scale=self.scale,
            fp8=_fp8(query, kv_c_and_k_pe_cache, decode.math, layer),
        )
        return out.flatten(0, 1), lse.transpose(1, 2).reshape(tokens, heads)


def _fp8(query: torch.Tensor, cache: torch.Tensor, math: str, layer: Any) -> Fp8 | None:
    """The layer's scales for `mla_decode`: numbers of the host, or tensors for FP8 matmuls."""
    if cache.dtype not in _BYTES:
        return None
    if math == "exact":
        return Fp8(kv_scale=float(layer._k_scale_float))
    of_rows = layer._q_scale.reshape(()).expand(query.shape[:3]) if query.dtype in _BYTES else 1.0
    return Fp8(math, of_rows, layer._k_scale.reshape(1))


def _parts(q: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Latent and RoPE part of the queries; of one tensor its columns."""
    return q if isinstance(q, tuple) else (q[..., :D_V], q[..., D_V:])


def _joined(q: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Both parts of the queries in one tensor; without a copy where a model has no RoPE part."""
    if not isinstance(q, tuple):
        return q
    latent, rope = q
    return torch.cat(q, dim=-1) if rope.shape[-1] else latent
