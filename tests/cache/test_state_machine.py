"""`PagedKVCache` against its model, under operations in any order, with every token's bytes."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mla_cupy.cache.memory import HostMemory
from mla_cupy.errors import CacheFullError
from tests.cache.model import LibraryPair, Pair, RealPair

INJECTED = RuntimeError("injected")


class FailingMemory(HostMemory):
    """Refuses a step when it is told to, before or after the tables have changed."""

    failing = ""

    def submit(self, part: slice, copies: int, stream: Any) -> None:
        if self.failing == "before":
            raise INJECTED
        super().submit(part, copies, stream)
        if self.failing == "after":
            raise INJECTED


class Machine(RuleBasedStateMachine):
    """Rules draw numbers, and use them modulo what there is."""

    pair_type: type[Pair] = Pair

    @initialize(
        num_pages=st.integers(1, 14),
        page_size=st.integers(1, 4),
        max_seqs=st.integers(1, 5),
        max_pages=st.integers(1, 6),
    )
    def begin(self, num_pages: int, page_size: int, max_seqs: int, max_pages: int) -> None:
        self.pair = self.pair_type(num_pages, page_size, max_seqs, max_pages, memory=FailingMemory)
        self.prompts: list[list[int]] = [[]]
        self.promised: dict[int, int] = {}  # the length up to which there are pages of a sequence's own

    def pick(self, number: int) -> int:
        return list(self.pair.tokens)[number % len(self.pair.tokens)]

    def room(self, sequence: int) -> int:
        return self.pair.max_tokens - len(self.pair.tokens[sequence])

    @rule(prompt=st.integers(0, 20), tail=st.integers(0, 3), key=st.sampled_from([b"", b"lora"]))
    def allocate(self, prompt: int, tail: int, key: bytes) -> None:
        """Allocate with the tokens of an earlier sequence and new ones; uncached tokens are written."""
        whole = [*self.prompts[prompt % len(self.prompts)], *self.pair.new_ids(tail)][: self.pair.max_tokens]
        if len(self.pair.tokens) == self.pair.cache._book.max_seqs:
            with pytest.raises(CacheFullError, match="sequences"):
                self.pair.allocate(whole, key)
            return
        sequence = self.pair.allocate(whole, key)
        self._extend({sequence: whole[len(self.pair.tokens[sequence]) :]})

    def _extend(self, added: dict[int, list[int]]) -> None:
        """All or nothing; nothing is no answer where every token has been promised a place."""
        kept = all(self._has_room(sequence, len(tokens)) for sequence, tokens in added.items())
        with contextlib.nullcontext() if kept else contextlib.suppress(CacheFullError):
            self.pair.extend(added)

    def _has_room(self, sequence: int, count: int) -> bool:
        """True if `reserve` promised room, unless the last page is shared."""
        tail, book = len(self.pair.tokens[sequence]), self.pair.cache._book
        page = book.table[self.pair.cache.row(sequence), max(0, tail - 1) // self.pair.page_size]
        own = tail % self.pair.page_size == 0 or book.refs[page] == 1
        return count == 0 or (own and tail + count <= self.promised.get(sequence, 0))

    @precondition(lambda self: self.pair.tokens)
    @rule(
        numbers=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), max_size=5),
        fail=st.sampled_from(["", "before", "after"]),
    )
    def extend(self, numbers: list[tuple[int, int]], fail: str) -> None:
        """Several sequences by different numbers of tokens; a failure changes nothing, and the next call succeeds."""
        added = {}
        for number, count in numbers:
            sequence = self.pick(number)
            added[sequence] = self.pair.new_ids(min(count, self.room(sequence)))
        if fail:
            before = self.pair.state()
            self.pair.cache._memory.failing = fail  # type: ignore[attr-defined]
            with pytest.raises((RuntimeError, CacheFullError)):
                self.pair.extend(added)
            self.pair.cache._memory.failing = ""  # type: ignore[attr-defined]
            assert self.pair.state() == before
            self.pair.check()
        self._extend(added)

    @precondition(lambda self: self.pair.tokens)
    @rule(number=st.integers(0, 9), count=st.integers(0, 3))
    def fork(self, number: int, count: int) -> None:
        sequence = self.pick(number)
        if len(self.pair.tokens) + count > self.pair.cache._book.max_seqs:
            before = self.pair.state()
            with pytest.raises(CacheFullError, match="sequences"):
                self.pair.cache.fork(sequence, count)
            assert self.pair.state() == before
        else:
            self.pair.fork(sequence, count)

    @precondition(lambda self: self.pair.tokens)
    @rule(number=st.integers(0, 9), length=st.integers(0, 24))
    def truncate(self, number: int, length: int) -> None:
        sequence = self.pick(number)
        self.pair.truncate(sequence, length % (len(self.pair.tokens[sequence]) + 1))
        self.promised.pop(sequence, None)

    @precondition(lambda self: self.pair.tokens)
    @rule(number=st.integers(0, 9))
    def free(self, number: int) -> None:
        self.pair.free(self.pick(number))

    @precondition(lambda self: self.pair.tokens)
    @rule(number=st.integers(0, 9), length=st.integers(0, 24))
    def commit(self, number: int, length: int) -> None:
        sequence = self.pick(number)
        tokens = self.pair.tokens[sequence]
        self.pair.cache.commit(sequence, tokens[: length % (len(tokens) + 1)])
        self.prompts.append(list(tokens))

    @precondition(lambda self: self.pair.tokens)
    @rule(number=st.integers(0, 9), count=st.integers(0, 12))
    def reserve(self, number: int, count: int) -> None:
        """Reserve pages; later steps of the sequence check the promise, with others' steps in between."""
        sequence = self.pick(number)
        count = min(count, self.room(sequence))
        before = self.pair.state()
        try:
            self.pair.cache.reserve(sequence, count)
        except CacheFullError:
            assert self.pair.state() == before
            return
        self.promised[sequence] = max(self.promised.get(sequence, 0), len(self.pair.tokens[sequence]) + count)

    @invariant()
    def equal(self) -> None:
        if hasattr(self, "pair"):
            self.pair.check()


QUICK = settings(
    max_examples=25, stateful_step_count=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
TestQuick = Machine.TestCase
TestQuick.settings = QUICK


class RealMachine(Machine):
    """A machine with latent records and index keys, and the calls that write them."""

    pair_type = RealPair


TestReal = RealMachine.TestCase
TestReal.settings = settings(QUICK, max_examples=3, stateful_step_count=12)


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_other_libraries(library: str) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    pytest.importorskip(library)
    pair = type("Pair", (LibraryPair,), {"library": library})
    machine = type("LibraryMachine", (Machine,), {"pair_type": pair})
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine, settings=settings(QUICK, max_examples=3, stateful_step_count=12)
    )


@pytest.mark.slow
def test_many_examples() -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Machine, settings=settings(QUICK, max_examples=1500, stateful_step_count=60, derandomize=False)
    )
