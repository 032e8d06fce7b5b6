"""A decode loop in JAX: one jitted step that appends a token to a donated cache and attends to all of it.

The cache stays where it is: it is donated to the step, which writes one row of it. On a GPU, XLA can replay the step as
a CUDA graph. The script runs on the device that JAX takes by default: on the CPU with smaller sizes, in some
5 seconds.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import mla_cupy.jax as mla
from mla_cupy import reference

PAGE_SIZE, D_QK = 64, 576
SCALE = 192**-0.5  # of DeepSeek-V3, which YaRN multiplies further
TOLERANCE = 2e-2
"""Error allowed in bfloat16, relative to the largest value."""
SIZES = {
    "batch": "sequences",
    "heads": "query heads",
    "length": "tokens already in the cache",
    "steps": "tokens to decode",
}
DEFAULTS = {
    "gpu": {"batch": 8, "heads": 128, "length": 4096, "steps": 100},
    "cpu": {"batch": 2, "heads": 32, "length": 500, "steps": 20},
}


@functools.partial(jax.jit, donate_argnums=(0, 1))
def step(
    kv_cache: jax.Array, seqlens: jax.Array, q: jax.Array, latent: jax.Array, block_table: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One more token for every sequence."""
    page = jnp.take_along_axis(block_table, (seqlens // PAGE_SIZE)[:, None], axis=1)[:, 0]
    kv_cache = kv_cache.at[page, seqlens % PAGE_SIZE].set(latent)
    seqlens = seqlens + 1
    out, _lse = mla.mla_decode(q, kv_cache, block_table, seqlens, scale=SCALE)
    return kv_cache, seqlens, out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, text in SIZES.items():
        default = f"default: {DEFAULTS['gpu'][name]}; on the CPU {DEFAULTS['cpu'][name]}"
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"{text} ({default})")
    options = parser.parse_args()
    for name, size in DEFAULTS["cpu" if jax.default_backend() == "cpu" else "gpu"].items():
        setattr(options, name, size if getattr(options, name) is None else getattr(options, name))
    if options.steps < 2:
        parser.error("--steps must be at least 2")
    print(f"{options.steps} tokens for each of {options.batch} sequences on {jax.default_backend()}", flush=True)
    b, h_q = options.batch, options.heads
    rng = np.random.default_rng(0)
    max_pages = -(-(options.length + options.steps) // PAGE_SIZE)

    def random(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, dtype=np.float32), jnp.bfloat16)

    q, latent, kv_cache = random(b, 1, h_q, D_QK), random(b, D_QK), random(b * max_pages, PAGE_SIZE, D_QK)
    block_table = jnp.asarray(rng.permutation(b * max_pages).reshape(b, max_pages), jnp.int32)
    seqlens = jnp.full(b, options.length, jnp.int32)

    kv_cache, seqlens, out = step(kv_cache, seqlens, q, latent, block_table)  # traces, compiles, loads the kernels
    jax.block_until_ready(out)
    start = time.perf_counter()
    for taken in range(2, options.steps + 1):
        kv_cache, seqlens, out = step(kv_cache, seqlens, q, latent, block_table)
        if taken % 5 == 0 and jax.default_backend() == "cpu":
            jax.block_until_ready(out)
            print(f"  {taken} tokens", flush=True)
    jax.block_until_ready(out)
    microseconds = 1e6 * (time.perf_counter() - start) / (options.steps - 1)
    print(f"{options.steps - 1} steps on {jax.default_backend()}: {microseconds:.1f} us each")

    exact, _ = reference.mla_decode(*(np.asarray(x) for x in (q, kv_cache, block_table, seqlens)), scale=SCALE)
    error = np.abs(np.asarray(out).astype(np.float64) - exact).max() / np.abs(exact).max()
    print(f"lengths are now {int(seqlens[0])}; largest error of out: {error:.1e}")
    return 0 if error <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
