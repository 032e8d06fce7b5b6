"""The comparison with an engine's source, on a small engine in which something has moved."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.compare import compare, facts
from tests.engines.source import Package

BACKEND = """
from abc import abstractmethod
from sglang.srt.layers.attention.base import Base

class FlashMLABackend(Base):
    def __init__(self, model_runner, skip_prefill=False, kv_indptr_buf=None, kv_last_page_len_buf=None):
        self.req_to_token = self.data_type = self.q_data_type = self.num_q_heads = self.num_draft_tokens = None
        self.kv_lora_rank = self.kv_cache_dim = None
    def init_forward_metadata(self, forward_batch): ...
    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False): ...
    def init_cuda_graph_state(self, max_bs, max_num_tokens, block_kv_indices=None): ...
    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True): ...
    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True): ...
"""
BASE = """
from abc import abstractmethod

class Base:
    token_to_kv_pool: object
    @abstractmethod
    def init_forward_metadata(self, forward_batch): ...
    def forward(self, q, k, v, layer, forward_batch):
        return self.forward_decode(q, k, v, layer, forward_batch, save_kv_cache=True)
"""
BATCH = """
class ForwardMode:
    def is_decode_or_idle(self): ...
    def is_target_verify(self): ...

class ForwardBatch:
    forward_mode: object
    batch_size: int
    seq_lens: object
    req_pool_indices: object
    out_cache_loc: object
"""
LAYER = """
class RadixAttention:
    def __init__(self):
        self.tp_q_head_num = self.head_dim = self.v_head_dim = self.scaling = self.layer_id = 0
"""
POOL = """
class MLATokenToKVPool:
    def set_kv_buffer(self, layer, loc_info, cache_k, cache_v): ...
    def get_key_buffer(self, layer_id): ...
"""
HOOKS = """
class HookRegistry:
    def register(cls, target, hook, hook_type): ...
    def apply_hooks(cls): ...
"""
FILES = {
    "layers/attention/flashmla_backend.py": BACKEND,
    "layers/attention/base.py": BASE,
    "layers/radix_attention.py": LAYER,
    "model_executor/forward_batch_info.py": BATCH,
    "mem_cache/memory_pool.py": POOL,
    "plugins/hook_registry.py": HOOKS,
}


def engine(folder: Path, file: str = "", old: str = "", new: str = "") -> Package:
    """A small SGLang with a text replaced in one of its files."""
    for name, text in FILES.items():
        path = folder / "sglang" / "srt" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        assert old in text or name != file
        path.write_text(text.replace(old, new) if name == file else text)
    for path in (folder / "sglang").rglob("*"):
        if path.is_dir():
            (path / "__init__.py").touch()
    return Package(folder)


def test_an_engine_that_fits(tmp_path: Path) -> None:
    package = engine(tmp_path)
    assert compare("sglang", package) == []
    told = facts("sglang", package)["MlaCupyBackend.forward_decode"]
    assert told["takes"] == "q, k, v, layer, forward_batch, save_kv_cache=..."
    assert told["calls"] == ["5 save_kv_cache"]


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("layers/attention/flashmla_backend.py", "class FlashMLABackend", "class Flash", "has no FlashMLABackend"),
        (
            "layers/attention/flashmla_backend.py",
            "self.req_to_token = ",
            "",
            "MlaCupyBackend reads self.req_to_token, which nobody sets",
        ),
        (
            "layers/attention/flashmla_backend.py",
            "forward_decode(self, q, k, v, layer",
            "forward_decode(self, q, k, v, sinks, layer",
            "FlashMLABackend.forward_decode takes q, k, v, sinks, layer",
        ),
        (
            "layers/attention/base.py",
            "    def forward(",
            "    @abstractmethod\n    def rewind(self): ...\n    def forward(",
            "Base.rewind is abstract, and MlaCupyBackend has none",
        ),
        ("model_executor/forward_batch_info.py", "out_cache_loc", "cache_loc", "ForwardBatch has no out_cache_loc"),
        ("mem_cache/memory_pool.py", "class MLATokenToKVPool", "class Pool", "has no class MLATokenToKVPool"),
    ],
)
def test_what_moved_is_said(tmp_path: Path, file: str, old: str, new: str, said: str) -> None:
    found = compare("sglang", engine(tmp_path, file, old, new))
    assert any(said in x for x in found), found


def test_a_call_that_only_the_engine_s_own_takes(tmp_path: Path) -> None:
    """A method that takes anything says nothing of the calls; the calls do."""
    package = engine(
        tmp_path,
        "layers/attention/flashmla_backend.py",
        "def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True): ...",
        "def forward_decode(self, *given, **named): ...\n"
        "    def run(self, q):\n        return self.forward_decode(q, None, None, None, None, sinks=None)",
    )
    (found,) = compare("sglang", package)
    assert "calls MlaCupyBackend.forward_decode: got an unexpected keyword argument 'sinks'" in found
