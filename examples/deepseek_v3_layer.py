"""One attention layer of DeepSeek-V3 decodes a prompt token by token and equals traditional MLA.

The layer has the real dimensions (hidden 7168, q_lora 1536, kv_lora 512, 128 heads, nope 128 + rope 64, v 128) and
random weights. Two ways to run it over the same prompt are compared:

  decode       one token at a time: project it, append its 576 numbers to a paged cache, absorb the query, and attend
               with mla_cupy.mla_decode, on the GPU if there is one and in NumPy otherwise;
  traditional  the whole prompt at once: keys and values of all 128 heads are materialised, 64 tokens at a time.

Projections are in float32 on the CPU in both. The queries, the cache and the result of the attention of the first one
are rounded to 16 bits, as in serving: that is the difference that remains. Takes 1 GiB of memory.
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np

import mla_cupy
from mla_cupy.dtypes import numpy_dtype
from mla_cupy.reference import MlaConfig, MlaWeights, layer, random_weights

#: The largest relative error of a token's result that rounding to 16 bits explains.
TOLERANCE = {"bfloat16": 1e-2, "float16": 1.5e-3}


class PagedCache:
    """The latents of one sequence, in pages scattered over a pool."""

    def __init__(self, max_tokens: int, page_size: int, width: int, dtype: np.dtype, rng: np.random.Generator) -> None:
        num_pages = -(-max_tokens // page_size)
        self.pool = np.full((num_pages, page_size, 1, width), np.nan, dtype)  # unused slots are never read
        self.block_table = rng.permutation(num_pages).astype(np.int32)[None]
        self.seqlens = np.zeros(1, np.int32)

    def append(self, latent: np.ndarray) -> None:
        page, slot = divmod(int(self.seqlens[0]), self.pool.shape[1])
        self.pool[self.block_table[0, page], slot, 0] = latent.astype(self.pool.dtype)
        self.seqlens += 1


def decode_token(weights: MlaWeights, hidden: np.ndarray, cache: PagedCache) -> np.ndarray:
    """The layer's result (1, hidden) for one more token with the hidden state (1, hidden)."""
    position = cache.seqlens.copy()
    cache.append(layer.project_latents(weights, hidden, position)[0])
    q = layer.absorb_queries(weights, layer.project_queries(weights, hidden, position))
    out, _ = mla_cupy.mla_decode(
        q[None].astype(cache.pool.dtype),  # (b, s_q, h_q, 576)
        cache.pool,
        cache.block_table,
        cache.seqlens,
        scale=weights.config.scale,  # 192**-0.5: absorbing makes the query wider, not the scores larger
    )
    return layer.project_output(weights, layer.expand_values(weights, out[0].astype(np.float32)))


def relative_errors(got: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """||got - expected|| / ||expected|| of each row."""
    return np.linalg.norm(got - expected, axis=-1) / np.linalg.norm(expected, axis=-1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tokens", type=int, default=24, metavar="N", help="length of the random prompt (default: %(default)s)"
    )
    parser.add_argument(
        "--page-size", type=int, default=16, metavar="N", help="tokens in a page of the cache (default: %(default)s)"
    )
    parser.add_argument(
        "--dtype", choices=TOLERANCE, default="bfloat16", help="of queries, cache and attention (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and prompt (default: %(default)s)")
    options = parser.parse_args()
    if options.tokens < 1 or options.page_size < 1:
        parser.error("--tokens and --page-size must be at least 1")

    rng = np.random.default_rng(options.seed)
    config = MlaConfig()
    start = time.perf_counter()
    weights = random_weights(config, rng, np.float32)
    print(f"random weights: {time.perf_counter() - start:.1f} s")
    hidden = rng.standard_normal((options.tokens, config.hidden), dtype=np.float32)

    width = config.kv_lora + config.d_rope
    cache = PagedCache(options.tokens, options.page_size, width, numpy_dtype(options.dtype), rng)
    start = time.perf_counter()
    decoded = np.concatenate([decode_token(weights, hidden[t : t + 1], cache) for t in range(options.tokens)])
    print(f"decode: {options.tokens} tokens, {(time.perf_counter() - start) / options.tokens * 1e3:.0f} ms each")

    start = time.perf_counter()
    traditional = layer.mla_layer(weights, hidden, "unabsorbed_chunked")
    print(f"traditional MLA: {time.perf_counter() - start:.1f} s")
    absorbed = layer.mla_layer(weights, hidden, "absorbed_chunked")

    itemsize = cache.pool.itemsize
    per_head = config.heads * (config.d_nope + config.d_rope + config.d_v)
    print(f"cache: {width * itemsize} bytes per token; keys and values per head would take {per_head * itemsize}")
    return report(relative_errors(decoded, traditional), relative_errors(absorbed, traditional), options.dtype)


def report(decode_errors: np.ndarray, absorbed_errors: np.ndarray, dtype: str) -> int:
    """Print the errors relative to traditional MLA; 0 if they are what rounding explains, else 1."""
    print(f"\n token   |decode - traditional| / |traditional|, decode in {dtype}")
    shown = np.unique(np.linspace(0, len(decode_errors) - 1, 8).astype(int))
    for t in shown:
        print(f"{t:6}   {decode_errors[t]:.2e}")
    worst = int(np.argmax(decode_errors))
    print(f" worst   {decode_errors[worst]:.2e} at token {worst}; allowed {TOLERANCE[dtype]:.1e}")
    print(f"The absorbed form without rounding to 16 bits: {absorbed_errors.max():.1e} (float32)")
    equal = bool(decode_errors[worst] <= TOLERANCE[dtype] and absorbed_errors.max() <= 1e-4)
    print("equal" if equal else "DIFFERENT")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
