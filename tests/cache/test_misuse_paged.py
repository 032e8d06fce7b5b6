"""Every method of `PagedKVCache`, in any order, with nonsense in its arguments, beside the ledger.

A refused call leaves the cache as it was, down to the bytes of its pages. An accepted one must have been sensible, by
a reading of its arguments that is stricter than the cache's, and does what the ledger says.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mla_cupy
from mla_cupy import CacheStep, MlaError, PagedKVCache
from tests.cache.ledger import POOLS, Faults, Ledger
from tests.cache.walk import Prompts, Walk, some_sizes
from tests.support.mistakes import Call
from tests.support.misuse import Refused, attempt, misused, nonsense, numbers, spoil_array

CALLS = 50
"""Wrong calls of a session, with good ones in between."""
QUICK, SLOW = 20, 250
"""Sessions."""


class NonsenseError(Exception):
    """An argument that no caller can mean."""


class Handed:
    """The cache, but one method gets other arguments than the ledger gives."""

    def __init__(self, cache: PagedKVCache, method: str, given: Call) -> None:
        self._cache, self._method, self._given = cache, method, given

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._cache, name)
        return (lambda *args, **options: found(**self._given)) if name == self._method else found


# ---- A strict reading of arguments ---------------------------------------------------------------------------------


def whole(x: Any) -> int:
    """A number, as Python's."""
    if isinstance(x, (bool, np.timedelta64)) or not isinstance(x, (int, np.integer)):
        raise NonsenseError
    return int(x)


def wholes(given: Any) -> list[int]:
    """Numbers in a row, as Python's."""
    if isinstance(given, memoryview):
        given = np.asarray(given)
    if isinstance(given, np.ndarray):
        if isinstance(given, np.ma.MaskedArray) or given.ndim != 1 or (given.dtype.kind not in "iu" and given.size):
            raise NonsenseError
        return [int(x) for x in given]
    if not isinstance(given, (list, tuple, range)):
        raise NonsenseError
    return [whole(x) for x in given]


def each_of(given: Any, count: int) -> list[int]:
    """A number for each sequence; one is for all."""
    if isinstance(given, np.ndarray) and given.ndim == 0 and given.dtype.kind in "iu":
        given = int(given)
    made = wholes(given) if isinstance(given, (list, tuple, range, memoryview, np.ndarray)) else [whole(given)] * count
    if len(made) != count:
        raise NonsenseError
    return made


def in_range(x: int, least: int, most: int) -> int:
    if not least <= x <= most:
        raise NonsenseError
    return x


# ---- A session -----------------------------------------------------------------------------------------------------


class Session:
    """Misuses among good calls.

    Each method is named like a method of the cache: it draws arguments, and returns them with what the ledger does
    if they make sense.
    """

    def __init__(self, seed: int) -> None:
        self.rng, self.numpy = random.Random(seed), np.random.default_rng([seed, 14])
        sizes = some_sizes(self.rng)
        self.cache = sizes.cache("cpu")
        self.ledger = Ledger(self.cache, sizes, Faults(self.cache))
        self.prompts = Prompts()
        self.walk = Walk(self.rng, self.ledger, self.prompts)
        self.freed = [0]
        self.about = f"session {seed}"

    def run(self, calls: int) -> int:
        """Returns how many calls with mistakes were accepted."""
        accepted = 0
        for number in range(calls):
            if not self.ledger.held or self.rng.random() < 0.4:
                before = set(self.ledger.held)
                self.walk.run(1, 2**30)
                self.freed += before - set(self.ledger.held)
            accepted += self.misuse(number)
        self.ledger.check()
        return accepted

    def misuse(self, number: int) -> bool:
        """A call; whether it was accepted."""
        method = self.rng.choice(list(METHODS))
        about = f"{self.about}, call {number}: {method}"
        given, meant = METHODS[method](self) if self.ledger.held else Session.allocate(self)
        method = method if self.ledger.held else "allocate"
        before = self.cache.stats()
        if meant is None:
            outcome = attempt(lambda: getattr(self.cache, method)(**given), NAMES, self.arrays(), about)
            assert isinstance(outcome, Refused), f"{about}: accepted {given}"
        else:
            self.ledger.cache = Handed(self.cache, method, given)  # type: ignore[assignment]
            outcome = attempt(meant, NAMES, (), about)
            self.ledger.cache = self.cache
        if isinstance(outcome, Refused):
            assert self.cache.stats() == before, about
            self.ledger.check_sequences()
            return False
        return True

    def arrays(self) -> list[Any]:
        """Arrays that a refused call must not change."""
        pools = [self.cache.layer(at, pool) for at in range(self.ledger.sizes.num_layers) for pool in POOLS]
        return [self.cache.block_table, self.cache.seqlens, *pools]

    def spoil(self, given: Call, meaning: Callable[[Call], Callable[[], Any] | None]) -> tuple[Call, Any]:
        """Up to two arguments are replaced; what the ledger does then, None if they make no sense."""
        for _ in range(self.rng.choice((0, 1, 1, 1, 2))):
            name = self.rng.choice(list(given))
            given[name] = self.spoiled(given[name])
        try:
            return given, meaning(given)
        except NonsenseError:
            return given, None

    def spoiled(self, x: Any) -> Any:
        """Another value, or the same in another form."""
        if self.rng.random() < 0.3:
            return nonsense(self.numpy)
        if isinstance(x, list) and all(type(one) is int for one in x):
            return self.rng.choice(LISTS)(self, x)
        if type(x) is int:
            return self.rng.choice(NUMBERS)(self, x)
        return nonsense(self.numpy)

    def sequence(self, given: Any) -> int:
        sequence = whole(given)
        if sequence not in self.ledger.held:
            raise NonsenseError
        return sequence

    def sequences(self, given: Any) -> list[int]:
        if isinstance(given, list):  # the cache recognises the latest one by equality
            given = [int(x) if isinstance(x, (float, bool)) and x in self.ledger.held else x for x in given]
        made = [self.sequence(x) for x in wholes(given)]
        if len(set(made)) != len(made):
            raise NonsenseError
        return made

    def some(self) -> list[int]:
        return self.rng.sample(list(self.ledger.held), self.rng.randint(1, len(self.ledger.held)))

    # ---- Methods of the cache --------------------------------------------------------------------------------------

    def allocate(self) -> tuple[Call, Any]:
        given = {"tokens": self.prompts.draw(self.rng), "key": self.rng.choice((b"", b"lora"))}

        def meaning(given: Call) -> Any:
            if type(given["key"]) is not bytes:
                raise NonsenseError
            tokens = [] if given["tokens"] is None else wholes(given["tokens"])
            for token in tokens:
                in_range(token, -(2**63), 2**63 - 1)
            return lambda: self.ledger.allocate(tokens, given["key"])

        return self.spoil(given, meaning)

    def extend(self) -> tuple[Call, Any]:
        chosen = self.some()
        counts: Any = [self.rng.randint(0, 3) for _ in chosen] if self.rng.random() < 0.7 else self.rng.randint(0, 2)

        def meaning(given: Call) -> Any:
            sequences = self.sequences(given["sequences"])
            added = each_of(given["counts"], len(sequences))
            in_range(sum(in_range(count, 0, self.ledger.sizes.max_tokens) for count in added), 0, self._max_tokens)
            for sequence, count in zip(sequences, added, strict=True):
                in_range(len(self.ledger.held[sequence].tokens) + count, 0, self.ledger.longest)
            ids = {s: self.prompts.new_ids(self.rng, n) for s, n in zip(sequences, added, strict=True)}
            return lambda: self.ledger.extend(ids)

        return self.spoil({"sequences": chosen, "counts": counts}, meaning)

    @property
    def _max_tokens(self) -> int:
        return self.ledger.sizes.max_tokens

    def truncate(self) -> tuple[Call, Any]:
        chosen = self.some()
        lengths = [self.rng.randint(0, len(self.ledger.held[sequence].tokens)) for sequence in chosen]

        def meaning(given: Call) -> Any:
            sequences = self.sequences(given["sequences"])
            wanted = dict(zip(sequences, each_of(given["lengths"], len(sequences)), strict=True))
            for sequence, length in wanted.items():
                in_range(length, 0, len(self.ledger.held[sequence].tokens))
            return lambda: self.ledger.truncate(wanted)

        return self.spoil({"sequences": chosen, "lengths": lengths}, meaning)

    def free(self) -> tuple[Call, Any]:
        def meaning(given: Call) -> Any:
            sequences = self.sequences(given["sequences"])
            self.freed += sequences
            return lambda: self.ledger.free(sequences)

        return self.spoil({"sequences": self.some()[:2]}, meaning)

    def fork(self) -> tuple[Call, Any]:
        def meaning(given: Call) -> Any:
            sequence, count = self.sequence(given["sequence"]), in_range(whole(given["count"]), 0, 2**31 - 1)
            return lambda: self.ledger.fork(sequence, count)

        return self.spoil({"sequence": self.some()[0], "count": self.rng.randint(0, 2)}, meaning)

    def commit(self) -> tuple[Call, Any]:
        chosen = self.some()[0]
        tokens = self.ledger.held[chosen].tokens

        def meaning(given: Call) -> Any:
            sequence, told = (
                self.sequence(given["sequence"]),
                [] if given["tokens"] is None else wholes(given["tokens"]),
            )
            held = self.ledger.held[sequence].tokens
            in_range(len(told), 0, len(held))
            if told != held[: len(told)]:  # a lie that the cache cannot detect: pass the truth instead
                given["tokens"] = told = held[: len(told)]
            return lambda: self.ledger.commit(sequence, len(told))

        return self.spoil({"sequence": chosen, "tokens": tokens[: self.rng.randint(0, len(tokens))]}, meaning)

    def reserve(self) -> tuple[Call, Any]:
        def meaning(given: Call) -> Any:
            sequence, tokens = self.sequence(given["sequence"]), in_range(whole(given["tokens"]), 0, 2**31 - 1)
            return lambda: self.ledger.reserve(sequence, tokens)

        return self.spoil({"sequence": self.some()[0], "tokens": self.rng.randint(0, 9)}, meaning)

    def _reading(self, method: str, expected: Callable[[int], Any]) -> tuple[Call, Any]:
        def meaning(given: Call) -> Any:
            wanted = expected(self.sequence(given["sequence"]))

            def read() -> None:
                assert np.array_equal(getattr(self.cache, method)(**given), wanted)

            return read

        return self.spoil({"sequence": self.some()[0]}, meaning)

    def length(self) -> tuple[Call, Any]:
        return self._reading("length", lambda sequence: len(self.ledger.held[sequence].tokens))

    def pages(self) -> tuple[Call, Any]:
        return self._reading("pages", lambda sequence: self.ledger.held[sequence].pages)

    def row(self) -> tuple[Call, Any]:
        return self._reading("row", self.cache.row)

    def verify(self) -> tuple[Call, Any]:
        def meaning(given: Call) -> Any:
            if not isinstance(given["device"], (bool, np.bool_)):
                in_range(whole(given["device"]), 0, 1)
            return lambda: self.cache.verify(**given)

        return self.spoil({"device": self.rng.random() < 0.5}, meaning)

    def layer(self) -> tuple[Call, Any]:
        def meaning(given: Call) -> Any:
            index = in_range(whole(given["layer"]), 0, self.ledger.sizes.num_layers - 1)
            if not isinstance(given["pool"], str) or given["pool"] not in POOLS:
                raise NonsenseError
            pool = self.cache.layer(index, given["pool"])
            return lambda: np.testing.assert_array_equal(self.cache.layer(**given), pool)

        return self.spoil({"layer": self.rng.randrange(self.ledger.sizes.num_layers), "pool": "kv"}, meaning)

    def append(self) -> tuple[Call, Any]:
        return self._writing("latent", "kv", np.float16, 512)

    def append_keys(self) -> tuple[Call, Any]:
        return self._writing("k", "indexer", ml_dtypes.bfloat16, 128)

    def _writing(self, name: str, pool: str, dtype: Any, width: int) -> tuple[Call, Any]:
        """The newest step, an overtaken one or none; arrays of any kind; options."""
        newest = self.ledger._newest
        step = self.rng.choice((newest, newest, newest, self.ledger.overtaken, OTHER))
        n = len(step.slots) if step is not None else 1
        options = OPTIONS[name]
        made = {name: self.numpy.standard_normal((n, width), np.float32).astype(dtype)}
        given = {**misused(self.numpy, made, [], [], options), "pool": pool}
        given |= {"step": step, "layer": self.rng.randrange(self.ledger.sizes.num_layers)}
        if self.rng.random() < 0.3:
            spoiled = self.rng.choice(("step", "layer", "pool"))
            given[spoiled] = self.spoiled(given[spoiled])

        def meaning(given: Call) -> Any:
            layer = in_range(whole(given["layer"]), 0, self.ledger.sizes.num_layers - 1)
            if given["step"] is not newest or newest is None or not isinstance(given["pool"], str):
                raise NonsenseError
            if not isinstance(given[name], np.ndarray) or isinstance(given[name], np.ma.MaskedArray):
                raise NonsenseError
            if given["pool"] != pool:
                raise NonsenseError
            return lambda: self._write(given, name, self.cache.layer(layer, pool))

        try:
            return given, meaning(given)
        except NonsenseError:
            return given, None

    def _write(self, given: Call, name: str, pages: Any) -> None:
        """Write, compare with what clean copies write, and undo it: the ledger knows of no such tokens."""
        step, before, kept = given["step"], np.array(pages), [x.copy() for x in self.arrays()]
        method, plain = WRITERS[name]
        try:
            getattr(self.cache, method)(**given)
        except MlaError:
            assert all(map(_same, self.arrays(), kept))
            raise
        written = np.array(pages)
        pages[...] = before
        assert all(map(_same, self.arrays(), kept)), "another layer was written"
        options = {option: given[option] for option in OPTIONS[name] if option in given}
        inputs = (given[name], options.pop("rope", None)) if name == "latent" else (given[name],)
        clean = (x if x is None else np.ascontiguousarray(x) for x in inputs)
        plain(*clean, pages, step.slots.copy(), **options)
        assert _same(pages, written)
        pages[...] = before


def _same(x: Any, y: Any) -> bool:
    return bool(np.ascontiguousarray(x).tobytes() == np.ascontiguousarray(y).tobytes())


WRITERS: dict[str, tuple[str, Any]] = {
    "latent": ("append", mla_cupy.cache_append),
    "k": ("append_keys", mla_cupy.indexer_cache_append),
}
OPTIONS = {
    "latent": ("rope", "cos", "sin", "positions", "kv_format", "scales", "kv_scale", "interleaved", "stream"),
    "k": ("cos", "sin", "positions", "interleaved", "hadamard", "scales", "reference_rounding", "stream"),
}
METHODS: dict[str, Callable[[Session], tuple[Call, Any]]] = {
    name: getattr(Session, name)
    for name in (
        *("allocate", "extend", "truncate", "free", "fork", "commit", "reserve", "length", "pages", "row", "verify"),
        *("layer", "append", "append_keys"),
    )
}
NAMES = (
    *(
        "sequences",
        "sequence",
        "counts",
        "tokens",
        "key",
        "lengths",
        "count",
        "layer",
        "pool",
        "step",
        "device",
    ),
    *("latent", "k", *OPTIONS["latent"], *OPTIONS["k"], "pools", "pages", "cache"),
)


def as_array(x: list[int]) -> Any:
    """Integers, the lower 64 bits of them."""
    return np.array([(one + 2**63) % 2**64 - 2**63 for one in x], np.int64)


#: A list of numbers in other forms, or with other numbers in it.
LISTS: tuple[Callable[[Session, list[int]], Any], ...] = (
    lambda session, x: as_array(x).astype(session.rng.choice(("int32", ">i8", "uint64", "int8", "uint16"))),
    lambda session, x: as_array(x).astype(session.rng.choice(("float64", "bool", "object", "U3", "M8[s]"))),
    lambda session, x: spoil_array(session.numpy, as_array(x)),
    lambda session, x: np.ma.masked_array(x, [at == 0 for at in range(len(x))]),
    lambda session, x: tuple(x),
    lambda session, x: [*x, *x[:1]],
    lambda session, x: x[::-1],
    lambda session, x: [-one - 1 for one in x],
    lambda session, x: x[:-1],
    lambda session, x: [x],
    lambda session, x: set(x),
    lambda session, x: memoryview(as_array(x)),
    lambda session, x: [*as_array(x)],
    lambda session, x: [*map(float, x)],
    lambda session, x: [*map(str, x)],
    lambda session, x: [*x[1:], session.rng.choice((None, -1, 2**31, 2**63, 2**64, -(2**63), 2**70, 10**30, 0.5, "0"))],
    lambda session, x: [*x[1:], session.rng.choice(session.freed)],
    lambda session, x: [nonsense(session.numpy) for _ in x],
)
#: A number in other forms, or another.
NUMBERS: tuple[Callable[[Session, int], Any], ...] = (
    lambda session, x: session.rng.choice((np.int64, np.int8, np.uint64))(x % 128),
    lambda session, x: float(x),
    lambda session, x: str(x),
    lambda session, x: [x],
    lambda session, x: np.array(x),
    lambda session, x: np.array([x]),
    lambda session, x: np.ma.masked_array(x),
    lambda session, x: x + session.rng.choice((2**31, 2**32, 2**63, 2**64, -(2**63), 2**70)),
    lambda session, x: -x - 1,
    lambda session, x: bool(x),
    lambda session, x: session.rng.choice(session.freed),
)


def _step_of_another_cache() -> CacheStep:
    cache = PagedKVCache("fp16-nope", num_pages=2, page_size=2, max_seqs=1, max_pages=2, device="cpu")
    return cache.extend([cache.allocate()[0]], 1)


OTHER = _step_of_another_cache()


@pytest.mark.parametrize("sessions", numbers(QUICK, SLOW))
def test_methods(sessions: int) -> None:
    accepted = sum(Session(seed).run(CALLS) for seed in range(sessions))
    assert 0 < accepted < CALLS * sessions


SIZES: Call = {"num_pages": 6, "page_size": 4, "num_layers": 2, "max_seqs": 3, "max_pages": 4}


@pytest.mark.parametrize("count", numbers(100, 1000))
def test_making_a_cache(count: int) -> None:
    """A cache that can be made works."""
    made = 0
    for seed in range(count):
        rng = np.random.default_rng([seed, 15])
        given: Call = {**SIZES, "pools": {"kv": "bf16", "indexer": "indexer"}, "max_tokens": 50, "device": "cpu"}
        for _ in range(rng.integers(1, 3)):
            given[str(rng.choice(list(given)))] = nonsense(rng)
        outcome = attempt(lambda given=given: PagedKVCache(**given), [*given], (), f"seed {seed}")  # type: ignore[misc]
        if isinstance(outcome, Refused):
            continue
        made += 1
        for name in SIZES:
            whole(given[name])
        step = outcome.extend([outcome.allocate()[0]], 1)
        assert step.slots.tolist() == [0]
        assert step.block_table.shape == (1, given["max_pages"])
        assert [outcome.layer(given["num_layers"] - 1, pool).shape[:2] for pool in outcome.formats]
        outcome.verify(device=True)
    assert 0 < made < count
