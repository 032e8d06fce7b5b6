"""A decode loop in PyTorch: a plan, a cache that grows by a token per step, and a CUDA graph replayed for every token.

Every step appends a token to each sequence's cache, schedules and decodes; nothing is allocated, and the host never
waits. Without a GPU the same step runs on the CPU, without the graph, with smaller sizes and in
some 5 seconds.
"""

from __future__ import annotations

import argparse
import sys

import torch

import mla_cupy.torch as mla
from mla_cupy import reference

PAGE_SIZE, D_QK, D_V = 64, 576, 512
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


class DecodeLoop:
    """Everything that a step reads and writes: a graph remembers where it is."""

    def __init__(self, options: argparse.Namespace, device: str) -> None:
        b, h_q = options.batch, options.heads
        generator = torch.Generator().manual_seed(0)
        max_pages = -(-(options.length + options.steps) // PAGE_SIZE)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(device, torch.bfloat16)

        self.q, self.latent = random(b, 1, h_q, D_QK), random(b, D_QK)
        self.kv_cache = random(b * max_pages, PAGE_SIZE, D_QK)
        pages = torch.randperm(b * max_pages, generator=generator)
        self.block_table = pages.view(b, max_pages).to(device, torch.int32)
        self.seqlens = torch.full((b,), options.length, dtype=torch.int32, device=device)
        self.out = torch.empty((b, 1, h_q, D_V), dtype=torch.bfloat16, device=device)
        self.lse = torch.empty((b, h_q, 1), device=device)
        # The plan holds the workspace of the largest call that it will serve.
        self.plan = mla.plan_decode(
            max_b=b, s_q=1, h_q=h_q, max_pages=max_pages, page_size=PAGE_SIZE, dtype=torch.bfloat16, device=device
        )

    def step(self) -> None:
        """One more token for every sequence."""
        position = self.seqlens.long()
        page = self.block_table.gather(1, (position // PAGE_SIZE)[:, None])[:, 0].long()
        self.kv_cache[page, position % PAGE_SIZE] = self.latent
        self.seqlens += 1
        self.plan.update(self.seqlens)  # once per token; a model's layers share it
        mla.mla_decode(
            self.q,
            self.kv_cache,
            self.block_table,
            self.seqlens,
            plan=self.plan,
            out=self.out,
            lse=self.lse,
            scale=SCALE,
        )


def run_in_graph(loop: DecodeLoop, steps: int) -> None:
    """The first step loads the kernels, which a capture must not do; all others are replays."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loop.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loop.step()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(steps - 1):
        graph.replay()
    stop.record()
    stop.synchronize()
    print(f"{steps - 1} replays of the graph: {1000 * start.elapsed_time(stop) / (steps - 1):.1f} us each")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, text in SIZES.items():
        default = f"default: {DEFAULTS['gpu'][name]}; on the CPU {DEFAULTS['cpu'][name]}"
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"{text} ({default})")
    parser.add_argument("--device", help="default: cuda if PyTorch has a GPU, else cpu")
    options = parser.parse_args()
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    for name, size in DEFAULTS["cpu" if device == "cpu" else "gpu"].items():
        setattr(options, name, size if getattr(options, name) is None else getattr(options, name))
    if options.steps < 2:
        parser.error("--steps must be at least 2")
    print(f"{options.steps} tokens for each of {options.batch} sequences on {device}", flush=True)
    loop = DecodeLoop(options, device)
    if device == "cpu":
        for step in range(options.steps):
            loop.step()
            if step % 5 == 4:
                print(f"  {step + 1} tokens", flush=True)
    else:
        run_in_graph(loop, options.steps)

    arrays = (loop.q.float(), loop.kv_cache.float(), loop.block_table, loop.seqlens)
    exact, _ = reference.mla_decode(*(x.cpu().numpy() for x in arrays), scale=SCALE)
    want = torch.from_numpy(exact)
    error = float((loop.out.cpu().double() - want).abs().max() / want.abs().max())
    print(f"lengths are now {int(loop.seqlens[0])}; largest error of out: {error:.1e}")
    return 0 if error <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
