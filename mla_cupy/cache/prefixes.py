"""Index of full pages by their tokens: a chain of hashes, each page's made of the one before and its own tokens."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

Digest = bytes
_DIGEST_BYTES = 16


class Prefixes:
    """Full pages by the hash of all tokens up to their end.

    Attributes
    ----------
    hashed : array, (num_pages,), bool
        Whether a page can be found by its hash.
    hits, lookups : int
        Pages found, and pages looked for.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.hashed = np.zeros(num_pages, bool)
        self.hits = self.lookups = 0
        self._page_size = page_size
        self._pages_of: dict[Digest, dict[int, None]] = {}  # equal ones, the first to be known before the others
        self._digest_of: dict[int, Digest] = {}

    @property
    def is_empty(self) -> bool:
        """True if no page can be found."""
        return not self._digest_of

    def chain(self, tokens: npt.NDArray[np.int64], key: bytes, known: list[Digest]) -> Iterator[Digest]:
        """The digests of the full pages of `tokens` after those that are known."""
        last = known[-1] if known else blake2b(key, digest_size=_DIGEST_BYTES).digest()
        for page in range(len(known), len(tokens) // self._page_size):
            part = tokens[page * self._page_size : (page + 1) * self._page_size]
            last = blake2b(last + part.tobytes(), digest_size=_DIGEST_BYTES).digest()
            yield last

    def match(self, tokens: npt.NDArray[np.int64], key: bytes) -> tuple[list[int], list[Digest]]:
        """The longest run of known pages from the start; at least one token is left over, which has to be computed."""
        pages: list[int] = []
        digests: list[Digest] = []
        for digest in self.chain(tokens[: len(tokens) - 1], key, []):
            self.lookups += 1
            equal = self._pages_of.get(digest)
            if equal is None:
                break
            pages.append(next(iter(equal)))
            digests.append(digest)
        self.hits += len(pages)
        return pages, digests

    def register(self, page: int, digest: Digest) -> None:
        """Make a page findable, unless it is already; of several that hold the same, the oldest is found."""
        if page not in self._digest_of:
            self._pages_of.setdefault(digest, {})[page] = None
            self._digest_of[page] = digest
            self.hashed[page] = True

    def has_equal(self, page: int) -> bool:
        """True if the contents of a findable page can also be found in another page."""
        return len(self._pages_of[self._digest_of[page]]) > 1

    def forget(self, page: int) -> None:
        """A page is about to be overwritten."""
        if self.hashed[page]:
            digest = self._digest_of.pop(page)
            equal = self._pages_of[digest]
            del equal[page]
            if not equal:
                del self._pages_of[digest]
            self.hashed[page] = False

    def verify(self) -> list[str]:
        """Inconsistencies of the maps."""
        pages = set(np.flatnonzero(self.hashed).tolist())
        same = {page: digest for digest, equal in self._pages_of.items() for page in equal} == self._digest_of
        good = same and all(self._pages_of.values()) and pages == set(self._digest_of)
        return [] if good else ["the maps of hashes differ"]
