"""The plugin of vLLM: dense or sparse MLA as `--attention-backend CUSTOM`.

vLLM loads it through the entry point `vllm.general_plugins`. It has one place for backends from outside;
`MLA_CUPY_VLLM=sparse` puts the sparse backend there, for models with sparse attention (DSA), in place of the dense one.
The interfaces have moved before: if one differs from what the backend was written for, the plugin logs the difference
and declines.
"""

from __future__ import annotations

from typing import Any

from mla_cupy.integrations.probe import attribute, difference, offer
from mla_cupy.runtime import env

BACKENDS = {
    "dense": "mla_cupy.integrations.vllm_backend.MlaCupyBackend",
    "sparse": "mla_cupy.integrations.vllm_sparse_backend.MlaCupySparseBackend",
}
_REGISTRY = "vllm.v1.attention.backends.registry"
_LAYER = "vllm.model_executor.layers.attention.mla_attention"
_SPARSE = "vllm.v1.attention.backends.mla.flashmla_sparse"
FORWARD = ("self", "q", "kv_c_and_k_pe_cache", "attn_metadata", "layer")
BUILD = (
    *("self", "block_table_tensor", "seq_lens_device", "max_seq_len", "query_start_loc_cpu"),
    *("query_start_loc_device", "num_decode_tokens", "dcp_tot_seq_lens_device"),
)
KERNEL = ("self", "q", "kv_c_and_k_pe_cache", "topk_indices", "topk_length", "actual_num_heads")
FP8_KERNEL = ("self", "q", "kv_c_and_k_pe_cache", "topk_indices", "kernel_metadata")


def register() -> None:
    """Offer the backend to vLLM; changes nothing for those who do not choose it."""
    kind = env.get("VLLM")
    offer("vLLM", {"dense": _dense_difference, "sparse": _sparse_difference}[kind], lambda: _register(BACKENDS[kind]))


def _register(path: str) -> None:
    kinds: Any = attribute(_REGISTRY, "AttentionBackendEnum")
    enter: Any = attribute(_REGISTRY, "register_backend")
    enter(kinds.CUSTOM, path)


def _dense_difference() -> str:
    impl, builder = attribute(_LAYER, "MLACommonImpl"), attribute(_LAYER, "MLACommonMetadataBuilder")
    methods = [name for name in ("forward_mqa", "_forward_decode") if hasattr(impl, name)]
    if not methods:
        return "MLACommonImpl has neither forward_mqa nor _forward_decode"
    return difference(impl, dict.fromkeys(methods, FORWARD)) or difference(builder, {"_build_decode": BUILD})


def _sparse_difference() -> str:
    attribute(_SPARSE, "FlashMLASparseBackend")
    wanted = {"forward_mqa": FORWARD, "_bf16_flash_mla_kernel": KERNEL, "_fp8_flash_mla_kernel": FP8_KERNEL}
    return difference(attribute(_SPARSE, "FlashMLASparseImpl"), wanted)
