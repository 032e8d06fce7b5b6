"""A plain model of a paged cache: lists of token ids, whose bytes the real one has in every layer of every pool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mla_cupy import PagedKVCache, reference
from mla_cupy.cache.memory import HostMemory
from mla_cupy.cache_formats import CacheFormat, Field
from mla_cupy.dtypes import numpy_dtype
from mla_cupy.errors import CacheFullError
from tests.cache.ledger import conversions

#: Records of a few bytes, so that pages are quick to compare.
SMALL = CacheFormat("small", "for tests", (4,), (Field("latent", "float32", 1, 0),))
PLANAR = CacheFormat(
    "planar", "for tests", (8, 4), (Field("latent", "float32", 2, 0), Field("rope", "float32", 1, 0, 1))
)
POOLS = {"kv": SMALL, "indexer": PLANAR}
NUM_LAYERS = 2


class Pair:
    """A cache and its model, changed together and compared."""

    pools: Mapping[str, str | CacheFormat] = POOLS

    def __init__(
        self, num_pages: int = 12, page_size: int = 3, max_seqs: int = 5, max_pages: int = 6,
        memory: type[HostMemory] = HostMemory,
    ) -> None:  # fmt: skip
        sizes = {"num_pages": num_pages, "page_size": page_size, "max_seqs": max_seqs, "max_pages": max_pages}
        self.cache = PagedKVCache(
            self.pools, num_layers=NUM_LAYERS, max_tokens=64, device="cpu", memory=memory, **sizes
        )
        self._begin(page_size, max_pages)

    def _begin(self, page_size: int, max_pages: int) -> None:
        self.of, self.host = conversions(self.cache.seqlens)
        self.page_size, self.max_tokens = page_size, max_pages * page_size
        self.tokens: dict[int, list[int]] = {}
        self.next_id = 1

    # ---- Changes ----------------------------------------------------------------------------------------------

    def allocate(self, prompt: list[int], key: bytes = b"") -> int:
        """A sequence for a prompt; what is cached of it is read back, the rest is written."""
        sequence, cached = self.cache.allocate(prompt, key=key)
        assert cached % self.page_size == 0
        assert cached < max(1, len(prompt))
        self.tokens[sequence] = prompt[:cached]
        return sequence

    def extend(self, added: dict[int, list[int]]) -> None:
        """Write given tokens. If there is no room, nothing may have changed."""
        before = self.state()
        try:
            step = self.cache.extend(list(added), [len(tokens) for tokens in added.values()])
        except CacheFullError:
            assert self.state() == before
            self.check()
            raise
        self.write(step, [token for tokens in added.values() for token in tokens])
        for sequence, tokens in added.items():
            self.tokens[sequence] = self.tokens[sequence] + tokens
        self._check_step(step, list(added))

    def write(self, step: Any, ids: list[int]) -> None:
        """The bytes of tokens: id + 1000 * layer, in each pool as often as a token has four bytes."""
        for name, record in POOLS.items():
            for layer in range(NUM_LAYERS):
                pages = self._words(name, layer)
                for field in record.fields:
                    self._of(pages, record, field)[step.slots // self.page_size, step.slots % self.page_size] = (
                        np.array(ids, np.int32)[:, None] + 1000 * layer
                    )

    def new_ids(self, count: int) -> list[int]:
        self.next_id += count
        return [number % 2**30 for number in range(self.next_id - count, self.next_id)]

    def truncate(self, sequence: int, length: int) -> None:
        self.cache.truncate([sequence], length)
        self.tokens[sequence] = self.tokens[sequence][:length]

    def fork(self, sequence: int, count: int) -> list[int]:
        made = self.cache.fork(sequence, count)
        for other in made:
            self.tokens[other] = list(self.tokens[sequence])
        return made

    def free(self, sequence: int) -> None:
        self.cache.free([sequence])
        del self.tokens[sequence]

    # ---- Comparison -------------------------------------------------------------------------------------------

    def state(self) -> tuple[Any, ...]:
        """Everything that a failed call may not change."""
        book = self.cache._book
        held = [(s, self.cache.length(s), self.cache.pages(s).tolist()) for s in sorted(self.tokens)]
        stats = self.cache.stats()
        return (held, book.refs.tolist(), stats.pages_used, stats.sequences, stats.tokens, stats.copies)

    def check(self) -> None:
        """Every token of every sequence is where its pages say, in all layers of all pools."""
        self.cache.verify(device=True)
        assert self.cache.stats().sequences == len(self.tokens)
        assert self.cache.stats().tokens == sum(map(len, self.tokens.values()))
        for sequence, ids in self.tokens.items():
            assert self.cache.length(sequence) == len(ids)
            self._check_pages(self.host(self.cache.pages(sequence)), ids)

    def _check_step(self, step: Any, sequences: list[int]) -> None:
        """The arrays of the step, and the table of all sequences, name the same tokens."""
        table, seqlens = self.host(step.block_table), self.host(step.seqlens)
        for at, sequence in enumerate(sequences):
            ids = self.tokens[sequence]
            assert seqlens[at] == len(ids)
            self._check_pages(table[at, : -(-len(ids) // self.page_size)], ids)
        table, seqlens = self.host(self.cache.block_table), self.host(self.cache.seqlens)
        for sequence, ids in self.tokens.items():
            row = self.cache.row(sequence)
            assert seqlens[row] == len(ids)
            self._check_pages(table[row, : -(-len(ids) // self.page_size)], ids)
        live = {self.cache.row(sequence) for sequence in self.tokens}
        assert all(seqlens[row] == 0 for row in range(len(seqlens)) if row not in live)

    def _check_pages(self, pages: Any, ids: list[int]) -> None:
        place = np.arange(len(ids))
        for name, record in POOLS.items():
            for layer in range(NUM_LAYERS):
                words = self._words(name, layer)
                for field in record.fields:
                    read = self._of(words, record, field)[pages[place // self.page_size], place % self.page_size]
                    assert (read == np.array(ids, np.int32)[:, None] + 1000 * layer).all()

    def _words(self, name: str, layer: int) -> Any:
        return self.cache._memory.pools[name][layer]

    def _of(self, pages: Any, record: CacheFormat, field: Field) -> Any:
        """A field of all tokens as int32, (num_pages, page_size, words)."""
        begin = record.offset(field, self.page_size, 0)
        step = record.planes[field.plane]
        reach = pages[:, begin : begin + self.page_size * step]
        split = reach.reshape(len(pages), self.page_size, step) if reach.flags.c_contiguous else None
        if split is None:
            shape, strides = (len(pages), self.page_size, step), (pages.strides[0], step, 1)
            split = np.lib.stride_tricks.as_strided(reach, shape, strides)
        inside = split[..., field.offset : field.offset + field.nbytes]
        return inside.view(np.int32)


class RealPair(Pair):
    """Latent records and index keys, written and read by the public calls: every number of a token says which it is."""

    pools: Mapping[str, str | CacheFormat] = {"kv": "v32", "indexer": "indexer"}

    def write(self, step: Any, ids: list[int]) -> None:
        """Octal digits, which e4m3 and bfloat16 hold exactly, beside 448, whose scale is 1."""
        for layer in range(NUM_LAYERS):
            digits = _digits(ids, layer)
            latent, rope, key = np.full((len(ids), 512), 448), np.zeros((len(ids), 64)), np.full((len(ids), 128), 448)
            latent[:, : digits.shape[1]] = rope[:, : digits.shape[1]] = key[:, 1 : 1 + digits.shape[1]] = digits
            self.cache.append(step, layer, self.of(latent.astype(np.float16)), self.of(rope.astype(np.float16)))
            self.cache.append_keys(step, layer, self.of(key.astype(numpy_dtype("bfloat16"))), hadamard=False)

    def _check_pages(self, pages: Any, ids: list[int]) -> None:
        place = np.arange(len(ids))
        slots = pages[place // self.page_size] * self.page_size + place % self.page_size
        for layer in range(NUM_LAYERS):
            digits = _digits(ids, layer)
            (rows,) = reference.cache_gather(self.host(self.cache.layer(layer)), slots)
            codes, k_scale = reference.indexer_cache_gather(self.host(self.cache.layer(layer, "indexer")), slots)
            assert (rows[:, : digits.shape[1]] == digits).all()
            assert (rows[:, 512 : 512 + digits.shape[1]] == digits).all()
            assert (codes[:, 1 : 1 + digits.shape[1]] == digits).all()
            assert (k_scale == 1).all()


class LibraryPair(RealPair):
    """Over arrays of another library. Its memory fails when it is told to, as `FailingMemory` does."""

    library = "torch"

    def __init__(self, num_pages: int, page_size: int, max_seqs: int, max_pages: int, **given: Any) -> None:
        page_size = 4 if self.library == "jax" else page_size  # index keys in pages of 16 bytes
        sizes = {"num_pages": num_pages, "page_size": page_size, "max_seqs": max_seqs, "max_pages": max_pages}
        self.cache = PagedKVCache(
            self.pools, num_layers=NUM_LAYERS, max_tokens=64, device="cpu", library=self.library, **sizes
        )
        self._begin(page_size, max_pages)
        memory: Any = self.cache._memory
        submit, memory.failing = memory.submit, ""

        def guarded(*arguments: Any) -> None:
            if memory.failing == "before":
                raise RuntimeError("injected")
            submit(*arguments)
            if memory.failing == "after":
                raise RuntimeError("injected")

        memory.submit = guarded


def _digits(ids: list[int], layer: int) -> Any:
    return (np.array(ids, np.int64).reshape(-1, 1) + 1000 * layer) // 8 ** np.arange(11) % 8
