"""Steps of `run context-parallel-prefill`: attention of a whole sequence, and of one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mla_cupy.parallel import Zigzag

LATENT, NOPE, ROPE, VALUES = 512, 128, 64, 128
SCALE = (NOPE + ROPE) ** -0.5
INDEX_HEADS, INDEX_WIDTH, TOPK = 64, 128, 2048
Step = tuple[Callable[[], Any], Sequence[Any]]
"""A call, and the arrays that have gradients."""


def dense(zigzag: Zigzag, links: Any, heads: int, chunk_tokens: int, place: str) -> Step:
    """Attention to keys and values that are expanded from latents."""
    x = _leaves(len(zigzag.rows(links.rank)), heads, place)
    return (_dense_whole(x) if zigzag.world == 1 else _dense_share(x, zigzag, links, chunk_tokens)), list(x.values())


def _dense_whole(x: dict[str, Any]) -> Callable[[], Any]:
    import mla_cupy.torch as mla

    def step() -> Any:
        k, v = _expand(x["latents"], x["w"])
        return mla.mla_prefill(x["q"], k, v, q_rope=x["q_rope"], k_rope=x["k_rope"], scale=SCALE)[0]

    return step


def _dense_share(x: dict[str, Any], zigzag: Zigzag, links: Any, chunk_tokens: int) -> Callable[[], Any]:
    import torch

    from mla_cupy.torch.parallel.attention import Attention, Prefill
    from mla_cupy.torch.parallel.links import schedule

    calls = schedule(zigzag, links.rank, chunk_tokens, x["q"].device)
    attention = Attention(links, *calls, _expand, LATENT, SCALE, False)

    def step() -> Any:
        rows = torch.cat([x["latents"], x["k_rope"]], -1)
        return Prefill.apply(attention, x["q"], x["q_rope"], rows, x["w"])[0]

    return step


def sparse(zigzag: Zigzag, links: Any, heads: int, chunk_tokens: int, place: str) -> Step:
    """Selection by an indexer in FP8, and sparse attention to latents; the selection has no gradient."""
    import torch

    import mla_cupy.torch as mla
    from mla_cupy import indexer_select
    from mla_cupy.torch.parallel.links import Gather, bounds, whole

    rank, n = links.rank, len(zigzag.rows(links.rank))
    q = _normal((n, heads, LATENT + ROPE), place).requires_grad_()
    latents = _normal((n, LATENT + ROPE), place).requires_grad_()
    index_q, index_k, keys = (
        _normal(shape, place).to(torch.float8_e4m3fn)
        for shape in ((n, INDEX_HEADS, INDEX_WIDTH), (n, INDEX_WIDTH), (zigzag.tokens, INDEX_WIDTH))
    )
    weights, scales = (torch.rand(shape, device=place) for shape in ((n, INDEX_HEADS), (zigzag.tokens,)))
    chunk, spans = whole(zigzag, rank, q.device), bounds(zigzag, rank, q.device)
    options = {"k_scale": scales, "topk": min(TOPK, zigzag.tokens), "relative": False}

    def step() -> Any:
        rows, _ = (Gather.apply(links, chunk, x) for x in (latents, index_k))
        # Other keys than the copies: every copy scores the same, and no model selects among such ties.
        indices = indexer_select(index_q, keys, weights, *spans, **options)[0]
        return mla.sparse_mla_forward(q, rows, indices, scale=SCALE)[0]

    return step, [q, latents]


KINDS = {"dense": dense, "sparse": sparse}


def alone(zigzag: Zigzag, rank: int) -> Any:
    """Links of a rank to others that send what it sends: copies in place of the exchanges."""
    from mla_cupy.torch.parallel.links import Links, Pending

    class Alone(Links):
        def begin(self, collective: Any, sent: Any, rows: int) -> Pending:
            if self.world == 1:
                return super().begin(collective, sent, rows)
            return Pending(sent.repeat(rows // max(1, len(sent)), 1), sent, None, sent.device)

    return Alone(None, zigzag.world, rank, zigzag.most)


def _leaves(tokens: int, heads: int, place: str) -> dict[str, Any]:
    shapes = {"q": (tokens, heads, NOPE), "q_rope": (tokens, heads, ROPE), "latents": (tokens, LATENT)}
    shapes |= {"k_rope": (tokens, ROPE), "w": (heads * (NOPE + VALUES), LATENT)}
    made = {name: _normal(shape, place) for name, shape in shapes.items()}
    made["w"] *= LATENT**-0.5
    return {name: x.requires_grad_() for name, x in made.items()}


def _normal(shape: tuple[int, ...], place: str) -> Any:
    import torch

    return torch.randn(shape, device=place, dtype=torch.bfloat16)


def _expand(latents: Any, w: Any) -> tuple[Any, Any]:
    kv = (latents @ w.T).unflatten(-1, (-1, NOPE + VALUES))
    k, v = kv.split([NOPE, VALUES], -1)
    return k, v
