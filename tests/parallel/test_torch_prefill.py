"""Context-parallel prefill of PyTorch tensors: ranks of a group agree with one process."""

from __future__ import annotations

import datetime
import os
import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist

from mla_cupy import ArgumentError, DTypeError, ParallelError, ShapeError
from mla_cupy.parallel import Zigzag
from mla_cupy.torch.parallel import gather, prefill, sparse_prefill
from tests.parallel import sparse_training, training
from tests.parallel.ranks import on_all_ranks
from tests.parallel.sparse_training import Tokens
from tests.parallel.training import Sequences

_EXACT = ("lse", "indices", "sparse_kl", "warm_kl", "sparse", "warm")
_PATIENCE = datetime.timedelta(seconds=2)
_GPU = pytest.mark.gpu
_GROUPS = pytest.mark.parametrize(
    ("place", "backend"),
    [("cpu", "gloo"), pytest.param("cuda", "gloo", marks=_GPU), pytest.param("cuda", "nccl", marks=_GPU)],
    ids=["cpu", "cuda-gloo", "cuda-nccl"],
)


def _on_ranks(world: int, task: Any, *arguments: Any, backend: str) -> list[Any]:
    if backend == "nccl" and torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    return on_all_ranks(world, task, *arguments, backend=backend)


def _compare(ranks: list[Any], expected: Any, zigzag: Zigzag, shared: tuple[str, ...] = ()) -> None:
    assert all(isinstance(of_rank, dict) for of_rank in ranks), ranks
    found = training.joined(ranks, zigzag, shared)
    for name, x in expected.items():
        tolerance = 1e-5 if name in _EXACT else 8e-3 if name.startswith("d ") else 4e-3
        assert training.error(found[name], x) < tolerance, name


@_GROUPS
@pytest.mark.parametrize(
    ("world", "lengths", "chunk_tokens"),
    [(2, (40,), 12), (4, (64, 24), 16), (4, (37, 2, 0, 19), 1 << 14), (4, (3,), 16)],
    ids=["2", "4-packed", "4-uneven", "4-without-tokens"],
)
def test_prefill(world: int, lengths: tuple[int, ...], chunk_tokens: int, place: str, backend: str) -> None:
    """Results and gradients for several chunks, lengths that no rank count divides, and ranks without tokens."""
    given = Sequences(lengths, place)
    ranks = _on_ranks(world, training.on_rank, given, world, chunk_tokens, backend=backend)
    _compare(ranks, training.in_one(given), Zigzag(lengths, world), ("d w",))


@_GROUPS
@pytest.mark.parametrize(("world", "lengths"), [(2, (40,)), (4, (29, 0, 6, 13))], ids=["2", "4-packed"])
def test_sparse(world: int, lengths: tuple[int, ...], place: str, backend: str) -> None:
    """Selection, attention, both losses, and the gradients of all of them."""
    given = Tokens(lengths, place)
    ranks = _on_ranks(world, sparse_training.on_rank, given, world, backend=backend)
    _compare(ranks, sparse_training.in_one(given), Zigzag(lengths, world), ("sparse", "warm"))


def _codes(rank: int, lengths: tuple[int, ...], world: int) -> dict[str, Any]:
    """Selection and attention by an indexer in FP8."""
    zigzag = Zigzag(lengths, world)
    x = {name: y.detach() for name, y in Tokens(lengths).inputs().items()}
    x |= {name: x[name].to(torch.float8_e4m3fn) for name in ("index_q", "index_k")}
    scales = 1 + torch.arange(zigzag.tokens) / zigzag.tokens
    own = (zigzag.split(y, rank) for y in x.values())
    found = sparse_prefill(*own, zigzag, scale=training.SCALE, k_scale=zigzag.split(scales, rank), topk=8)
    assert torch.equal(found.k_scale, scales)
    assert torch.equal(found.index_k.float(), x["index_k"].float())
    return {"out": found.out.float(), "indices": found.indices.sort(-1).values.float()}


def test_codes() -> None:
    """Index keys in FP8 travel with their scales."""
    lengths = (21, 12)
    expected = training.joined([_codes(0, lengths, 1)], Zigzag(lengths, 1), ())
    _compare(on_all_ranks(2, _codes, lengths, 2), expected, Zigzag(lengths, 2))


def _repeats(rank: int, given: Sequences) -> bool:
    """Tell whether two runs return the same bits."""
    first, second = (training.on_rank(rank, given, 2, 16, deterministic=True) for _ in range(2))
    return all(torch.equal(x, second[name]) for name, x in first.items())


@_GROUPS
def test_deterministic(place: str, backend: str) -> None:
    assert _on_ranks(2, _repeats, Sequences((200, 33), place), backend=backend) == [True, True]


@pytest.mark.gpu
def test_in_a_cuda_graph() -> None:
    """Capture after one call of the same shapes; a replay reads the arrays anew."""
    zigzag, x = Zigzag((90, 38), 1), Sequences((90, 38), "cuda").inputs()
    given = {name: x[name].detach() for name in ("q", "latents", "q_rope", "k_rope", "w")}

    def run() -> Any:
        of = {"q_rope": given["q_rope"], "k_rope": given["k_rope"], "parameters": (given["w"],)}
        return prefill(given["q"], given["latents"], training.expand, zigzag, chunk_tokens=32, **of)[0]

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    given["q"].neg_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, run())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # PyTorch looks at it, and ignores the warning
def test_torch_compile_leaves_it_out() -> None:
    zigzag, x = Zigzag((6,), 1), torch.arange(6.0, requires_grad=True)
    compiled = torch.compile(lambda x: 2 * gather(x + 1, zigzag), backend="eager")
    found = compiled(x)
    found.sum().backward()
    assert torch.equal(found.detach(), 2 * (torch.arange(6.0) + 1))
    assert torch.equal(x.grad, torch.full((6,), 2.0))


def test_one_rank_needs_no_group() -> None:
    given = Sequences((9, 4))
    _compare([training.on_rank(0, given, 1)], training.in_one(given), Zigzag(given.lengths, 1), ("d w",))


def _without_rank_1(rank: int, seconds: float) -> str:
    """Errors on the other ranks if a rank ends or makes no call."""
    zigzag = Zigzag((8,), 3)
    x, group = zigzag.split(torch.ones(8, 4), rank), dist.new_group(timeout=_PATIENCE)
    gather(x, zigzag, group=group)
    dist.barrier()
    if rank == 1:
        time.sleep(seconds)
        os._exit(1)
    try:
        gather(x, zigzag, group=group)
    except ParallelError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("seconds", [0, 600], ids=["ends", "stays away"])
def test_a_lost_rank_ends_the_others(seconds: float) -> None:
    found = on_all_ranks(3, _without_rank_1, seconds, without=(1,))
    for rank in (0, 2):
        assert found[rank].startswith("group: got an exchange that failed ("), found
        assert "expected all ranks; look at the other ranks' errors" in found[rank]


_UNEQUAL: dict[str, dict[str, Any]] = {
    "of 12 tokens in 3 sequences": {"lengths": (4, 4, 4)},
    "of 16 tokens": {"lengths": (8, 8)},
    "rows of 96 ": {"width": 32},
    "rows of 128 float16": {"dtype": torch.float16},
    "no gradients": {"needs_grad": False},
    "gather of": {"of": "gather"},
}
"""What rank 1 calls differently, by a part of the error on rank 0."""


def _call(
    rank: int,
    group: Any,
    lengths: tuple[int, ...] = (8, 4),
    width: int = 64,
    dtype: Any = torch.bfloat16,
    needs_grad: bool = True,
    of: str = "prefill",
    chunk_tokens: int = 16,
    place: str = "cpu",
) -> None:
    zigzag, x = Zigzag(lengths, 2), Sequences(lengths, place).inputs()
    given = {name: zigzag.split(x[name].detach().to(dtype), rank) for name in ("q", "latents", "q_rope", "k_rope")}
    q, latents, q_rope, k_rope = (y.requires_grad_(needs_grad) for y in given.values())
    latents, w = latents[:, :width], x["w"].detach().to(dtype)[:, :width]
    if of == "gather":
        gather(latents, zigzag, group=group)
        return
    options = {"group": group, "chunk_tokens": chunk_tokens, "parameters": (w,)}
    prefill(q, latents, training.expand, zigzag, q_rope=q_rope, k_rope=k_rope, **options)


def _unequal_calls(rank: int, place: str, patience: datetime.timedelta) -> list[str]:
    """Errors of calls that differ on rank 1; after each one the ranks make the same call."""
    group, errors = dist.new_group(timeout=patience), []
    for options in _UNEQUAL.values():
        try:
            _call(rank, group, place=place, **(options if rank == 1 else {}))
        except ParallelError as error:
            errors.append(str(error))
        _call(rank, group, lengths=(10 + len(errors),), place=place)
    return errors


@_GROUPS
def test_unequal_calls(place: str, backend: str) -> None:
    """Every rank raises at once, before an exchange that would wait."""
    patience = _PATIENCE if place == "cpu" else 10 * _PATIENCE  # a GPU's first calls take seconds
    first, second = _on_ranks(2, _unequal_calls, place, patience, backend=backend)
    assert isinstance(first, list), first
    assert isinstance(second, list), second
    assert len(first) == len(second) == len(_UNEQUAL)
    usual, remedy = "prefill of 12 tokens in 2 sequences", "make the same calls in the same order on every rank"
    for part, one, other in zip(_UNEQUAL, first, second, strict=True):
        assert all(x in one for x in (part, "on rank 1", usual, remedy)), one
        assert all(x in other for x in (part, "on rank 0", usual, remedy)), other


def _compares(rank: int) -> list[int]:
    """Exchanges of a first call, and of the same call again."""
    from mla_cupy.torch.parallel.links import Links

    begin, begun = Links.begin, []
    Links.begin = lambda *of: begun.append(of) or begin(*of)
    counts = []
    for _ in range(3):
        _call(rank, None, of="gather")
        counts.append(len(begun))
        begun.clear()
    return counts


def test_a_repeated_call_is_not_compared() -> None:
    assert on_all_ranks(2, _compares) == [[2, 1, 1]] * 2


def test_what_does_not_fit() -> None:
    zigzag, given = Zigzag((4,), 1), Sequences((4,)).inputs()
    q, latents, w = given["q"], given["latents"], given["w"]
    with pytest.raises(DTypeError, match="expand: got a tensor that requires grad"):
        prefill(q, latents, lambda x: training.expand(x, w), zigzag)
    with pytest.raises(ShapeError, match=r"latents\.shape\[0\]: got 3, expected 4, this rank's tokens"):
        prefill(q, latents[:3], training.expand, zigzag, parameters=(w,))
    with pytest.raises(ArgumentError, match="chunk_tokens: got 0"):
        prefill(q, latents, training.expand, zigzag, parameters=(w,), chunk_tokens=0)
    with pytest.raises(ArgumentError, match="group: got no process group"):
        prefill(q, latents, training.expand, Zigzag((4,), 2), parameters=(w,))
