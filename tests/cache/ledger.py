"""Required contents and counts of a `PagedKVCache`, from its docstrings alone, compared with the cache itself.

Nothing here reads the cache's bookkeeping: only its methods, its arrays, and the bytes of its pages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from threading import local
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mla_cupy
from mla_cupy import ArgumentError, CacheFullError, CacheStats, CacheStep, PagedKVCache

#: Latents of 512 numbers, which hold eight bytes of a token's id, and index keys, which hold its 22 octal digits.
POOLS = {"kv": "fp16-nope", "indexer": "indexer"}
_CODES = np.arange(8).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
Content = tuple[bytes, tuple[int, ...]]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a cache."""

    num_pages: int
    page_size: int
    max_seqs: int
    max_pages: int
    num_layers: int

    @property
    def max_tokens(self) -> int:
        """Largest number of tokens of a step: all places."""
        return self.num_pages * self.page_size

    def cache(self, device: int | str, library: str | None = None) -> PagedKVCache:
        """Make a cache of these sizes."""
        sizes = {field.name: getattr(self, field.name) for field in fields(self)}
        return PagedKVCache(POOLS, **sizes, max_tokens=self.max_tokens, device=device, library=library)


@dataclass
class Held:
    """A sequence: its tokens, what keeps its prefix apart, its pages as last seen, and how many with those reserved."""

    tokens: list[int]
    key: bytes
    pages: list[int]
    owned: int


class InjectedError(Exception):
    """A failure of the device."""


class Faults:
    """Makes the calling thread's steps fail, before or after the arrays of the cache have changed."""

    def __init__(self, cache: PagedKVCache) -> None:
        self._when = local()
        submit = cache._memory.submit

        def guarded(part: slice, copies: int, stream: Any) -> None:
            when = getattr(self._when, "value", "")
            if when == "before":
                raise InjectedError
            submit(part, copies, stream)
            if when == "after":
                raise InjectedError

        cache._memory.submit = guarded  # type: ignore[method-assign]

    @contextmanager
    def failing(self, when: str) -> Iterator[None]:
        """Within a with statement."""
        self._when.value = when
        try:
            yield
        finally:
            self._when.value = ""


def conversions(like: Any) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Conversions to arrays of another array's library and place, and from them to NumPy's."""
    library = type(like).__module__.partition(".")[0]
    if library == "numpy":
        return np.asarray, np.asarray
    if library == "cupy":
        import cupy

        return cupy.asarray, cupy.asnumpy
    if library == "torch":
        import torch

        words = {"bfloat16": np.int16, "float8_e4m3fn": np.uint8}

        def of(x: Any) -> Any:
            name = str(x.dtype)
            bits = torch.from_numpy(np.ascontiguousarray(x.view(words.get(name, x.dtype))))
            return (bits.view(getattr(torch, name)) if name in words else bits).to(like.device)

        def host(x: Any) -> Any:
            assert isinstance(x, torch.Tensor)
            name = str(x.dtype).removeprefix("torch.")
            if name not in words:
                return x.cpu().numpy()
            bits = torch.int16 if name == "bfloat16" else torch.uint8
            return x.cpu().view(bits).numpy().view(getattr(ml_dtypes, name))

        return of, host
    import jax

    place = next(iter(like.devices()))
    return lambda x: jax.device_put(x, place), np.asarray


class Tokens:
    """Writes the ids of tokens to all pools of a cache, and reads them back."""

    def __init__(self, cache: PagedKVCache, num_layers: int) -> None:
        self._cache, self._num_layers = cache, num_layers
        self.of, self.host = conversions(cache.seqlens)

    def write(self, step: CacheStep, ids: Sequence[int]) -> None:
        """Write with `append` and `append_keys`, another number in each layer."""
        for layer in range(self._num_layers):
            latent = np.zeros((len(ids), 512), np.float16)
            key = np.full((len(ids), 128), 448, ml_dtypes.bfloat16)  # the largest number: the scale is 1
            latent[:, :8], latent[:, 8], key[:, 1:23] = _bytes(ids), layer, _octals(ids)
            key[:, 23] = layer
            self._cache.append(step, layer, self.of(latent))
            self._cache.append_keys(step, layer, self.of(key), hadamard=False)

    def check(self, slots: Any, ids: Sequence[int], page_size: int) -> None:
        """Every token is at its slot, in all layers of all pools."""
        if not len(ids):
            return
        where = self.of(slots)
        latent = np.column_stack([_bytes(ids), np.zeros(len(ids))])
        codes = np.column_stack([_octals(ids), np.zeros(len(ids), np.int64)])
        for layer in range(self._num_layers):
            latent[:, 8] = codes[:, 22] = layer
            rows = self._cache.layer(layer)[where // page_size, where % page_size, :9]
            assert (self.host(rows) == latent).all()
            keys, _ = mla_cupy.indexer_cache_gather(self._cache.layer(layer, "indexer"), where)
            assert (self.host(keys).view(np.uint8)[:, 1:24] == _CODES[codes]).all()


def _bytes(ids: Sequence[int]) -> Any:
    return np.array(ids, np.int64).view(np.uint8).reshape(-1, 8)


def _octals(ids: Sequence[int]) -> Any:
    digits = np.array(ids, np.int64).view(np.uint64)[:, None] >> np.arange(0, 66, 3, np.uint64) & np.uint64(7)
    return digits.astype(np.int64)


class Prefixes:
    """Pages that can be found, and their contents: the key and all tokens up to the page's end.

    Which cached pages are given up is the cache's choice. Those that a sequence has next are known to be gone; of those
    that are only reserved, or that a step took that failed, it is known how many they are: `lost`.
    """

    def __init__(self) -> None:
        self.content: dict[int, Content] = {}
        self.lost = 0
        self.vague = False  # whether it is not known, either, which of two equal pages was kept

    @property
    def exact(self) -> bool:
        """True for each page that is known to be cached."""
        return not (self.lost or self.vague)

    def commit(self, held: Held, count: int, page_size: int) -> None:
        """The full pages of the first tokens of a sequence."""
        for column in range(count // page_size):
            self.content.setdefault(held.pages[column], (held.key, tuple(held.tokens[: (column + 1) * page_size])))

    def write(self, page: int) -> None:
        """A page is overwritten."""
        self.content.pop(page, None)

    def hand_out(self, pages: Sequence[int], evictions: int) -> None:
        """Pages have an owner from now on, and the call evicted this number of pages."""
        gone = sum(self.content.pop(page, None) is not None for page in pages)
        self.lost += evictions - gone
        assert self.lost >= 0 or self.vague

    def give_up(self, pages: Sequence[int], unowned: set[int]) -> None:
        """The last sequence with these pages has let them go; `unowned` says which pages nobody has."""
        for page in pages:
            content = self.content.get(page)
            equal = [other for other, held in self.content.items() if held == content and other != page]
            if content is None or not equal:
                continue
            if self.exact or not all(other in unowned for other in equal):
                del self.content[page]
            else:
                self.vague = True

    def findable(self, prompt: list[int], key: bytes, page_size: int, unowned: set[int]) -> tuple[int, int]:
        """Least and most pages of a prompt that can be found."""
        at_most = set(self.content.values())
        sure = {content for page, content in self.content.items() if self.exact or page not in unowned}
        candidates = [(key, tuple(prompt[:end])) for end in range(page_size, len(prompt), page_size)]
        return _run(candidates, sure), _run(candidates, at_most)

    def clear(self) -> None:
        """Every page has been handed out since."""
        self.content.clear()
        self.lost, self.vague = 0, False


def _run(candidates: Sequence[Content], known: set[Content]) -> int:
    for found, content in enumerate(candidates):
        if content not in known:
            return found
    return len(candidates)


class Ledger:
    """A cache, and what it must hold and count.

    Parameters
    ----------
    cache : PagedKVCache
    sizes : Sizes
    faults : Faults
    alone : bool
        Whether nobody else changes the cache: then pages, counts and errors are foretold, too.
    """

    def __init__(self, cache: PagedKVCache, sizes: Sizes, faults: Faults, alone: bool = True) -> None:
        self.cache, self.sizes, self.alone = cache, sizes, alone
        self.page_size, self.longest = sizes.page_size, sizes.max_pages * sizes.page_size
        self.held: dict[int, Held] = {}
        self.prefixes = Prefixes()
        self.tokens = Tokens(cache, sizes.num_layers)
        self.overtaken: CacheStep | None = None
        self._newest: CacheStep | None = None
        self.copies = 0
        self._faults = faults

    # ---- What follows from the docstrings ----------------------------------------------------------------------

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def owners(self) -> Counter[int]:
        """Number of sequences that share each page."""
        return Counter(page for held in self.held.values() for page in held.pages)

    def reserved(self) -> int:
        return sum(held.owned - len(held.pages) for held in self.held.values())

    def room(self) -> int:
        """Pages that a call may take."""
        return self.sizes.num_pages - len(self.owners()) - self.reserved()

    def unowned(self) -> set[int]:
        return set(range(self.sizes.num_pages)) - set(self.owners())

    def writers(self, added: dict[int, list[int]]) -> dict[int, list[int]]:
        """The partly filled pages that a step writes, and who writes them."""
        made: dict[int, list[int]] = {}
        for sequence, ids in added.items():
            held = self.held[sequence]
            if ids and len(held.tokens) % self.page_size:
                made.setdefault(held.pages[-1], []).append(sequence)
        return made

    def needs(self, added: dict[int, list[int]]) -> tuple[int, int]:
        """Pages that a step takes, and how many of them are copies: the last owner of a page to write it keeps it."""
        owners = self.owners()
        copies = sum(min(len(by), owners[page] - 1) for page, by in self.writers(added).items())
        grown = 0
        for sequence, ids in added.items():
            held = self.held[sequence]
            grown += max(0, self.pages_for(len(held.tokens) + len(ids)) - held.owned)
        return grown + copies, copies

    # ---- Operations ------------------------------------------------------------------------------------------------

    def allocate(self, prompt: list[int], key: bytes = b"") -> int | None:
        """A sequence; None if there is no place for one."""
        if self.alone and len(self.held) == self.sizes.max_seqs:
            self.refused(CacheFullError, "sequences", lambda: self.cache.allocate(prompt, key=key))
            return None
        before = self.cache.stats()
        least, most = self.prefixes.findable(prompt[: self.longest], key, self.page_size, self.unowned())
        try:
            sequence, cached = self.cache.allocate(prompt, key=key)
        except CacheFullError:
            assert not self.alone
            return None
        assert cached % self.page_size == 0
        assert cached < max(1, len(prompt))
        assert sequence not in self.held
        pages = self.cache.pages(sequence).tolist()
        self.held[sequence] = Held(prompt[:cached], key, pages, len(pages))
        if self.alone:
            assert least <= cached // self.page_size <= most
            after = self.cache.stats()
            assert after.prefix_hits - before.prefix_hits == len(pages)
            assert len(pages) <= after.prefix_lookups - before.prefix_lookups <= len(pages) + 1
            for end, page in enumerate(pages, 1):
                assert self.prefixes.content[page] == (key, tuple(prompt[: end * self.page_size]))
        self.check_tokens([sequence])
        return int(sequence)

    def extend(self, added: dict[int, list[int]]) -> bool:
        """A step, and its tokens in all layers; False if there is no room."""
        needed, copies = self.needs(added)
        counts = [len(ids) for ids in added.values()]
        if self.alone and needed > self.room():
            self.refused(CacheFullError, "pages", lambda: self.cache.extend(list(added), counts))
            return False
        before = self.cache.stats()
        with self.cache.lock:
            try:
                step = self.cache.extend(list(added), counts)
            except CacheFullError:
                assert not self.alone
                return False
            self.tokens.write(step, [token for ids in added.values() for token in ids])
            self._check_step(step, added)
        self.overtaken, self._newest = self._newest, step
        pages = {sequence: self.cache.pages(sequence).tolist() for sequence in added}
        if self.alone:
            assert step.copies == copies
            self._check_new_pages(added, pages, needed, before)
        self.copies += copies
        for sequence, ids in added.items():
            held = self.held[sequence]
            held.tokens += ids
            held.pages, held.owned = pages[sequence], max(held.owned, len(pages[sequence]))
        return True

    def fail(self, added: dict[int, list[int]], when: str) -> None:
        """A step that fails changes nothing, but that cached pages may be gone."""
        needed, _ = self.needs(added)
        before = self.cache.stats()
        full = self.alone and needed > self.room()
        with self._faults.failing(when), pytest.raises((InjectedError, CacheFullError)) as raised:
            self.cache.extend(list(added), [len(ids) for ids in added.values()])
        if self.alone:
            assert (raised.type is CacheFullError) == full
            evictions = self.cache.stats().evictions - before.evictions
            assert evictions == (0 if full else max(0, needed - before.pages_free))
            self.prefixes.lost += evictions
        if raised.type is InjectedError:
            self.overtaken, self._newest = self._newest or self.overtaken, None
        self.check_sequences()

    def stale(self) -> None:
        """A step that has been overtaken is refused, and nothing is written."""
        step = self.overtaken
        if step is not None:
            latent = self.tokens.of(np.full((1, 512), 3, np.float16))
            self.refused(ArgumentError, "step: got number", lambda: self.cache.append(step, 0, latent))
            key = self.tokens.of(np.ones((1, 128), ml_dtypes.bfloat16))
            self.refused(ArgumentError, "step: got number", lambda: self.cache.append_keys(step, 0, key))

    def fork(self, sequence: int, count: int) -> list[int]:
        """Sequences that share all pages; none if there are no places for them."""
        if self.alone and len(self.held) + count > self.sizes.max_seqs:
            self.refused(CacheFullError, "sequences", lambda: self.cache.fork(sequence, count))
            return []
        try:
            made = self.cache.fork(sequence, count)
        except CacheFullError:
            assert not self.alone
            return []
        assert len(made) == count
        held = self.held[sequence]
        for other in made:
            assert other not in self.held
            self.held[other] = Held(list(held.tokens), held.key, list(held.pages), len(held.pages))
        return made

    def truncate(self, lengths: dict[int, int]) -> None:
        self.cache.truncate(list(lengths), list(lengths.values()))
        for sequence, length in lengths.items():
            held = self.held[sequence]
            keep = self.pages_for(length)
            pages, held.pages, held.owned = held.pages[keep:], held.pages[:keep], keep
            del held.tokens[length:]
            self._gone(pages)

    def free(self, sequences: Sequence[int]) -> None:
        self.cache.free(sequences)
        for sequence in sequences:
            self._gone(self.held.pop(sequence).pages)
        if sequences:
            with pytest.raises(ArgumentError, match="sequence: got"):
                self.cache.row(sequences[0])

    def _gone(self, pages: list[int]) -> None:
        unowned = self.unowned()
        self.prefixes.give_up([page for page in pages[::-1] if page in unowned], unowned)

    def commit(self, sequence: int, count: int) -> None:
        held = self.held[sequence]
        self.cache.commit(sequence, held.tokens[:count])
        self.prefixes.commit(held, count, self.page_size)

    def reserve(self, sequence: int, tokens: int) -> None:
        held = self.held[sequence]
        wanted = self.pages_for(len(held.tokens) + tokens)
        if wanted > self.sizes.max_pages:
            self.refused(ArgumentError, "tokens: got", lambda: self.cache.reserve(sequence, tokens))
            return
        missing = max(0, wanted - held.owned)
        if self.alone and missing > self.room():
            self.refused(CacheFullError, "pages", lambda: self.cache.reserve(sequence, tokens))
            return
        before = self.cache.stats()
        try:
            self.cache.reserve(sequence, tokens)
        except CacheFullError:
            assert not self.alone
            return
        held.owned += missing
        if self.alone:
            evictions = self.cache.stats().evictions - before.evictions
            assert evictions == max(0, missing - before.pages_free)
            self.prefixes.lost += evictions

    def drain(self) -> None:
        """Every page is handed out, so that none of those that were cached is left."""
        self.free(list(self.held))
        left, number = self.sizes.max_tokens, 0
        added: dict[int, list[int]] = {}
        while left:
            sequence = self.allocate([])
            assert sequence is not None
            count = min(left, self.longest)
            added[sequence] = list(range(number, number + count))
            left, number = left - count, number + count
        assert self.extend(added)
        stats = self.cache.stats()
        assert (stats.pages_free, stats.pages_cached, stats.tokens_wasted) == (0, 0, 0)
        self.prefixes.clear()
        self.check()
        self.free(list(added))

    def refused(self, kind: type[Exception], message: str, call: Callable[[], object]) -> None:
        """An error of that kind, and nothing has changed."""
        before = self.cache.stats() if self.alone else None
        with pytest.raises(kind, match=message):
            call()
        assert not self.alone or self.cache.stats() == before
        self.check_sequences()

    # ---- Comparison ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Everything."""
        self.cache.verify(device=True)
        self.check_sequences()
        self.check_tokens(list(self.held))
        if self.alone:
            self._check_counts(self.cache.stats())

    def check_sequences(self) -> None:
        """Lengths, pages and rows."""
        rows = [self.cache.row(sequence) for sequence in self.held]
        assert len(set(rows)) == len(rows)
        assert all(0 <= row < self.sizes.max_seqs for row in rows)
        for sequence, held in self.held.items():
            assert self.cache.length(sequence) == len(held.tokens)
            assert self.cache.pages(sequence).tolist() == held.pages
            assert len(held.pages) == self.pages_for(len(held.tokens)) <= held.owned

    def check_tokens(self, sequences: Sequence[int]) -> None:
        """The bytes of every token."""
        slots, ids = [], []
        for sequence in sequences:
            held = self.held[sequence]
            slots.append(self._slots(held.pages, 0, len(held.tokens)))
            ids += held.tokens
        if slots:
            self.tokens.check(np.concatenate(slots), ids, self.page_size)

    def _slots(self, pages: Sequence[int], begin: int, end: int) -> Any:
        place = np.arange(begin, end)
        return np.array(pages, np.int64)[place // self.page_size] * self.page_size + place % self.page_size

    def _check_counts(self, stats: CacheStats) -> None:
        owners = self.owners()
        filled: dict[int, int] = dict.fromkeys(owners, 0)
        for held in self.held.values():
            for column, page in enumerate(held.pages):
                filled[page] = max(filled[page], min(self.page_size, len(held.tokens) - column * self.page_size))
        reserved = self.reserved()
        assert stats.sequences == len(self.held)
        assert stats.tokens == sum(len(held.tokens) for held in self.held.values())
        assert stats.pages_used == len(owners) + reserved
        assert stats.pages_reserved == reserved
        assert stats.pages_shared == sum(count > 1 for count in owners.values())
        assert stats.tokens_wasted == (len(owners) + reserved) * self.page_size - sum(filled.values())
        assert stats.pages_used + stats.pages_cached + stats.pages_free == self.sizes.num_pages
        assert stats.copies == self.copies
        if not self.prefixes.vague:
            cached = sum(page not in owners for page in self.prefixes.content) - self.prefixes.lost
            assert stats.pages_cached == cached

    def _check_step(self, step: CacheStep, added: dict[int, list[int]]) -> None:
        """The arrays of a step, and of all sequences."""
        host, slots, positions = self.tokens.host, [], []
        table, seqlens = host(step.block_table), host(step.seqlens)
        assert len(table) == len(seqlens) == len(added)
        every_table, every_length = host(self.cache.block_table), host(self.cache.seqlens)
        for at, (sequence, ids) in enumerate(added.items()):
            pages, begin = self.cache.pages(sequence).tolist(), len(self.held[sequence].tokens)
            assert seqlens[at] == begin + len(ids)
            assert table[at, : len(pages)].tolist() == pages
            slots.append(self._slots(pages, begin, begin + len(ids)))
            positions.append(np.arange(begin, begin + len(ids)))
        if added:
            np.testing.assert_array_equal(host(step.slots), np.concatenate(slots))
            np.testing.assert_array_equal(host(step.positions), np.concatenate(positions))
        for sequence in self.held:
            row, pages = self.cache.row(sequence), self.cache.pages(sequence).tolist()
            assert every_table[row, : len(pages)].tolist() == pages
            assert every_length[row] == self.cache.length(sequence)
        if self.alone:
            assert np.count_nonzero(every_length) == sum(self.cache.length(s) > 0 for s in self.held)

    def _check_new_pages(
        self, added: dict[int, list[int]], pages: dict[int, list[int]], needed: int, before: CacheStats
    ) -> None:
        """Check the pages that a step took: nobody owned them."""
        owned, fresh = self.owners(), []
        kept = set(self.writers(added))
        for sequence in added:
            held, now = self.held[sequence], pages[sequence]
            differ = [column for column, page in enumerate(held.pages) if now[column] != page]
            assert differ in ([], [len(held.pages) - 1])
            assert not differ or len(held.tokens) % self.page_size
            fresh += [now[column] for column in differ] + now[len(held.pages) :]
        assert len(set(fresh)) == len(fresh)
        assert not set(fresh) & set(owned)
        for page, by in self.writers(added).items():
            assert sum(pages[sequence][len(self.held[sequence].pages) - 1] == page for sequence in by) == (
                len(by) == owned[page]
            )
            if len(by) < owned[page]:
                kept.discard(page)
        for page in kept:
            self.prefixes.write(page)
        evictions = self.cache.stats().evictions - before.evictions
        assert evictions == max(0, needed - before.pages_free)
        self.prefixes.hand_out(fresh, evictions)
