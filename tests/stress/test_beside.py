"""Calls that start before the previous one has ended, by a promise: replays with other contents next to a busy stream.

`independent=True`: the chain's first call writes what the independent one reads early; attention reads what both calls
before it write. `after_prepare=True`: attention reads queries and a token that the call before writes, and the rest
early. The results without the promise are the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy.runtime.device import DeviceInfo

pytestmark = pytest.mark.gpu

PAGE_SIZE, PAGES, TOPK, INDEX_HEADS, D_NOPE = 64, 64, 2048, 64, 128
SETS, REPLAYS = 7, 1500
TURNS: dict[str, Any] = {"theta": 10000.0}


def normal(rng: np.random.Generator, *shape: int) -> Any:
    import cupy

    return cupy.asarray(rng.standard_normal(shape, np.float32)).astype(cupy.float16)


@dataclass
class Layer:
    """Arrays of a layer of `b` sequences: those that each set fills anew, weights and caches, results."""

    given: dict[str, Any]
    fixed: dict[str, Any]
    results: dict[str, Any]


def contents(b: int, h: int, seed: int) -> dict[str, Any]:
    """What differs from one set to the next. The new token of a sequence is its last one."""
    import cupy

    rng = np.random.default_rng(seed)
    return {
        "raw": normal(rng, b, h, D_NOPE + 64),
        "latent": normal(rng, b, 512),
        "rope": normal(rng, b, 64),
        "positions": cupy.asarray(rng.integers(0, 100_000, b)),
        "codes": cupy.asarray(rng.integers(0, 0x70, (b, 1, INDEX_HEADS, 128), np.uint8)),
        "folded": cupy.asarray(rng.standard_normal((b, 1, INDEX_HEADS), np.float32)),
    }


def make(b: int, h: int, kv_format: str) -> Layer:
    import cupy

    rng, tokens = np.random.default_rng(99), b * PAGES * PAGE_SIZE
    table = rng.permutation(b * PAGES).astype(np.int32).reshape(b, PAGES)
    index_cache = rng.integers(0, 0x70, (b * PAGES, PAGE_SIZE * 132), np.uint8)  # codes, then a page's scales
    index_cache[:, PAGE_SIZE * 128 :] = rng.random((b * PAGES, PAGE_SIZE), np.float32).view(np.uint8)
    every = cupy.arange(tokens)
    cache = cupy.zeros((b * PAGES, PAGE_SIZE, *((656,) if kv_format == "v32" else (576,))), cupy.uint8)
    cache = cache if kv_format == "v32" else cache.astype(cupy.float16)
    mla_cupy.cache_append(normal(rng, tokens, 512), normal(rng, tokens, 64), cache, every)
    kv_b_proj = normal(rng, h, 256, 512) / 16
    fixed = {
        "q": cupy.empty((b, h, D_NOPE + 64), cupy.float16),
        "w_uk": kv_b_proj[:, :D_NOPE],
        "w_uv": kv_b_proj[:, D_NOPE:],
        "index_cache": cupy.asarray(index_cache.reshape(b * PAGES, PAGE_SIZE, 132)),
        "table": cupy.asarray(table),
        "seqlens": cupy.full(b, PAGES * PAGE_SIZE, cupy.int32),
        "ends": cupy.full((b, 1), PAGES * PAGE_SIZE, cupy.int32),
        "slots": cupy.asarray(table[:, -1] * PAGE_SIZE + PAGE_SIZE - 1),
    }
    results = {
        "cache": cache,
        "absorbed": cupy.empty((b, h, 576), cupy.float16),
        "indices": cupy.zeros((b, 1, TOPK), cupy.int32),
        "counts": cupy.zeros((b, 1), cupy.int32),
        "out": cupy.empty((b, 1, h, 128), cupy.float16),
    }
    return Layer(contents(b, h, 0), fixed, results)


def memory(function: Any, *arrays: Any, **options: Any) -> Any:
    import cupy

    return cupy.empty(mla_cupy.workspace_bytes(function, *arrays, **options), cupy.uint8)


def after_select(layer: Layer) -> Callable[[bool], None]:
    """Selection, then `mla_prepare`, then attention to what is selected, the new token always among it."""
    given, fixed, results = layer.given, layer.fixed, layer.results
    select = (given["codes"], fixed["index_cache"], given["folded"], fixed["ends"], fixed["table"])
    chosen = {"topk": TOPK, "keep_last": 1, "indices": results["indices"], "counts": results["counts"]}
    chosen["workspace"] = memory(mla_cupy.indexer_select_paged, *select, **chosen)
    token = (given["latent"], given["rope"], results["cache"], fixed["slots"])
    turns = {**TURNS, "positions": given["positions"]}
    attend = (results["absorbed"][:, None], results["cache"], results["indices"])
    options = {"scale": 192**-0.5, "project": mla_cupy.Project(fixed["w_uv"]), "out": results["out"]}
    options["lse"] = _lse(layer, sparse=True)
    options["workspace"] = memory(mla_cupy.sparse_mla_decode, *attend, **options)

    def call(independent: bool) -> None:
        mla_cupy.mla_prepare(given["raw"], **turns, out=fixed["q"])
        mla_cupy.indexer_select_paged(*select, **chosen)
        absorbed = results["absorbed"]
        mla_cupy.mla_prepare(fixed["q"], *token, **turns, w_uk=fixed["w_uk"], out=absorbed, independent=independent)
        mla_cupy.sparse_mla_decode(*attend, **options)

    return call


def after_append(layer: Layer) -> Callable[[bool], None]:
    """An append, then `absorb`, then attention to the whole cache."""
    given, fixed, results = layer.given, layer.fixed, layer.results
    b, h = given["raw"].shape[:2]
    sizes = {"max_b": b, "s_q": 1, "h_q": h, "max_pages": PAGES, "page_size": PAGE_SIZE}
    plan = mla_cupy.plan_decode(**sizes, dtype="float16", d_head=128)
    plan.update(fixed["seqlens"])
    attend = (results["absorbed"][:, None], results["cache"], fixed["table"], fixed["seqlens"])
    options = {"scale": 192**-0.5, "project": mla_cupy.Project(fixed["w_uv"]), "out": results["out"]}
    options |= {"lse": _lse(layer, sparse=False), "plan": plan}
    q_nope, q_rope = fixed["q"][..., :D_NOPE], fixed["q"][..., D_NOPE:]

    def call(independent: bool) -> None:
        mla_cupy.mla_prepare(given["raw"], **TURNS, positions=given["positions"], out=fixed["q"])
        mla_cupy.cache_append(given["latent"], given["rope"], results["cache"], fixed["slots"])
        own = {"q_rope": q_rope, "out": results["absorbed"], "independent": independent}
        mla_cupy.absorb(q_nope, fixed["w_uk"], **own)
        mla_cupy.mla_decode(*attend, **options)

    return call


def early(layer: Layer) -> Callable[[bool], None]:
    """`mla_prepare`, then attention that reads older tokens early."""
    given, fixed, results = layer.given, layer.fixed, layer.results
    b, h = given["raw"].shape[:2]
    sizes = {"max_b": b, "s_q": 1, "h_q": h, "max_pages": PAGES, "page_size": PAGE_SIZE, "d_head": 128}
    plans = [mla_cupy.plan_decode(**sizes, dtype="float16", after_prepare=flag) for flag in (False, True)]
    for plan in plans:
        plan.update(fixed["seqlens"])
    token = (given["latent"], given["rope"], results["cache"], fixed["slots"])
    attend = (results["absorbed"][:, None], results["cache"], fixed["table"], fixed["seqlens"])
    options = {"scale": 192**-0.5, "project": mla_cupy.Project(fixed["w_uv"]), "out": results["out"]}
    options["lse"] = _lse(layer, sparse=False)
    turns = {**TURNS, "positions": given["positions"]}

    def call(promised: bool) -> None:
        mla_cupy.mla_prepare(given["raw"], **turns, out=fixed["q"])
        mla_cupy.mla_prepare(fixed["q"], *token, **turns, w_uk=fixed["w_uk"], out=results["absorbed"])
        mla_cupy.mla_decode(*attend, **options, plan=plans[promised])

    return call


def _lse(layer: Layer, sparse: bool) -> Any:
    import cupy

    b, h = layer.given["raw"].shape[:2]
    return cupy.empty((b, 1, h) if sparse else (b, h, 1), cupy.float32)


def graph_of(stream: Any, call: Callable[[], None]) -> Any:
    call()  # loads the kernels
    stream.synchronize()
    stream.begin_capture()
    call()
    return stream.end_capture()


@pytest.mark.parametrize("chain", ["select", "append", "prepare"])
@pytest.mark.parametrize(("b", "h"), [(1, 16), (1, 128), (12, 16)])
def test_equals_the_plain_order(gpu: DeviceInfo, chain: str, b: int, h: int) -> None:
    import cupy

    with cupy.cuda.Stream(non_blocking=True) as stream:
        layer = make(b, h, "v32" if chain == "select" else "rows")
        sets = [contents(b, h, seed) for seed in range(SETS)]
        call = {"select": after_select, "append": after_append, "prepare": early}[chain](layer)
        plain, beside = (graph_of(stream, lambda flag=flag: call(flag)) for flag in (False, True))  # type: ignore[misc]

        def replay(graph: Any, number: int) -> None:
            for name, target in layer.given.items():
                target[...] = sets[number][name]
            graph.launch(stream)

        wanted = []
        for number in range(SETS):
            replay(plain, number)
            wanted.append({name: result.copy() for name, result in layer.results.items()})
        names = ("out", "absorbed", "indices") if chain == "select" else ("out", "absorbed")
        assert all((wanted[0][name] != wanted[1][name]).any() for name in names)
        assert cupy.isfinite(wanted[0]["out"]).all()
        wrong = cupy.zeros((), cupy.int64)
        other = cupy.cuda.Stream(non_blocking=True)
        stream.synchronize()
        with other:
            load = cupy.ones(1 << 22, cupy.float32)
        for step in range(REPLAYS):
            if step % 2:
                with other:
                    load *= 1.0
            number = step % SETS
            replay(beside, number)
            for name in (*names, *(("cache",) if step % 100 == 0 else ())):
                wrong += (layer.results[name].view(cupy.uint8) != wanted[number][name].view(cupy.uint8)).any()
        assert int(wrong) == 0
    other.synchronize()
