"""Waste of pages, and savings by sharing them: counted in `Book`, the bookkeeping of `PagedKVCache`, without a GPU.

Lengths are drawn, not recorded: log-normal prompts and answers of a mean that is stated, and no longer than the model
allows. Sequences grow by a token a step, and when one ends another begins, so that averages are those of a server that
is never idle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mla_cupy.cache.book import Book

Array = npt.NDArray[np.int64]
_SPREAD = 1.0  # of the logarithm of lengths


@dataclass(frozen=True)
class Traffic:
    """Requests that are served side by side.

    Attributes
    ----------
    batch, steps : int
        Sequences at a time; steps that are counted, after as many that are not.
    prompt, answer, longest : int
        Mean tokens of each, and the most that a sequence may have.
    """

    batch: int = 64
    steps: int = 2048
    prompt: int = 512
    answer: int = 512
    longest: int = 8192

    def lengths(self, rng: np.random.Generator, mean: int) -> int:
        """A length of this mean, but for the limit of a half of the longest."""
        drawn = rng.lognormal(np.log(mean) - _SPREAD**2 / 2, _SPREAD)
        return int(np.clip(drawn, 1, self.longest // 2))


@dataclass(frozen=True)
class Waste:
    """Shares of the allocated places that hold no token, averaged over steps.

    Attributes
    ----------
    paged : float
        Pages of the cache.
    whole, doubled : float
        A contiguous piece for each sequence: of the longest that it may have, or of a power of two, moved when full.
    """

    paged: float
    whole: float
    doubled: float


def waste(traffic: Traffic, page_size: int, seed: int = 0) -> Waste:
    """Serve requests, and count after each step what is allocated and what of it holds tokens."""
    rng = np.random.default_rng(seed)
    pages = -(-traffic.longest // page_size)
    book = Book(traffic.batch * pages, page_size, traffic.batch, pages)
    rows = [_begin(book, traffic.lengths(rng, traffic.prompt)) for _ in range(traffic.batch)]
    left = np.array([traffic.lengths(rng, traffic.answer) for _ in rows])
    held = np.zeros((4, traffic.steps))  # tokens, and places of the three kinds
    for step in range(-traffic.steps, traffic.steps):
        for i in np.flatnonzero(left == 0):
            book.close(rows[i])
            rows[i], left[i] = _begin(book, traffic.lengths(rng, traffic.prompt)), traffic.lengths(rng, traffic.answer)
        _extend(book, rows, 1)
        left -= 1
        if step >= 0:
            tokens = book.length[rows]
            used = book.num_pages - sum(book.available)
            doubled = (2 ** np.ceil(np.log2(tokens))).sum()
            held[:, step] = tokens.sum(), used * page_size, traffic.batch * traffic.longest, doubled
    tokens, *places = held.mean(axis=1)
    return Waste(*(1 - float(tokens / of) for of in places))


@dataclass(frozen=True)
class Saving:
    """Savings by sharing: pages with it, and pages if each sequence had its own, averaged over steps."""

    shared: float
    alone: float

    @property
    def saved(self) -> float:
        """The share of pages that are saved."""
        return 1 - self.shared / self.alone

    @property
    def times(self) -> float:
        """The factor by which more sequences fit."""
        return self.alone / self.shared


def parallel_samples(page_size: int, prompt: int, answer: int, samples: int, seed: int = 0) -> Saving:
    """Several answers to one prompt: the prompt's pages are shared, but for a last one that is not full."""
    return _grow(page_size, prompt, answer, samples, lambda book, rows, rng: rows, seed)


def beams(page_size: int, prompt: int, answer: int, width: int, seed: int = 0) -> Saving:
    """Beam search: at each step the best beams go on, some of them twice, and others end.

    Which one a beam goes on from is drawn, better ones more often: with weights 1, 1/2, 1/4 ...
    """
    weights = 0.5 ** np.arange(width)

    def choose(book: Book, rows: list[int], rng: np.random.Generator) -> list[int]:
        parents = sorted(rng.choice(width, width, p=weights / weights.sum()).tolist())
        first = [i == 0 or parents[i] != parents[i - 1] for i in range(width)]
        gone = [row for i, row in enumerate(rows) if i not in parents]
        for row in gone:
            book.close(row)
        return [rows[p] if is_first else book.fork(rows[p]) for p, is_first in zip(parents, first, strict=True)]

    return _grow(page_size, prompt, answer, width, choose, seed)


def system_prompt(page_size: int, common: int, own: int, requests: int, seed: int = 0) -> Saving:
    """Requests that begin with the same tokens, which are found by their hashes."""
    rng = np.random.default_rng(seed)
    pages = -(-(common + 4 * own) // page_size) + 1
    book = Book(requests * pages, page_size, requests, pages)
    prefix = rng.integers(0, 1 << 17, common)
    alone = 0
    for _ in range(requests):
        tokens = np.concatenate([prefix, rng.integers(0, 1 << 17, int(rng.integers(1, 2 * own)))])
        found, chain = book.prefixes.match(tokens, b"")
        row = book.open(found, len(found) * page_size, chain, b"")
        _extend(book, [row], len(tokens) - len(found) * page_size)
        book.commit(row, tokens)
        alone += book.pages_for(len(tokens))
    return Saving(book.num_pages - sum(book.available), alone)


def _begin(book: Book, tokens: int) -> int:
    row = book.open([], 0, [], b"")
    _extend(book, [row], tokens)
    return row


def _extend(book: Book, rows: list[int], tokens: int) -> None:
    book.extend(book.plan_extend(np.array(rows), tokens))


Choose = Callable[[Book, list[int], np.random.Generator], list[int]]


def _grow(page_size: int, prompt: int, answer: int, count: int, choose: Choose, seed: int) -> Saving:
    """Sequences from one prompt on, a token a step, after `choose` said which of them go on."""
    rng = np.random.default_rng(seed)
    pages = -(-(prompt + answer) // page_size)
    book = Book((2 * count + 1) * pages, page_size, 2 * count, pages)
    first = _begin(book, prompt)
    rows = [first, *(book.fork(first) for _ in range(count - 1))]
    shared = alone = 0
    for _ in range(answer):
        rows = choose(book, rows, rng)
        _extend(book, rows, 1)
        shared += book.num_pages - sum(book.available)
        alone += sum(book.pages_for(int(book.length[row])) for row in rows)
    return Saving(shared / answer, alone / answer)
