"""A serving loop in PyTorch: continuous batching, shared prefixes, and a CUDA graph for each size of batch.

Requests arrive with a system prompt that others have, too. A step first admits what fits, then decodes one token of
every running request. The model is small and random; in the end each request's logits are compared with attention
without any cache. Without a GPU the same loop runs on the CPU, without graphs, in some 5 seconds.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

import mla_cupy.torch as mla
from mla_cupy import CacheFullError, PagedKVCache

VOCABULARY, HIDDEN, D_LATENT, D_ROPE = 512, 256, 512, 64
SCALE = 192**-0.5
PAGE_SIZE, MAX_PAGES = 16, 8
TOLERANCE = 3e-2
"""Error allowed in logits of 16 bits, relative to the largest."""


@dataclass
class Request:
    """A prompt, and what has been generated; `logits` has a row for each generated token."""

    prompt: list[int]
    wanted: int
    generated: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)


class Model:
    """Layers of absorbed MLA with random weights."""

    def __init__(self, layers: int, heads: int, device: str) -> None:
        generator = torch.Generator().manual_seed(0)

        def weights(*shape: int) -> torch.Tensor:
            scaled = torch.randn(shape, generator=generator) * shape[0] ** -0.5
            return scaled.to(device, torch.bfloat16)

        self.heads, self.embedding = heads, weights(VOCABULARY, HIDDEN) * VOCABULARY**0.5
        self.layers = [
            {
                "q": weights(HIDDEN, heads * (D_LATENT + D_ROPE)),
                "latent": weights(HIDDEN, D_LATENT),
                "rope": weights(HIDDEN, D_ROPE),
                "out": weights(heads * D_LATENT, HIDDEN),
            }
            for _ in range(layers)
        ]
        angles = torch.arange(PAGE_SIZE * MAX_PAGES)[:, None] * 10000.0 ** (-torch.arange(D_ROPE // 2) / (D_ROPE // 2))
        self.cos, self.sin = angles.cos().to(device), angles.sin().to(device)

    def turned(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """RoPE of the last 64 columns, (tokens, heads, width)."""
        pairs = x[..., -D_ROPE:].float().unflatten(-1, (-1, 2))
        cos, sin = self.cos[positions.long(), None], self.sin[positions.long(), None]
        left, right = pairs.unbind(-1)
        turned = torch.stack((left * cos - right * sin, left * sin + right * cos), -1).flatten(-2)
        return torch.cat((x[..., :-D_ROPE], turned.to(x.dtype)), -1)

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Any) -> torch.Tensor:
        """Logits of each token; `attend(layer, q, latent, rope)` returns (tokens, heads, 512)."""
        hidden = self.embedding[tokens.long()]
        for number, layer in enumerate(self.layers):
            normed = torch.nn.functional.rms_norm(hidden, (HIDDEN,))
            q = (normed @ layer["q"]).view(-1, self.heads, D_LATENT + D_ROPE)
            rows = attend(number, self.turned(q, positions), normed @ layer["latent"], normed @ layer["rope"])
            hidden = hidden + rows.flatten(1) @ layer["out"]
        return torch.nn.functional.rms_norm(hidden, (HIDDEN,)) @ self.embedding.T

    def without_cache(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits by attention over whole sequences."""
        positions = torch.arange(len(tokens), device=tokens.device)

        def attend(number: int, q: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
            keys = torch.cat((latent, self.turned(rope[:, None], positions)[:, 0]), -1)
            scores = torch.einsum("ihd,jd->hij", q.float(), keys.float()) * SCALE
            hidden = torch.ones(len(tokens), len(tokens), dtype=torch.bool, device=tokens.device).triu(1)
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            return torch.einsum("hij,jd->ihd", weights, latent.float()).to(q.dtype)

        return self(tokens, positions, attend)


class Bucket:
    """A decode step of up to `size` requests. Its inputs stay where they are, so that a CUDA graph can hold them.

    Rows without a request have length 0 and slot -1: attention returns zeros for them, and nothing is written.
    """

    def __init__(self, model: Model, cache: PagedKVCache, size: int) -> None:
        device = cache.seqlens.device

        def integers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.model, self.cache, self.size = model, cache, size
        self.tokens, self.positions, self.slots, self.seqlens = (integers(size) for _ in range(4))
        self.slots.fill_(-1)
        self.block_table = integers(size, MAX_PAGES)
        self.plan = mla.plan_decode(
            max_b=size,
            s_q=1,
            h_q=model.heads,
            max_pages=MAX_PAGES,
            page_size=PAGE_SIZE,
            dtype=torch.bfloat16,
            device=device,
        )
        self.graph = self.captured() if device.type == "cuda" else None

    def captured(self) -> torch.cuda.CUDAGraph:
        """The first run loads kernels, which a capture must not do."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run()
        return graph

    def run(self) -> None:
        """One token of each row."""
        self.plan.update(self.seqlens)  # once; all layers have these lengths
        self.logits = self.model(self.tokens, self.positions, self.attend)

    def attend(self, layer: int, q: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        """Append, then attend; both read what the step has been given."""
        pages, angles = self.cache.layer(layer), {"cos": self.model.cos, "sin": self.model.sin}
        mla.cache_append(latent, rope, pages, self.slots, **angles, positions=self.positions)
        out, _ = mla.mla_decode(q[:, None], pages, self.block_table, self.seqlens, plan=self.plan, scale=SCALE)
        return out[:, 0]

    def __call__(self, tokens: list[int], step: Any) -> torch.Tensor:
        """Logits of a step's tokens."""
        b = len(tokens)
        self.tokens[:b] = torch.tensor(tokens, dtype=torch.int32)
        for mine, given in (
            (self.positions, step.positions),
            (self.slots, step.slots),
            (self.seqlens, step.seqlens),
            (self.block_table, step.block_table),
        ):
            mine[:b] = given
        self.slots[b:], self.seqlens[b:] = -1, 0
        self.graph.replay() if self.graph else self.run()
        return self.logits[:b]


class Server:
    """Requests that wait and that run, over one cache."""

    def __init__(self, model: Model, num_pages: int, max_batch: int, device: str) -> None:
        self.model = model
        self.cache = PagedKVCache(
            "bf16",
            num_layers=len(model.layers),
            num_pages=num_pages,
            page_size=PAGE_SIZE,
            max_seqs=max_batch,
            max_pages=MAX_PAGES,
            library="torch",
            device=device,
        )
        self.sizes = [1 << i for i in range(max_batch.bit_length())]
        self.buckets: dict[int, Bucket] = {}
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}  # by the cache's number
        self.finished: list[Request] = []
        self.reused = self.preempted = 0
        self.setup_seconds, self.setup_bytes = 0.0, 0  # of all buckets

    def step(self) -> None:
        """Admit what fits, then decode a token of each request."""
        while self.waiting and self.admit(self.waiting[0]):
            self.waiting.popleft()
        self.decode()

    def admit(self, request: Request) -> bool:
        """Prefill the part of a prompt whose pages are not in the cache yet."""
        tokens = request.prompt + request.generated  # a preempted request has some
        sequence = None
        try:
            sequence, cached = self.cache.allocate(tokens)
            step = self.cache.extend([sequence], len(tokens) - cached)
        except CacheFullError:
            if sequence is not None:
                self.cache.free([sequence])
            return False
        angles = {"cos": self.model.cos, "sin": self.model.sin, "positions": step.positions}

        def attend(layer: int, q: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
            pages = self.cache.layer(layer)
            mla.cache_append(latent, rope, pages, step.slots, **angles)
            out, _ = mla.mla_decode(q[None], pages, step.block_table, step.seqlens, scale=SCALE, causal=True)
            return out[0]

        new = torch.tensor(tokens[cached:], device=self.cache.seqlens.device)
        self.emit(request, self.model(new, step.positions, attend)[-1])
        self.cache.commit(sequence, tokens)
        self.running[sequence] = request
        self.reused += cached
        return True

    def decode(self) -> None:
        """One token of each request; where pages are short, the youngest request waits again."""
        self.release()
        while self.running:
            try:
                step = self.cache.extend(list(self.running), 1)
                break
            except CacheFullError:
                sequence, request = self.running.popitem()
                self.cache.free([sequence])
                self.waiting.appendleft(request)
                self.preempted += 1
        else:
            return
        requests = list(self.running.values())
        size = next(size for size in self.sizes if size >= len(requests))
        logits = self.bucket(size)([request.generated[-1] for request in requests], step)
        for request, row in zip(requests, logits.clone(), strict=True):  # the next replay overwrites them
            self.emit(request, row)
        self.release()

    def bucket(self, size: int) -> Bucket:
        """Made when a batch of this size comes for the first time."""
        if size not in self.buckets:
            begun, before = time.perf_counter(), torch.cuda.memory_reserved()
            self.buckets[size] = Bucket(self.model, self.cache, size)
            self.setup_seconds += time.perf_counter() - begun
            self.setup_bytes += torch.cuda.memory_reserved() - before
        return self.buckets[size]

    def emit(self, request: Request, logits: torch.Tensor) -> None:
        """The likeliest token."""
        request.logits.append(logits)
        request.generated.append(int(logits.argmax()))

    def release(self) -> None:
        """Free what is finished: pages that are committed stay until others need them."""
        done = [s for s, request in self.running.items() if len(request.generated) >= request.wanted]
        self.cache.free(done)
        self.finished += [self.running.pop(sequence) for sequence in done]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, help="default: 64; on the CPU 8")
    parser.add_argument("--heads", type=int, help="default: 128; on the CPU 4")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--max-batch", type=int, default=16, help="a power of two")
    parser.add_argument("--pages", type=int, default=48)
    parser.add_argument("--device", help="default: cuda if PyTorch has a GPU, else cpu")
    options = parser.parse_args()
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    requests, heads = (
        options.requests or (8 if device == "cpu" else 64),
        options.heads or (4 if device == "cpu" else 128),
    )
    if options.max_batch & (options.max_batch - 1):
        parser.error(f"--max-batch: got {options.max_batch}, expected a power of two")

    draw = random.Random(0)
    shared = [[draw.randrange(VOCABULARY) for _ in range(length)] for length in (20, 40)]
    model = Model(options.layers, heads, device)
    server = Server(model, options.pages, options.max_batch, device)
    print(f"{requests} requests on {device}", flush=True)
    begun, steps, arrived = time.perf_counter(), 0, 0
    with torch.no_grad():
        while len(server.finished) < requests:
            if arrived < requests:
                own = [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 12))]
                server.waiting.append(Request(draw.choice(shared) + own, draw.randint(2, 10)))
                arrived += 1
            server.step()
            steps += 1
            if steps % 20 == 0:
                print(f"  step {steps}: {len(server.running)} running, {len(server.waiting)} waiting", flush=True)
        seconds = time.perf_counter() - begun
        server.cache.verify(device=True)
        worst = 0.0
        for request in server.finished:
            tokens = torch.tensor(request.prompt + request.generated[:-1], device=device)
            exact = model.without_cache(tokens)[len(request.prompt) - 1 :].float()
            error = (torch.stack(request.logits).float() - exact).abs().max() / exact.abs().max()
            worst = max(worst, float(error))
    generated = sum(len(request.generated) for request in server.finished)
    print(f"{generated} tokens in {steps} steps and {seconds:.1f} s, batches of up to {max(server.buckets)}")
    print(f"{server.reused} prompt tokens found in the cache, {server.preempted} requests preempted")
    if device != "cpu":
        made = f"{len(server.buckets)} graphs, {server.setup_seconds:.1f} s to compile and capture"
        print(f"{made}, {server.setup_bytes / 2**20:.0f} MiB")
    print(f"largest error of a logit: {worst:.1e}")
    return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
