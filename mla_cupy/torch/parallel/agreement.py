"""Comparison of the ranks' calls: ranks that make different ones raise instead of waiting for each other."""

from __future__ import annotations

import zlib
from collections.abc import Hashable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from mla_cupy.errors import ParallelError, explain
from mla_cupy.parallel.zigzag import Zigzag
from mla_cupy.torch.parallel.links import Links, gather_rows, is_capturing

_TEXT_BYTES = 256
_MOST_CALLS = 1024
"""Number of calls that a group remembers; then all of its ranks forget all of them."""
_compared: WeakKeyDictionary[Any, set[Hashable]] = WeakKeyDictionary()


def agree(links: Links, call: str, zigzag: Zigzag, rows: torch.Tensor, needs_grad: bool) -> None:
    """Compare a call with the calls of the other ranks, the first time that this group makes it.

    Parameters
    ----------
    links : Links
    call : str
        Name of the function.
    zigzag : Zigzag
    rows : tensor
        What travels, one row per token.
    needs_grad : bool
        Some argument requires grad, so the backward exchanges, too.

    Raises
    ------
    ParallelError
        On every rank, if the calls differ. A rank that repeats an earlier call compares nothing: it and a rank that
        makes a new call wait for each other until the group's timeout.
    """
    if links.world == 1 or is_capturing():
        return
    described = (call, zigzag, tuple(rows.shape[1:]), rows.dtype, needs_grad and torch.is_grad_enabled())
    known = _compared.setdefault(links.group or dist.group.WORLD, set())
    if described in known:
        return
    mine = _text(*described)
    for rank, theirs in enumerate(_gathered(links, mine, rows.device)):
        if theirs != mine:
            remedy = "make the same calls in the same order on every rank"
            raise ParallelError(explain("the call", f"{theirs} on rank {rank}", f"{mine}, as on this rank", remedy))
    if len(known) == _MOST_CALLS:
        known.clear()
    known.add(described)


def _text(call: str, zigzag: Zigzag, shape: tuple[int, ...], dtype: torch.dtype, has_gradients: bool) -> str:
    """A short text that differs, almost surely, between calls that do not fit together."""
    lengths = zlib.crc32(repr(zigzag.lengths).encode())
    of = f"{zigzag.tokens} tokens in {len(zigzag.lengths)} sequences (checksum {lengths:08x})"
    kind = " ".join([*map(str, shape), str(dtype).removeprefix("torch.")])
    return f"{call} of {of}, rows of {kind}, {'with' if has_gradients else 'no'} gradients"


def _gathered(links: Links, text: str, device: torch.device) -> list[str]:
    """The texts of all ranks."""
    sent = torch.tensor([list(text.encode().ljust(_TEXT_BYTES))], dtype=torch.uint8, device=device)
    received = links.begin(gather_rows, sent, links.world).wait().cpu()
    return [bytes(of_rank.tolist()).decode().rstrip() for of_rank in received]
