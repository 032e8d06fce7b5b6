"""Prefill in the plugin of vLLM, against a stand-in of its interface."""

from __future__ import annotations

import importlib
import logging
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mla_cupy
from mla_cupy.kernels.dense.problem import GEOMETRIES
from tests.bindings import stand_in_vllm
from tests.bindings.test_vllm import IMPL
from tests.interop.test_torch import array, tensor
from tests.support.tolerance import check

pytestmark = pytest.mark.usefixtures("_numpy_backend")

HEADS, NOPE, ROPE, D_V, PAGE = 4, 128, 64, 128, 64
PREFIXES, NEW = (70, 0, 130), (5, 3, 9)
"""Tokens of three prompts: those in the cache, and those that are prefilled."""
CHUNK = 64
"""Tokens of a prompt in a chunk of cached prefixes."""
TABLE = ((7, 2, 99), (99, 99, 99), (4, 1, 6))
"""Pages, and numbers that are no page's where a prefix has none."""
CHOSEN = np.random.default_rng(2).integers(0, 512, HEADS * (NOPE + D_V))


def project(latent: Any) -> tuple[Any, None]:
    """A projection that rounds nothing: each number of keys and values is one of the latent's."""
    return latent[:, CHOSEN], None


@pytest.fixture
def backend(torch: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    stand_in_vllm.install(monkeypatch)
    return importlib.import_module("mla_cupy.integrations.vllm_backend")


def layer_of(backend: Any, **others: Any) -> Any:
    return backend.MlaCupyImpl(**{**IMPL, "scale": 0.11, "kv_b_proj": project, **others})


class Step:
    """A step's prefills as vLLM has them, and what attention to all tokens of each prompt gives."""

    def __init__(self, torch: Any, form: str, kv_scale: float = 0.0, device: str = "cpu") -> None:
        draw = np.random.default_rng(1)
        lengths = np.add(PREFIXES, NEW)
        self.rows = [draw.standard_normal((n, 512 + ROPE)).astype(ml_dtypes.bfloat16) for n in lengths]
        stored = ml_dtypes.float8_e4m3fn if kv_scale else ml_dtypes.bfloat16
        cache = np.full((8, PAGE, 512 + ROPE), np.nan, stored)
        for rows, pages, prefix in zip(self.rows, TABLE, PREFIXES, strict=True):
            for token in range(prefix):
                kept = (rows[token].astype(np.float32) / (kv_scale or 1.0)).astype(stored)
                cache[pages[token // PAGE], token % PAGE] = kept
                rows[token] = kept.astype(np.float32) * (kv_scale or 1.0)
        new = np.concatenate([rows[n:] for rows, n in zip(self.rows, PREFIXES, strict=True)])
        self.q = draw.standard_normal((sum(NEW), HEADS, NOPE + ROPE)).astype(ml_dtypes.bfloat16)
        self.output = torch.full((sum(NEW), HEADS * D_V), torch.nan, dtype=torch.bfloat16, device=device)
        starts = torch.tensor(np.cumsum([0, *NEW]), dtype=torch.int32, device=device)
        prefill = SimpleNamespace(
            block_table=torch.tensor(TABLE, dtype=torch.int32, device=device),
            query_start_loc=starts,
            q_data_type=torch.bfloat16,
            chunked_context=context(torch, form, device) if form else None,
        )
        self.arguments = (
            tensor(torch, self.q, device),
            tensor(torch, np.ascontiguousarray(new[:, :512]), device),
            tensor(torch, np.ascontiguousarray(new[:, None, 512:]), device),
            tensor(torch, cache, device),
            SimpleNamespace(prefill=prefill),
            torch.tensor(kv_scale or 1.0, device=device),
        )

    def check(self, torch: Any, with_prefixes: bool) -> None:
        """The output equals attention to all of a prompt; without prefixes, to its new tokens."""
        got = array(torch, self.output.view(-1, HEADS, D_V))
        first = 0
        for rows, prefix, count in zip(self.rows, PREFIXES, NEW, strict=True):
            seen = rows if with_prefixes else rows[prefix:]
            both = seen[:, CHOSEN].reshape(-1, HEADS, NOPE + D_V)
            arguments = self.q[first : first + count], both[..., :NOPE], both[..., NOPE:]
            exact, rounded = (
                mla_cupy.reference.mla_prefill(*arguments, k_rope=seen[:, 512:], scale=0.11, rounding=rounding)
                for rounding in (None, "bfloat16")
            )
            check((got[first : first + count], exact[1]), exact, rounded, "bfloat16")
            first += count


def context(torch: Any, form: str, device: str) -> SimpleNamespace:
    """Cached prefixes in chunks: each prompt's in objects of their own, or all prompts' in lists."""
    workspace = torch.full((2 * CHUNK, 512 + ROPE), torch.nan, dtype=torch.bfloat16, device=device)

    def ints(*numbers: int) -> Any:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    if form == "chunks":
        chunks, first = [], 0
        for request, (prefix, count) in enumerate(zip(PREFIXES, NEW, strict=True)):
            for start in range(0, prefix, CHUNK):
                rows = min(CHUNK, prefix - start)
                chunks.append(
                    SimpleNamespace(
                        token_slice=slice(first, first + count),
                        request_slice=slice(request, request + 1),
                        query_start_loc=ints(0, count),
                        cu_seq_lens=ints(0, rows),
                        starts=ints(start),
                        token_to_seq=ints(*[0] * rows),
                        num_context_tokens=rows,
                    )
                )
            first += count
        return SimpleNamespace(workspace=workspace, chunks=chunks)
    starts = range(0, max(PREFIXES), CHUNK)
    rows = np.array([[min(max(n - start, 0), CHUNK) for n in PREFIXES] for start in starts])
    return SimpleNamespace(
        workspace=workspace,
        cu_seq_lens=torch.stack([ints(0, *np.cumsum(x)) for x in rows]),
        starts=torch.stack([ints(*[start] * len(PREFIXES)) for start in starts]),
        token_to_seq=[ints(*np.repeat(range(len(PREFIXES)), x), 0, 0) for x in rows],
        chunk_total_token=rows.sum(1),
    )


@pytest.mark.parametrize("form", ["chunks", "lists", ""])
def test_prefills(torch: Any, backend: Any, form: str) -> None:
    """Prompts with a cached prefix of several chunks, with none, and all with none."""
    step, layer = Step(torch, form), layer_of(backend)
    layer.forward_mha(*step.arguments, step.output)
    assert layer.prefilled == []
    step.check(torch, with_prefixes=bool(form))


def test_prefixes_in_an_fp8_cache(torch: Any, backend: Any) -> None:
    step, layer = Step(torch, "chunks", kv_scale=0.25), layer_of(backend, kv_cache_dtype="fp8")
    layer.forward_mha(*step.arguments, output=step.output, output_scale=None)
    step.check(torch, with_prefixes=True)


def test_keys_are_not_joined(torch: Any, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values are views of what the projection gives, and the RoPE part is vLLM's own."""
    prefill = importlib.import_module("mla_cupy.integrations.vllm_prefill")
    calls: list[Any] = []
    inner = prefill.mla_prefill
    monkeypatch.setattr(
        prefill, "mla_prefill", lambda *x, **options: calls.append((x, options)) or inner(*x, **options)
    )
    step = Step(torch, "chunks")
    layer_of(backend).forward_mha(*step.arguments, step.output)
    assert len(calls) == 6
    for (_, keys, values), options in calls:
        assert keys.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
        assert options["lse"].data_ptr() == (options["state_lse"].data_ptr())
    assert calls[-1][1]["k_rope"] is step.arguments[2]
    assert calls[-1][1]["out"].data_ptr() == step.output.data_ptr()


@pytest.mark.parametrize("why", ["output_scale", "queries in fp8", "ranks"])
def test_steps_that_stay_the_engine_s(torch: Any, backend: Any, why: str) -> None:
    step, layer = Step(torch, "chunks"), layer_of(backend)
    scale = torch.tensor(1.0) if why == "output_scale" else None
    if why == "queries in fp8":
        step.arguments[4].prefill.q_data_type = torch.float8_e4m3fn
    if why == "ranks":
        layer.dcp_world_size = 2
    layer.forward_mha(*step.arguments, step.output, scale)
    assert [tuple(map(id, x)) for x in layer.prefilled] == [tuple(map(id, (*step.arguments, step.output, scale)))]
    assert step.output.isnan().all()


def test_ranks_without_cached_prefixes(torch: Any, backend: Any) -> None:
    step, layer = Step(torch, ""), layer_of(backend)
    layer.dcp_world_size = 2
    layer.forward_mha(*step.arguments, step.output)
    step.check(torch, with_prefixes=False)


def test_layers_that_stay_the_engine_s(
    torch: Any, backend: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Layers stay vLLM's by the user's choice, for batch invariance, without a kernel, or with other descriptions of
    prefixes.
    """
    assert importlib.import_module("mla_cupy.integrations.vllm_prefill").WIDTHS == GEOMETRIES
    assert layer_of(backend)._prefills
    assert not layer_of(backend, v_head_dim=96)._prefills
    assert not layer_of(backend, head_size=512, v_head_dim=256)._prefills
    assert layer_of(backend, head_size=512, qk_nope_head_dim=256, v_head_dim=256)._prefills
    with monkeypatch.context() as patch:
        patch.setenv("MLA_CUPY_ENGINE_PREFILL", "engine")
        assert not layer_of(backend)._prefills
    with monkeypatch.context() as patch:
        patch.setattr(backend.envs, "VLLM_BATCH_INVARIANT", True)
        assert not layer_of(backend)._prefills
    known = stand_in_vllm.MLACommonPrefillMetadata.ChunkedContextMetadata
    monkeypatch.setattr(known, "__annotations__", {"workspace": Any, "pieces": Any})
    with caplog.at_level(logging.WARNING, "mla_cupy"):
        assert not layer_of(backend)._prefills
    assert "describes cached prefixes in a way that the plugin knows not" in caplog.text
