"""`PagedKVCache` with arrays of PyTorch and JAX on a GPU: the ledger's walks, streams, graphs, threads, host time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import PagedKVCache, reference
from tests.cache.walk import walk, walk_in_threads

pytestmark = pytest.mark.gpu
SIZES: dict[str, Any] = {"num_pages": 40, "page_size": 16, "max_seqs": 8, "max_pages": 8, "device": 0}
BUSY_CYCLES = 200_000_000
"""Some 0.1 s of a stream."""


@pytest.fixture
def torch(gpu: object) -> Any:
    found = pytest.importorskip("torch")
    if not found.cuda.is_available():
        pytest.skip("PyTorch has no GPU")
    return found


def cache(library: str = "torch", **changes: Any) -> PagedKVCache:
    return PagedKVCache("fp16", **{**SIZES, **changes}, library=library)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("library", ["torch", "jax"])
def test_the_cache_does_what_it_says(gpu: object, library: str, seed: int) -> None:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else other processes find no memory
    if library == "jax" and pytest.importorskip("jax").default_backend() != "gpu":
        pytest.skip("JAX has no GPU")
    if library == "torch":
        pytest.importorskip("torch")
    walk(seed, 150, 10, device=0, library=library)


def test_threads(torch: Any) -> None:
    walk_in_threads(0, 400, 20, device=0, library="torch")


class Decoder:
    """A cache of tensors, the same on the host, and random tokens."""

    def __init__(self, torch: Any, seed: int = 0) -> None:
        self.torch, self.rng = torch, np.random.default_rng(seed)
        self.mine, self.host = cache(), cache("numpy", device="cpu")
        self.held = [self.both(lambda c: c.allocate()[0]) for _ in range(3)]

    def both(self, call: Callable[[PagedKVCache], Any]) -> Any:
        found = call(self.mine), call(self.host)
        assert found[0] == found[1]
        return found[0]

    def numbers(self, *shape: int) -> tuple[Any, Any]:
        x = self.rng.standard_normal(shape).astype(np.float16)
        return self.torch.from_numpy(x).to("cuda:0"), x

    def step(self, sleep: int = 0) -> tuple[Any, Any]:
        """Tokens for all sequences; returns the result of attention, and what it must be. First the stream is busy."""
        latent, rope, q = self.numbers(9, 512), self.numbers(9, 64), self.numbers(3, 1, 16, 576)
        if sleep:
            self.torch.cuda._sleep(sleep)
        steps = [one.extend(self.held, 3) for one in (self.mine, self.host)]
        self.mine.append(steps[0], 0, latent[0], rope[0])
        reference.cache_append(latent[1], rope[1], self.host.layer(0), steps[1].slots)
        out, _ = mla_cupy.mla_decode(q[0], self.mine.layer(0), steps[0].block_table, steps[0].seqlens, scale=192**-0.5)
        exact, _ = reference.mla_decode(
            q[1], self.host.layer(0), steps[1].block_table, steps[1].seqlens, scale=192**-0.5
        )
        return out, exact


def check(out: Any, exact: Any) -> None:
    np.testing.assert_allclose(out.cpu().numpy().astype(np.float32), exact, atol=2e-3, rtol=0)


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
@pytest.mark.parametrize("side", [False, True], ids=["default", "side"])
def test_work_is_on_the_current_stream(torch: Any, side: bool, busy: bool) -> None:
    """Each step comes after what the stream still has to do, and before what follows; shared pages are copied there."""
    decoder = Decoder(torch)
    stream = torch.cuda.Stream() if side else torch.cuda.default_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for number in range(4):
            if number == 2:
                decoder.held += [decoder.both(lambda c: c.fork(decoder.held[0])[0])]
                decoder.both(lambda c: c.free([decoder.held[1]]))
                del decoder.held[1]
            out, exact = decoder.step(BUSY_CYCLES if busy else 0)
            check(out, exact)
    decoder.mine.verify(device=True)


def test_two_caches_on_two_streams(torch: Any) -> None:
    decoders = [Decoder(torch, seed) for seed in range(2)]
    streams = [torch.cuda.Stream() for _ in decoders]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    found = []
    for _ in range(4):
        for decoder, stream in zip(decoders, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(decoder.step(BUSY_CYCLES // 10))
    torch.cuda.synchronize()
    for out, exact in found:
        check(out, exact)


def test_a_stream_for_each_thread(torch: Any) -> None:
    failures = []

    def work(seed: int) -> None:
        try:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.default_stream())
            with torch.cuda.stream(stream):
                decoder = Decoder(torch, seed)
                for _ in range(4):
                    check(*decoder.step())
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def test_a_graph_follows_the_steps(torch: Any) -> None:
    """It reads the tables of all sequences, whose addresses stay."""
    from mla_cupy import torch as operators

    made, host = cache(max_seqs=2), cache("numpy", device="cpu", max_seqs=2)
    pairs = [[one.allocate()[0] for _ in range(2)] for one in (made, host)]
    rng = np.random.default_rng(0)
    pages = rng.standard_normal(host.layer(0).shape).astype(np.float16)
    made.layer(0).copy_(torch.from_numpy(pages))
    x = rng.standard_normal((2, 1, 16, 576)).astype(np.float16)
    q = torch.from_numpy(x).cuda()
    plan = operators.plan_decode(
        max_b=2, s_q=1, h_q=16, max_pages=8, page_size=16, dtype=torch.float16, device="cuda:0"
    )

    def attend() -> Any:
        plan.update(made.seqlens)
        return operators.mla_decode(q, made.layer(0), made.block_table, made.seqlens, plan=plan, scale=192**-0.5)

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = attend()
    for count in (5, 20, 1):
        for one, held in zip((made, host), pairs, strict=True):
            one.extend(held, count)
        graph.replay()
        exact, _ = reference.mla_decode(x, pages, host.block_table, host.seqlens, scale=192**-0.5)
        check(out, exact)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of inductor
def test_compiled_functions_take_steps(torch: Any) -> None:
    from mla_cupy import torch as operators

    made = cache()
    sequence, _ = made.allocate()

    @torch.compile(fullgraph=True)
    def attend(q: Any, pages: Any, table: Any, lengths: Any) -> Any:
        out, _ = operators.mla_decode(q, pages, table, lengths, scale=192**-0.5)
        return out * 2

    q = torch.randn(1, 1, 16, 576, device="cuda").half()
    for _ in range(3):
        step = made.extend([sequence], 5)
        tokens = torch.randn(5, 576, device="cuda").half()
        made.append(step, 0, tokens[:, :512].contiguous(), tokens[:, 512:].contiguous())
        arrays = made.layer(0), step.block_table, step.seqlens
        out, _ = mla_cupy.mla_decode(q, *arrays, scale=192**-0.5)
        torch.testing.assert_close(attend(q, *arrays), out * 2)


@pytest.mark.perf
def test_host_time(torch: Any) -> None:
    """A step's, at most 5 us above CuPy's."""
    found = {}
    for library in ("cupy", "torch", "cupy", "torch"):
        made = PagedKVCache("v32", num_pages=2000, page_size=64, max_seqs=256, max_pages=256, device=0, library=library)
        held = [made.allocate()[0] for _ in range(256)]
        times = []
        for number in range(400):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            made.extend(held, 1)
            times.append(1e6 * (time.perf_counter() - begin))
            if number % 100 == 99:
                made.truncate(held, 0)
        found[library] = min(found.get(library, 1e9), float(np.median(times)))
        del made
    print(f"us per step: {found}")
    assert found["torch"] <= found["cupy"] + 5
