"""Sparse attention with gradients in JAX: `mla_cupy.jax`, outside and inside of jit, checked against JAX itself.

The kernels run on XLA's buffers and in XLA's stream: nothing is copied, and XLA may put them into its CUDA graphs. The
script runs on the device that JAX takes by default.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import mla_cupy.jax as mla

D_QK, D_V = 576, 512

#: The largest error, relative to the largest value, that rounding to 16 bits explains.
TOLERANCE = {"bfloat16": 2e-2, "float16": 3e-3}


def sparse_attention(q: jax.Array, kv: jax.Array, indices: jax.Array, attn_sink: jax.Array) -> jax.Array:
    """out[i, h] = sum_j softmax_j(q[i, h] . kv[j] / 24) * kv[j, :512], j over the rows that indices[i] selects."""
    out, _lse, _max_logits = mla.sparse_mla_forward(q, kv, indices, scale=D_QK**-0.5, attn_sink=attn_sink)
    return out


def plain_attention(q: jax.Array, kv: jax.Array, indices: jax.Array, attn_sink: jax.Array) -> jax.Array:
    """Attention in operations that JAX can differentiate: it stores the selected rows of every query."""
    keys = kv[jnp.maximum(indices, 0)]  # (s_q, topk, 576)
    scores = jnp.einsum("shd,skd->shk", q, keys, precision="highest") * D_QK**-0.5
    scores = jnp.where((indices < 0)[:, None], -jnp.inf, scores)
    sink = jnp.broadcast_to(attn_sink[None, :, None], (*scores.shape[:2], 1))
    weights = jax.nn.softmax(jnp.concatenate((scores, sink), axis=-1), axis=-1)[..., :-1]
    return jnp.einsum("shk,skd->shd", weights, keys[..., :D_V], precision="highest")


def random_inputs(options: argparse.Namespace) -> tuple[jax.Array, ...]:
    """Queries, latents, sinks, causal indices (-1 where fewer than topk rows are visible), gradient of the result."""
    rng = np.random.default_rng(options.seed)
    s, h = options.tokens, options.heads
    q, kv, dout = (
        jnp.asarray(rng.standard_normal(shape), options.dtype) for shape in ((s, h, D_QK), (s, D_QK), (s, h, D_V))
    )
    attn_sink = jnp.asarray(rng.standard_normal(h), jnp.float32)
    indices = np.full((s, options.topk), -1, np.int32)
    for i, row in enumerate(indices):
        chosen = rng.permutation(i + 1)[: options.topk]
        row[: len(chosen)] = chosen
    return q, kv, attn_sink, jnp.asarray(indices), dout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=48, metavar="N", help="of the sequence (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=16, metavar="N", help="query heads (default: %(default)s)")
    parser.add_argument("--topk", type=int, default=24, metavar="N", help="slots of a query (default: %(default)s)")
    parser.add_argument("--dtype", choices=TOLERANCE, default="bfloat16", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs (default: %(default)s)")
    options = parser.parse_args()
    if min(options.tokens, options.heads, options.topk) < 1:
        parser.error("--tokens, --heads and --topk must be at least 1")
    q, kv, attn_sink, indices, dout = random_inputs(options)

    def with_gradients(attention: Callable[..., jax.Array], *inputs: jax.Array) -> tuple[jax.Array, ...]:
        out, pull_back = jax.vjp(lambda q, kv, sink: attention(q, kv, indices, sink), *inputs)
        return out, *pull_back(dout.astype(out.dtype))

    def ours(*inputs: jax.Array) -> tuple[jax.Array, ...]:
        return with_gradients(sparse_attention, *inputs)

    # The exact products of 16-bit numbers fit float32: what it rounds is far below the tolerance.
    exact = with_gradients(plain_attention, q.astype(jnp.float32), kv.astype(jnp.float32), attn_sink)

    (device,) = q.devices()
    print(f"{options.tokens} tokens, {options.heads} heads, top-{options.topk}, {options.dtype}, on {device.platform}")
    right = True
    for way, results in (("outside jit", ours(q, kv, attn_sink)), ("inside jit", jax.jit(ours)(q, kv, attn_sink))):
        print(f" {way}: largest errors relative to the largest values")
        for name, got, want in zip(("out", "dq", "dkv", "d_sink"), results, exact, strict=True):
            error = float(jnp.abs(got.astype(jnp.float32) - want).max() / jnp.abs(want).max())
            right &= error <= TOLERANCE[options.dtype]
            print(f"  {name:6} {error:.1e}")
    print("equal to JAX's gradients" if right else "DIFFERENT FROM JAX's gradients")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
