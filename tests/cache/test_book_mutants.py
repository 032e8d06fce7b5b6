"""Bugs planted in the bookkeeping of `PagedKVCache`: each must show in a walk beside the ledger."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mla_cupy import PagedKVCache
from mla_cupy.cache.book import Book
from mla_cupy.cache.prefixes import Prefixes
from tests.cache.walk import walk

Owner = Any
Planted = tuple[str, Owner, str, Callable[..., Any]]


def _reserve(book: Book, row: int, pages: int) -> None:
    owned = int(book.owned[row])
    book.table[row, owned : owned + pages] = book._take(pages)
    book.owned[row] += pages
    book.changed = True


def _verify_less(book: Book) -> list[str]:
    return []


def _fork(book: Book, row: int) -> int:
    pages = book.table[row, : book.owned[row]].tolist()
    return book.open(pages, int(book.length[row]), list(book.chains[row]), book.keys[row])


def _truncate(book: Book, row: int, length: int) -> None:
    book._drop(row, book.pages_for(length))
    book.length[row] = length
    book.dirty[row] = book.changed = True


def _register(prefixes: Prefixes, page: int, digest: bytes) -> None:
    if page not in prefixes._digest_of and digest not in prefixes._pages_of:
        prefixes._pages_of[digest], prefixes._digest_of[page] = {page: None}, digest
        prefixes.hashed[page] = True


def _wasted(book: Book) -> int:
    return int((book.owned * book.page_size - book.length).sum())


_chain, _match, _undo, _copy = Prefixes.chain, Prefixes.match, Book.undo, Book._copy


def _undo_in_silence(book: Book, plan: Any) -> None:
    synced, dirty, changed = book.synced.copy(), book.dirty.copy(), book.changed
    _undo(book, plan)
    book.synced[:], book.dirty[:], book.changed = synced, dirty, changed


def _copy_in_silence(book: Book, plan: Any, taken: list[int]) -> None:
    synced = book.synced.copy()
    _copy(book, plan, taken)
    book.synced[:] = synced


PLANTED: tuple[Planted, ...] = (
    ("a reservation is kept from the device", Book, "reserve", _reserve),
    ("tokens of 32 bits", Prefixes, "chain", lambda p, tokens, *more: _chain(p, tokens.astype(np.int32), *more)),
    ("keys do not keep apart", Prefixes, "match", lambda p, tokens, key: _match(p, tokens, b"")),
    ("whole prompts are found", Prefixes, "match", lambda p, tokens, key: _match(p, np.append(tokens, 0), key)),
    ("equal pages hide each other", Prefixes, "register", _register),
    ("pages that are written are still found", Book, "forget_tails", lambda book, plan: None),
    ("prefixes outlive a truncation", Book, "truncate", _truncate),
    ("shared pages are written", Book, "_shared_tails", lambda book, *plan: []),
    ("copies are kept from the device", Book, "_copy", _copy_in_silence),
    ("forks share what is reserved", Book, "fork", _fork),
    ("a failure is kept from the device", Book, "undo", _undo_in_silence),
    ("shared pages count twice", Book, "wasted", _wasted),
    ("overtaken steps are taken", PagedKVCache, "_check_newest", lambda cache, step: None),
)


def walks() -> None:
    for seed in range(8):
        walk(seed, 300, 5)


@pytest.mark.parametrize("planted", PLANTED, ids=[name for name, *_ in PLANTED])
def test_shows(planted: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger detects the bug, not only the cache's own checks."""
    _, owner, name, wrong = planted
    monkeypatch.setattr(owner, name, wrong)
    monkeypatch.setattr(Book, "verify", _verify_less)
    monkeypatch.setattr(Book, "compare", lambda book, *arrays: _verify_less(book))
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        walks()
