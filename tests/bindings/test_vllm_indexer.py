"""Our indexer in vLLM's place for it, against a stand-in of that place."""

from __future__ import annotations

import importlib
import logging
import sys
from dataclasses import make_dataclass
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mla_cupy import reference
from mla_cupy.integrations import vllm as plugin
from tests.bindings import stand_in_vllm
from tests.bindings.stand_in import install_modules
from tests.interop.test_torch import tensor

pytestmark = pytest.mark.usefixtures("_numpy_backend")

HEADS, WIDTH, SIZE, COUNT = 3, 32, 4, 5
"""Heads and columns of the indexer, tokens of a page, and selected tokens: fewer than in the longest request."""


def engine_operator(
    hidden_states: Any,
    k_cache_prefix: Any,
    kv_cache: Any,
    q_quant: Any,
    q_scale: Any,
    k: Any,
    weights: Any,
    quant_block_size: Any,
    scale_fmt: Any,
    topk_tokens: Any,
    head_dim: Any,
    max_model_len: Any,
    total_seq_lens: Any,
    topk_indices_buffer: Any,
    skip_k_cache_insert: Any,
    use_pcp: Any,
) -> Any:
    assert (q_scale, topk_tokens, head_dim, use_pcp) == (None, COUNT, WIDTH, False)
    return "the engine's"


class SparseAttnIndexer:
    registered: dict[str, type]

    def __init__(self, cache: Any, selected: Any, **fields: Any) -> None:
        self.k_cache = SimpleNamespace(prefix="layer", kv_cache=cache)
        self.quant_block_size, self.scale_fmt, self.topk_tokens, self.head_dim = WIDTH, "ue8m0", COUNT, WIDTH
        self.max_model_len, self.max_total_seq_len, self.topk_indices_buffer = 64, 64, selected
        self.skip_k_cache_insert, self.use_fp4_cache, self.use_pcp, self.dcp_world_size = False, False, False, 1
        vars(self).update(fields)

    @classmethod
    def register_oot(cls, kind: type, name: str) -> None:
        cls.registered[name] = kind

    def forward_cuda(self, hidden_states: Any, q_quant: Any, k: Any, weights: Any) -> Any:
        return "the engine's"


class Engine(SimpleNamespace):
    """Recorded arguments of the stand-in."""


@pytest.fixture
def engine(torch: Any, monkeypatch: pytest.MonkeyPatch) -> Engine:
    told = Engine(steps=None, inserted=[], operators={}, ops=["vllm::sparse_attn_indexer"])
    stand_in_vllm.install(monkeypatch)

    def gather(cache: Any, keys: Any, scales: Any, table: Any, ends: Any) -> None:
        """Pages of codes, then of scales, to rows; what lies behind them stays as it was."""
        at = 0
        for pages, count in zip(table, np.diff(ends.numpy()), strict=True):
            for token in range(count):
                page = cache[pages[token // SIZE]].reshape(-1)
                place = token % SIZE
                keys.view(torch.uint8)[at] = page[place * WIDTH : (place + 1) * WIDTH]
                scales[at] = page[SIZE * WIDTH + 4 * place : SIZE * WIDTH + 4 * place + 4]
                at += 1

    def workspace(*specs: Any) -> Any:
        return [torch.full(shape, 0x7F, dtype=torch.uint8).view(dtype) for shape, dtype in specs]

    def register(name: str, function: Any, mutates_args: list[str], fake_impl: Any) -> None:
        assert (name, mutates_args) == ("mla_cupy_indexer", ["selected"])
        told.operators[name] = function
        monkeypatch.setattr(torch.ops.vllm, name, function, raising=False)

    chunk = make_dataclass("DeepseekV32IndexerPrefillChunkMetadata", [(x, Any) for x in CHUNK])
    decode = make_dataclass("DeepSeekV32IndexerDecodeMetadata", [(x, Any) for x in DECODE])
    SparseAttnIndexer.registered = {}
    modules = {
        "vllm": {
            "_custom_ops": SimpleNamespace(
                indexer_k_quant_and_cache=lambda *given: told.inserted.append(given),
                cp_gather_indexer_k_quant_cache=gather,
            )
        },
        "vllm.forward_context": {"get_forward_context": lambda: SimpleNamespace(attn_metadata=told.steps)},
        "vllm.config.compilation": {"CompilationConfig": SimpleNamespace(_attention_ops=told.ops)},
        "vllm.model_executor.layers.sparse_attn_indexer": {
            "SparseAttnIndexer": SparseAttnIndexer,
            "sparse_attn_indexer": engine_operator,
            "LayerNameType": str,
            "_encode_layer_name": lambda name: name,
            "_resolve_layer_name": lambda name: name,
            "_gather_workspace_shapes": lambda count, width, dtype, fp4: (
                *(((count, width), dtype), ((count, 4), torch.uint8)),
            ),
        },
        "vllm.model_executor.models.registry": {
            "_TEXT_GENERATION_MODELS": {"DeepseekV32ForCausalLM": ("deepseek_v2", "DeepseekV3ForCausalLM")}
        },
        "vllm.utils.torch_utils": {"direct_register_custom_op": register},
        "vllm.v1.worker.workspace": {"current_workspace_manager": lambda: SimpleNamespace(get_simultaneous=workspace)},
        "vllm.v1.attention.backends.mla.indexer": {x.__name__: x for x in (chunk, decode)},
    }
    install_modules(monkeypatch, modules)
    monkeypatch.delitem(sys.modules, "mla_cupy.integrations.vllm_indexer", raising=False)
    monkeypatch.setattr(sys.modules["vllm.model_executor.layers"], "sparse_attn_indexer", None, raising=False)
    monkeypatch.setattr(
        sys.modules["vllm.model_executor.layers"],
        "sparse_attn_indexer",
        sys.modules["vllm.model_executor.layers.sparse_attn_indexer"],
    )
    monkeypatch.setenv("MLA_CUPY_ENGINE_INDEXER", "mla_cupy")
    return told


CHUNK = (
    *("block_table", "cu_seqlen_ks", "cu_seqlen_ke", "cu_seq_lens", "total_seq_lens", "token_start", "token_end"),
    "skip_kv_gather",
)
DECODE = ("block_table", "seq_lens", "decode_lens", "requires_padding")
"""Metadata by which the engine describes a step."""


def cached(rng: np.random.Generator, pages: int) -> tuple[Any, Any, Any]:
    """Pages, and their keys and scales."""
    keys = rng.standard_normal((pages, SIZE, WIDTH)).astype(ml_dtypes.float8_e4m3fn)
    scales = (2.0 ** rng.integers(-2, 3, (pages, SIZE))).astype(np.float32)
    parts = keys.view(np.uint8).reshape(pages, -1), scales.view(np.uint8).reshape(pages, -1)
    return np.concatenate(parts, axis=1).reshape(pages, SIZE, WIDTH + 4), keys, scales


def expected(q: Any, weights: Any, keys: Any, scales: Any, table: Any, length: int) -> Any:
    """The tokens that one query selects, ascending, then -1."""
    pages = table[np.arange(length) // SIZE]
    places = np.arange(length) % SIZE
    rows, of_rows = keys[pages, places], scales[pages, places]
    scores = reference.indexer_logits(q[None], rows, weights[None], k_scale=of_rows)[0]
    best = np.sort(np.argsort(-scores, kind="stable")[:COUNT])
    return np.concatenate([best, np.full(COUNT - len(best), -1)])


@pytest.mark.parametrize(("s_q", "few"), [(1, 8), (2, 8), (2, 3)], ids=["1", "2", "2 in two calls"])
def test_a_step(torch: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch, s_q: int, few: int) -> None:
    """Two requests decode, one of them with less than what is selected; two prompts, the first with a cached prefix."""
    plugin.register()
    monkeypatch.setattr("mla_cupy.integrations.vllm_indexer.FEW", few)
    assert SparseAttnIndexer.registered["SparseAttnIndexer"].__name__ == "MlaCupyIndexer"
    assert engine.ops == ["vllm::sparse_attn_indexer", "vllm::mla_cupy_indexer"]
    rng = np.random.default_rng(5)
    cache, keys, scales = cached(rng, 9)
    tables = np.array([[3, 0, 7], [5, 1, 8], [2, 8, 4], [6, 3, 1]], np.int32)
    totals, own = [11, 3, 9, 2], [s_q, s_q, 3, 2]
    tokens = sum(own)
    q = rng.standard_normal((tokens, HEADS, WIDTH)).astype(ml_dtypes.float8_e4m3fn)
    weights = rng.standard_normal((tokens, HEADS)).astype(np.float32)
    lengths = np.concatenate([np.arange(n - s, n) + 1 for n, s in zip(totals, own, strict=True)]).astype(np.int32)
    decoded, begins = 2 * s_q, np.repeat([0, 9], own[2:])
    seqlens = torch.from_numpy(lengths[:decoded].reshape(2, s_q))
    engine.steps = {
        "layer": SimpleNamespace(
            num_decodes=2,
            num_prefills=2,
            num_decode_tokens=decoded,
            slot_mapping=torch.arange(tokens),
            decode=SimpleNamespace(
                block_table=torch.from_numpy(tables[:2]),
                seq_lens=seqlens[:, 0] if s_q == 1 else seqlens,
                decode_lens=torch.full((2,), s_q),
                requires_padding=False,
            ),
            prefill=SimpleNamespace(
                chunks=[
                    SimpleNamespace(
                        block_table=torch.from_numpy(tables[2:]),
                        cu_seqlen_ks=torch.from_numpy(begins.astype(np.int32)),
                        cu_seqlen_ke=torch.from_numpy((begins + lengths[decoded:]).astype(np.int32)),
                        cu_seq_lens=torch.tensor([0, 9, 11]),
                        total_seq_lens=11,
                        token_start=decoded,
                        token_end=tokens,
                        skip_kv_gather=False,
                    )
                ]
            ),
        )
    }
    selected = torch.full((tokens + 2, COUNT + 3), 99, dtype=torch.int32)
    layer = SparseAttnIndexer.registered["SparseAttnIndexer"](torch.from_numpy(cache), selected)
    hidden, own_keys = torch.zeros((tokens, 8)), torch.zeros((tokens + 1, WIDTH))
    found = layer.forward_cuda(hidden, tensor(torch, q), own_keys, torch.from_numpy(weights))
    assert found is selected
    ((stored, where, slots, block, form),) = engine.inserted
    assert (len(stored), where is layer.k_cache.kv_cache, len(slots)) == (tokens, True, tokens)
    assert (block, form) == (WIDTH, "ue8m0")
    requests = np.repeat(range(4), own)
    for token, (request, length) in enumerate(zip(requests, lengths, strict=True)):
        wanted = expected(q[token], weights[token], keys, scales, tables[request], length)
        assert found[token, :COUNT].tolist() == wanted.tolist(), token
    assert (found[:tokens, COUNT:] == -1).all()
    assert (found[tokens:] == 99).all()


@pytest.mark.parametrize("what", ["measured", "padded", "fp4", "dcp"])
def test_what_stays_with_the_engine(torch: Any, engine: Engine, what: str) -> None:
    """A step whose memory is measured, requests of several lengths, FP4 caches, and ranks that share the cache."""
    plugin.register()
    kind = SparseAttnIndexer.registered["SparseAttnIndexer"]
    decode = SimpleNamespace(requires_padding=True)
    engine.steps = {"layer": SimpleNamespace(num_decodes=2, decode=decode)} if what == "padded" else None
    fields = {"fp4": {"use_fp4_cache": True}, "dcp": {"dcp_world_size": 2}}.get(what, {})
    layer = kind(torch.zeros((1, SIZE, WIDTH + 4), dtype=torch.uint8), torch.zeros((4, COUNT)), **fields)
    q = torch.zeros((2, HEADS, WIDTH))
    given = (torch.zeros((2, 8)), (q, q) if what == "fp4" else q, torch.zeros((2, WIDTH)), torch.zeros((2, HEADS)))
    assert layer.forward_cuda(*given) == "the engine's"
    assert engine.inserted == []


@pytest.mark.parametrize("what", ["model", "operator", "chunk", "place", "not asked for"])
def test_no_place(
    torch: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, engine: Engine, what: str
) -> None:
    """Nothing is registered, and one line says why."""
    home = sys.modules["vllm.model_executor.layers.sparse_attn_indexer"]
    models = sys.modules["vllm.model_executor.models.registry"]._TEXT_GENERATION_MODELS
    if what == "model":
        monkeypatch.setitem(models, "DeepseekV32ForCausalLM", ("vllm.models.deepseek_v32", "DeepseekV32ForCausalLM"))
    elif what == "operator":
        monkeypatch.setattr(home, "sparse_attn_indexer", lambda hidden_states, k_cache_prefix, q_quant: None)
    elif what == "chunk":
        module = sys.modules["vllm.v1.attention.backends.mla.indexer"]
        kind = make_dataclass("DeepseekV32IndexerPrefillChunkMetadata", [(x, Any) for x in CHUNK[1:]])
        monkeypatch.setattr(module, kind.__name__, kind)
    elif what == "place":
        monkeypatch.delattr(SparseAttnIndexer, "register_oot")
    else:
        monkeypatch.setenv("MLA_CUPY_ENGINE_INDEXER", "engine")
    with caplog.at_level(logging.WARNING, "mla_cupy"):
        plugin.register()
    assert (SparseAttnIndexer.registered, engine.operators) == ({}, {})
    assert len(caplog.records) == (what != "not asked for")
    assert importlib.import_module("mla_cupy.integrations.vllm").indexer_difference() or what == "not asked for"
