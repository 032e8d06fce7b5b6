"""A decode loop with CuPy arrays: a plan, preallocated results, and a CUDA graph replayed for every token.

Needs an NVIDIA GPU and CuPy. Every step makes each sequence one token longer, schedules on the device, and decodes;
nothing is allocated and the host never waits. (A real loop would also write the new tokens into the cache.)
"""

from __future__ import annotations

import argparse
import sys

import cupy as cp
import numpy as np

import mla_cupy
from mla_cupy import reference

PAGE_SIZE, D_QK, D_V = 64, 576, 512
SCALE = 192**-0.5  # of DeepSeek-V3, which YaRN multiplies further


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="sequences (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=128, metavar="N", help="query heads (default: %(default)s)")
    parser.add_argument(
        "--length", type=int, default=4096, metavar="N", help="tokens already in the cache (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="tokens to decode (default: %(default)s)")
    options = parser.parse_args()
    if options.steps < 2:
        parser.error("--steps must be at least 2")
    if not cp.cuda.is_available():
        sys.exit("cupy_decode.py needs an NVIDIA GPU, and found none; numpy_decode.py needs none")
    b, h_q = options.batch, options.heads

    # Random numbers come from the host in half precision: the pool is the only large array.
    rng = np.random.default_rng(0)
    max_pages = -(-(options.length + options.steps) // PAGE_SIZE)
    num_pages = b * max_pages
    q = cp.asarray(rng.standard_normal((b, 1, h_q, D_QK), dtype=np.float32).astype(np.float16))
    kv_cache = cp.asarray(rng.standard_normal((num_pages, PAGE_SIZE, 1, D_QK), dtype=np.float32).astype(np.float16))
    block_table = cp.asarray(rng.permutation(num_pages).reshape(b, max_pages).astype(np.int32))
    seqlens = cp.full(b, options.length, np.int32)

    # The plan holds the workspace for the largest call that it will serve; `update` splits the work for these lengths.
    plan = mla_cupy.plan_decode(max_b=b, s_q=1, h_q=h_q, max_pages=max_pages, page_size=PAGE_SIZE, dtype=q.dtype.name)
    out = cp.empty((b, 1, h_q, D_V), q.dtype)
    lse = cp.empty((b, h_q, 1), np.float32)
    print(f"workspace: {plan.workspace_bytes / 2**20:.1f} MiB")

    def step() -> None:
        cp.add(seqlens, 1, out=seqlens)
        plan.update(seqlens)
        mla_cupy.mla_decode(q, kv_cache, block_table, seqlens, plan=plan, out=out, lse=lse, scale=SCALE)

    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.get_current_stream().synchronize()  # the arrays above were made on another stream
    with stream:
        step()  # the first call loads the kernels, which a capture must not do
        stream.begin_capture()
        step()
        graph = stream.end_capture()

        start, stop = cp.cuda.Event(), cp.cuda.Event()
        start.record(stream)
        for _ in range(options.steps - 1):
            graph.launch(stream)
        stop.record(stream)
        stop.synchronize()
    microseconds = 1000 * cp.cuda.get_elapsed_time(start, stop) / (options.steps - 1)
    print(f"{options.steps - 1} replays of the graph: {microseconds:.1f} us each")

    exact, _ = reference.mla_decode(q.get(), kv_cache.get(), block_table.get(), seqlens.get(), scale=SCALE)
    print(f"lengths are now {int(seqlens[0])}; largest error of out: {np.abs(out.get() - exact).max():.1e}")


if __name__ == "__main__":
    main()
