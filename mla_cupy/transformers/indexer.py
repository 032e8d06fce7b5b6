"""The lightning indexer of DeepSeek sparse attention, with the arithmetic of transformers.

As the stock code: no Hadamard transform, no quantisation, products of bfloat16 added in float32, float32 weights.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch

import mla_cupy
from mla_cupy.transformers.cache import LatentLayer
from mla_cupy.transformers.families import Indexer
from mla_cupy.transformers.ragged import Ragged


class IndexStates(NamedTuple):
    """Queries [b, s, heads, d], keys [b, s, d] and the heads' weights [b, s, heads], without factors, of new tokens."""

    q: torch.Tensor
    k: torch.Tensor
    weights: torch.Tensor

    @property
    def folded(self) -> torch.Tensor:
        """Weights times the factors of the scores."""
        return self.weights * (self.q.shape[-2] * self.q.shape[-1]) ** -0.5

    def of(self, new: Ragged) -> IndexStates:
        """The states of real tokens, [n, ...]."""
        return IndexStates(*(new.take(x) for x in self))

    def detach(self) -> IndexStates:
        """Drop the gradients."""
        return IndexStates(*(x.detach() for x in self))


def index_states(indexer: Any, style: Indexer, x: torch.Tensor, read: torch.Tensor, embeddings: Any) -> IndexStates:
    """Compute an indexer's states from hidden states `x` and the input of q_b_proj."""
    if isinstance(embeddings, torch.Tensor):  # complex numbers, of deepseek_v2
        embeddings = tuple(torch.cat([part, part], -1).to(x.dtype) for part in (embeddings.real, embeddings.imag))
    q = indexer.wq_b(read).view(*x.shape[:2], indexer.n_heads, indexer.head_dim)
    norm = indexer.k_norm.weight.dtype
    k = indexer.k_norm(indexer.wk(x).to(norm)).to(x.dtype)[:, :, None]
    turned, rest = (_split(y, indexer.qk_rope_head_dim, style.rope_first) for y in (q, k))
    name = "apply_rotary_pos_emb_interleave" if style.rope == "interleaved" else "apply_rotary_pos_emb"
    both = getattr(sys.modules[type(indexer).__module__], name)(turned[0], rest[0], *embeddings, unsqueeze_dim=2)
    q, k = (
        torch.cat([a, b] if style.rope_first else [b, a], -1) for a, b in zip(both, (turned[1], rest[1]), strict=True)
    )
    weights = indexer.weights_proj(x.to(indexer.weights_proj.weight.dtype)).float()
    return IndexStates(q, k[:, :, 0], weights)


def _split(x: torch.Tensor, rope: int, rope_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns for RoPE, and the others."""
    return (x[..., :rope], x[..., rope:]) if rope_first else (x[..., -rope:], x[..., :-rope])


def select(states: IndexStates, new: Ragged, layer: LatentLayer | None, past: int, topk: int) -> torch.Tensor:
    """Positions of the keys of largest scores in their sequences, [n, topk], -1 where there are no more.

    Needs the states of real tokens, and stores the new keys, if there is a cache.
    """
    q, k, _ = states
    if layer is not None:
        layer.store.write_index_keys(layer.layer, k, layer.store.step.slots)
    sequence = new.sequence
    if layer is not None and past:
        keys, stride = layer.store.index_keys(layer.layer)
        first = sequence * stride
        last = first + layer.store.step.positions + 1
    else:
        keys, first = k, new.starts[sequence]
        last = torch.arange(1, len(k) + 1, dtype=torch.int32, device=k.device)
    weights, topk = states.folded.contiguous(), min(topk, len(keys))
    return mla_cupy.indexer_select(q, keys, weights, first.int(), last.int(), topk=topk)[0]
