"""Calls are bound to find out if they fit: names that are ignored may move, names that are used may not."""

from __future__ import annotations

from typing import Any

import pytest

from mla_cupy.integrations.probe import absent, misfit, overridden, refused


def used(self: Any, q: Any, cache: Any, *, scale: float = 1.0) -> None: ...


def lenient(self: Any, table: Any, lengths: Any, *newer: Any, total: Any = None, **ignored: Any) -> None: ...


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        (used, lambda self, q, cache: None, ""),
        (used, lambda self, q, cache, *, scale=2.0: None, ""),
        (used, lambda self, cache, q: None, "passes cache where ours takes q"),
        (used, lambda self, q, kv: None, "passes kv where ours takes cache"),
        (used, lambda self, q, cache, sinks=None: None, "too many positional arguments"),
        (used, lambda self, q, cache, *, sinks=None: None, "unexpected keyword argument 'sinks'"),
        (used, lambda self, q=None, cache=None: None, "missing a required argument: 'q'"),
        (lenient, lambda self, table, lengths, longest, total: None, ""),
        (lenient, lambda self, table, lengths, total, longest=0, *, seed=None: None, ""),
        (lenient, lambda self, longest, table, lengths, total: None, "passes longest where ours takes table"),
        (used, lambda *given, **named: None, ""),
        (lenient, lambda self, table, total: None, "passes total where ours takes lengths"),
    ],
)
def test_calls_are_bound(ours: Any, theirs: Any, said: str) -> None:
    found = misfit(ours, theirs)
    assert said in found
    assert bool(found) == bool(said)


class Base:
    def __init__(self, config: Any, kind: Any = None) -> None: ...

    def forward(self, q: Any, layer: Any) -> None: ...

    @staticmethod
    def sizes(spec: Any = None) -> list[int]:
        return []

    @classmethod
    def supports(cls, width: int) -> bool:
        return True


def test_what_a_class_overrides() -> None:
    """All of it, static and class methods included; what a constructor may be told is not the engine's to tell."""

    class Fits(Base):
        factor = 2

        def __init__(self, config: Any) -> None: ...

        def forward(self, q: Any, layer: Any) -> None: ...

        @staticmethod
        def sizes(spec: Any = None) -> list[int]:
            return [64]

        @classmethod
        def supports(cls, width: int) -> bool:
            return width == 576

        def helper(self, anything: Any) -> None: ...

    class Static(Base):
        @staticmethod
        def sizes() -> list[int]:  # type: ignore[override]
            return [64]

    class Ordinary(Base):
        def forward(self, layer: Any, q: Any) -> None: ...

    assert overridden(Fits, "forward", "sizes") == ""
    assert overridden(Fits, "helper") == "Base has no helper"
    assert overridden(Static).startswith("Base.sizes takes spec, which ours cannot be called with")
    assert overridden(Ordinary) == "Base.forward passes q where ours takes layer"


def test_functions_that_are_called() -> None:
    assert refused([].extend, ["a"]) == ""
    assert refused(lambda: None, ["a"]) == "<lambda>: too many positional arguments"
    assert absent(Base, "forward", "sizes") == ""
    assert absent(Base, "forward", "backward") == "Base has no backward"
