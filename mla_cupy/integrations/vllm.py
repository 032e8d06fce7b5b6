"""The plugin of vLLM: dense MLA as `--attention-backend CUSTOM`, and sparse MLA instead of FLASHMLA_SPARSE.

vLLM loads it through the entry point `vllm.general_plugins`. It has one name for backends from outside, CUSTOM, which
the dense backend has. With `MLA_CUPY_VLLM=sparse` models with sparse attention (DSA) that vLLM would serve by its
backend FLASHMLA_SPARSE are served by ours, under that name. With `MLA_CUPY_ENGINE_INDEXER=mla_cupy` our indexer selects
for such models, whichever backend attends, where vLLM's models call an operator that others may replace.

The interfaces change with most releases: if calls of the engine's own methods would not fit their overrides, the plugin
logs the differences and declines.
"""

from __future__ import annotations

import importlib
from typing import Any

from mla_cupy.integrations.probe import absent, attribute, offer, overridden, refused
from mla_cupy.runtime import env

BACKENDS = {
    "CUSTOM": "mla_cupy.integrations.vllm_backend.MlaCupyBackend",
    "FLASHMLA_SPARSE": "mla_cupy.integrations.vllm_sparse_backend.MlaCupySparseBackend",
}
_REGISTRY = "vllm.v1.attention.backends.registry"


def register() -> None:
    """Offer the backends to vLLM; changes nothing for those who do not choose them."""
    _offer("CUSTOM", dense_difference)
    if env.get("VLLM") == "sparse":
        _offer("FLASHMLA_SPARSE", sparse_difference)
    if env.get("ENGINE_INDEXER") == "mla_cupy":
        ours = "mla_cupy.integrations.vllm_indexer"
        offer("vLLM", indexer_difference, lambda: attribute(ours, "register")())


def _offer(name: str, difference: Any) -> None:
    offer("vLLM", lambda: _registry_difference(name) or difference(), lambda: _register(name))


def _register(name: str) -> None:
    attribute(_REGISTRY, "register_backend")(_place(name), BACKENDS[name])


def _place(name: str) -> Any:
    return getattr(attribute(_REGISTRY, "AttentionBackendEnum"), name)


def _registry_difference(name: str) -> str:
    registry: Any = importlib.import_module(_REGISTRY)
    return absent(registry.AttentionBackendEnum, name) or refused(
        registry.register_backend, _place(name), BACKENDS[name]
    )


def dense_difference() -> str:
    """Say why the dense backend does not fit this vLLM; "" if it does."""
    ours = importlib.import_module("mla_cupy.integrations.vllm_backend")
    return (
        overridden(ours.MlaCupyBackend, "get_builder_cls", "get_impl_cls")
        or overridden(ours.MlaCupyMetadataBuilder, "build_for_cudagraph_capture", "_build_decode")
        or overridden(ours.MlaCupyImpl, "forward_mqa")
    )


def sparse_difference() -> str:
    """Say why the sparse backend does not fit this vLLM; "" if it does."""
    ours = importlib.import_module("mla_cupy.integrations.vllm_sparse_backend")
    return (
        overridden(ours.MlaCupySparseBackend, "get_impl_cls")
        or overridden(ours.MlaCupySparseImpl, "_bf16_flash_mla_kernel", "_fp8_flash_mla_kernel")
        or str(ours.difference())
    )


def indexer_difference() -> str:
    """Say why the indexer has no place in this vLLM; "" if it has one."""
    models: Any = importlib.import_module("vllm.model_executor.models.registry")
    home = models._TEXT_GENERATION_MODELS["DeepseekV32ForCausalLM"][0]
    if home != "deepseek_v2":
        return f"the indexer of {home} is a function, which nothing can take the place of"
    return str(importlib.import_module("mla_cupy.integrations.vllm_indexer").difference())
