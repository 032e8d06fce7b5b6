"""The part of SGLang's interface that the plugin implements and calls.

As of the newest version that `tests/engines` has records of, and held against that record there.
"""

from __future__ import annotations

import importlib
import sys
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

from tests.bindings.stand_in import install_modules


class FlashMLABackend:
    """Notes what is left to it in `left`."""

    supports_ragged_verify_graph = True

    def __init__(
        self, model_runner: Any, skip_prefill: Any = False, kv_indptr_buf: Any = None, kv_last_page_len_buf: Any = None
    ) -> None:
        self.left: list[str] = []
        config = model_runner.model_config
        self.num_q_heads = config.num_attention_heads
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.kv_lora_rank = config.kv_lora_rank
        self.kv_cache_dim = config.kv_lora_rank + config.qk_rope_head_dim
        self.data_type = model_runner.kv_cache_dtype
        self.q_data_type = model_runner.dtype
        self.num_draft_tokens = model_runner.server_args.speculative_num_draft_tokens
        self.dcp_world_size = model_runner.dcp_world_size
        self.kv_index_translator = SimpleNamespace(reads_are_translated=model_runner.is_unified)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.left.append("init_forward_metadata")

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        self.left.append(f"init_forward_metadata_out_graph {in_capture}")

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int, block_kv_indices: Any = None) -> None:
        self.left.append("init_cuda_graph_state")

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> Any: ...

    def forward_extend(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True) -> Any:
        self.left.append("forward_extend")
        self.extended = q, k, v


class ServerArgs:
    """A server's arguments, which are resolved when they are made."""

    def __init__(self, **given: Any) -> None:
        self.attention_backend = self.decode_attention_backend = self.page_size = None
        self.speculative_algorithm = self.speculative_draft_attention_backend = None
        vars(self).update(given)
        _FIRST_POST_INIT(self)

    def __post_init__(self) -> None:
        """Resolve nothing; the class goes on calling this one, whatever takes its place."""

    def resolve_once(self) -> None:
        self.page_size = self.page_size or 1


_FIRST_POST_INIT = ServerArgs.__post_init__


class OlderServerArgs:
    """The arguments before 0.5.19: resolved on construction."""

    def __init__(self, **given: Any) -> None:
        self.attention_backend = self.decode_attention_backend = self.page_size = None
        self.speculative_algorithm = self.speculative_draft_attention_backend = None
        vars(self).update(given)
        self.__post_init__()

    def __post_init__(self) -> None:
        self.page_size = self.page_size or 1


class HookType(Enum):
    BEFORE = "before"


class HookRegistry:
    """Hooks on one of the methods of `ServerArgs`, the only ones that are registered."""

    hooks: dict[str, Any]

    @classmethod
    def register(cls, target: str, hook: Any, hook_type: HookType = HookType.BEFORE, *, source: Any = None) -> None:
        assert target.startswith("sglang.srt.server_args.ServerArgs.")
        cls.hooks[target.rpartition(".")[2]] = hook

    @classmethod
    def apply_hooks(cls, patch: pytest.MonkeyPatch) -> None:
        kind = sys.modules["sglang.srt.server_args"].ServerArgs
        for name, hook in cls.hooks.items():
            inner = getattr(kind, name)
            patch.setattr(kind, name, lambda self, hook=hook, inner=inner: (hook(self), inner(self)))


class KVWriteLoc:
    """Locations of new tokens, in the form of newer pools."""

    def __init__(self, loc: Any, physical: bool = False) -> None:
        self.loc, self.physical = loc, physical

    @classmethod
    def for_batch(cls, forward_batch: Any) -> KVWriteLoc:
        return cls(forward_batch.out_cache_loc, physical=True)


class AttentionBackendRegistry:
    """Registry of prefill handlers by the backend's name; unknown names get Triton's."""

    handlers: dict[str, str]

    @classmethod
    def register(cls, backend_name: str, handler_func: str) -> None:
        cls.handlers[backend_name] = handler_func

    @classmethod
    def get_handler(cls, backend_name: str) -> str:
        return cls.handlers.get(backend_name, "triton's")


class Mode:
    """A forward mode."""

    def __init__(self, name: str) -> None:
        self.name = name

    def is_decode_or_idle(self) -> bool:
        return self.name in ("decode", "idle")

    def is_target_verify(self) -> bool:
        return self.name == "verify"


class Pool:
    """The cache of one layer: `slots` rows, which are cast to its dtype."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    @property
    def stored(self) -> Any:
        """FP8 rows lie in memory as bytes."""
        return self.rows.dtype if self.rows.element_size() > 1 else importlib.import_module("torch").uint8

    def get_key_buffer(self, layer_id: int) -> Any:
        return self.rows

    def set_kv_buffer(self, layer: Any, loc_info: Any, cache_k: Any, cache_v: Any) -> None:
        slots = loc_info
        if isinstance(loc_info, KVWriteLoc):
            assert loc_info.physical
            slots = loc_info.loc
        self.rows.view(self.stored)[slots] = cache_k.to(self.rows.dtype).view(self.stored)


def install(patch: pytest.MonkeyPatch, arguments: type = ServerArgs) -> SimpleNamespace:
    """Put the stand-in where SGLang would be; returns what has been registered."""
    found = SimpleNamespace(choices=["flashmla"], backends={}, chunked=["flashmla"], in_parts=["fa3"])
    patch.setattr(HookRegistry, "hooks", {}, raising=False)
    patch.setattr(AttentionBackendRegistry, "handlers", {"flashmla": "FlashMLA's"}, raising=False)
    modules = {
        "sglang.srt.server_args": {
            "ATTENTION_BACKEND_CHOICES": found.choices,
            "add_attention_backend_choices": found.choices.extend,
            "add_chunked_prefix_cache_attention_backend": found.chunked.append,
            "ServerArgs": arguments,
        },
        "sglang.srt.plugins.hook_registry": {"HookRegistry": HookRegistry, "HookType": HookType},
        "sglang.srt.models.deepseek_common.attention_backend_handler": {
            "AttentionBackendRegistry": AttentionBackendRegistry
        },
        "sglang.srt.models.deepseek_common.utils": {"FORWARD_ABSORB_CORE_ATTENTION_BACKENDS": found.in_parts},
        "sglang.srt.layers.attention.attention_registry": {
            "register_attention_backend": lambda name: lambda create: found.backends.setdefault(name, create)
        },
        "sglang.srt.layers.attention.flashmla_backend": {"FlashMLABackend": FlashMLABackend},
        "sglang.srt.mem_cache": {},
        "sglang.srt.mem_cache.memory_pool": {"KVWriteLoc": KVWriteLoc},
    }
    install_modules(patch, modules)
    memory_pool = sys.modules["sglang.srt.mem_cache.memory_pool"]
    patch.setattr(sys.modules["sglang.srt.mem_cache"], "memory_pool", memory_pool, raising=False)
    patch.delitem(sys.modules, "mla_cupy.integrations.sglang_backend", raising=False)
    return found
