"""Several processes decode one attention layer of DeepSeek-V3 over one long prompt, and agree with one process.

    python -m mla_cupy.parallel --gpus 2 examples/context_parallel.py

The tokens of the prompt are shared out: token t is in the cache of rank t % world. Every rank attends with all heads to
its own tokens; one exchange later it has the result of its own heads over all of them. With `--project-first` the
partial results are multiplied by W_UV before the exchange, which is linear: 128 numbers per head travel, not 512.

On GPUs the exchange goes through the peers' memory; without them, or where they do not suffice, everything runs in
NumPy and the exchange goes through the processes' rendezvous. Rank 0 also decodes alone, and compares.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import ml_dtypes
import numpy as np

import mla_cupy
from mla_cupy.parallel import ContextParallel, HostTransport, PeerTransport, Rendezvous
from mla_cupy.reference import MlaConfig, MlaWeights, layer, random_weights

PAGE = 64
TOLERANCE = 2e-2
"""Rounding of a result to bfloat16, and of partial ones that were projected in float32."""


def shard(latents: np.ndarray, world: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """A rank's cache, (num_pages, PAGE, 576), and its block table, (1, num_pages)."""
    mine = latents[rank::world]
    num_pages = max(1, -(-len(mine) // PAGE))
    cache = np.zeros((num_pages * PAGE, latents.shape[1]), latents.dtype)
    cache[: len(mine)] = mine
    return cache.reshape(num_pages, PAGE, -1), np.arange(num_pages, dtype=np.int32)[None]


def attend(
    context: ContextParallel, weights: MlaWeights, arrays: list[Any], project_first: bool, to_host: Any
) -> np.ndarray:
    """The values of this rank's heads, (heads / world, 128), for the one query."""
    scale, shard = weights.config.scale, mla_cupy.Shard(context.world, context.rank)
    heads = weights.config.heads // context.world
    mine = slice(context.rank * heads, (context.rank + 1) * heads)
    if project_first:
        out, lse = mla_cupy.mla_decode(*arrays, scale=scale, shard=shard, out_dtype="float32")
        values = expand(weights, to_host(out)[0], slice(None))[None].astype(np.float32)
        out, _ = context.merge(like(arrays[0], values), lse)
        return np.asarray(to_host(out))[0, 0]
    out, _ = context.decode(*arrays, scale=scale)
    return expand(weights, to_host(out)[0].astype(np.float32), mine)[0]


def expand(weights: MlaWeights, out: np.ndarray, heads: slice) -> np.ndarray:
    """W_UV of some heads: (tokens, heads, 512) -> (tokens, heads, 128)."""
    return np.einsum("thc,hcv->thv", out, weights.v_up[heads])


def like(model: Any, x: np.ndarray) -> Any:
    """`x` as an array of the library of `model`."""
    if isinstance(model, np.ndarray):
        return x
    import cupy

    return cupy.asarray(x)


def place(group: Rendezvous, arrays: list[np.ndarray], rows: int) -> tuple[ContextParallel, list[Any], Any]:
    """The context, the arrays where it works, and what brings results back."""
    if gpus() < group.world:
        return ContextParallel(HostTransport(group)), list(arrays), np.asarray
    import cupy

    cupy.cuda.Device(group.rank).use()
    transport = PeerTransport(group, max_rows=rows)
    return ContextParallel(transport), [cupy.asarray(x) for x in arrays], cupy.asnumpy


def gpus() -> int:
    """Number of GPUs that CuPy sees."""
    try:
        import cupy

        return int(cupy.cuda.runtime.getDeviceCount())
    except Exception:  # no CuPy, no driver, no GPU
        return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2000, metavar="N", help="of the prompt (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=128, metavar="N", help="of the layer (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=7168, metavar="N", help="width of it (default: %(default)s)")
    parser.add_argument("--project-first", action="store_true", help="project the values before the exchange")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and prompt (default: %(default)s)")
    options = parser.parse_args()
    with Rendezvous.from_environment() as group:
        return run(group, options)


def run(group: Rendezvous, options: argparse.Namespace) -> int:
    rng = np.random.default_rng(options.seed)  # the same on every rank
    config = MlaConfig(hidden=options.hidden, heads=options.heads)
    weights = random_weights(config, rng, np.float32)
    hidden = rng.standard_normal((options.tokens, config.hidden), dtype=np.float32)
    positions = np.arange(options.tokens)
    latents = layer.project_latents(weights, hidden, positions).astype(ml_dtypes.bfloat16)
    q = layer.project_queries(weights, hidden[-1:], positions[-1:])
    q = layer.absorb_queries(weights, q)[None].astype(ml_dtypes.bfloat16)
    seqlens = np.array([options.tokens], np.int32)
    context, arrays, to_host = place(group, [q, *shard(latents, group.world, group.rank), seqlens], config.heads)
    values = attend(context, weights, arrays, options.project_first, to_host)
    gathered = group.gather(np.ascontiguousarray(values, np.float32).tobytes())
    if group.rank:
        return 0
    together = np.concatenate([np.frombuffer(x, np.float32).reshape(values.shape) for x in gathered])
    alone, _ = mla_cupy.mla_decode(q, *shard(latents, 1, 0), seqlens, scale=config.scale, out_dtype="float32")
    expected = layer.expand_values(weights, alone[0])[0]
    error = float(np.linalg.norm(together - expected) / np.linalg.norm(expected))
    where = type(context.transport).__name__
    print(f"{options.tokens} tokens on {group.world} ranks by {where}: relative error {error:.1e}")
    print("agreed" if error < TOLERANCE else "DIFFERENT")
    return 0 if error < TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
