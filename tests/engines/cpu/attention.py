"""Prefill and merging in PyTorch, for vLLM's MLA layers on a CPU."""

from __future__ import annotations

from typing import Any

import torch

from tests.engines.cpu.operators import counted

REFERENCE = "CUTLASS_MLA"
"""The reference's name in vLLM: a backend that no CPU and no Hopper has."""


def varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    return_softmax_lse: bool = False,
    **_: Any,
) -> Any:
    """Attention of sequences of several lengths; a query without keys has 0, and an LSE of minus infinity."""
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[-1], dtype=q.dtype)
    lse = torch.full((q.shape[1], q.shape[0]), float("-inf"))
    queries, keys = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for start, end, first, last in zip(queries, queries[1:], keys, keys[1:], strict=False):
        if end <= start or last <= first:
            continue
        scores = torch.einsum("qhd,khd->hqk", q[start:end].float(), k[first:last].float()) * softmax_scale
        if causal:
            n, m = end - start, last - first
            hidden = torch.arange(m)[None, :] > torch.arange(n)[:, None] + (m - n)
            scores = scores.masked_fill(hidden, float("-inf"))
        lse[:, start:end] = torch.logsumexp(scores, -1)
        weights = scores.softmax(-1)
        out[start:end] = torch.einsum("hqk,khd->qhd", weights, v[first:last].float()).to(q.dtype)
    return (out, lse) if return_softmax_lse else out


def merge_attn_states(
    output: Any,
    prefix_output: Any,
    prefix_lse: Any,
    suffix_output: Any,
    suffix_lse: Any,
    output_lse: Any = None,
    prefill_tokens_with_context: int | None = None,
    **_: Any,
) -> None:
    """Merge attention to a prefix and to what follows it; from `prefill_tokens_with_context` on there is no prefix."""
    lse = torch.stack([prefix_lse.T, suffix_lse.T])
    greatest = torch.where(lse.amax(0).isinf(), 0.0, lse.amax(0))
    weights = torch.nan_to_num((lse - greatest).exp())
    outputs = torch.stack([prefix_output.float(), suffix_output.float()])
    merged = (outputs * weights[..., None]).sum(0) / weights.sum(0)[..., None]
    if prefill_tokens_with_context is not None:
        merged[prefill_tokens_with_context:] = suffix_output[prefill_tokens_with_context:].float()
    output.copy_(merged.to(output.dtype))
    if output_lse is not None:
        output_lse.copy_((greatest + weights.sum(0).log()).T)


def mask_empty_context(lse: Any, out: Any, query_start_loc: Any, cu_seqlens_k: Any) -> None:
    """Make nothing of attention to prefixes that are empty."""
    starts, keys = query_start_loc.tolist(), cu_seqlens_k.tolist()
    for start, end, first, last in zip(starts, starts[1:], keys, keys[1:], strict=False):
        if first == last:
            lse[:, start:end] = float("-inf")
            out[start:end] = 0


def install() -> None:
    """Put these in the places of vLLM's kernels, and register the reference."""
    import vllm.model_executor.layers.attention.mla_attention as mla
    import vllm.v1.attention.backends.fa_utils as flash
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    mla.current_platform = _NotCpu(mla.current_platform)
    mla.merge_attn_states = counted(merge_attn_states)
    mla.mask_empty_context = counted(mask_empty_context)
    for name in ("compile_flash_attn_varlen_func_from_specs", "flash_attn_varlen_func"):
        if not hasattr(flash, name):
            setattr(flash, name, None)
    _install_prefill()
    register_backend(getattr(AttentionBackendEnum, REFERENCE), "tests.engines.cpu.reference.Backend")


class _NotCpu:
    """A platform that does not say that it is a CPU: newer versions gather rows another way there, of 16 bits only."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def is_cpu(self) -> bool:
        """Take the GPU's way."""
        return False


def _install_prefill() -> None:
    import vllm.v1.attention.backends.mla.prefill.flash_attn as prefill

    class TorchPrefill(prefill.FlashAttnPrefillBackend):  # type: ignore[misc]
        """vLLM's prefill by FlashAttention 3, but for the kernel."""

        @classmethod
        def is_available(cls) -> bool:
            return True

        @classmethod
        def supports_mla_dimensions(cls, *_: Any) -> bool:
            return True

        def __init__(self, *arguments: Any, **named: Any) -> None:
            prefill.MLAPrefillBackend.__init__(self, *arguments, **named)
            self.flash_attn_varlen_func = counted(varlen)
            self.vllm_flash_attn_version = 3
            self.requires_v_padding = False
            self._is_vllm_fa = True

    prefill.FlashAttnPrefillBackend = TorchPrefill
