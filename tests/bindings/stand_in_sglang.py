"""The part of SGLang's interface that the backend implements, as of its repository in autumn 2026."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tests.bindings.stand_in import install_modules


class FlashMLABackend:
    """Notes what is left to it in `left`."""

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

    def set_kv_buffer(self, layer: Any, slots: Any, k: Any, v: Any) -> None:
        self.rows.view(self.stored)[slots] = k.to(self.rows.dtype).view(self.stored)


def install(patch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Put the stand-in where SGLang would be; returns what has been registered."""
    found = SimpleNamespace(choices=["flashmla"], backends={})
    modules = {
        "sglang.srt.server_args": {
            "ATTENTION_BACKEND_CHOICES": found.choices,
            "add_attention_backend_choices": lambda choices: found.choices.extend(choices),
        },
        "sglang.srt.layers.attention.attention_registry": {
            "register_attention_backend": lambda name: lambda create: found.backends.setdefault(name, create)
        },
        "sglang.srt.layers.attention.flashmla_backend": {"FlashMLABackend": FlashMLABackend},
    }
    install_modules(patch, modules)
    patch.delitem(sys.modules, "mla_cupy.integrations.sglang_backend", raising=False)
    return found
