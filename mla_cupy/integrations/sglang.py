"""The plugin of SGLang: dense decode as `--attention-backend mla_cupy`.

SGLang loads it through the entry point `sglang.srt.plugins`, in every process and before its layers. The plugin
therefore only checks that it can register; the backend's interface is compared when a model is loaded. If either
differs from what the plugin was written for, the log says so.
"""

from __future__ import annotations

import importlib
from typing import Any

from mla_cupy.errors import UnsupportedDeviceError
from mla_cupy.integrations.probe import attribute, difference, logger, offer

BACKEND = "mla_cupy"
_ARGUMENTS = "sglang.srt.server_args"
_REGISTRY = "sglang.srt.layers.attention.attention_registry"
_BASE = "sglang.srt.layers.attention.flashmla_backend"
_FORWARD = ("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache")
INTERFACE = {
    "__init__": ("self", "model_runner", "skip_prefill", "kv_indptr_buf", "kv_last_page_len_buf"),
    "init_forward_metadata": ("self", "forward_batch"),
    "init_forward_metadata_out_graph": ("self", "forward_batch", "in_capture"),
    "init_cuda_graph_state": ("self", "max_bs", "max_num_tokens", "block_kv_indices"),
    "forward_decode": _FORWARD,
    "forward_extend": _FORWARD,
}


def register() -> None:
    """Offer the backend to SGLang; changes nothing for those who do not choose it."""
    offer("SGLang", _difference, _register)


def create(model_runner: Any) -> Any:
    """The backend for a model.

    Raises
    ------
    UnsupportedDeviceError
        If this SGLang's interface is another one; one line in the log says what differs.
    """
    try:
        found = difference(attribute(_BASE, "FlashMLABackend"), INTERFACE)
    except (ImportError, AttributeError) as error:
        found = f"{type(error).__name__}: {error}"
    if found:
        message = f"mla_cupy is no attention backend for this SGLang: {found}"
        logger.warning(message)
        raise UnsupportedDeviceError(f"{message}; choose another --attention-backend")
    kind: Any = attribute("mla_cupy.integrations.sglang_backend", "MlaCupyBackend")
    return kind(model_runner)


def _difference() -> str:
    arguments, registry = importlib.import_module(_ARGUMENTS), importlib.import_module(_REGISTRY)
    return difference(arguments, {"add_attention_backend_choices": ("choices",)}) or difference(
        registry, {"register_attention_backend": ("name",)}
    )


def _register() -> None:
    choices: Any = attribute(_ARGUMENTS, "ATTENTION_BACKEND_CHOICES")
    if BACKEND not in choices:
        add: Any = attribute(_ARGUMENTS, "add_attention_backend_choices")
        add([BACKEND])
    enter: Any = attribute(_REGISTRY, "register_attention_backend")
    enter(BACKEND)(create)
