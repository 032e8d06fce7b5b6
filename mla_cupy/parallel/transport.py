"""Interface of transports, which turn partial results of all heads into merged results of one rank's heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from mla_cupy.errors import ArgumentError, ParallelError, ShapeError, explain
from mla_cupy.kernels.lse import LseOptions
from mla_cupy.kernels.merge.exchange import Splits
from mla_cupy.parallel.group import Group


class Result(NamedTuple):
    """Options of a merged result, see `ContextParallel.merge`."""

    out: Any = None
    lse: Any = None
    out_dtype: Any = None
    lse_options: LseOptions = LseOptions()
    stream: Any = None

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of `merge_states`."""
        others = self._asdict()
        return {**others.pop("lse_options")._asdict(), **others}


@runtime_checkable
class Transport(Protocol):
    """Exchange between the ranks of a group."""

    @property
    def world(self) -> int:
        """Number of ranks."""

    @property
    def rank(self) -> int:
        """This rank."""

    def merge(self, outs: Any, lses: Any, result: Result) -> tuple[Any, Any]:
        """Exchange partial results, and merge the results of this rank's heads.

        Parameters
        ----------
        outs : array, (b, s_q, h_q, d)
        lses : array, (b, h_q, s_q), float32
        result : Result

        Returns
        -------
        out : array, (b, s_q, h_q / world, d)
        lse : array, (b, h_q / world, s_q), float32
        """

    def check(self) -> None:
        """Raise ParallelError if another rank is gone, or an earlier exchange has failed."""


class OfGroup:
    """Base of the transports between the ranks of a group."""

    def __init__(self, group: Group) -> None:
        if not isinstance(group, Group):
            raise ArgumentError(explain("group", repr(group), "a Rendezvous, or a member of a LocalGroup"))
        self._group = group

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self._group.world

    @property
    def rank(self) -> int:
        """This rank."""
        return self._group.rank

    def check(self) -> None:
        """Raise ParallelError if another rank is gone."""
        self._group.check()


@runtime_checkable
class MergesSplits(Protocol):
    """A transport that merges the pieces of a decode's split requests itself."""

    def merge_splits(self, outs: Any, lses: Any, splits: Splits, result: Result) -> tuple[Any, Any]:
        """See `Transport.merge`; `outs` and `lses` lack the rows of the requests that `splits` cuts into pieces."""


def check_alike(calls: Sequence[bytes], rank: int) -> None:
    """Raise ParallelError unless every rank describes its call as this one does."""
    mine = calls[rank]
    for other, theirs in enumerate(calls):
        if theirs != mine:
            what = f"rank {other} merges {theirs.decode(errors='replace')}"
            raise ParallelError(explain("the group", what, f"{mine.decode()}, as rank {rank}"))


def heads_per_rank(outs: tuple[int, ...], lses: tuple[int, ...], world: int) -> int:
    """Number of query heads per rank, for partial results of these shapes.

    Raises
    ------
    ShapeError
        If the shapes do not fit partial results, or the heads cannot be shared evenly.
    """
    if len(outs) != 4:
        raise ShapeError(explain("outs.shape", outs, "(b, s_q, h_q, d)"))
    b, s_q, h_q, _ = outs
    if lses != (b, h_q, s_q):
        raise ShapeError(explain("lses.shape", lses, f"(b, h_q, s_q) = {(b, h_q, s_q)}"))
    if h_q % world:
        raise ShapeError(
            explain("h_q", h_q, f"a multiple of world={world}", "every rank gets the same number of heads")
        )
    return h_q // world
