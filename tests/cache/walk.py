"""Operations at random on a `PagedKVCache` and its ledger, from one thread or several."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tests.cache.ledger import Faults, Ledger, Sizes

KEYS = (b"", b"lora")
SHIFTS = (0, 0, 2**32, -(2**32), 2**62, -(2**63) + 2**40)


@dataclass
class Prompts:
    """Committed tokens, as the beginnings of later prompts; and unused ids."""

    known: list[list[int]] = field(default_factory=lambda: [[]])
    next_id: int = 0

    def add(self, tokens: list[int]) -> None:
        self.known = [*self.known[-20:], list(tokens)]

    def new_ids(self, rng: random.Random, count: int) -> list[int]:
        """Some of them differ from others in their upper bits alone."""
        self.next_id += count
        return [number + rng.choice(SHIFTS) for number in range(self.next_id - count, self.next_id)]

    def draw(self, rng: random.Random) -> list[int]:
        """A known beginning, now and then with another token that has the same lower bits, and a new end."""
        begin = list(rng.choice(self.known))
        begin = begin[: rng.randint(0, len(begin))] if rng.random() < 0.5 else begin
        if begin and rng.random() < 0.2:
            begin[rng.randrange(len(begin))] ^= 1 << rng.choice((32, 40, 60))
        return begin + self.new_ids(rng, rng.randint(0, 5))


WEIGHTS = {
    "allocate": 6, "twice": 1, "extend": 14, "fork": 4, "truncate": 4, "free": 4, "commit": 6, "reserve": 4, "fail": 3,
    "stale": 1, "read": 1,
}  # fmt: skip


class Walk:
    """Operations at random on a ledger."""

    def __init__(self, rng: random.Random, ledger: Ledger, prompts: Prompts) -> None:
        self.rng, self.ledger, self.prompts = rng, ledger, prompts
        self.names, self.weights = list(WEIGHTS), list(WEIGHTS.values())

    def run(self, operations: int, check_every: int) -> None:
        for number in range(operations):
            name = self.rng.choices(self.names, self.weights)[0]
            method: Callable[[], None] = getattr(self, name if self.ledger.held else "allocate")
            method()
            if number % check_every == 0:
                self.ledger.check()
            if self.ledger.alone and not self.ledger.prefixes.exact and self.rng.random() < 0.02:
                self.ledger.drain()
        self.ledger.check()

    def pick(self) -> int:
        return self.rng.choice(list(self.ledger.held))

    def added(self) -> dict[int, list[int]]:
        """New tokens for some sequences, no more than fit a step and a row of the block table."""
        made = {}
        most = 2 * self.ledger.page_size if self.rng.random() < 0.2 else 2
        step = self.ledger.sizes.max_tokens
        for sequence in self.rng.sample(list(self.ledger.held), self.rng.randint(0, len(self.ledger.held))):
            left = self.ledger.longest - len(self.ledger.held[sequence].tokens)
            count = min(left, step, self.rng.randint(0, most))
            made[sequence] = self.prompts.new_ids(self.rng, count)
            step -= count
        return made

    def rest(self, prompt: list[int], sequence: int) -> list[int]:
        """The uncached tokens of a prompt that fit."""
        ids = prompt[len(self.ledger.held[sequence].tokens) : self.ledger.longest]
        return ids[: self.ledger.sizes.max_tokens // 2]

    def grow(self, added: dict[int, list[int]]) -> None:
        """A step; where there is no room, a sequence leaves."""
        if not self.ledger.extend(added) and self.rng.random() < 0.7:
            self.ledger.free([self.pick()])

    def allocate(self) -> None:
        prompt = self.prompts.draw(self.rng)
        sequence = self.ledger.allocate(prompt, self.rng.choice(KEYS))
        if sequence is None:
            self.ledger.free([self.pick()] if self.ledger.held else [])
        elif self.rng.random() < 0.9:
            self.grow({sequence: self.rest(prompt, sequence)})

    def twice(self) -> None:
        """Two requests for one prompt that come together: both compute it, on pages of their own."""
        prompt = self.prompts.draw(self.rng)
        made = [self.ledger.allocate(prompt) for _ in range(2)]
        self.grow({sequence: self.rest(prompt, sequence) for sequence in made if sequence is not None})
        for sequence in made:
            if sequence in self.ledger.held:
                self.ledger.commit(sequence, len(self.ledger.held[sequence].tokens))
        self.prompts.add(prompt)

    def extend(self) -> None:
        self.grow(self.added())

    def fail(self) -> None:
        self.ledger.fail(self.added(), self.rng.choice(("before", "after")))

    def fork(self) -> None:
        self.ledger.fork(self.pick(), self.rng.randint(0, 3))

    def truncate(self) -> None:
        chosen = self.rng.sample(list(self.ledger.held), self.rng.randint(0, min(2, len(self.ledger.held))))
        self.ledger.truncate({s: self.rng.randint(0, len(self.ledger.held[s].tokens)) for s in chosen})

    def free(self) -> None:
        self.ledger.free(self.rng.sample(list(self.ledger.held), self.rng.randint(0, min(2, len(self.ledger.held)))))

    def commit(self) -> None:
        sequence = self.pick()
        tokens = self.ledger.held[sequence].tokens
        self.ledger.commit(sequence, self.rng.choice((len(tokens), self.rng.randint(0, len(tokens)))))
        self.prompts.add(tokens)

    def reserve(self) -> None:
        self.ledger.reserve(self.pick(), self.rng.randint(0, 3 * self.ledger.page_size))

    def stale(self) -> None:
        self.ledger.stale()

    def read(self) -> None:
        self.ledger.check_sequences()
        self.ledger.cache.verify()


def some_sizes(rng: random.Random) -> Sizes:
    """Small, so that pages run out; all of them can be handed out."""
    max_seqs, max_pages = rng.randint(2, 10), rng.randint(2, 8)
    num_pages = rng.randint(3, min(36, max_seqs * max_pages))
    return Sizes(num_pages, rng.randint(1, 6), max_seqs, max_pages, rng.choice((1, 1, 2)))


def walk(seed: int, operations: int, check_every: int, device: int | str = "cpu", library: str | None = None) -> Ledger:
    """Walk on a cache of one thread."""
    rng = random.Random(seed)
    sizes = some_sizes(rng)
    if library == "jax":  # index keys in pages of 16 bytes
        sizes = replace(sizes, page_size=4)
    cache = sizes.cache(device, library)
    ledger = Ledger(cache, sizes, Faults(cache))
    Walk(rng, ledger, Prompts()).run(operations, check_every)
    return ledger


def walk_in_threads(
    seed: int,
    operations: int,
    check_every: int,
    device: int | str = "cpu",
    threads: int = 4,
    library: str | None = None,
) -> None:
    """Each thread has sequences of its own; they find each other's prompts."""
    rng = random.Random(seed)
    sizes = Sizes(rng.randint(16, 60), rng.randint(1, 5), rng.randint(8, 16), rng.randint(4, 8), 1)
    cache, prompts = sizes.cache(device, library), Prompts()
    faults, failures = Faults(cache), []

    def work(number: int) -> None:
        try:
            own = random.Random(1000 * seed + number)
            Walk(own, Ledger(cache, sizes, faults, alone=False), prompts).run(operations // threads, check_every)
        except BaseException as error:
            failures.append(error)

    started = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    if failures:
        raise failures[0]
    cache.verify(device=True)
