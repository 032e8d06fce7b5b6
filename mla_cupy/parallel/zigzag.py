"""Zigzag context parallelism: which tokens a rank holds, and which keys each call of `mla_prefill` sees."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mla_cupy.errors import ArgumentError, ShapeError, explain
from mla_cupy.ops.checks import check_count
from mla_cupy.shapes import MAX_TOKENS

Rows = npt.NDArray[np.int64]
Starts = npt.NDArray[np.int32]
HALVES = (0, 1)
"""A rank's two pieces of a sequence: an early piece, with few keys before it, and a late piece."""
CHUNK_TOKENS = 32768
"""Default number of tokens whose keys and values exist at a time."""
_MAX_WORLD = 1 << 16
_MOST_SCHEDULES = 64


@dataclass(frozen=True)
class Zigzag:
    """Packed sequences, each cut into 2 * world pieces: rank r holds pieces r and 2 * world - 1 - r of every sequence.

    A late piece has many keys before it and an early one few, so causal attention costs every rank the same. A rank
    stores its early and late pieces of the first sequence, then the pieces of the second one, and so on: the order of
    Transformer Engine and Megatron-Core.

    Attributes
    ----------
    lengths : tuple of int
        Tokens of each sequence, any number. Piece i of a sequence of n tokens begins at token i * n // (2 * world).
    world : int
        Number of ranks.

    Raises
    ------
    ArgumentError
        If there is no sequence, or a number does not fit.

    Examples
    --------
    >>> import numpy as np
    >>> from mla_cupy.parallel import Zigzag
    >>> zigzag = Zigzag((8, 4), world=2)
    >>> tokens = np.array([0, 1, 2, 3, 4, 5, 6, 7, 100, 101, 102, 103])
    >>> [zigzag.split(tokens, rank).tolist() for rank in range(2)]
    [[0, 1, 6, 7, 100, 103], [2, 3, 4, 5, 101, 102]]
    >>> zigzag.positions(1).tolist()
    [2, 3, 4, 5, 1, 2]
    >>> zigzag.join(np.concatenate([zigzag.split(tokens, rank) for rank in range(2)])).tolist() == tokens.tolist()
    True
    """

    lengths: tuple[int, ...]
    world: int

    def __post_init__(self) -> None:
        check_count("world", self.world, 1, _MAX_WORLD)
        lengths = tuple(check_count("lengths", length, 0, MAX_TOKENS) for length in self.lengths)
        if not lengths:
            raise ArgumentError(explain("lengths", self.lengths, "the tokens of at least one sequence"))
        object.__setattr__(self, "lengths", lengths)  # accepts any integer type; equal zigzags must have equal hashes

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(self.lengths)

    @functools.cached_property
    def most(self) -> int:
        """Rows of the rank that holds the most."""
        return max(sum(map(_size, itertools.chain(*self._spans(rank)))) for rank in range(self.world))

    @property
    def is_even(self) -> bool:
        """Tell whether all pieces of a sequence have the same size, as the arrays of `jax.shard_map` need."""
        return all(length % (2 * self.world) == 0 for length in self.lengths)

    def rows(self, rank: int) -> Rows:
        """Rows of the packed sequences that a rank holds, in its order; int64."""
        return np.concatenate([np.arange(*span) for spans in self._spans(rank) for span in spans])

    def positions(self, rank: int) -> Rows:
        """Positions of a rank's tokens in their sequences, for RoPE; int64."""
        firsts = np.repeat(self.starts[:-1], [sum(map(_size, spans)) for spans in self._spans(rank)])
        return self.rows(rank) - firsts

    def bounds(self, rank: int) -> tuple[Starts, Starts]:
        """First row of each token's sequence, and one past the token's own row: `ks` and `ke` of `indexer_select`."""
        rows = self.rows(rank)
        return (rows - self.positions(rank)).astype(np.int32), (rows + 1).astype(np.int32)

    def split(self, x: Any, rank: int) -> Any:
        """Rows that a rank holds of an array, (tokens, ...), of NumPy, CuPy, PyTorch or JAX.

        Raises
        ------
        ShapeError
            If the array has another number of rows.
        """
        self._check_rows(x)
        return x[self.rows(rank)]

    def join(self, x: Any) -> Any:
        """Put rows of all ranks, one rank after another, in the sequences' order: the inverse of `split`.

        Raises
        ------
        ShapeError
            If the array has another number of rows.
        """
        self._check_rows(x)
        return x[np.argsort(np.concatenate([self.rows(rank) for rank in range(self.world)]))]

    @functools.cached_property
    def starts(self) -> Starts:
        """First row of each sequence, and the number of tokens."""
        return _starts(self.lengths)

    def _check_rows(self, x: Any) -> None:
        if x.shape[0] != self.tokens:
            raise ShapeError(explain("x.shape[0]", x.shape[0], f"{self.tokens}, the tokens of all sequences"))

    def _spans(self, rank: int) -> list[list[tuple[int, int]]]:
        """Rows [first, end) of a rank's early and late piece, for each sequence."""
        check_count("rank", rank, 0, self.world - 1)
        pieces = 2 * self.world
        return [
            [(first + i * length // pieces, first + (i + 1) * length // pieces) for i in (rank, pieces - 1 - rank)]
            for first, length in zip(self.starts.tolist(), self.lengths, strict=False)
        ]


class Segments(NamedTuple):
    """One call of `mla_prefill`: some of a rank's queries, and the keys of a chunk that each of them sees.

    Attributes
    ----------
    begin, end : int
        The rank's rows that are the queries.
    starts_q, starts_kv : array, int32
        Starts of the packed sequences of the call.
    is_empty : bool
        No query sees a key.
    """

    begin: int
    end: int
    starts_q: Starts
    starts_kv: Starts
    is_empty: bool


class Chunk(NamedTuple):
    """Keys that exist together, such as a slice of every rank's early or late pieces.

    Attributes
    ----------
    order : array, int64
        Their rows in the gathered array, (world * zigzag.most, ...), by sequence, then by piece.
    calls : tuple of Segments
        Queries of the early pieces and queries of the late pieces, without queries before the keys.
    """

    order: Rows
    calls: tuple[Segments, ...]


class Schedule(NamedTuple):
    """A rank's calls of `mla_prefill`.

    Attributes
    ----------
    own : Segments
        Each piece with itself, causal.
    chunks : tuple of Chunk
        Keys before the queries, of all ranks. Every query of a call sees all keys of its sequence in the call.
    """

    own: Segments
    chunks: tuple[Chunk, ...]


@functools.lru_cache(maxsize=_MOST_SCHEDULES)
def whole(zigzag: Zigzag, rank: int) -> Chunk:
    """Chunk of all rows, in the sequences' order.

    The calls are for queries of the early pieces and of the late ones, causal.
    """
    order = np.empty(zigzag.tokens, np.int64)
    for r in range(zigzag.world):
        rows = zigzag.rows(r)
        order[rows] = r * zigzag.most + np.arange(len(rows))
    return Chunk(order, tuple(_causal(zigzag, rank, half) for half in HALVES))


@functools.lru_cache(maxsize=_MOST_SCHEDULES)
def schedule(zigzag: Zigzag, rank: int, chunk_tokens: int) -> Schedule:
    """Divide a rank's attention into calls.

    Parameters
    ----------
    zigzag : Zigzag
    rank : int
    chunk_tokens : int
        About the most tokens of a chunk.
    """
    sizes = [_size(span) for spans in zigzag._spans(rank) for span in spans]
    starts = _starts(sizes)
    own = Segments(0, int(starts[-1]), starts, starts, not starts[-1])
    count = max(1, -(-zigzag.tokens // (len(HALVES) * chunk_tokens)))
    return Schedule(own, tuple(_chunk(zigzag, rank, half, i, count) for half in HALVES for i in range(count)))


def _chunk(zigzag: Zigzag, rank: int, half: int, i: int, count: int) -> Chunk:
    """Slice i of `count` of all pieces of a half."""
    slices = [_slices(zigzag, r, half, i, count) for r in range(zigzag.world)]
    sizes = np.array([[len(rows) for rows in of_rank] for of_rank in slices])  # [rank, sequence]
    order = [r * zigzag.most + slices[r][n] for n in range(sizes.shape[1]) for r in _by_piece(zigzag.world, half)]
    calls = (_segments(zigzag, rank, queries, half, sizes) for queries in HALVES if queries >= half)
    return Chunk(np.concatenate(order), tuple(calls))


def _slices(zigzag: Zigzag, rank: int, half: int, i: int, count: int) -> list[Rows]:
    """Rows of a rank that lie in slice i of its pieces of a half, for each sequence."""
    sizes = [_size(span) for spans in zigzag._spans(rank) for span in spans]
    firsts = _starts(sizes)[half::2].tolist()
    return [
        np.arange(first + i * size // count, first + (i + 1) * size // count)
        for first, size in zip(firsts, sizes[half::2], strict=False)
    ]


def _by_piece(world: int, half: int) -> Sequence[int]:
    """Ranks in the order of their pieces of a half."""
    return range(world) if half == 0 else range(world - 1, -1, -1)


def _segments(zigzag: Zigzag, rank: int, queries: int, half: int, sizes: Rows) -> Segments:
    """Queries of a half, and the keys of a chunk in earlier pieces; the chunk is of either half."""
    ranks = _by_piece(zigzag.world, half)
    before = list(ranks[: ranks.index(rank)] if queries == half else ranks)
    return _paired(zigzag, rank, queries, sizes[before].sum(0), sizes.sum(0))


def _causal(zigzag: Zigzag, rank: int, half: int) -> Segments:
    """Queries of a half, and the keys up to the end of their pieces."""
    ends: Rows = np.array([spans[half][1] for spans in zigzag._spans(rank)])
    return _paired(zigzag, rank, half, ends - zigzag.starts[:-1], np.array(zigzag.lengths))


def _paired(zigzag: Zigzag, rank: int, half: int, seen: Rows, keys: Rows) -> Segments:
    """Queries of a half, and the first `seen` of the `keys` of each sequence.

    Between the sequences lie the other keys, without queries, and queries of the other half, without keys.
    """
    own = np.array([[_size(span) for span in spans] for spans in zigzag._spans(rank)])  # [sequence, half]
    begin, end = int(own[0, :half].sum()), int(own.sum() - own[-1, half + 1 :].sum())
    between = np.append(own[:-1, 1] if half == 0 else own[1:, 0], 0)
    none = np.zeros_like(seen)
    starts_q = _starts(np.stack([own[:, half], none, between], axis=1).ravel())
    starts_kv = _starts(np.stack([seen, keys - seen, none], axis=1).ravel())
    return Segments(begin, end, starts_q, starts_kv, not (own[:, half] * seen).any())


def _size(span: tuple[int, int]) -> int:
    return span[1] - span[0]


def _starts(sizes: Iterable[int]) -> Starts:
    return np.fromiter(itertools.accumulate(sizes, initial=0), np.int32)


def check_tokens(argument: str, count: int, zigzag: Zigzag, rank: int) -> None:
    """Check that an array has a row for each token of a rank.

    Raises
    ------
    ShapeError
    """
    expected = schedule(zigzag, rank, CHUNK_TOKENS).own.end
    if count != expected:
        remedy = "pass zigzag.split(..., rank), or the lengths of whole sequences to Zigzag"
        raise ShapeError(explain(f"{argument}.shape[0]", count, f"{expected}, this rank's tokens", remedy))
