"""Context-parallel decode on GPUs: the exchange of ranks that share one GPU, and two GPUs of one host."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import ParallelError, arrays
from mla_cupy.kernels.lse import LseOptions
from mla_cupy.kernels.merge.exchange import ADDRESSES, BLOCKS_PER_SM, Exchange
from mla_cupy.kernels.pipeline import Layout, Prepared
from mla_cupy.parallel import ContextParallel, LocalGroup, NcclTransport, PeerTransport
from mla_cupy.runtime.device import DeviceInfo
from tests.merge.exchanges import Ranks
from tests.parallel.shards import Batch, heads_of
from tests.support.flat import flat, plan_decode
from tests.support.tolerance import check

pytestmark = pytest.mark.gpu
WORLD = 2
KINDS = ["peer", "nccl", "nccl4py"]
"""NCCL through CuPy's binding, or NVIDIA's if CuPy has none."""


# ---- Ranks that share a GPU ------------------------------------------------------------------------------------


def on_gpu(ranks: Ranks) -> tuple[list[Any], list[Any]]:
    """A rank's slabs and flags, and the arrays in the order of the kernel's addresses, on the GPU."""
    import cupy

    shared = [cupy.asarray(ranks.slabs), cupy.asarray(ranks.flags)]
    for name, memory in zip(("slabs", "flags"), shared, strict=True):
        ranks.mailboxes[name] = [memory[rank].data.ptr for rank in range(ranks.call.world)]
    return shared, [cupy.asarray(x if x.dtype.isbuiltin else x.view(np.uint8)) for x in ranks.arrays]


def addresses_of(ranks: Ranks, placed: list[Any]) -> list[int]:
    """Addresses that the kernel reads; without pieces there is no schedule."""
    addresses = [0, *(x.data.ptr for x in placed)]
    if not ranks.num_splits:
        addresses[1 + ADDRESSES.index("schedule")] = 0
    return addresses


@pytest.mark.parametrize(
    "ranks",
    [
        Ranks(Exchange(2, 1, 1, 64, 512, "float32", "e"), "float32"),
        Ranks(Exchange(2, 4, 2, 64, 512, "float32", "2"), "float16"),
        Ranks(Exchange(4, 3, 1, 7, 128, "float16", "e"), "float32", LseOptions("2", 0.0)),
        Ranks(Exchange(8, 1, 4, 2, 64, "float32", "e"), "float16"),
        Ranks(Exchange(2, 1, 1, 64, 512, "float32", "e", 128), "float32", num_splits=66),
        Ranks(Exchange(2, 5, 2, 8, 512, "float32", "2", 64), "float16", num_splits=33),
        Ranks(Exchange(4, 2, 1, 4, 512, "float32", "e", 32), "float32", num_splits=132),
    ],
    ids=lambda ranks: f"world{ranks.call.world}-rows{ranks.call.rows}-splits{ranks.num_splits}",
)
def test_ranks_of_one_gpu(gpu: DeviceInfo, ranks: Ranks) -> None:
    """All blocks of all ranks are resident, so they can wait for each other; a hundred calls, then the results."""
    import cupy

    if ranks.call.blocks * ranks.call.world > BLOCKS_PER_SM * gpu.sm_count:
        pytest.skip("more blocks than are resident at once")
    ranks.__post_init__()
    ranks.fill(0)
    shared, placed = on_gpu(ranks)
    cupy.cuda.get_current_stream().synchronize()  # the copies are done before another stream reads them
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        step: Prepared = ranks.prepared(gpu, stream.ptr)
        for _ in range(100):
            step.enqueue(addresses_of(ranks, placed), 0, stream.ptr)
    stream.synchronize()
    for mine, theirs in zip(ranks.arrays, placed, strict=True):
        mine.reshape(-1).view(np.uint8)[:] = cupy.asnumpy(theirs).reshape(-1).view(np.uint8)
    ranks.check()
    assert ranks.states["epoch"].tolist() == [100] * ranks.call.world
    assert not ranks.reports["failure"].any()
    del shared


def test_a_rank_without_peers_gives_up(gpu: DeviceInfo) -> None:
    import cupy

    ranks = Ranks(Exchange(2, 1, 1, 64, 512, "float32", "e"), timeout_ns=50_000_000)
    ranks.fill(0)
    shared, placed = on_gpu(ranks)
    stream = cupy.cuda.get_current_stream()
    step = ranks.prepared(gpu, stream.ptr, rank=1, ranks=1)
    begin = time.monotonic()
    step.enqueue(addresses_of(ranks, placed), 0, stream.ptr)
    stream.synchronize()
    assert 0.04 < time.monotonic() - begin < 5
    assert np.isnan(cupy.asnumpy(placed[2])[0]).all()
    assert ADDRESSES[2] == "out"
    assert cupy.asnumpy(placed[-1]).view(np.uint64)[0] & 0xFF == 1
    assert Layout({}).nbytes == 0
    del shared


# ---- Two GPUs --------------------------------------------------------------------------------------------------


@pytest.fixture
def two_gpus(gpu: DeviceInfo) -> None:
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < WORLD:
        pytest.skip(f"needs {WORLD} GPUs")
    gc.collect()  # free earlier tests' memory now: amid an exchange, freeing would wait for it


def transports(kind: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[Any]:
    if kind == "peer":
        return list(PeerTransport.for_devices(range(WORLD), **options))
    group = LocalGroup(WORLD)
    if kind == "nccl4py":
        monkeypatch.setattr(type(arrays.cupy_family()), "nccl", lambda self: None)
    try:
        return each(lambda rank: NcclTransport(group.member(rank), device=rank))
    except ParallelError as error:
        pytest.skip(str(error))


def each(task: Callable[[int], Any]) -> list[Any]:
    """Run `task(rank)` on all ranks at once, each with its GPU as the current one."""
    import cupy

    def run(rank: int) -> Any:
        with cupy.cuda.Device(rank):
            return task(rank)

    with ThreadPoolExecutor(WORLD) as threads:
        return [future.result() for future in [threads.submit(run, rank) for rank in range(WORLD)]]


def failures_of(contexts: list[ContextParallel]) -> dict[int, str]:
    """Failures that the ranks' transports report: the reason for missing numbers."""
    failures = {}
    for context in contexts:
        try:
            context.transport.check()
        except ParallelError as error:
            failures[context.rank] = str(error)
    return failures


def plan_of(shard: list[Any], rank: int) -> mla_cupy.DecodePlan:
    """A plan for one rank's shard, scheduled."""
    q, cache, table, seqlens = shard
    b, s_q, h_q, d_qk = q.shape
    plan = plan_decode(
        max_b=b, s_q=s_q, h_q=h_q, d_qk=d_qk, max_pages=table.shape[1], page_size=cache.shape[1], dtype=q.dtype,
        cp_world=WORLD, cp_rank=rank,
    )  # fmt: skip
    plan.update(seqlens)
    return plan


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("partial_dtype", ["float32", "bfloat16"])
def test_random_batches(kind: str, partial_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    contexts = [ContextParallel(x, partial_dtype=partial_dtype) for x in transports(kind, monkeypatch)]
    rng, begin = np.random.default_rng(7), time.monotonic()
    for seed in range(12):
        s_q = int(rng.choice([1, 1, 2, 4]))
        lengths = tuple(int(x) for x in rng.integers(0, rng.choice([3, 200, 3000]), int(rng.integers(1, 7))))
        batch = Batch(lengths, s_q, int(rng.choice([8, 16, 128])), int(rng.choice([576, 512])), seed=seed)
        causal, planned = bool(rng.integers(2)), seed % 2 == 1
        case = f"{kind}, {partial_dtype}, {batch}, causal={causal}, planned={planned}"
        exact, rounded = batch.expected(causal), batch.expected(causal, rounding="bfloat16")

        # Copies and calls apart: one thread's copy, which waits for a result, would hold up another's, which the
        # result waits for.
        shards = each(lambda rank, batch=batch: [cupy.asarray(x) for x in batch.shard(WORLD, rank)])
        plans = each(lambda rank, shards=shards: plan_of(shards[rank], rank)) if planned else [None] * WORLD
        made = each(
            lambda rank, shards=shards, plans=plans, causal=causal: flat(contexts[rank].decode)(
                *shards[rank], plan=plans[rank], causal=causal
            )
        )
        found = each(lambda rank, made=made: tuple(map(cupy.asnumpy, made[rank])))
        failures = failures_of(contexts)
        assert not failures, f"{case}, after {time.monotonic() - begin:.1f} s: {failures}"
        for rank, got in enumerate(found):
            mine = [(heads_of(o, 2, WORLD, rank), heads_of(x, 1, WORLD, rank)) for o, x in (exact, rounded)]
            try:
                check(got, mine[0], mine[1], batch.dtype)
            except AssertionError as error:
                raise AssertionError(f"{case}, rank {rank}: {error}") from None


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("replays", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_replays_of_graphs(kind: str, replays: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An odd number of exchanges in the graph, and the same bits from every replay, over results spoiled before."""
    import cupy

    contexts = [ContextParallel(x) for x in transports(kind, monkeypatch)]
    batch = Batch((900, 450, 33), h_q=128)

    def decode(rank: int) -> tuple[int, tuple[Any, Any]]:
        q, cache, table, seqlens = shard = [cupy.asarray(x) for x in batch.shard(WORLD, rank)]
        plan = plan_of(shard, rank)
        out = cupy.empty((3, 1, 64, 512), cupy.float32)
        lse = cupy.empty((3, 64, 1), cupy.float32)
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            for _ in range(2):  # build kernels, connect and allocate before the capture
                plan.update(seqlens)
                flat(contexts[rank].decode)(q, cache, table, seqlens, plan=plan, out=out, lse=lse)
            stream.synchronize()
            stream.begin_capture()
            for _ in range(3):
                plan.update(seqlens)
                flat(contexts[rank].decode)(q, cache, table, seqlens, plan=plan, out=out, lse=lse)
            graph = stream.end_capture()
            first, found = [x.copy() for x in (out, lse)], (out, lse)
            wrong = cupy.zeros((), cupy.int64)
            for turn in range(replays):
                for x in found:
                    x.fill(cupy.nan)
                graph.launch(stream)
                for x, wanted in zip(found, first, strict=True):
                    wrong += (x.view(cupy.int32) != wanted.view(cupy.int32)).sum()
                if turn % 50 == 0:
                    stream.synchronize()
            stream.synchronize()
        contexts[rank].transport.check()
        return int(wrong), (cupy.asnumpy(out), cupy.asnumpy(lse))

    exact, rounded = batch.expected(), batch.expected(rounding="bfloat16")
    for rank, (wrong, found) in enumerate(each(decode)):
        assert wrong == 0
        mine = [(heads_of(o, 2, WORLD, rank), heads_of(x, 1, WORLD, rank)) for o, x in (exact, rounded)]
        check(found, mine[0], mine[1], "float32")


@pytest.mark.usefixtures("two_gpus")
def test_one_thread_makes_the_calls_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    contexts = [ContextParallel(x) for x in transports("peer", monkeypatch)]
    batch, found = Batch((300, 5), h_q=16), []
    for rank, context in enumerate(contexts):
        with cupy.cuda.Device(rank):
            found.append(flat(context.decode)(*(cupy.asarray(x) for x in batch.shard(WORLD, rank))))
    exact, rounded = batch.expected(), batch.expected(rounding="bfloat16")
    for rank, got in enumerate(found):
        with cupy.cuda.Device(rank):
            mine = [(heads_of(o, 2, WORLD, rank), heads_of(x, 1, WORLD, rank)) for o, x in (exact, rounded)]
            check(tuple(map(cupy.asnumpy, got)), mine[0], mine[1], batch.dtype)


@pytest.mark.usefixtures("two_gpus")
def test_a_rank_that_stays_away(monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    context, _ = (ContextParallel(x) for x in transports("peer", monkeypatch, timeout=0.2))
    shard = [cupy.asarray(x) for x in Batch((30,), h_q=8).shard(WORLD, 0)]
    out, lse = flat(context.decode)(*shard)
    assert math.isnan(float(out[0, 0, 0, 0]))
    assert math.isnan(float(lse[0, 0, 0]))
    with pytest.raises(ParallelError, match="exchange 1: got rank 1 has not sent its part in time"):
        flat(context.decode)(*shard)
