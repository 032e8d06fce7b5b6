"""Decode attention of a paged, ragged batch, with NumPy arrays. Runs anywhere: on the GPU if there is one."""

from __future__ import annotations

import argparse

import ml_dtypes
import numpy as np

import mla_cupy
from mla_cupy import reference

BF16 = ml_dtypes.bfloat16
PAGE_SIZE, D_QK = 64, 576
SCALE = 192**-0.5  # of DeepSeek-V3, which YaRN multiplies further


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=int, default=16, metavar="N", help="query heads (default: %(default)s)")
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=[1000, 64, 1, 0],
        metavar="N",
        help="tokens in the cache of each sequence (default: 1000 64 1 0)",
    )
    options = parser.parse_args()
    rng = np.random.default_rng(0)

    # One pool of pages serves all sequences. The block table lists the pages of each, in order.
    seqlens = np.array(options.lengths, np.int32)
    pages_of = -(-seqlens // PAGE_SIZE)
    num_pages, max_pages = int(pages_of.sum()), max(1, int(pages_of.max()))
    kv_cache = rng.standard_normal((num_pages, PAGE_SIZE, 1, D_QK)).astype(BF16)
    block_table = np.zeros((len(seqlens), max_pages), np.int32)  # entries past a sequence's end are never read
    free_pages = iter(rng.permutation(num_pages))
    for row, count in zip(block_table, pages_of, strict=True):
        row[:count] = [next(free_pages) for _ in range(count)]

    # One new token per sequence. Its absorbed query is as wide as a token in the cache: 512 latent + 64 RoPE.
    q = rng.standard_normal((len(seqlens), 1, options.heads, D_QK)).astype(BF16)

    out, lse = mla_cupy.mla_decode(q, kv_cache, block_table, seqlens, scale=SCALE)

    exact, _ = reference.mla_decode(q, kv_cache, block_table, seqlens, scale=SCALE)
    print(f"out {out.shape} {out.dtype}, lse {lse.shape} {lse.dtype}")
    for i, length in enumerate(seqlens):
        error = np.abs(out[i].astype(np.float64) - exact[i]).max()
        print(f"  {length:6} tokens: lse of head 0 = {lse[i, 0, 0]:8.4f}, largest error of out = {error:.1e}")


if __name__ == "__main__":
    main()
