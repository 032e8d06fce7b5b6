"""Continuous batching over `PagedKVCache`: requests arrive, share prompts, fork into samples, and leave.

Every step decodes one token of each running sequence: extend, append, attend. Prompts begin with one of a few system
prompts, whose pages are found by their hash; a request asks for one to three samples, which share its prompt's pages.
The attention is one layer with random weights: what it shows is who has which page. With `--topk`, each token attends
to as many that an indexer selects: latent records and index keys then lie in two pools under the same block table.
(`dsa_decode.py` has the launches of such a step in one CUDA graph.) `--plot` draws the use of the pool over the steps.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from rich.live import Live
from rich.table import Table

import mla_cupy
from mla_cupy import CacheFullError, PagedKVCache

D_LATENT, D_ROPE = 512, 64
INDEX_HEADS, INDEX_DIM = 4, 128
POOLS = {"kv": "v32", "indexer": "indexer"}
PAGES = ("used", "cached", "free")


@dataclass
class Course:
    """Tokens and time of the latest steps, and of every step the pages used, cached and free, and tokens per second."""

    latest: deque[tuple[float, int]] = field(default_factory=lambda: deque([(time.perf_counter(), 0)], maxlen=20))
    pages: list[tuple[int, ...]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    def add(self, generated: int, stats: mla_cupy.CacheStats) -> None:
        self.latest.append((time.perf_counter(), generated))
        (begin, before), (end, after) = self.latest[0], self.latest[-1]
        self.rates.append((after - before) / max(end - begin, 1e-9))
        self.pages.append(tuple(getattr(stats, f"pages_{name}") for name in PAGES))


@dataclass
class Loop:
    """The requests that run, and the counts that the table shows."""

    cache: PagedKVCache
    heads: int
    rng: random.Random
    arrays: Any  # NumPy or CuPy
    topk: int = 0  # 0: attention to all tokens
    running: dict[int, int] = field(default_factory=dict)  # sequence -> tokens to go
    step: int = 0
    arrived: int = 0
    finished: int = 0
    waited: int = 0
    generated: int = 0
    cached: int = 0
    course: Course = field(default_factory=Course)

    def numbers(self, *shape: int, dtype: Any = np.float16) -> Any:
        """Numbers that stand for what a model would have computed."""
        made = np.random.default_rng(self.step).standard_normal(shape, np.float32).astype(dtype)
        return self.arrays.asarray(made)

    def arrive(self, system_prompts: list[list[int]]) -> None:
        """A request: its prompt is written, but for what is cached, and forked into samples."""
        prompt = [
            *self.rng.choice(system_prompts),
            *(self.rng.randrange(1 << 16) for _ in range(self.rng.randint(1, 30))),
        ]
        sequence = None
        try:
            sequence, cached = self.cache.allocate(prompt)
            self._write([sequence], len(prompt) - cached)
            self.cache.commit(sequence, prompt)
            samples = [sequence, *self.cache.fork(sequence, self.rng.randint(0, 2))]
        except CacheFullError:  # it would wait in a queue
            self.waited += 1
            if sequence is not None:
                self.cache.free([sequence])
            return
        self.arrived, self.cached = self.arrived + 1, self.cached + cached
        self.running.update({sample: self.rng.randint(5, 40) for sample in samples})

    def decode(self) -> None:
        """One token of every sequence. Where pages are short, the youngest sequence makes room."""
        while self.running:
            try:
                step = self._write(list(self.running), 1)
                break
            except CacheFullError:
                youngest = list(self.running)[-1]
                self.cache.free([youngest])
                del self.running[youngest]
                self.waited += 1
        else:
            return
        q = self.numbers(len(self.running), 1, self.heads, D_LATENT + D_ROPE)
        if self.topk:
            self._attend_to_selected(q, step)
        else:
            mla_cupy.mla_decode(q, self.cache.layer(0), step.block_table, step.seqlens, scale=192**-0.5)
        self.generated += len(self.running)
        self.running = {sequence: left - 1 for sequence, left in self.running.items()}
        done = [sequence for sequence, left in self.running.items() if left == 0]
        self.cache.free(done)
        self.finished += len(done)
        for sequence in done:
            del self.running[sequence]

    def _attend_to_selected(self, q: Any, step: Any) -> None:
        b = len(self.running)
        index_q = self.numbers(b, INDEX_HEADS, INDEX_DIM, dtype=ml_dtypes.bfloat16)
        weights, angles = self.numbers(b, INDEX_HEADS, dtype=np.float32), np.zeros((1, INDEX_DIM // 8), np.float32)
        unturned = (self.arrays.asarray(x) for x in (np.cos(angles), np.sin(angles)))
        codes, folded = mla_cupy.indexer_prepare_q(index_q, weights, *unturned, step.positions)
        keys = self.cache.layer(0, "indexer")
        queries = codes[:, None], keys, folded[:, None]
        slots, _ = mla_cupy.indexer_select_paged(*queries, step.seqlens, step.block_table, topk=self.topk)
        mla_cupy.sparse_mla_decode(q, self.cache.layer(0, "kv"), slots, scale=192**-0.5)

    def _write(self, sequences: list[int], count: int) -> Any:
        step = self.cache.extend(sequences, count)
        n = len(step.slots)
        self.cache.append(step, 0, self.numbers(n, D_LATENT), self.numbers(n, D_ROPE))
        if self.topk:
            self.cache.append_keys(step, 0, self.numbers(n, INDEX_DIM, dtype=ml_dtypes.bfloat16))
        return step

    def table(self) -> Table:
        """Table of what happens, for the terminal."""
        stats = self.cache.stats()
        made = Table("what", "now", title=f"step {self.step}")
        for what, value in (
            ("requests that have arrived", f"{self.arrived}"),
            ("their samples running, finished", f"{len(self.running)}, {self.finished}"),
            ("postponed for lack of pages", f"{self.waited}"),
            ("pages used, cached, free", f"{stats.pages_used}, {stats.pages_cached}, {stats.pages_free}"),
            ("pages shared", f"{stats.pages_shared}"),
            ("pages copied on write, evicted", f"{stats.copies}, {stats.evictions}"),
            ("prompt tokens found in the cache", f"{self.cached}"),
            ("tokens per second, in the latest steps", f"{self.course.rates[-1]:.0f}" if self.course.rates else ""),
        ):
            made.add_row(what, value)
        return made


def plot(course: Course, path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(2, sharex=True, figsize=(7, 5), layout="constrained")
    steps = range(1, len(course.rates) + 1)
    top.stackplot(steps, *zip(*course.pages, strict=True), labels=PAGES)
    top.set(ylabel="pages")
    top.legend(loc="lower left")
    bottom.plot(steps, course.rates)
    bottom.set(xlabel="step", ylabel="tokens per second", ylim=(0, None))
    bottom.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--pages", type=int, default=128)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--topk", type=int, default=0, help="attend to as many selected tokens; 0, the default: to all")
    parser.add_argument("--arrivals", type=float, default=0.5, help="requests per step, on average")
    parser.add_argument("--device", default=None, help='"cpu", or none for the current GPU, if there is one')
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw pages and tokens per second over the steps")
    options = parser.parse_args()

    rng = random.Random(options.seed)
    cache = PagedKVCache(
        POOLS if options.topk else "fp16",
        num_pages=options.pages,
        page_size=options.page_size,
        max_seqs=64,
        max_pages=32,
        device=options.device,
    )
    arrays: Any = np
    if not isinstance(cache.seqlens, np.ndarray):
        import cupy

        arrays = cupy
    loop = Loop(cache, options.heads, rng, arrays, options.topk)
    system_prompts = [[rng.randrange(1 << 16) for _ in range(length)] for length in (40, 70, 100)]
    with Live(loop.table(), refresh_per_second=4) as live:
        for loop.step in range(1, options.steps + 1):
            if rng.random() < options.arrivals:
                loop.arrive(system_prompts)
            loop.decode()
            loop.course.add(loop.generated, cache.stats())
            live.update(loop.table())
    cache.verify()
    copies = cache.stats().copies
    cache.free(list(loop.running))
    if options.plot:
        plot(loop.course, options.plot)
    requests = f"{loop.arrived} requests, {loop.generated} tokens"
    print(f"\n{requests}; {copies} pages copied, {loop.cached} tokens reused")


if __name__ == "__main__":
    main()
