"""A paged latent cache; sequences can share pages."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from mla_cupy.cache.arguments import MAX_SLOTS, check_key, check_sizes, record_of_pool, tokens_of, vector
from mla_cupy.cache.book import Book
from mla_cupy.cache.in_jax import JaxMemory
from mla_cupy.cache.memory import HostMemory, Layout, Memory
from mla_cupy.cache.places import memory_of
from mla_cupy.cache.reports import CacheStats, CacheStep, next_number, numbered
from mla_cupy.cache.upload import Words, mark_uploaded, pack
from mla_cupy.cache_formats import V32_NOPE, CacheFormat
from mla_cupy.errors import ArgumentError, ShapeError, explain, kind_of
from mla_cupy.ops.checks import check_count, check_flag

Array = npt.NDArray[Any]
_STEPS_KEPT = 256
_WRITTEN = "those that have been written: the last sampled token is not yet"


class PagedKVCache:
    """Paged cache for the tokens of many sequences, in all layers, on a GPU or in host memory.

    Several pools, such as latents and indexer keys, share one block table: every change of a sequence applies to all of
    them. Sequences may share pages, by `fork` or because they begin with the same tokens. When a sequence writes to a
    shared page, the page is copied first, in all layers of a pool by one launch.

    Parameters
    ----------
    pools : str, CacheFormat or mapping
        Format of the pool "kv", or a mapping from pool names to formats; `mla-cupy formats` lists them.
    num_pages, page_size : int
        Number of pages per layer, and of tokens per page.
    num_layers : int
    max_seqs : int
        Largest number of sequences at a time.
    max_pages : int
        Largest number of pages of a sequence.
    max_tokens : int, optional
        Largest number of tokens that one `extend` adds, all sequences together. Default: 8192, or max_seqs if that is
        more.
    device : int, str or None
        CUDA ordinal, "cuda:N", or "cpu", where the oracle does the work. Default: the library's current GPU, else
        "cpu".
    library : {"numpy", "cupy", "torch", "jax"} or None
        Library of the arrays that the cache holds, returns and accepts. Default: CuPy on a GPU, NumPy in host memory.

    Attributes
    ----------
    block_table : array, (max_seqs, max_pages), int32
    seqlens : array, (max_seqs,), int32
        Lengths of all sequences, indexed by `row`, after the latest step; for CUDA graphs of a fixed batch. Rows
        without a sequence have length 0.
    lock : context manager
        Held by each method while it runs. A thread that holds it keeps other threads from making steps.

    Raises
    ------
    ArgumentError
        If a size is out of range.
    UnsupportedDeviceError
        If there is no such GPU.

    Notes
    -----
    All methods are thread-safe. The next step, of any thread, overwrites a step's arrays. Where several threads make
    steps, each must therefore hold `lock` from `extend` to the last call that uses the step, and all must use one
    stream::

        with cache.lock:
            step = cache.extend(sequences, 1)
            cache.append(step, 0, latent, rope)
            out, lse = mla_cupy.mla_decode(q, cache.layer(0), step.block_table, step.seqlens, scale=192**-0.5)

    Without the lock, `append` and `append_keys` raise an error for a step that another thread has overtaken;
    `mla_decode` cannot detect it.

    GPU work is enqueued on the library's current stream, or on `stream` where a method accepts it. Steps and the calls
    that use them belong on one stream. Pages and the arrays of steps keep their addresses, so CUDA graphs may hold
    them, except for JAX arrays.

    JAX arrays are immutable: each step returns new arrays, and `append` replaces the layer's pages. Pass `layer(...)`,
    donated, to a function under `jax.jit`, and give the pages that it returns to `set_layer`.

    Sequences are numbers; the number of a freed sequence is rejected. Host memory: 4 bytes per entry of the block table
    and about 20 per page.

    Examples
    --------
    >>> import numpy as np, mla_cupy
    >>> cache = mla_cupy.PagedKVCache("bf16", num_pages=8, page_size=4, max_seqs=4, max_pages=4, device="cpu")
    >>> sequence, cached = cache.allocate()
    >>> step = cache.extend([sequence], 6)
    >>> step.slots.tolist(), step.seqlens.tolist()
    ([0, 1, 2, 3, 4, 5], [6])
    >>> copy = cache.fork(sequence)[0]
    >>> cache.extend([sequence, copy], 1).copies
    1
    >>> cache.stats().pages_used
    3
    """

    def __init__(
        self,
        pools: str | CacheFormat | Mapping[str, str | CacheFormat],
        *,
        num_pages: int,
        page_size: int,
        num_layers: int = 1,
        max_seqs: int,
        max_pages: int,
        max_tokens: int | None = None,
        device: int | str | None = None,
        library: str | None = None,
        memory: type[HostMemory] = HostMemory,
    ) -> None:
        given = {"num_pages": num_pages, "page_size": page_size, "num_layers": num_layers}
        given = check_sizes({**given, "max_seqs": max_seqs, "max_pages": max_pages})
        num_pages, page_size, num_layers, max_seqs, max_pages = given.values()
        max_tokens = max(8192, max_seqs) if max_tokens is None else check_count("max_tokens", max_tokens, 1, MAX_SLOTS)
        named = pools if isinstance(pools, Mapping) else {"kv": pools}
        self.formats = {name: record_of_pool(name, record) for name, record in named.items()}
        self.page_size, self.num_layers, self._max_tokens = page_size, num_layers, max_tokens
        self._words = Words.of(max_seqs, max_pages)
        sizes = (num_layers, num_pages, page_size, max_seqs, max_pages, max_tokens)
        self._book = Book(num_pages, page_size, max_seqs, max_pages)
        self._memory: Memory = memory_of(library, device, Layout(self._words, self.formats, *sizes), memory)
        self.lock = threading.RLock()
        self._steps: dict[tuple[int, int, int], CacheStep] = {}  # by sizes; equal ones differ in their number alone
        self._newest: int | None = None  # the number of the step that the arrays hold

    def __reduce__(self) -> NoReturn:
        remedy = "it owns its pages: make another cache, `fork` sequences, or copy the result of `cache_gather`"
        raise ArgumentError(explain("cache", "a copy or a pickle of it", "the cache itself", remedy))

    @property
    def block_table(self) -> Any:
        """The block table of all sequences, by row."""
        return self._memory.tables.table

    @property
    def seqlens(self) -> Any:
        """The lengths of all sequences, by row."""
        return self._memory.tables.seqlens

    def layer(self, layer: int, pool: str = "kv") -> Any:
        """Return the pages of a layer.

        Parameters
        ----------
        layer : int
        pool : str

        Returns
        -------
        array, (num_pages, page_size, width)
            A view, uint8 or the format's 16-bit dtype, for `mla_decode` and `cache_append`.
        """
        self._check_layer(layer, pool)
        return self._memory.layer(pool, layer)

    def set_layer(self, layer: int, pages: Any, pool: str = "kv") -> None:
        """Replace the pages of a layer by pages that a function of JAX returned.

        Parameters
        ----------
        layer : int
        pages : array, (num_pages, page_size, width)
        pool : str

        Raises
        ------
        ArgumentError
            If the arrays are not JAX's: other libraries write pages in place.
        ShapeError, DTypeError
            If the pages do not fit.
        """
        with self.lock:
            self._check_layer(layer, pool)
            if not isinstance(self._memory, JaxMemory):
                raise ArgumentError(explain("library", "a cache with pages that are written in place", "library='jax'"))
            self._memory.set_layer(pool, layer, pages)

    def allocate(self, tokens: Any = None, *, key: bytes = b"") -> tuple[int, int]:
        """Begin a sequence, and reuse the pages of its longest cached prefix.

        Parameters
        ----------
        tokens : array of int, optional
            All tokens of the prompt. Pages are found by the tokens that earlier sequences passed to `commit`. Token ids
            are signed integers of up to 64 bits, so that hashes of images may stand for their tokens.
        key : bytes
            Anything else that the cached numbers depend on, such as a LoRA adapter: only sequences with equal keys
            share pages.

        Returns
        -------
        sequence : int
            The sequence's number, for all other calls.
        cached : int
            Number of tokens that are already in the cache: whole pages, and never all tokens. `extend` the sequence by
            the rest.

        Raises
        ------
        CacheFullError
            If there are max_seqs sequences.
        """
        given = tokens_of(tokens)
        check_key(key)
        with self.lock:
            book = self._book
            book.check_rows(1)
            pages, digests = book.prefixes.match(given[: self._book.max_pages * self.page_size], key)
            row = book.open(pages, len(pages) * self.page_size, digests, key)
            return book.handle(row), int(book.length[row])

    def extend(self, sequences: Sequence[int] | Array, counts: Any = 1, *, stream: Any = None) -> CacheStep:
        """Make room for more tokens, all or nothing, and bring the arrays on the device up to date.

        Parameters
        ----------
        sequences : sequence of int
            Sequences to extend, each once.
        counts : int or array, (b,)
            Tokens to add to each sequence; 0 is allowed, and returns the arrays for a call without new tokens.
        stream : int or stream object, optional
            Stream to enqueue on. Default: the library's current stream. Ignored with JAX.

        Returns
        -------
        CacheStep

        Raises
        ------
        CacheFullError
            If there are not enough pages; nothing has changed.
        ArgumentError
            If a sequence is not alive or would be too long, or the step has too many tokens; nothing has changed.
        """
        with self.lock:
            book, memory = self._book, self._memory
            rows = book.rows_of(sequences)
            added = self._counts(counts, len(rows))
            plan = book.plan_extend(rows, added)
            sheet = memory.staging()
            book.extend(plan)
            self._newest = None  # from here on the arrays may be any step's
            try:
                part, packed = pack(sheet, self._words, book, plan, added)
                memory.submit(part, len(plan.copied), stream)
            except BaseException:
                book.undo(plan)
                raise
            mark_uploaded(book, plan, packed)
            book.forget_tails(plan)
            tokens = added * len(rows) if isinstance(added, int) else int(added.sum())
            return self._step(len(rows), tokens, len(plan.copied))

    def append(
        self, step: CacheStep, layer: int, latent: Any, rope: Any = None, *, pool: str = "kv", **options: Any
    ) -> None:
        """Write the tokens of a step to a layer: `cache_append` to the slots of the step.

        Parameters
        ----------
        step : CacheStep
            The cache's newest step: the slots of earlier steps have been overwritten.
        layer : int
        latent, rope : array
            In the order of the step's slots.
        pool : str
        **options
            Options of `cache_append`. With `cos` and `sin` and without `positions`, the step's positions are used.

        Raises
        ------
        ArgumentError
            If there has been a later step, even one that failed; nothing has been written.
        """
        with self.lock:
            self._check_newest(step)
            if "cos" in options:
                options.setdefault("positions", step.positions)
            try:
                self._check_layer(layer, pool)
                if self.formats[pool] is V32_NOPE:  # its tokens have the width of another format's
                    options.setdefault("kv_format", V32_NOPE.name)
                self._memory.write("cache_append", (latent, rope), pool, layer, step.slots, **options)
            except ShapeError:
                _check_tokens("latent", latent, step)
                raise

    def append_keys(self, step: CacheStep, layer: int, k: Any, *, pool: str = "indexer", **options: Any) -> None:
        """Write the index keys of a step to a layer: `indexer_cache_append` to the slots of the step.

        Parameters
        ----------
        step, layer
            As for `append`.
        k : array
            In the order of the step's slots.
        pool : str
            A pool in the format "indexer".
        **options
            Options of `indexer_cache_append`. With `cos` and `sin` and without `positions`, the step's positions are
            used.

        Raises
        ------
        ArgumentError
            As for `append`.
        """
        with self.lock:
            self._check_newest(step)
            if "cos" in options:
                options.setdefault("positions", step.positions)
            try:
                self._check_layer(layer, pool)
                self._memory.write("indexer_cache_append", (k,), pool, layer, step.slots, **options)
            except ShapeError:
                _check_tokens("k", k, step)
                raise

    def fork(self, sequence: int, count: int = 1) -> list[int]:
        """Begin `count` sequences with the same tokens; they share all pages.

        Parameters
        ----------
        sequence : int
        count : int

        Returns
        -------
        list of int

        Raises
        ------
        CacheFullError
            If the cache has no room for `count` more sequences; nothing has changed.
        """
        count = check_count("count", count, 0, MAX_SLOTS)
        with self.lock:
            row = self._book.row_of(sequence)
            self._book.check_rows(count)
            return [self._book.handle(self._book.fork(row)) for _ in range(count)]

    def truncate(self, sequences: Sequence[int] | Array, lengths: Any) -> None:
        """Drop tokens from the ends of sequences, as after speculative decoding, and drop reserved pages.

        Parameters
        ----------
        sequences : sequence of int
        lengths : int or array, (b,)
            New lengths, at most the present ones.

        Raises
        ------
        ArgumentError
            If a length is above the present one; nothing has changed.
        """
        with self.lock:
            rows = self._book.rows_of(sequences)
            wanted = vector("lengths", lengths, len(rows))
            bad = np.flatnonzero((wanted < 0) | (wanted > self._book.length[rows]))
            if len(bad):
                most = self._book.length[rows[bad[0]]]
                raise ArgumentError(explain(f"lengths[{bad[0]}]", wanted[bad[0]], f"0 to {most}"))
            for row, length in zip(rows.tolist(), wanted.tolist(), strict=True):
                self._book.truncate(row, length)

    def free(self, sequences: Sequence[int] | Array) -> None:
        """End sequences. Committed pages stay cached until they are evicted.

        Parameters
        ----------
        sequences : sequence of int
        """
        with self.lock:
            for row in self._book.rows_of(sequences).tolist():
                self._book.close(row)

    def commit(self, sequence: int, tokens: Any) -> None:
        """Let later sequences find the full pages of this one.

        Parameters
        ----------
        sequence : int
        tokens : array of int
            The sequence's tokens from the first one on, as far as they have been written.

        Raises
        ------
        ArgumentError
            If there are more tokens than the sequence has.
        """
        given = tokens_of(tokens)
        with self.lock:
            row = self._book.row_of(sequence)
            if len(given) > self._book.length[row]:
                raise ArgumentError(
                    explain("tokens", len(given), f"at most {self._book.length[row]}, its length", _WRITTEN)
                )
            self._book.commit(row, given)

    def reserve(self, sequence: int, tokens: int) -> None:
        """Reserve pages, so that the sequence can be extended by `tokens` tokens.

        Parameters
        ----------
        sequence : int
        tokens : int

        Raises
        ------
        CacheFullError
            If there are not enough pages; nothing has changed.

        Notes
        -----
        The reservation does not include a copy of a shared, partly filled last page.
        """
        tokens = check_count("tokens", tokens, 0, MAX_SLOTS)
        with self.lock:
            row = self._book.row_of(sequence)
            self._book.reserve(row, self._book.plan_reserve(row, tokens))

    def row(self, sequence: int) -> int:
        """Return the sequence's row in `block_table` and `seqlens`; it does not change."""
        with self.lock:
            return self._book.row_of(sequence)

    def length(self, sequence: int) -> int:
        """Return the number of tokens of a sequence."""
        with self.lock:
            return int(self._book.length[self._book.row_of(sequence)])

    def pages(self, sequence: int) -> Any:
        """Return the pages of a sequence, in order, without reserved pages."""
        with self.lock:
            row = self._book.row_of(sequence)
            held: Array = self._book.table[row, : self._book.pages_for(int(self._book.length[row]))].copy()
            return self._memory.lend(held)

    def stats(self) -> CacheStats:
        """Return statistics of the pages."""
        with self.lock:
            book = self._book
            free, cached = book.available
            needed = -(-book.length // self.page_size)
            used = book.num_pages - free - cached
            reserved = int((book.owned - needed).sum())
            return CacheStats(
                *(int(np.count_nonzero(book.active)), int(book.length.sum()), used, cached, free),
                *(int((book.refs > 1).sum()), reserved, book.wasted(), book.copies, book.evictions),
                *(book.prefixes.hits, book.prefixes.lookups),
            )

    def verify(self, device: bool = False) -> None:
        """Check the bookkeeping against itself; slow, for tests.

        Parameters
        ----------
        device : bool
            Also check `block_table` and `seqlens` on the device, wherever they must agree with the host. This waits for
            all work on the device. It reports lengths that a model has lowered in `seqlens` as well.

        Raises
        ------
        AssertionError
            If there is a bug in the package. The message names the row, and the column of the block table.
        """
        with self.lock:
            wrong = self._book.verify()
            if check_flag("device", device):
                wrong += self._book.compare(*self._memory.fetch())
            if wrong:
                raise AssertionError("; ".join(wrong[:8]))

    def _step(self, b: int, tokens: int, copies: int) -> CacheStep:
        step = self._steps.get((b, tokens, copies))
        if step is None:  # slicing takes longer than the rest of a step's bookkeeping
            step = CacheStep(*self._memory.step(b, tokens), copies, 0)
            if len(self._steps) >= _STEPS_KEPT:
                self._steps.clear()
            if self._memory.in_place:
                self._steps[b, tokens, copies] = step
        self._newest = number = next_number()
        return numbered(step, number)

    def _check_newest(self, step: Any) -> None:
        if not isinstance(step, CacheStep):
            raise ArgumentError(explain("step", kind_of(step), "the CacheStep that `extend` returned"))
        if step.number != self._newest:
            newest = f"number {self._newest}, its newest" if self._newest else "one that `extend` has yet to return"
            remedy = "append before the next `extend`; hold `cache.lock` from `extend` to `append` in each thread"
            raise ArgumentError(explain("step", f"number {step.number}", f"a step of this cache: {newest}", remedy))

    def _check_layer(self, layer: Any, pool: Any) -> None:
        if not isinstance(pool, str) or pool not in self.formats:
            raise ArgumentError(explain("pool", repr(pool), f"one of {', '.join(self.formats)}"))
        check_count("layer", layer, 0, self.num_layers - 1)

    def _counts(self, counts: Any, b: int) -> Array | int:
        if type(counts) is int and 0 <= counts <= self._max_tokens and counts * b <= self._max_tokens:
            return counts
        added = vector("counts", counts, b)
        most, remedy = self._max_tokens, "extend in several steps"
        if (least := int(added.min(initial=0))) < 0:
            raise ArgumentError(explain("counts", least, f"0 to max_tokens={most}", "truncate shortens a sequence"))
        largest = int(added.max(initial=0))
        total = largest if largest > most else int(added.sum())  # which cannot overflow then
        if total > most:
            raise ArgumentError(explain("counts", f"{total} in all", f"at most max_tokens={most}", remedy))
        return added


def _check_tokens(argument: str, x: Any, step: CacheStep) -> None:
    """Raise ShapeError if an array does not have one row per token of the step."""
    expected, shape = step.slots.shape[0], tuple(x.shape)
    if len(shape) == 2 and shape[0] != expected:
        remedy = "for rows of a padded batch call cache_append with your own slots, -1 for padding"
        raise ShapeError(explain(f"{argument}.shape[0]", shape[0], f"{expected}, the tokens of the step", remedy))
