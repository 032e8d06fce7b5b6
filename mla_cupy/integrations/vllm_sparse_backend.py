"""Sparse MLA (DSA) for vLLM: its FlashMLA backend, with our attention instead of FlashMLA's kernels.

The indexer, the cache, the metadata and the translation of indices are vLLM's. The difference: heads are not padded to
a multiple of 64. It keeps the name of the backend that it replaces: vLLM decides by that name how the cache is stored
and which kernels warm up.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend, FlashMLASparseImpl

from mla_cupy.torch import sparse_mla_decode, sparse_mla_forward

# Not inspect.signature, which refuses the stand-in that the documentation is built with.
_GIVES = str(FlashMLASparseImpl._bf16_flash_mla_kernel.__annotations__.get("return", "nothing that it names"))
WITH_LSE = "tuple" in _GIVES.lower()
"""True if this vLLM's 16-bit kernel returns the LSE, too: before 0.29 it returns the output alone."""


def difference() -> str:
    """Explain a difference that a probe of parameters cannot see, a kernel with other results; "" if there is none."""
    if WITH_LSE or "Tensor" in _GIVES:
        return ""
    return f"FlashMLASparseImpl._bf16_flash_mla_kernel returns {_GIVES}, neither a tensor nor a tuple"


class MlaCupySparseBackend(FlashMLASparseBackend):  # type: ignore[misc]
    """Description by which vLLM chooses a backend."""

    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "bfloat16", "fp8", "fp8_ds_mla"]

    @staticmethod
    def get_impl_cls() -> type[MlaCupySparseImpl]:
        """The class of the layers' attention."""
        return MlaCupySparseImpl

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Hopper: elsewhere the kernels are not fast yet."""
        return bool(capability.major == 9)


class MlaCupySparseImpl(FlashMLASparseImpl):  # type: ignore[misc]
    """One layer's attention."""

    def _bf16_flash_mla_kernel(
        self,
        q: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        topk_indices: torch.Tensor,
        topk_length: torch.Tensor | None = None,
        actual_num_heads: int | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend to the selected rows.

        Parameters
        ----------
        q : tensor, (tokens, heads, d_qk), bfloat16
            With `actual_num_heads`, the heads from there on are padding.
        kv_c_and_k_pe_cache : tensor, (..., d_qk), bfloat16
            Rows of the cache.
        topk_indices : tensor, (tokens, topk), int32
            Rows; -1 is none.
        topk_length : tensor, (tokens,), int32, optional
        out : tensor, optional
            Memory for padded heads, which FlashMLA writes to; vLLM reads what is returned.

        Returns
        -------
        attended : tensor, (tokens, actual_num_heads, 512)
        lse : tensor, (tokens, actual_num_heads), float32
            Natural; -inf, which counts for nothing when ranks are merged, for a query without rows. Not before vLLM
            0.29.
        """
        attended, lse, _ = sparse_mla_forward(
            q[:, :actual_num_heads],
            kv_c_and_k_pe_cache.view(-1, kv_c_and_k_pe_cache.shape[-1]),
            topk_indices.view(q.shape[0], -1),
            scale=self.softmax_scale,
            topk_length=topk_length,
        )
        return (attended, lse) if WITH_LSE else attended

    def _fp8_flash_mla_kernel(
        self, q: torch.Tensor, kv_c_and_k_pe_cache: torch.Tensor, topk_indices: torch.Tensor, kernel_metadata: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend to the selected tokens of an FP8 cache.

        Parameters
        ----------
        q : tensor, (b, s_q, heads, 576 or 512), bfloat16
        kv_c_and_k_pe_cache : tensor, (num_pages, page_size, 656), uint8 or a type of its size
            Records of "v32", or of "v32-nope" for queries of 512 columns.
        topk_indices : tensor, (b, s_q, topk), int32
            Slots; -1 is none.
        kernel_metadata : object
            FlashMLA's schedule.

        Returns
        -------
        out : tensor, (b, s_q, heads, 512)
        lse : tensor, (b, heads, s_q), float32
            Natural; -inf for a query without tokens, whose `out` is 0.
        """
        cache = kv_c_and_k_pe_cache.view(torch.uint8)
        out, lse = sparse_mla_decode(q, cache, topk_indices, scale=self.softmax_scale)
        return out, lse.transpose(1, 2)
