"""Sequences of MLA's tokens for context-parallel prefill: one process's results, and a rank's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import mla_cupy.torch as mla
from mla_cupy.ops.groups import Packed
from mla_cupy.parallel import Zigzag

HEADS, LATENT, NOPE, ROPE, VALUES = 2, 64, 128, 64, 128
SCALE = (NOPE + ROPE) ** -0.5
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Sequences:
    """Packed sequences of random tokens, and the gradients that reach their attention."""

    lengths: tuple[int, ...]
    place: str = "cpu"
    seed: int = 0

    def inputs(self) -> Tensors:
        """Queries, latents, weights; each requires grad."""
        n = sum(self.lengths)
        shapes = {"q": (n, HEADS, NOPE), "q_rope": (n, HEADS, ROPE), "latents": (n, LATENT), "k_rope": (n, ROPE)}
        shapes["w"] = (HEADS * (NOPE + VALUES), LATENT)
        made = self._random(shapes)
        made["w"] *= LATENT**-0.5
        return {name: x.bfloat16().requires_grad_() for name, x in made.items()}

    def cotangents(self) -> Tensors:
        n = sum(self.lengths)
        made = self._random({"out": (n, HEADS, VALUES), "lse": (n, HEADS)})
        return {"out": made["out"].bfloat16(), "lse": made["lse"]}

    def packed(self) -> Packed:
        starts = torch.tensor([0, *self.lengths], device=self.place).cumsum(0, dtype=torch.int32)
        return Packed(starts, starts)

    def _random(self, shapes: dict[str, tuple[int, ...]]) -> Tensors:
        generator = torch.Generator().manual_seed(self.seed)
        return {name: torch.randn(shape, generator=generator).to(self.place) for name, shape in shapes.items()}


def expand(latents: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values per head."""
    kv = (latents @ w.T).unflatten(-1, (HEADS, NOPE + VALUES))
    return kv[..., :NOPE], kv[..., NOPE:]


def in_one(given: Sequences) -> Tensors:
    """Results and gradients of one process."""
    inputs = given.inputs()
    k, v = expand(inputs["latents"], inputs["w"])
    of = {"q_rope": inputs["q_rope"], "k_rope": inputs["k_rope"], "packed": given.packed(), "scale": SCALE}
    out, lse = mla.mla_prefill(inputs["q"], k, v, **of)
    return _with_gradients(out, lse, given.cotangents(), inputs)


def on_rank(
    rank: int, given: Sequences, world: int, chunk_tokens: int = 1 << 14, deterministic: bool | None = None
) -> Tensors:
    """Results and gradients of a rank; gradients of weights are summed over the group."""
    from mla_cupy.torch.parallel import prefill

    zigzag = Zigzag(given.lengths, world)
    whole = given.inputs()
    inputs = {name: zigzag.split(x.detach(), rank).requires_grad_() for name, x in whole.items() if name != "w"}
    inputs["w"] = whole["w"]
    of = {"q_rope": inputs["q_rope"], "k_rope": inputs["k_rope"], "parameters": (inputs["w"],), "scale": SCALE}
    options = {"chunk_tokens": chunk_tokens + rank, "deterministic": deterministic}  # ranks may differ
    out, lse = prefill(inputs["q"], inputs["latents"], expand, zigzag, **options, **of)
    cotangents = {name: zigzag.split(x, rank) for name, x in given.cotangents().items()}
    found = _with_gradients(out, lse, cotangents, inputs)
    if world > 1:
        found["d w"] = added_up(found["d w"])
    return found


def added_up(x: torch.Tensor) -> torch.Tensor:
    """Sum over the ranks, on the host."""
    x = x.cuda() if dist.get_backend() == "nccl" else x
    dist.all_reduce(x)
    return x.cpu()


def joined(ranks: list[Tensors], zigzag: Zigzag, shared: tuple[str, ...]) -> Tensors:
    """Rows of all ranks in the sequences' order; `shared` results are the same on every rank."""
    return {
        name: ranks[0][name] if name in shared else zigzag.join(torch.cat([of[name] for of in ranks]))
        for name in ranks[0]
    }


def _with_gradients(out: torch.Tensor, lse: torch.Tensor, cotangents: Tensors, inputs: Tensors) -> Tensors:
    torch.autograd.backward((out, lse), (cotangents["out"], cotangents["lse"]))
    results: dict[str, Any] = {"out": out.detach(), "lse": lse.detach()}
    results |= {f"d {name}": x.grad for name, x in inputs.items()}
    return {name: x.float().cpu() for name, x in results.items()}


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative norm of the difference."""
    return float((found - expected).norm() / expected.norm().clamp(min=1e-30))
