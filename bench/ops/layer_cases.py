"""The cases of a layer, and its arrays: what projections leave, weights, caches with all tokens but the new ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

import mla_cupy
from mla_cupy.cache_formats import FORMATS

from ..core.cost import D_V, ELEMENT_BYTES, Cost
from ..core.device import Device
from ..core.operation import Case

Array = npt.NDArray[Any]

# ---- Cases -----------------------------------------------------------------------------------------------------------

PAGE_SIZE, D_ROPE, D_INDEX = 64, 64, 128


@dataclass(frozen=True)
class Model:
    """A layer of a model between its projections.

    `record` is "" for a cache of 16-bit rows, and attention to all of it. With `index_heads` an indexer selects `topk`
    tokens; without, `topk` and `extra` are of lists in two caches, and nothing is absorbed.
    """

    record: str = ""
    d_nope: int = 128
    d_head: int = 128
    has_rope: bool = True
    has_gate: bool = False
    index_heads: int = 0
    topk: int = 0
    extra: int = 0

    @property
    def absorbs(self) -> bool:
        """True if queries and results are multiplied by kv_b_proj."""
        return not self.extra

    @property
    def d_qk(self) -> int:
        """Width of a key."""
        return D_V + D_ROPE * (self.has_rope and self.absorbs)

    @property
    def d_latent(self) -> int:
        """Width of a token's latent part."""
        return FORMATS[self.record].d_latent if self.record else D_V

    @property
    def d_query(self) -> int:
        """Width of queries as the projection leaves them."""
        return self.d_nope + D_ROPE * self.has_rope if self.absorbs else D_V


MODELS = {
    "v3": Model(),
    "v32": Model("v32", index_heads=64, topk=2048),
    "glm5": Model("v32", d_nope=192, d_head=256, index_heads=32, topk=2048),
    "k3": Model(has_rope=False, has_gate=True),
    "v4flash": Model("v4", topk=128, extra=512),
}


@dataclass(frozen=True)
class LayerCase(Case):
    """One token for each of `b` sequences of `s_kv` tokens, the new one included."""

    model_name: str
    h_q: int
    b: int
    s_kv: int

    op = "layer"

    @property
    def model(self) -> Model:
        """The layer's model."""
        return MODELS[self.model_name]

    @property
    def name(self) -> str:
        return f"{self.model_name}-hq{self.h_q}-b{self.b}-skv{self.s_kv}"

    @property
    def pages(self) -> int:
        """Pages of a sequence."""
        return -(-self.s_kv // PAGE_SIZE)

    @property
    def scale(self) -> float:
        """Factor of the scores: of the width before W_UK is absorbed."""
        return float(self.model.d_query**-0.5)

    @property
    def cost(self) -> Cost:
        """Attention, the indexer's logits and both products; the cache as far as it is read, weights, q and out."""
        model, rows = self.model, self.b * self.h_q
        keys = min(self.s_kv, model.topk) + model.extra if model.topk else self.s_kv
        token = FORMATS[model.record].token_bytes if model.record else ELEMENT_BYTES * model.d_qk
        flops, nbytes = 2 * rows * keys * (model.d_qk + D_V), self.b * keys * token
        nbytes += ELEMENT_BYTES * rows * (model.d_query + model.d_head)
        if model.absorbs:
            flops += 2 * rows * D_V * (model.d_nope + model.d_head)
            nbytes += ELEMENT_BYTES * self.h_q * D_V * (model.d_nope + model.d_head)
        if model.index_heads:
            flops += 2 * self.b * self.s_kv * model.index_heads * D_INDEX
            nbytes += self.b * self.s_kv * FORMATS["indexer"].width
        return Cost(flops, nbytes)

    def shape(self) -> dict[str, Any]:
        return {"model": self.model_name, "h_q": self.h_q, "b": self.b, "s_kv": self.s_kv, "page_size": PAGE_SIZE}


MAIN = LayerCase("v3", 16, 64, 4096)
CASES = (
    MAIN,
    *(LayerCase("v3", h_q, b, 4096) for h_q, b in ((16, 1), (16, 16), (128, 1), (128, 16), (128, 64))),
    *(LayerCase("v32", h_q, b, 16384) for h_q in (16, 128) for b in (1, 64)),
    *(LayerCase("glm5", 64, b, 16384) for b in (1, 64)),
    *(LayerCase("k3", 96, b, 4096) for b in (1, 64)),
    *(LayerCase("v4flash", 64, b, 16384) for b in (1, 64)),
)


def case_of(model: str, h_q: str, b: str, s_kv: str) -> LayerCase:
    case = LayerCase(model, int(h_q), int(b), int(s_kv))
    if min(case.h_q, case.b, case.s_kv) < 1:
        raise ValueError("every size must be at least 1")
    return case


# ---- Inputs and outputs ----------------------------------------------------------------------------------------------

_CHUNK = 1 << 16


@dataclass(frozen=True)
class IndexInputs:
    """Inputs of an indexer."""

    q: Any  # (b, heads, 128), bfloat16
    weights: Any  # (b, heads), float32
    k: Any  # (b, 128), bfloat16, before its LayerNorm
    norm_weight: Any  # (128,), float32
    norm_bias: Any
    cache: Any  # (pages, 64, 132)


@dataclass(frozen=True)
class LayerInputs:
    """One set of inputs. The caches are changed in place, by the same tokens in every call."""

    q: Any  # (b, h_q, d_query)
    latent: Any  # (b, d_latent)
    rope: Any  # (b, 64)
    gate: Any  # (b, 1, h_q, d_head)
    kv_b_proj: Any  # (h_q, d_nope + d_head, 512)
    cos: Any  # (s_kv, 32)
    sin: Any
    cache: Any  # (pages, 64, width)
    block_table: Any  # (b, pages of a sequence)
    seqlens: Any  # (b,)
    positions: Any  # (b,)
    slots: Any  # (b,)
    sink: Any  # (h_q,)
    lists: Any  # (b, 1, topk) int32, where nothing selects
    extra_cache: Any
    extra_lists: Any  # (b, 1, extra)
    index: IndexInputs | None
    host_table: Array


@dataclass(frozen=True)
class LayerOutputs:
    """Results of a call: (b, 1, h_q, d_head), or 512 wide where nothing is projected."""

    out: Any


def make_inputs(case: LayerCase, dtype: str, seed: int, device: Device) -> LayerInputs:
    """Normal numbers in shuffled pages."""
    model, rng = case.model, np.random.default_rng(seed)
    table = rng.permutation(case.b * case.pages).astype(np.int32).reshape(case.b, case.pages)
    last = case.s_kv - 1
    slots = table[:, last // PAGE_SIZE] * PAGE_SIZE + last % PAGE_SIZE
    angles = np.arange(case.s_kv)[:, None] * 10000.0 ** (-np.arange(0, D_ROPE, 2) / D_ROPE)
    numbers = iter(range(20 * seed + 1, 20 * seed + 20))

    def normal(*shape: int, kind: str = dtype, scale: float = 1.0) -> Any:
        return device.normal(shape, kind, next(numbers), scale=scale)

    def chosen(count: int) -> Any:
        return device.upload(rng.integers(0, case.b * case.pages * PAGE_SIZE, (case.b, 1, count), np.int32))

    index = None
    if model.index_heads:
        index = IndexInputs(
            q=normal(case.b, model.index_heads, D_INDEX, kind="bfloat16"),
            weights=normal(case.b, model.index_heads, kind="float16").astype("float32"),
            k=normal(case.b, D_INDEX, kind="bfloat16"),
            norm_weight=device.upload(1 + rng.standard_normal(D_INDEX, np.float32) / 8),
            norm_bias=device.upload(rng.standard_normal(D_INDEX, np.float32) / 8),
            cache=_index_cache(case, next(numbers), device),
        )
    return LayerInputs(
        q=normal(case.b, case.h_q, model.d_query),
        latent=normal(case.b, model.d_latent),
        rope=normal(case.b, D_ROPE),
        gate=normal(case.b, 1, case.h_q, model.d_head),
        kv_b_proj=normal(case.h_q, model.d_nope + model.d_head, D_V, scale=D_V**-0.5),
        cos=device.upload(np.cos(angles).astype(np.float32)),
        sin=device.upload(np.sin(angles).astype(np.float32)),
        cache=_cache(case, dtype, next(numbers), device),
        block_table=device.upload(table),
        seqlens=device.upload(np.full(case.b, case.s_kv, np.int32)),
        positions=device.upload(np.full(case.b, last, np.int32)),
        slots=device.upload(slots.astype(np.int32)),
        sink=device.upload(rng.standard_normal(case.h_q, np.float32)),
        lists=chosen(model.topk) if model.extra else None,
        extra_cache=_cache(case, dtype, next(numbers), device) if model.extra else None,
        extra_lists=chosen(model.extra) if model.extra else None,
        index=index,
        host_table=table,
    )


def _cache(case: LayerCase, dtype: str, seed: int, device: Device) -> Any:
    model, pages = case.model, case.b * case.pages
    if not model.record:
        return device.normal((pages, PAGE_SIZE, model.d_qk), dtype, seed)
    cache = device.empty((pages, PAGE_SIZE, FORMATS[model.record].width), "uint8")
    with device.current():
        for first in range(0, pages * PAGE_SIZE, _CHUNK):
            count = min(_CHUNK, pages * PAGE_SIZE - first)
            latent, rope = (device.normal((count, width), dtype, seed + first) for width in (model.d_latent, D_ROPE))
            mla_cupy.cache_append(latent, rope, cache, device.upload(np.arange(first, first + count)))
    return cache


def _index_cache(case: LayerCase, seed: int, device: Device) -> Any:
    pages = case.b * case.pages
    cache = device.empty((pages, PAGE_SIZE, FORMATS["indexer"].width), "uint8")
    with device.current():
        for first in range(0, pages * PAGE_SIZE, _CHUNK):
            count = min(_CHUNK, pages * PAGE_SIZE - first)
            keys = device.normal((count, D_INDEX), "bfloat16", seed + first)
            mla_cupy.indexer_cache_append(keys, cache, device.upload(np.arange(first, first + count)))
    return cache
