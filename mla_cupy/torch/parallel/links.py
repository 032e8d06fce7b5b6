"""Process groups: schedules on a device, and exchanges of rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

import mla_cupy.parallel.zigzag as pieces
from mla_cupy.errors import ArgumentError, ParallelError, explain
from mla_cupy.ops.groups import Packed
from mla_cupy.parallel.zigzag import Zigzag

_HOST_ONLY = "gloo"
"""Backend that needs tensors on the host: GPU tensors are copied there and back."""
gather_rows: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_MOST_TABLES = 8
"""Number of schedules cached on devices, 8 bytes per token each."""
_captured: dict[int, Any] = {}
Tables = TypeVar("Tables")

# ---- Schedules on a device ------------------------------------------------------------------------------------------


class Segments(NamedTuple):
    """`zigzag.Segments` on a device."""

    begin: int
    end: int
    packed: Packed

    def of(self, *arrays: torch.Tensor | None) -> tuple[Any, ...]:
        """Rows of the queries of the call; None stays None."""
        return tuple(None if x is None else x[self.begin : self.end] for x in arrays)


class Chunk(NamedTuple):
    """`zigzag.Chunk` on a device, without calls whose queries see no key."""

    order: torch.Tensor
    calls: tuple[Segments, ...]


def schedule(zigzag: Zigzag, rank: int, chunk_tokens: int, device: torch.device) -> tuple[Segments, tuple[Chunk, ...]]:
    """`zigzag.schedule` on a device."""
    return _kept(_schedule(zigzag, rank, chunk_tokens, device))


def whole(zigzag: Zigzag, rank: int, device: torch.device) -> Chunk:
    """`zigzag.whole` on a device."""
    return _kept(_whole(zigzag, rank, device))


def bounds(zigzag: Zigzag, rank: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """`Zigzag.bounds` on a device, int32."""
    return _kept(_bounds(zigzag, rank, device))


def _kept(tables: Tables) -> Tables:
    """Keep arrays that a CUDA graph is going to read, because the caches evict."""
    if is_capturing():
        _captured[id(tables)] = tables
    return tables


def is_capturing() -> bool:
    """Tell whether a CUDA graph records the current stream."""
    return bool(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


@functools.lru_cache(maxsize=_MOST_TABLES)
def _schedule(zigzag: Zigzag, rank: int, chunk_tokens: int, device: torch.device) -> tuple[Segments, tuple[Chunk, ...]]:
    found = pieces.schedule(zigzag, rank, chunk_tokens)
    return _segments(found.own, device), tuple(_chunk(chunk, device) for chunk in found.chunks)


@functools.lru_cache(maxsize=_MOST_TABLES)
def _whole(zigzag: Zigzag, rank: int, device: torch.device) -> Chunk:
    return _chunk(pieces.whole(zigzag, rank), device)


@functools.lru_cache(maxsize=_MOST_TABLES)
def _bounds(zigzag: Zigzag, rank: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    return tuple(_tensor(x, device) for x in zigzag.bounds(rank))


def _chunk(chunk: pieces.Chunk, device: torch.device) -> Chunk:
    calls = tuple(_segments(call, device) for call in chunk.calls if not call.is_empty)
    return Chunk(_tensor(chunk.order, device), calls)


def _segments(call: pieces.Segments, device: torch.device) -> Segments:
    starts = (_tensor(x, device) for x in (call.starts_q, call.starts_kv))
    return Segments(call.begin, call.end, Packed(*starts))


def _tensor(x: Any, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(x).to(device)


# ---- Exchanges ------------------------------------------------------------------------------------------------------


class Pending(NamedTuple):
    """An exchange in flight. It keeps the sent tensors alive until it is over."""

    received: torch.Tensor
    sent: torch.Tensor
    work: Any
    device: torch.device

    def wait(self) -> torch.Tensor:
        """Make the current stream wait, or the host with gloo; returns the received tensor."""
        if self.work is not None:
            _guarded(self.work.wait)
        return self.received.to(self.device)


class Links(NamedTuple):
    """A process group, this process's rank in it, and the rows that each rank sends, padding included."""

    group: Any
    world: int
    rank: int
    most: int

    @staticmethod
    def of(zigzag: Zigzag, group: Any) -> Links:
        if not dist.is_initialized() and zigzag.world == 1:
            return Links(None, 1, 0, zigzag.most)
        if not dist.is_initialized():
            raise ArgumentError(
                explain("group", "no process group", "one", "call torch.distributed.init_process_group")
            )
        world, rank = dist.get_world_size(group), dist.get_rank(group)
        if world != zigzag.world or rank < 0:
            got = f"a group of {world} ranks, this process being {'none' if rank < 0 else rank}"
            raise ArgumentError(explain("group", got, f"zigzag.world={zigzag.world} ranks, this process among them"))
        return Links(group, world, rank, zigzag.most)

    def gather(self, x: torch.Tensor) -> Pending:
        """Begin to gather the rows of all ranks, (world * most, ...)."""
        sent = x.detach()
        if len(x) < self.most:
            sent = torch.cat([sent, sent.new_zeros(self.most - len(x), *x.shape[1:])])
        return self.begin(gather_rows, sent.contiguous(), self.world * self.most)

    def gradients(self, like: torch.Tensor) -> torch.Tensor:
        """Zeros for the gradients of gathered rows, (world * most, ...)."""
        return like.new_zeros(self.world * self.most, *like.shape[1:])

    def added_up(self, gradients: torch.Tensor, rows: int) -> torch.Tensor:
        """Send gradients of gathered rows to the ranks that own them; returns the sums of this rank's rows.

        They are float32, added in the order of the ranks.
        """
        received = self.begin(dist.all_to_all_single, gradients, len(gradients)).wait()
        return received.unflatten(0, (self.world, self.most))[:, :rows].sum(0, dtype=torch.float32)

    def begin(self, collective: Callable[..., Any], sent: torch.Tensor, rows: int) -> Pending:
        """Begin an exchange that makes an array of `rows` rows."""
        device = sent.device
        if self.world == 1 or rows == 0:
            return Pending(sent, sent, None, device)
        if dist.get_backend(self.group) == _HOST_ONLY:
            sent = sent.cpu()
        received = sent.new_empty(rows, *sent.shape[1:])
        work = _guarded(lambda: collective(received, sent, group=self.group, async_op=True))
        return Pending(received, sent, work, device)


def _guarded(step: Callable[[], Any]) -> Any:
    """Run a step of an exchange; its failure means that another rank is gone."""
    try:
        return step()
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        remedy = "look at the other ranks' errors, and start all ranks anew"
        raise ParallelError(explain("group", f"an exchange that failed ({reason})", "all ranks", remedy)) from error


class Gather(torch.autograd.Function):  # type: ignore[misc]
    """Gather all ranks' rows; the backward returns the sums of their gradients."""

    @staticmethod
    def forward(ctx: Any, links: Links, chunk: Chunk, x: torch.Tensor) -> torch.Tensor:
        ctx.links, ctx.chunk, ctx.rows = links, chunk, len(x)
        carried = x.view(torch.uint8) if x.element_size() == 1 else x  # backends do not support e4m3
        return links.gather(carried).wait()[chunk.order].view(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        sent = ctx.links.gradients(gradient)
        sent[ctx.chunk.order] = gradient
        return None, None, ctx.links.added_up(sent, ctx.rows).to(gradient.dtype)
