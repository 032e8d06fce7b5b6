"""Random inputs of the bindings' fuzz: values and layouts for calls, and problems with gradients in textbook form.

The textbook is written from the docstrings, for PyTorch and for JAX in float64: `xp` is either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from mla_cupy.ops.operation import Input, axes_of
from tests.bindings.cases import Array, BoundCall
from tests.operations.test_layout_fuzz import LaidOut, lay_out, lay_out_pages

Rng = np.random.Generator
HALF = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16))


# ---- Values and layouts -------------------------------------------------------------------------------------------


def values(rng: Rng, call: BoundCall) -> dict[str, Array]:
    """The arrays of a call with other numbers in some of them; some of its axes are cut to one or to nothing."""
    arrays = {name: _values(rng, x) if rng.random() < 0.5 else x.copy() for name, x in call.arrays.items()}
    if rng.random() < 0.2:
        arrays = _cut(rng, call, arrays)
    return {name: x.astype(np.int64) if rng.random() < 0.2 and x.dtype == np.int32 else x for name, x in arrays.items()}


def _values(rng: Rng, x: Array) -> Array:
    if x.dtype not in (*HALF, np.float32):
        return x.copy()
    wild = rng.choice([np.nan, np.inf, -np.inf, 1e4, -3e38, 0.0], x.shape)
    with np.errstate(all="ignore"):
        ways = (
            lambda: np.full_like(x, rng.standard_normal()),  # ties
            lambda: np.zeros_like(x),
            lambda: (x.astype(np.float32) * 2.0 ** rng.integers(-20, 12)).astype(x.dtype),
            lambda: np.where(rng.random(x.shape) < 0.05, wild, x.astype(np.float32)).astype(x.dtype),
            lambda: x.astype(np.float32).round().astype(x.dtype),
        )
        return ways[rng.integers(len(ways))]()


def _cut(rng: Rng, call: BoundCall, arrays: dict[str, Array]) -> dict[str, Array]:
    """All arrays with fewer elements along one axis of the operation."""
    axes = {array.name: axes_of(array, arrays) for array in call.record.inputs if array.name in arrays}
    name = str(rng.choice(sorted({axis for names in axes.values() for axis in names})))
    count = int(rng.integers(2))
    found = {}
    for key, x in arrays.items():
        places = [slice(count) if axis == name and len(axes[key]) == x.ndim else slice(None) for axis in axes[key]]
        found[key] = x[tuple(places)[: x.ndim]].copy()
    return found


def layout(rng: Rng, x: Array, array: Any) -> LaidOut:
    """Equal values with gaps, steps and axes in another order; read-only arrays may repeat one element."""
    read = isinstance(array, Input) and not (array.written or array.wide or array.even)
    if read and x.ndim > 1 and len(x) > 1 and rng.random() < 0.2 and (x == x[:1]).all():
        one = np.ascontiguousarray(x[:1])
        return LaidOut(np.broadcast_to(one, x.shape), one, one.copy())
    if array.name.endswith("cache") and x.dtype.itemsize == 1 and x.size:  # tokens of a page follow one another
        pages = lay_out_pages(rng, x.view(np.uint8))
        return pages._replace(view=pages.view.view(x.dtype))
    return lay_out(rng, x, array, backwards=0)


# ---- Problems with gradients --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """A call of a differentiable function.

    Attributes
    ----------
    function : str
    arrays, options : dict
    leaves : tuple of str
        The arrays that it is differentiated by.
    textbook : callable
        `textbook(xp, put, leaves)`: the differentiable results, of leaves in float64; `put` makes constants of NumPy's
        arrays. A log-sum-exp over nothing is 0.
    cotangents : tuple of array
        Weights of the results' elements; 0 where a result is infinite.
    unit : float
        What errors of gradients are relative to, where the gradients themselves are small.
    """

    function: str
    arrays: dict[str, Array]
    options: dict[str, Any]
    leaves: tuple[str, ...]
    textbook: Callable[..., tuple[Any, ...]]
    cotangents: tuple[Array, ...]
    unit: float


def _normal(rng: Rng, *shape: int) -> Array:
    return rng.standard_normal(shape, np.float32)


def _size(rng: Rng, most: int) -> int:
    return int(rng.integers(1, most + 1))


def _starts(rng: Rng, queries: int, keys: int) -> dict[str, Array]:
    """Starts of two sequences, one possibly without queries or keys, and of tokens that belong to none."""
    cuts = [np.sort(rng.integers(0, n + 1, 3)) for n in (queries, keys)]
    return {f"cu_seqlens_{x}": cut.astype(np.int32) for x, cut in zip(("q", "kv"), cuts, strict=True)}


def _limits(queries: int, keys: int, starts: dict[str, Array], causal: bool) -> list[tuple[int, int]]:
    """First key of each query's sequence, and first key that it does not see."""
    limits = [(0, 0)] * queries
    q, kv = starts.get("cu_seqlens_q", (0, queries)), starts.get("cu_seqlens_kv", (0, keys))
    for begin, end, first, last in zip(q, q[1:], kv, kv[1:], strict=False):
        for i in range(begin, end):
            limits[i] = int(first), max(int(first), int(last - (end - 1 - i) * causal))
    return limits


def _counts(slots: Any, keys: int, limits: list[tuple[int, int]]) -> Array:
    """Number of times that each query, in all heads, attends to each key, by slots counted from its sequence's
    start.
    """
    counts = np.zeros((len(limits), 1, keys))
    for i, (first, limit) in enumerate(limits):
        for index in slots[i]:
            if 0 <= index < limit - first:
                counts[i, 0, first + index] += 1
    return counts


def _softmax(xp: Any, scores: Any, counts: Any) -> tuple[Any, Any, Any]:
    """Weights before they are divided by their sum, the sum, or 1 of none, and its logarithm."""
    weights = counts * xp.exp(scores)
    total = weights.sum(-1)
    total = xp.where(total > 0, total, xp.ones_like(total))
    return weights, total, xp.log(total)


def _cotangents(rng: Rng, some: Array, *shapes: tuple[int, ...]) -> tuple[Array, ...]:
    """Cotangents of results by query and head, some without a key; a result may have no weight at all."""
    wanted = [_normal(rng, *shape) * rng.integers(0, 2) for shape in shapes]
    return tuple(x * some.reshape(some.shape + (1,) * (x.ndim - some.ndim)) for x in wanted)


def sparse_forward(rng: Rng) -> Problem:
    s_q, s_kv, h, topk, dtype = _size(rng, 5), _size(rng, 20), _size(rng, 4), _size(rng, 9), rng.choice(HALF)
    d = int(rng.choice([512, 576]))
    arrays = {"q": _normal(rng, s_q, h, d).astype(dtype), "kv": _normal(rng, s_kv, d).astype(dtype)}
    arrays["indices"] = rng.integers(-2, s_kv + 2, (s_q, topk)).astype(np.int32)
    starts = _starts(rng, s_q, s_kv) if rng.random() < 0.5 else {}
    causal, lengths = bool(rng.random() < 0.3), np.full(s_q, topk, np.int32)
    if rng.random() < 0.3:
        lengths = arrays["topk_length"] = rng.integers(-1, topk + 2, s_q).astype(np.int32)
    if sink := bool(rng.random() < 0.5):
        arrays["attn_sink"] = np.append(_normal(rng, h)[1:], rng.choice([-np.inf, 0.5])).astype(np.float32)
    slots = [row[: max(0, length)] for row, length in zip(arrays["indices"], lengths, strict=True)]
    counts = _counts(slots, s_kv, _limits(s_q, s_kv, starts, causal))
    base, scale = str(rng.choice(["e", "2"])), d**-0.5
    logarithm = np.log(2) if base == "2" else 1.0

    def textbook(xp: Any, put: Any, leaves: Any) -> tuple[Any, ...]:
        q, kv = leaves["q"], leaves["kv"]
        weights, total, lse = _softmax(xp, scale * xp.einsum("ihd,jd->ihj", q, kv), put(counts))
        whole = total + xp.exp(leaves["attn_sink"]) if sink else total
        return xp.einsum("ihj,jd->ihd", weights, kv[:, :512]) / whole[..., None], lse / logarithm

    some = np.broadcast_to(counts.any(-1), (s_q, h))
    leaves = ("q", "kv", "attn_sink")[: 2 + sink]
    options = {"scale": scale, "causal": causal, "lse_base": base}
    cotangents = _cotangents(rng, some, (s_q, h, 512), (s_q, h))
    return Problem("sparse_mla_forward", arrays | starts, options, leaves, textbook, cotangents, scale)


def prefill(rng: Rng) -> Problem:
    s_q, s_kv, h_kv, group = _size(rng, 5), int(rng.integers(0, 7)), _size(rng, 2), _size(rng, 3)
    dtype = rng.choice(HALF)
    d_qk, d_v = ((192, 128), (128, 128), (256, 256))[rng.integers(3)]
    h = h_kv * group
    q, k = (_normal(rng, *shape).astype(dtype) for shape in ((s_q, h, d_qk), (s_kv, h_kv, d_qk)))
    arrays = {"q": q, "k": k, "v": _normal(rng, s_kv, h_kv, d_v).astype(dtype)}
    shared = bool(rng.random() < 0.5)
    if rng.random() < 0.6:  # keys, and perhaps queries, in two arrays
        arrays |= {"k": k[..., :-64].copy(), "k_rope": (k[:, 0, -64:] if shared else k[..., -64:]).copy()}
        if rng.random() < 0.5:
            arrays |= {"q": q[..., :-64].copy(), "q_rope": q[..., -64:].copy()}
    starts = _starts(rng, s_q, s_kv) if rng.random() < 0.5 else {}
    causal = bool(rng.random() < 0.5)
    if state := bool(rng.random() < 0.4):
        arrays |= {"state_out": _normal(rng, s_q, h, d_v), "state_lse": _normal(rng, s_q, h)}
        arrays["state_lse"][0] = -np.inf
    counts = _counts([np.arange(s_kv)] * s_q, s_kv, _limits(s_q, s_kv, starts, causal))
    scale = float(rng.choice([d_qk**-0.5, 0.1]))
    textbook = _textbook_prefill(counts, np.repeat(np.eye(h_kv), group, axis=0), scale)
    some = np.broadcast_to(counts.any(-1), (s_q, h)) | (np.isfinite(arrays["state_lse"]) if state else False)
    leaves = tuple(name for name in arrays if not name.startswith("cu"))
    cotangents = _cotangents(rng, some, (s_q, h, d_v), (s_q, h))
    options = {"causal": causal, "scale": scale}
    return Problem("mla_prefill", arrays | starts, options, leaves, textbook, cotangents, scale)


def _textbook_prefill(counts: Array, served: Array, scale: float) -> Callable[..., tuple[Any, ...]]:
    """Attention of a KV head by the heads that it has `served`."""

    def textbook(xp: Any, put: Any, leaves: Any) -> tuple[Any, ...]:
        heads = put(served)
        scores = sum(xp.einsum("ihd,jgd,hg->ihj", q, k, heads) for q, k in _parts(put, leaves, served.shape[1]))
        weights = put(counts) * xp.exp(scale * scores)
        out, total = xp.einsum("ihj,jgd,hg->ihd", weights, leaves["v"], heads), weights.sum(-1)
        if "state_lse" in leaves:
            earlier = xp.exp(leaves["state_lse"])
            out, total = out + earlier[..., None] * leaves["state_out"], total + earlier
        total = xp.where(total > 0, total, xp.ones_like(total))
        return out / total[..., None], xp.log(total)

    return textbook


def _parts(put: Any, leaves: Any, h_kv: int) -> list[tuple[Any, Any]]:
    """Queries and keys: whole, or all columns but the last 64 and these, which all heads may share."""
    q, k = leaves["q"], leaves["k"]
    if "k_rope" not in leaves:
        return [(q, k)]
    k_rope = leaves["k_rope"] if leaves["k_rope"].ndim == 3 else leaves["k_rope"][:, None]
    k_rope = k_rope + put(np.zeros((len(k), h_kv, 64)))
    return [(q[..., : k.shape[-1]], k), (leaves["q_rope"] if "q_rope" in leaves else q[..., -64:], k_rope)]


def warmup_objective(rng: Rng) -> Problem:
    return _objective(rng, "indexer_warmup_objective", None)


def sparse_objective(rng: Rng) -> Problem:
    return _objective(rng, "indexer_sparse_objective", _size(rng, 8))


def _objective(rng: Rng, function: str, topk: int | None) -> Problem:
    s_q, s_kv, h, d, d_i, bf16 = _size(rng, 5), _size(rng, 12), _size(rng, 3), 8 * _size(rng, 9), 32, HALF[0]
    per_head = topk is None and bool(rng.random() < 0.5)
    h_i = h if per_head else _size(rng, 3)
    arrays = {"q": _normal(rng, s_q, h, d).astype(bf16), "k": _normal(rng, s_kv, d).astype(bf16)}
    arrays |= {"index_q": _normal(rng, s_q, h_i, d_i).astype(bf16), "index_k": _normal(rng, s_kv, d_i).astype(bf16)}
    arrays["weights"] = _normal(rng, s_q, h_i).astype(rng.choice([bf16, np.dtype(np.float32)]))
    if rng.random() < 0.5:
        arrays["row_weights"] = _normal(rng, s_q)
    starts = _starts(rng, s_q, s_kv) if rng.random() < 0.5 else {}
    causal = bool(rng.random() < 0.5)
    if topk is not None:
        arrays["indices"] = rng.integers(-2, s_kv + 2, (s_q, topk)).astype(np.int32)
    slots = arrays["indices"] if topk is not None else [np.arange(s_kv)] * s_q
    counts = _counts(slots, s_kv, _limits(s_q, s_kv, starts, causal))
    scores = np.einsum("ihd,jd->ihj", *(arrays[name].astype(np.float64) for name in ("q", "k"))) * d**-0.5
    target, total, _ = _softmax(np, scores, counts)
    target = target / total[..., None]  # of each head; a key that is selected twice has two shares
    if not per_head:
        target = target.mean(1, keepdims=True)
    some = target.sum(-1) > 0
    each = target / np.maximum(counts, 1)
    entropy = (target * np.log(np.where(each > 0, each, 1))).sum(-1)
    factors = arrays["row_weights"].astype(np.float64) if "row_weights" in arrays else np.ones(s_q)

    def textbook(xp: Any, put: Any, leaves: Any) -> tuple[Any, ...]:
        products = xp.einsum("ihd,jd->ihj", leaves["index_q"], leaves["index_k"])
        products = leaves["weights"][..., None] * xp.where(products > 0, products, xp.zeros_like(products))
        if not per_head:
            products = products.sum(1)[:, None] * (h_i * d_i) ** -0.5
        _, _, lse = _softmax(xp, products, put(counts))
        kl = put(entropy) - (put(target) * products).sum(-1) + lse
        return ((kl * put(factors[:, None] * some)).sum(),)

    options: dict[str, Any] = {"scale": d**-0.5, "causal": causal}
    if per_head:
        options |= {"target": "per_head", "target_scale": d**-0.5}
    cotangents = (np.asarray(rng.choice([1.0, -2.0, 0.5])),)
    leaves = ("index_q", "index_k", "weights")
    return Problem(function, arrays | starts, options, leaves, textbook, cotangents, 1e-3)


PROBLEMS = (sparse_forward, prefill, warmup_objective, sparse_objective)
