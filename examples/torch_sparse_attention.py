"""Sparse attention with gradients in PyTorch: `mla_cupy.torch`, eager and compiled, checked against autograd.

The script compares result and gradients with the same attention written in plain PyTorch, in float64, on a
small case: on PyTorch's GPU if it has one, else on the CPU.
"""

from __future__ import annotations

import argparse
import sys

import torch

import mla_cupy.torch as mla

D_QK, D_V = 576, 512

#: The largest error, relative to the largest value, that rounding to 16 bits explains.
TOLERANCE = {"bfloat16": 2e-2, "float16": 3e-3}


def sparse_attention(q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, attn_sink: torch.Tensor) -> torch.Tensor:
    """out[i, h] = sum_j softmax_j(q[i, h] . kv[j] / 24) * kv[j, :512], j over the rows that indices[i] selects."""
    out, _lse, _max_logits = mla.sparse_mla_forward(q, kv, indices, scale=D_QK**-0.5, attn_sink=attn_sink)
    return out


def plain_attention(q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, attn_sink: torch.Tensor) -> torch.Tensor:
    """Attention in operations that autograd knows: it stores the selected rows of every query."""
    keys = kv[indices.clamp(min=0)]  # (s_q, topk, 576)
    scores = torch.einsum("shd,skd->shk", q, keys) * D_QK**-0.5
    scores = scores.masked_fill((indices < 0)[:, None], float("-inf"))
    sink = attn_sink[None, :, None].expand(len(q), -1, 1)
    weights = torch.cat((scores, sink), dim=-1).softmax(dim=-1)[..., :-1]
    return torch.einsum("shk,skd->shd", weights, keys[..., :D_V])


def random_inputs(options: argparse.Namespace, device: str) -> tuple[torch.Tensor, ...]:
    """Queries, latents, sinks, causal indices (-1 where fewer than topk rows are visible), gradient of the result."""
    generator = torch.Generator().manual_seed(options.seed)
    dtype = getattr(torch, options.dtype)
    s, h = options.tokens, options.heads
    q, kv, dout = (
        torch.randn(shape, generator=generator).to(device, dtype) for shape in ((s, h, D_QK), (s, D_QK), (s, h, D_V))
    )
    attn_sink = torch.randn(h, generator=generator).to(device)
    indices = torch.full((s, options.topk), -1, dtype=torch.int32)
    for i, row in enumerate(indices):
        chosen = torch.randperm(i + 1, generator=generator)[: options.topk]
        row[: len(chosen)] = chosen
    return q, kv, attn_sink, indices.to(device), dout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=48, metavar="N", help="of the sequence (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=16, metavar="N", help="query heads (default: %(default)s)")
    parser.add_argument("--topk", type=int, default=24, metavar="N", help="slots of a query (default: %(default)s)")
    parser.add_argument("--dtype", choices=TOLERANCE, default="bfloat16", help="default: %(default)s")
    parser.add_argument("--device", help="default: cuda if PyTorch has a GPU, else cpu")
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs (default: %(default)s)")
    options = parser.parse_args()
    if min(options.tokens, options.heads, options.topk) < 1:
        parser.error("--tokens, --heads and --topk must be at least 1")
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")

    q, kv, attn_sink, indices, dout = random_inputs(options, device)
    exact_leaves = [x.double().requires_grad_() for x in (q, kv, attn_sink)]
    exact = plain_attention(exact_leaves[0], exact_leaves[1], indices, exact_leaves[2])
    exact.backward(dout.double())

    print(f"{options.tokens} tokens, {options.heads} heads, top-{options.topk}, {options.dtype}, on {device}")
    right = True
    # Nothing is generated here, so that the simplest of the compilers will do; a model takes the default.
    compiled = torch.compile(sparse_attention, fullgraph=True, backend="aot_eager")
    for way, attention in (("eager", sparse_attention), ("compiled", compiled)):
        leaves = [x.clone().requires_grad_() for x in (q, kv, attn_sink)]
        out = attention(leaves[0], leaves[1], indices, leaves[2])
        out.backward(dout)
        print(f" {way}: largest errors relative to the largest values")
        pairs = [(x.grad, y.grad) for x, y in zip(leaves, exact_leaves, strict=True)]
        for name, (got, want) in zip(("out", "dq", "dkv", "d_sink"), [(out, exact), *pairs], strict=True):
            error = float((got.detach().double() - want.detach()).abs().max() / want.detach().abs().max())
            right &= error <= TOLERANCE[options.dtype]
            print(f"  {name:6} {error:.1e}")
    print("equal to autograd" if right else "DIFFERENT FROM autograd")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
