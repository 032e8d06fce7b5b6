"""Training steps through sparse attention in PyTorch: one attention layer learns to imitate a target.

The layer projects its inputs to absorbed queries and latents, attends to the rows that indices select, and projects
back. Forward and backward of the attention are kernels of the package; optimiser and projections are PyTorch's. With
--compile the whole layer becomes one graph of torch.compile.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import nn

import mla_cupy.torch as mla

D_QK, D_V = 576, 512


class SparseLayer(nn.Module):
    """x -> x + attention(x), over given rows of the same sequence."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(width, heads * D_QK, bias=False)
        self.to_latent = nn.Linear(width, D_QK, bias=False)
        self.to_out = nn.Linear(heads * D_V, width, bias=False)
        self.sink = nn.Parameter(torch.zeros(heads))

    def forward(self, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """`x` is (tokens, width), bfloat16."""
        q = self.to_q(x).view(-1, self.heads, D_QK)
        out, _lse, _max_logits = mla.sparse_mla_forward(
            q, self.to_latent(x), indices, scale=D_QK**-0.5, attn_sink=self.sink, causal=True
        )
        return x + self.to_out(out.flatten(1))


def causal_selection(tokens: int, topk: int, generator: torch.Generator) -> torch.Tensor:
    """Random rows up to each token's own; -1 where there are fewer than topk. An indexer would choose them."""
    indices = torch.full((tokens, topk), -1, dtype=torch.int32)
    for i, row in enumerate(indices):
        chosen = torch.randperm(i + 1, generator=generator)[:topk]
        row[: len(chosen)] = chosen
    return indices


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=48, metavar="N", help="of the sequence (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=4, metavar="N", help="query heads (default: %(default)s)")
    parser.add_argument("--topk", type=int, default=16, metavar="N", help="slots of a query (default: %(default)s)")
    parser.add_argument("--width", type=int, default=64, metavar="N", help="of the inputs (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=30, metavar="N", help="of the optimiser (default: %(default)s)")
    parser.add_argument("--compile", action="store_true", help="run the layer through torch.compile")
    parser.add_argument("--device", help="default: cuda if PyTorch has a GPU, else cpu")
    options = parser.parse_args()
    if min(options.tokens, options.heads, options.topk, options.width) < 1 or options.steps < 2:
        parser.error("--tokens, --heads, --topk and --width must be at least 1, and --steps at least 2")
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    layer = SparseLayer(options.width, options.heads).to(device)
    x, target = (torch.randn(options.tokens, options.width, generator=generator).to(device) for _ in range(2))
    indices = causal_selection(options.tokens, options.topk, generator).to(device)
    run = torch.compile(layer, fullgraph=True) if options.compile else layer
    optimizer = torch.optim.Adam(layer.parameters(), lr=3e-3)

    losses = []
    for _ in range(options.steps):
        optimizer.zero_grad()
        with torch.autocast(device.partition(":")[0], torch.bfloat16):  # weights stay in float32
            loss = nn.functional.mse_loss(run(x.bfloat16(), indices).float(), target)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    print(f"{options.steps} steps on {device}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    learned = losses[-1] < 0.7 * losses[0]
    print("the layer learns" if learned else "the layer DOES NOT learn")
    return 0 if learned else 1


if __name__ == "__main__":
    sys.exit(main())
