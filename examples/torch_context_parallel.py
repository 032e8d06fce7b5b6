"""Several processes train one attention layer on one long sequence, and agree with one process.

    python -m mla_cupy.parallel --gpus 2 examples/torch_context_parallel.py

Each rank has two pieces of the sequence, an early and a late one. The ranks gather latents, and each expands the keys
and values that it attends to. Gradients of weights are added up, as for data parallelism; those of latents have been
sent to the ranks that own them. Rank 0 also trains alone, and compares the losses. `torchrun` starts it just as well.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

import mla_cupy.torch as mla
from mla_cupy.parallel import Zigzag
from mla_cupy.torch.parallel import prefill

NOPE, ROPE, VALUES, LATENT = 128, 64, 128, 512
TOLERANCE = 1e-2


class Layer(nn.Module):
    """x -> x + attention(x), causal; without RoPE's turns, for brevity."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(width, heads * (NOPE + ROPE), bias=False)
        self.to_latent = nn.Linear(width, LATENT + ROPE, bias=False)
        self.norm = nn.RMSNorm(LATENT)
        self.kv_b = nn.Parameter(torch.randn(heads * (NOPE + VALUES), LATENT) * LATENT**-0.5)
        self.to_out = nn.Linear(heads * VALUES, width, bias=False)

    def expand(self, latents: torch.Tensor, kv_b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values per head."""
        k, v = (latents @ kv_b.T).unflatten(-1, (self.heads, -1)).split([NOPE, VALUES], -1)
        return k, v

    def forward(self, x: torch.Tensor, zigzag: Zigzag | None) -> torch.Tensor:
        """`x` is (tokens, width): this rank's tokens, or the whole sequence without a `zigzag`."""
        q, q_rope = self.to_q(x).unflatten(-1, (self.heads, -1)).split([NOPE, ROPE], -1)
        latents, k_rope = self.to_latent(x).split([LATENT, ROPE], -1)
        latents, ropes = self.norm(latents), {"q_rope": q_rope, "k_rope": k_rope}
        if zigzag is None:
            out, _ = mla.mla_prefill(q, *self.expand(latents, self.kv_b), **ropes)
        else:
            out, _ = prefill(q, latents, self.expand, zigzag, parameters=(self.kv_b,), **ropes)
        return x + self.to_out(out.flatten(1))


def train(
    options: argparse.Namespace, device: torch.device, zigzag: Zigzag | None = None, rank: int = 0
) -> list[float]:
    """The losses of all steps: of the whole sequence, whoever computes it."""
    torch.manual_seed(options.seed)  # the same weights and tokens on every rank
    layer = Layer(options.width, options.heads).to(device, torch.bfloat16)
    x, target = (torch.randn(options.tokens, options.width).to(device, torch.bfloat16) for _ in range(2))
    if zigzag is not None:
        x, target = zigzag.split(x, rank), zigzag.split(target, rank)
    optimiser = torch.optim.SGD(layer.parameters(), lr=options.rate)
    losses = []
    for _ in range(options.steps):
        optimiser.zero_grad()
        loss = (layer(x, zigzag).float() - target.float()).square().sum() / (options.tokens * options.width)
        loss.backward()
        loss = loss.detach()
        if zigzag is not None:
            for tensor in (loss, *(p.grad for p in layer.parameters())):
                dist.all_reduce(tensor)
        optimiser.step()
        losses.append(float(loss))
    return losses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=150, metavar="N", help="of the sequence (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=4, metavar="N", help="query heads (default: %(default)s)")
    parser.add_argument("--width", type=int, default=256, metavar="N", help="of the inputs (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="of the optimiser (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=2.0, help="of learning (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and tokens (default: %(default)s)")
    options = parser.parse_args()
    on_gpus = torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    world, rank = dist.get_world_size(), dist.get_rank()
    together = train(options, device, Zigzag((options.tokens,), world), rank)
    dist.destroy_process_group()
    if rank:
        return 0
    alone = train(options, device)
    for step, (one, other) in enumerate(zip(together, alone, strict=True)):
        print(f"step {step}: loss {one:.5f} on {world} ranks, {other:.5f} on one")
    agreed = all(abs(one - other) < TOLERANCE * other for one, other in zip(together, alone, strict=True))
    learned = together[-1] < together[0]
    print("agreed" if agreed and learned else "DIFFERENT")
    return 0 if agreed and learned else 1


if __name__ == "__main__":
    sys.exit(main())
