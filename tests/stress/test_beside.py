"""Calls that start before the previous one has ended, by a promise: replays with other contents next to a busy stream.

`independent=True`: the indexer's preparation runs beside `mla_prepare`, and later calls read what both write.
`after_prepare=True`: attention reads queries and a token that the call before writes, and the rest early. The results
without the promise are the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mla_cupy
from mla_cupy.runtime.device import DeviceInfo

pytestmark = pytest.mark.gpu

PAGE_SIZE, PAGES, TOPK, INDEX_HEADS, D_NOPE, ROWS = 64, 64, 2048, 64, 128, 50
SETS, REPLAYS = 7, 1500
TURNS: dict[str, Any] = {"theta": 10000.0}


def normal(rng: np.random.Generator, *shape: int) -> Any:
    import cupy

    return cupy.asarray(rng.standard_normal(shape, np.float32)).astype(cupy.float16)


def bfloat16(rng: np.random.Generator, *shape: int) -> Any:
    """CuPy has them as ml_dtypes' dtype."""
    import cupy

    return cupy.asarray(rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16))


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
        "rows": cupy.asarray(rng.integers(0, ROWS, b).astype(np.int32)),
        "index_q": bfloat16(rng, b, INDEX_HEADS, 128),
        "index_weights": cupy.asarray(rng.standard_normal((b, INDEX_HEADS), np.float32)),
        "index_k": bfloat16(rng, b, 128),
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
    angles = rng.standard_normal((ROWS, 32), np.float32)
    kv_b_proj = normal(rng, h, 256, 512) / 16
    fixed = {
        "q": cupy.empty((b, h, D_NOPE + 64), cupy.float16),
        "w_uk": kv_b_proj[:, :D_NOPE],
        "w_uv": kv_b_proj[:, D_NOPE:],
        "cos": cupy.asarray(np.cos(angles)),
        "sin": cupy.asarray(np.sin(angles)),
        "table": cupy.asarray(table),
        "seqlens": cupy.full(b, PAGES * PAGE_SIZE, cupy.int32),
        "ends": cupy.full((b, 1), PAGES * PAGE_SIZE, cupy.int32),
        "slots": cupy.asarray(table[:, -1] * PAGE_SIZE + PAGE_SIZE - 1),
    }
    results = {
        "cache": cache,
        "absorbed": cupy.empty((b, h, 576), cupy.float16),
        "index_cache": cupy.asarray(index_cache.reshape(b * PAGES, PAGE_SIZE, 132)),
        "codes": cupy.empty((b, INDEX_HEADS, 128), cupy.uint8),
        "folded": cupy.empty((b, INDEX_HEADS), cupy.float32),
        "indices": cupy.zeros((b, 1, TOPK), cupy.int32),
        "counts": cupy.zeros((b, 1), cupy.int32),
        "out": cupy.empty((b, 1, h, 128), cupy.float16),
    }
    return Layer(contents(b, h, 0), fixed, results)


def memory(function: Any, *arrays: Any, **options: Any) -> Any:
    import cupy

    return cupy.empty(mla_cupy.workspace_bytes(function, *arrays, **options), cupy.uint8)


def beside(layer: Layer) -> Callable[[bool], None]:
    """Run `mla_prepare` and the indexer's preparation at the same time, then select tokens and attend to them.

    The new token is always selected, and its index key is one of the keys.
    """
    given, fixed, results = layer.given, layer.fixed, layer.results
    tables = (fixed["cos"], fixed["sin"], given["rows"])
    vectors = (given["index_q"], given["index_weights"], given["index_k"], *tables, results["index_cache"])
    coded = {"codes": results["codes"], "folded": results["folded"]}
    queries = (results["codes"][:, None], results["index_cache"], results["folded"][:, None])
    select = (*queries, fixed["ends"], fixed["table"])
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
        mla_cupy.mla_prepare(fixed["q"], *token, **turns, w_uk=fixed["w_uk"], out=results["absorbed"])
        mla_cupy.indexer_prepare(*vectors, fixed["slots"], **coded, independent=independent)
        mla_cupy.indexer_select_paged(*select, **chosen)
        mla_cupy.sparse_mla_decode(*attend, **options)

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


@pytest.mark.parametrize("chain", ["beside", "early"])
@pytest.mark.parametrize(("b", "h"), [(1, 16), (1, 128), (12, 16)])
def test_equals_the_plain_order(gpu: DeviceInfo, chain: str, b: int, h: int) -> None:
    import cupy

    with cupy.cuda.Stream(non_blocking=True) as stream:
        layer = make(b, h, "v32" if chain == "beside" else "rows")
        sets = [contents(b, h, seed) for seed in range(SETS)]
        call = {"beside": beside, "early": early}[chain](layer)
        plain, promised = (graph_of(stream, lambda flag=flag: call(flag)) for flag in (False, True))  # type: ignore[misc]

        def replay(graph: Any, number: int) -> None:
            for name, target in layer.given.items():
                target.view(cupy.uint8)[...] = sets[number][name].view(cupy.uint8)  # CuPy moves no bfloat16
            graph.launch(stream)

        wanted = []
        for number in range(SETS):
            replay(plain, number)
            wanted.append({name: result.copy() for name, result in layer.results.items()})
        names = ("out", "absorbed", "codes", "indices") if chain == "beside" else ("out", "absorbed")
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
            replay(promised, number)
            for name in (*names, *(("cache",) if step % 100 == 0 else ())):
                wrong += (layer.results[name].view(cupy.uint8) != wanted[number][name].view(cupy.uint8)).any()
        assert int(wrong) == 0
    other.synchronize()
