"""Tokens of a sparse model: attention, selection and the losses of the indexer, in one process and on a rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import mla_cupy
import mla_cupy.torch as mla
from mla_cupy.ops.groups import Packed
from mla_cupy.parallel import Zigzag
from tests.parallel.training import Tensors, added_up

HEADS, WIDTH, INDEX_HEADS, INDEX_WIDTH, TOPK = 2, 576, 4, 32, 8
SCALE = 192**-0.5


@dataclass(frozen=True)
class Tokens:
    """Packed sequences of random tokens."""

    lengths: tuple[int, ...]
    place: str = "cpu"

    def inputs(self) -> Tensors:
        n, generator = sum(self.lengths), torch.Generator().manual_seed(3)
        shapes = {"q": (n, HEADS, WIDTH), "latents": (n, WIDTH)}
        shapes |= {"index_q": (n, INDEX_HEADS, INDEX_WIDTH), "index_k": (n, INDEX_WIDTH), "weights": (n, INDEX_HEADS)}
        made = {name: torch.randn(shape, generator=generator).to(self.place) for name, shape in shapes.items()}
        return {name: (x if name == "weights" else x.bfloat16()).requires_grad_() for name, x in made.items()}

    def dout(self) -> torch.Tensor:
        made = torch.randn(sum(self.lengths), HEADS, 512, generator=torch.Generator().manual_seed(4))
        return made.bfloat16().to(self.place)


def in_one(given: Tokens) -> Tensors:
    x, zigzag = given.inputs(), Zigzag(given.lengths, 1)
    starts = torch.from_numpy(zigzag.starts).to(given.place)
    packed = Packed(starts, starts)
    first, last = (torch.from_numpy(y).to(given.place) for y in zigzag.bounds(0))
    folded = x["weights"].detach() * (INDEX_HEADS * INDEX_WIDTH) ** -0.5
    scored = (x["index_q"].detach(), x["index_k"].detach(), folded)
    indices = mla_cupy.indexer_select(*scored, first, last, topk=TOPK)[0]
    out, lse, _ = mla.sparse_mla_forward(x["q"], x["latents"], indices, scale=SCALE, packed=packed)
    of: dict[str, Any] = {"scale": SCALE, "lse": lse.detach(), "packed": packed}
    main, index = (x["q"].detach(), x["latents"].detach()), (x["index_q"], x["index_k"], x["weights"])
    sparse, sparse_kl = mla.indexer_sparse_objective(*main, *index, indices, **of)
    warm, warm_kl = mla.indexer_warmup_objective(*main, *index, scale=SCALE, packed=packed)
    absolute = torch.where(indices < 0, -1, indices + first[:, None])
    return _results(x, given.dout(), (out, lse, absolute), (sparse, warm), (sparse_kl, warm_kl))


def on_rank(rank: int, given: Tokens, world: int) -> Tensors:
    from mla_cupy.torch.parallel import sparse_prefill, warmup_objective

    zigzag = Zigzag(given.lengths, world)
    x = {name: zigzag.split(y.detach(), rank).requires_grad_() for name, y in given.inputs().items()}
    found = sparse_prefill(*x.values(), zigzag, scale=SCALE, topk=TOPK)
    main, index = (x["q"].detach(), found.latents.detach()), (x["index_q"], found.index_k, x["weights"])
    of: dict[str, Any] = {"scale": SCALE, "lse": found.lse.detach(), "causal": False}
    sparse, sparse_kl = mla.indexer_sparse_objective(*main, *index, found.indices, **of)
    warm, warm_kl = warmup_objective(*main, *index, zigzag, scale=SCALE)
    dout = zigzag.split(given.dout(), rank)
    results = _results(x, dout, (found.out, found.lse, found.indices), (sparse, warm), (sparse_kl, warm_kl))
    for name in ("sparse", "warm"):
        results[name] = added_up(results[name])
    return results


def _results(x: Tensors, dout: torch.Tensor, main: Any, losses: Any, kls: Any) -> Tensors:
    """Results to compare between the ranks and the one process; losses are summed."""
    (out, lse, indices), (sparse, warm) = main, losses
    (out.float() * dout.float()).sum().add(sparse + warm).backward()
    found = {"out": out, "lse": lse, "indices": indices.sort(-1).values, "sparse_kl": kls[0], "warm_kl": kls[1]}
    found |= {"sparse": sparse, "warm": warm} | {f"d {name}": y.grad for name, y in x.items()}
    return {name: y.detach().float().cpu() for name, y in found.items()}
