"""The cases of a layer: a model, its heads on one GPU, sequences and their tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mla_cupy.cache_formats import FORMATS

from ...core.cost import D_V, ELEMENT_BYTES, Cost
from ...core.errors import BenchError

FORM = "<v3, v32, glm5, k3 or v4flash>-hq<N>-b<N>-skv<N>"
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
class LayerCase:
    """One token for each of `b` sequences of `s_kv` tokens, the new one included."""

    model_name: str
    h_q: int
    b: int
    s_kv: int
    peer_us: float | None = field(default=None, compare=False)

    @property
    def op(self) -> str:
        return "layer"

    @property
    def model(self) -> Model:
        """The layer's model."""
        return MODELS[self.model_name]

    @property
    def seen(self) -> dict[str, float | None]:
        return {}

    @property
    def name(self) -> str:
        """The canonical name, which `parse` reads."""
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
        """The sizes as plain data, for the records."""
        return {"model": self.model_name, "h_q": self.h_q, "b": self.b, "s_kv": self.s_kv, "page_size": PAGE_SIZE}


MAIN = LayerCase("v3", 16, 64, 4096)
CASES: tuple[LayerCase, ...] = (
    MAIN,
    *(LayerCase("v3", h_q, b, 4096) for h_q, b in ((16, 1), (16, 16), (128, 1), (128, 16), (128, 64))),
    *(LayerCase("v32", h_q, b, 16384) for h_q in (16, 128) for b in (1, 64)),
    *(LayerCase("glm5", 64, b, 16384) for b in (1, 64)),
    *(LayerCase("k3", 96, b, 4096) for b in (1, 64)),
    *(LayerCase("v4flash", 64, b, 16384) for b in (1, 64)),
)
SUITES: Mapping[str, tuple[LayerCase, ...]] = {"targets": CASES, "quick": (MAIN, LayerCase("v32", 128, 64, 16384))}

_PATTERN = re.compile(r"(\w+)-hq(\d+)-b(\d+)-skv(\d+)")


def parse(name: str) -> LayerCase:
    """The case of that name: one of `CASES`, or any other written in the same form."""
    match = _PATTERN.fullmatch(name.strip())
    if not match or match[1] not in MODELS:
        raise BenchError(f"case {name!r}: expected {FORM}; `list` prints the built-in ones")
    h_q, b, s_kv = map(int, match.groups()[1:])
    if min(h_q, b, s_kv) < 1:
        raise BenchError(f"case {name!r}: every size must be at least 1")
    case = LayerCase(match[1], h_q, b, s_kv)
    return next((known for known in CASES if known == case), case)
