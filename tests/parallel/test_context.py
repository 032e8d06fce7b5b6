"""Context-parallel decode on the host: ranks as threads, and as processes that a launcher starts."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mla_cupy
from mla_cupy import ArgumentError, DTypeError, ParallelError, PlanError, ShapeError
from mla_cupy.parallel import ContextParallel, HostTransport, LocalGroup
from tests.parallel.shards import Batch, heads_of
from tests.support.flat import flat, mla_decode, plan_decode

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _numpy_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")


def on_all_ranks(world: int, task: Any) -> list[Any]:
    """Run `task(context)` on every rank."""
    group = LocalGroup(world, timeout=60)
    with ThreadPoolExecutor(world) as threads:
        futures = [threads.submit(task, ContextParallel(HostTransport(group.member(r)))) for r in range(world)]
        return [future.result() for future in futures]


def plan_of(batch: Batch, shard: tuple[Any, ...], **options: int) -> mla_cupy.DecodePlan:
    """A plan for this rank's arrays, on the host, updated for their lengths."""
    _, cache, table, seqlens = shard
    sizes = {"max_b": len(seqlens), "s_q": batch.s_q, "h_q": batch.h_q, "d_qk": batch.d_qk}
    sizes |= {"max_pages": table.shape[1], "page_size": cache.shape[1]}
    plan = plan_decode(**sizes, dtype=batch.dtype, **options)
    plan.update(seqlens)
    return plan


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize(
    "batch",
    [
        Batch((100, 1, 0, 37), h_q=24),
        Batch((70, 5, 4, 2, 0), s_q=4, h_q=24),  # shorter than the queries; ranks without a token
        Batch((33, 8), s_q=3, h_q=24, d_qk=512, dtype="float16"),
    ],
    ids=lambda batch: f"sq{batch.s_q}-d{batch.d_qk}",
)
def test_ranks_agree_with_one(batch: Batch, world: int, causal: bool) -> None:
    def decode(context: ContextParallel) -> tuple[Any, Any]:
        shard = batch.shard(world, context.rank)
        return flat(context.decode)(*shard, causal=causal, out_dtype="float32")

    out, lse = batch.expected(causal)
    for rank, (mine, mine_lse) in enumerate(on_all_ranks(world, decode)):
        np.testing.assert_allclose(mine, heads_of(out, 2, world, rank), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(mine_lse, heads_of(lse, 1, world, rank), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("math", "coded"), [("exact", False), ("fp8", False), ("fp8", True)])
def test_records_of_e4m3(math: str, coded: bool) -> None:
    """The cache's scale, the scale of queries in e4m3 and the arithmetic reach every rank's decode."""
    batch, e4m3 = Batch((100, 1, 0, 37), h_q=4), ml_dtypes.float8_e4m3fn
    options = {"math": math, "kv_scale": 0.5, "q_scale": 0.25 if coded else 1.0, "out_dtype": "float32"}

    def over_records(shard: tuple[Any, ...]) -> tuple[Any, ...]:
        q, cache, table, seqlens = shard
        q = (q.astype(np.float32) / 0.25).astype(e4m3) if coded else q
        return q, (cache.astype(np.float32) / 0.5).astype(e4m3), table, seqlens

    out, lse = mla_decode(*over_records(batch.shard(1, 0)), **options)
    found = on_all_ranks(2, lambda rank: flat(rank.decode)(*over_records(batch.shard(2, rank.rank)), **options))
    for rank, (mine, mine_lse) in enumerate(found):
        np.testing.assert_allclose(mine, heads_of(out, 2, 2, rank), rtol=2e-2, atol=2e-2)
        np.testing.assert_allclose(mine_lse, heads_of(lse, 1, 2, rank), rtol=1e-3, atol=1e-3)
    plain, _ = mla_decode(*batch.shard(1, 0), out_dtype="float32")
    assert np.abs(plain - out).max() < 0.3 < np.abs(out).max()  # the scales count


def test_results_of_queries_in_e4m3_are_bfloat16() -> None:
    q, cache, table, seqlens = Batch((70,), h_q=4).shard(1, 0)
    shard = *(x.astype(ml_dtypes.float8_e4m3fn) for x in (q, cache)), table, seqlens
    ((out, _),) = on_all_ranks(1, lambda rank: flat(rank.decode)(*shard, math="fp8"))
    assert out.dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize(
    "batch",
    [Batch((100, 1, 0, 37, 29), h_q=24), Batch((70, 5, 4), s_q=4, h_q=24, d_qk=512, dtype="float16", seed=3)],
    ids=lambda batch: f"sq{batch.s_q}-d{batch.d_qk}",
)
@pytest.mark.parametrize("planned", [False, True])
def test_tokens_anywhere_with_local_lengths(batch: Batch, world: int, planned: bool) -> None:
    shards = [batch.scattered(world, rank) for rank in range(world)]
    lengths = np.array([shard[3] for shard in shards])
    assert (lengths.sum(0) == batch.seqlens).all()
    assert world == 1 or 0 in lengths[:, 0]  # an empty shard of a long sequence
    causal = batch.s_q == 1

    def decode(context: ContextParallel) -> tuple[Any, Any]:
        shard = shards[context.rank]
        plan = plan_of(batch, shard) if planned else None
        return flat(context.decode)(*shard, plan=plan, causal=causal, local_seqlens=True, out_dtype="float32")

    out, lse = batch.expected(causal)
    for rank, (mine, mine_lse) in enumerate(on_all_ranks(world, decode)):
        np.testing.assert_allclose(mine, heads_of(out, 2, world, rank), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(mine_lse, heads_of(lse, 1, world, rank), rtol=1e-5, atol=1e-5)


def test_local_lengths_take_a_plan_of_one_rank() -> None:
    batch = Batch((9, 4))

    def decode(context: ContextParallel) -> None:
        shard = batch.scattered(2, context.rank)
        plan = plan_of(batch, shard, cp_world=2, cp_rank=context.rank)
        with pytest.raises(PlanError, match=r"plan: got shard=Shard\(2, [01]\), expected shard=Shard\(1, 0\)"):
            flat(context.decode)(*shard, plan=plan, local_seqlens=True)

    on_all_ranks(2, decode)


def test_local_lengths_do_not_say_what_several_queries_see() -> None:
    def decode(context: ContextParallel) -> None:
        with pytest.raises(ArgumentError, match=r"local_seqlens: got True with s_q=2 .* s_q=1 or causal=False"):
            flat(context.decode)(*Batch((5,), s_q=2).scattered(2, context.rank), local_seqlens=True)

    on_all_ranks(2, decode)


@pytest.mark.parametrize("option", ["local_seqlens", "causal"])
def test_flags_that_are_none(option: str) -> None:
    context = ContextParallel(HostTransport(LocalGroup(1).member(0)))
    with pytest.raises(ArgumentError, match=rf"{option}: got array\(\[1, 2\]\), expected True or False"):
        flat(context.decode)(*Batch((5,), s_q=2).shard(1, 0), **{option: np.array([1, 2])})


def test_options_reach_the_result() -> None:
    batch = Batch((40, 0), h_q=4)

    def decode(context: ContextParallel) -> tuple[Any, Any]:
        q, cache, table, seqlens = batch.shard(2, context.rank)
        out, lse = np.empty((2, 1, 2, 512), q.dtype), np.empty((2, 2, 1), np.float32)
        found = flat(context.decode)(
            q, cache, table, seqlens, out=out, lse=lse, lse_base="2", empty_lse=3.0, scale=0.01
        )
        assert found[0] is out
        assert found[1] is lse
        return found

    q, cache, table, seqlens = batch.shard(1, 0)
    expected = mla_cupy.mla_decode(q, cache, table, seqlens, lse_base="2", empty_lse=3.0, scale=0.01)
    for rank, (out, lse) in enumerate(on_all_ranks(2, decode)):
        assert out.dtype == q.dtype
        np.testing.assert_allclose(
            out.astype(np.float32), heads_of(expected[0], 2, 2, rank).astype(np.float32), rtol=2**-7, atol=1e-3
        )
        np.testing.assert_allclose(lse, heads_of(expected[1], 1, 2, rank), rtol=1e-5)


def test_projected_before_the_merge() -> None:
    """The projection is linear: a quarter of the values travel."""
    batch, rng = Batch((60, 31), h_q=4), np.random.default_rng(5)
    w_uv = rng.standard_normal((4, 512, 128)).astype(np.float32) / 16

    def decode(context: ContextParallel) -> tuple[Any, Any]:
        q, cache, table, seqlens = batch.shard(2, context.rank)
        out, lse = mla_decode(q, cache, table, seqlens, cp_world=2, cp_rank=context.rank, out_dtype="float32")
        return context.merge(np.einsum("bshd,hdv->bshv", out, w_uv).astype(np.float32), lse)

    expected = np.einsum("bshd,hdv->bshv", batch.expected()[0], w_uv)
    for rank, (out, _) in enumerate(on_all_ranks(2, decode)):
        np.testing.assert_allclose(out, heads_of(expected, 2, 2, rank), rtol=1e-3, atol=1e-4)


def test_calls_that_differ_are_told_on_every_rank() -> None:
    def merge(context: ContextParallel) -> str:
        outs = np.zeros((1 + context.rank, 1, 2, 8), np.float32)
        with pytest.raises(ParallelError, match=r"rank [01] merges \[\[[12], 1, 2, 8\]") as error:
            context.merge(outs, np.zeros((1 + context.rank, 2, 1), np.float32))
        return str(error.value)

    assert len(on_all_ranks(2, merge)) == 2


def test_heads_that_cannot_be_shared() -> None:
    def decode(context: ContextParallel) -> None:
        with pytest.raises(ShapeError, match="h_q: got 4, expected a multiple of world=3"):
            flat(context.decode)(*Batch((5,), h_q=4).shard(3, context.rank))

    on_all_ranks(3, decode)


@pytest.mark.parametrize(
    ("outs", "lses", "text"),
    [((2, 1, 8), (2, 8, 1), r"outs.shape: got \(2, 1, 8\)"), ((2, 1, 4, 8), (2, 1, 4), r"lses.shape: got \(2, 1, 4\)")],
)
def test_shapes_that_are_none_of_partial_results(outs: tuple[int, ...], lses: tuple[int, ...], text: str) -> None:
    context = ContextParallel(HostTransport(LocalGroup(1).member(0)))
    with pytest.raises(ShapeError, match=text):
        context.merge(np.zeros(outs, np.float32), np.zeros(lses, np.float32))


def test_queries_of_another_rank() -> None:
    q, *rest = Batch((5,), h_q=4).shard(1, 0)
    with pytest.raises(ShapeError, match="q"):
        ContextParallel(HostTransport(LocalGroup(1).member(0))).decode(q[0], *rest)


@pytest.mark.parametrize("dtype", ["int32", "float64", 7])
def test_partial_dtypes(dtype: Any) -> None:
    with pytest.raises((DTypeError, ArgumentError), match="dtype"):
        ContextParallel(HostTransport(LocalGroup(1).member(0)), partial_dtype=dtype)


def test_results_of_ranks_are_not_quantised() -> None:
    context = ContextParallel(HostTransport(LocalGroup(1).member(0)))
    with pytest.raises(DTypeError, match="out_dtype: got float8_e4m3fn, expected 16 bits or float32"):
        flat(context.decode)(*Batch((5,), h_q=4).shard(1, 0), out_dtype="float8_e4m3fn")


SCRIPT = """
import sys
import numpy as np
from mla_cupy.parallel import ContextParallel, HostTransport, Rendezvous
from tests.parallel.shards import Batch, heads_of

with Rendezvous.from_environment(timeout=100) as group:
    context = ContextParallel(HostTransport(group))
    batch = Batch((90, 13), s_q=2, h_q=4)
    shard = batch.shard(context.world, context.rank)
    out, lse = context.decode(*shard, scale=576**-0.5, out_dtype="float32")
    expected = heads_of(batch.expected()[0], 2, context.world, context.rank)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
    group.gather(b"")
    if sys.argv[1:] == ["fail"] and context.rank == 1:
        sys.exit(3)
    print("agreed")
    if sys.argv[1:] == ["fail"]:
        group.gather(b"never")
"""


def launch(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "decode.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "mla_cupy.parallel", "--gpus", "2", str(script), *arguments]
    return subprocess.run(command, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=300)


def environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "MLA_CUPY_BACKEND": "numpy", "MLA_CUPY_JIT": "lazy"}


def test_two_processes(tmp_path: Path) -> None:
    done = launch(tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("agreed") == 2  # perhaps on one line


def test_a_process_that_fails_ends_the_others(tmp_path: Path) -> None:
    done = launch(tmp_path, "fail")
    assert done.returncode != 0
    assert "the others are stopped" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "text"), [(["--gpus", "0", "x.py"], "at least 1"), (["--gpus", "2", "absent.py"], "no file")]
)
def test_bad_command_lines(arguments: list[str], text: str) -> None:
    command = [sys.executable, "-m", "mla_cupy.parallel", *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert text in done.stderr
