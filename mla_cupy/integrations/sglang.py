"""The plugin of SGLang: dense decode as `--attention-backend mla_cupy`.

SGLang loads it through the entry point `sglang.srt.plugins`, in every process and before its layers. The plugin
therefore only checks that it can register; the backend's interface is compared when a model is loaded. The log reports
an unsupported interface of either.
"""

from __future__ import annotations

import importlib
from typing import Any

from mla_cupy.errors import UnsupportedDeviceError
from mla_cupy.integrations.probe import absent, attribute, explained, logger, offer, overridden, refused

BACKEND = "mla_cupy"
STOCK = "flashmla"
"""SGLang's backend that ours descends from: everything that SGLang does for its name is right for ours, too."""
PAGE_SIZE = 64
"""The fastest one, and the only one of SGLang's FlashMLA backend, which makes the drafts."""
NEEDED = (
    *("init_forward_metadata", "init_forward_metadata_out_graph", "init_cuda_graph_state"),
    *("forward_decode", "forward_extend"),
)
"""Methods that SGLang must have for ours to be called."""
_ARGUMENTS = "sglang.srt.server_args"
_REGISTRY = "sglang.srt.layers.attention.attention_registry"
_HOOKS = "sglang.srt.plugins.hook_registry"
_DISPATCH = "sglang.srt.models.deepseek_common.attention_backend_handler"
_IN_PARTS = "sglang.srt.models.deepseek_common.utils", "FORWARD_ABSORB_CORE_ATTENTION_BACKENDS"
"""Names of the backends that get queries and keys in two arrays, without a concatenation."""


def register() -> None:
    """Offer the backend to SGLang; changes nothing for those who do not choose it."""
    offer("SGLang", difference, _register)


def create(model_runner: Any) -> Any:
    """The backend for a model.

    Raises
    ------
    UnsupportedDeviceError
        If this SGLang's interface differs; one line in the log lists the differences.
    """
    found = explained(backend_difference)
    if found:
        message = f"mla_cupy is no attention backend for this SGLang: {found}"
        logger.warning(message)
        raise UnsupportedDeviceError(f"{message}; choose another --attention-backend")
    _dispatch_prefixes()
    return _backend()(model_runner, takes_parts=_ask_for_parts())


def set_defaults(arguments: Any, *_: Any, **__: Any) -> None:
    """Set a server's defaults for this backend: pages of 64 tokens, and a backend that makes drafts.

    SGLang calls it before it resolves its own defaults. Otherwise SGLang would use pages of one token, the slowest, and
    reject drafts, for which it accepts only its own backends. Those only make drafts; our backend verifies them.
    """
    if BACKEND not in (arguments.attention_backend, arguments.decode_attention_backend):
        return
    if arguments.page_size is None:
        arguments.page_size = PAGE_SIZE
    if arguments.speculative_algorithm and arguments.speculative_draft_attention_backend is None:
        arguments.speculative_draft_attention_backend = STOCK if arguments.page_size == PAGE_SIZE else "triton"


def difference() -> str:
    """Say why the plugin cannot register with this SGLang; "" if it can."""
    arguments, registry = importlib.import_module(_ARGUMENTS), importlib.import_module(_REGISTRY)
    hooks: Any = importlib.import_module(_HOOKS)
    return (
        absent(arguments, "ATTENTION_BACKEND_CHOICES", "add_attention_backend_choices")
        or absent(registry, "register_attention_backend")
        or absent(arguments.ServerArgs, _resolving_method(arguments.ServerArgs))
        or refused(arguments.add_attention_backend_choices, [BACKEND])
        or refused(registry.register_attention_backend, BACKEND)
        or refused(hooks.HookRegistry.register, _resolution(arguments), set_defaults, hooks.HookType.BEFORE)
    )


def backend_difference() -> str:
    """Say why the backend does not fit this SGLang's; "" if it does."""
    return overridden(_backend(), *NEEDED)


def _resolution(arguments: Any) -> str:
    """Path of the method that resolves a server's arguments."""
    return f"{_ARGUMENTS}.ServerArgs.{_resolving_method(arguments.ServerArgs)}"


def _resolving_method(kind: type) -> str:
    """Name of that method. From 0.5.20 on the class remembers its first `__post_init__`, and calls no hook on it."""
    return "resolve_once" if hasattr(kind, "resolve_once") else "__post_init__"


def _backend() -> Any:
    return attribute("mla_cupy.integrations.sglang_backend", "MlaCupyBackend")


def _register() -> None:
    arguments = importlib.import_module(_ARGUMENTS)
    if BACKEND not in arguments.ATTENTION_BACKEND_CHOICES:
        arguments.add_attention_backend_choices([BACKEND])
        hooks: Any = importlib.import_module(_HOOKS)
        hooks.HookRegistry.register(_resolution(arguments), set_defaults, hooks.HookType.BEFORE)
        # SGLang has a hook here; the base class reads prefixes in chunks.
        chunked = getattr(arguments, "add_chunked_prefix_cache_attention_backend", None)
        if chunked is not None:
            chunked(BACKEND)
    attribute(_REGISTRY, "register_attention_backend")(BACKEND)(create)


def _dispatch_prefixes() -> None:
    """Have prefills dispatched as for the base class. SGLang treats unknown names as Triton's."""
    try:
        registry = attribute(_DISPATCH, "AttentionBackendRegistry")
        registry.register(BACKEND, registry.get_handler(STOCK))
    except (ImportError, AttributeError, TypeError) as error:
        logger.warning("mla_cupy: prefills with a cached prefix take SGLang's slower path: %s", error)


def _ask_for_parts() -> bool:
    """Have queries come in two arrays: SGLang would copy both into one, in every layer. True if they will."""
    try:
        names = attribute(*_IN_PARTS)
        if BACKEND not in names:
            names.append(BACKEND)
    except (ImportError, AttributeError, TypeError) as error:
        logger.warning("mla_cupy: SGLang joins the parts of queries for every layer: %s", error)
        return False
    return True
