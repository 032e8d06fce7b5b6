"""Sampled tests: each kernel keeps cases, and each case is kept for some kernel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mla_cupy.kernels import KERNELS
from tests.budgets import builds
from tests.support import sampling, unchanged


class Item:
    """What `thin_out` needs of a test."""

    def __init__(self, test: str = "test", *marks: str, **params: Any) -> None:
        self.parent, self.originalname, self.marks = "file", test, {*marks}
        if params:
            self.callspec = SimpleNamespace(params=params)

    def get_closest_marker(self, name: str) -> bool:
        return name in self.marks

    def add_marker(self, marker: Any) -> None:
        assert marker == pytest.mark.slow
        self.marks.add("slow")

    @property
    def runs(self) -> bool:
        return "slow" not in self.marks


def changed(item: Item) -> bool:
    """No kernel is as it was."""
    return False


def test_one_of_four_cases_of_a_sampled_test_runs_ordinarily() -> None:
    sampled = [Item("one", "sampled", case=i) for i in range(11)]
    others = [Item("other", case=i) for i in range(11)]
    sampling.thin_out([*sampled[:5], *others, *sampled[5:]], changed)
    assert [i for i, item in enumerate(sampled) if item.runs] == [0, 7, 10]
    assert all(item.runs for item in others)


def test_kernels_share_the_cases() -> None:
    items = {(case, kernel): Item("one", "sampled", case=case, kernel=kernel) for case in range(5) for kernel in "abcd"}
    sampling.thin_out(items.values(), changed)
    assert [key for key, item in items.items() if item.runs] == [
        *[(0, "a"), (1, "b"), (2, "c"), (3, "d")],
        *[(4, "a"), (4, "b"), (4, "c"), (4, "d")],
    ]


def test_a_kernel_with_few_cases_keeps_one() -> None:
    few = [Item("one", "sampled", case=0, kernel=kernel) for kernel in "abc"]
    sampling.thin_out(few, changed)
    assert all(item.runs for item in few)


def test_what_is_slow_already_takes_no_turn() -> None:
    items = [Item("one", "sampled", *marks, case=i) for i, marks in enumerate([["slow"], [], ["slow"], []])]
    sampling.thin_out(items, changed)
    assert [item.runs for item in items] == [False, True, False, False]


def test_of_kernels_that_have_not_changed_one_of_eight_cases() -> None:
    items = {(kernel, case): Item("one", "sampled", kernel=kernel, case=case) for kernel in "abc" for case in range(9)}
    sampling.thin_out(items.values(), lambda item: item.callspec.params["kernel"] != "b")
    kept = {kernel: [case for name, case in items if name == kernel and items[name, case].runs] for kernel in "abc"}
    assert kept == {"a": [0, 8], "b": [1, 4, 8], "c": [2, 8]}


def test_of_few_cases_every_other_kernel_that_has_not_changed() -> None:
    """Each has its turn in some test; one that has changed always."""
    turns = set()
    for test in map("test {}".format, range(8)):
        items = {kernel: Item(test, "sampled", kernel=kernel) for kernel in "abcde"}
        sampling.thin_out(items.values(), lambda item: item.callspec.params["kernel"] != "c")
        turns.add("".join(kernel for kernel, item in items.items() if item.runs))
    assert turns == {"acd", "bce"}
    alone = Item("alone", "sampled", kernel="a")
    sampling.thin_out([alone], lambda item: True)
    assert alone.runs


def test_settled_cases_all_run_where_the_kernel_has_changed() -> None:
    items = {(kernel, case): Item("one", "settled", kernel=kernel, case=case) for kernel in "ab" for case in range(6)}
    sampling.thin_out(items.values(), lambda item: item.callspec.params["kernel"] == "a")
    assert [case for kernel, case in items if items[kernel, case].runs and kernel == "b"] == [*range(6)]
    assert [case for kernel, case in items if items[kernel, case].runs and kernel == "a"] == [0, 5]
    none = [Item("one", "settled", case=case) for case in range(5)]
    sampling.thin_out(none, lambda item: True)
    assert [item.runs for item in none] == [True, False, False, False, True]


def test_which_kernels_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told by the fingerprints of a test's kernel, or of its family and of what families share."""
    monkeypatch.setattr(builds, "fingerprint", lambda name: name)
    for function in (unchanged.source, unchanged.family):
        function.cache_clear()
    known = {name: name for name in KERNELS} | {"decode_sm100": "before"}
    monkeypatch.setattr(builds, "verified", lambda: known)
    names = ("decode_sm100", "sparse_decode_sm100", "no_kernel")
    assert [unchanged.kernel(name) for name in names] == [False, True, False]
    assert [unchanged.source(f"{name}.cu") for name in ("decode/sm100", "sparse_decode/sm100")] == [False, True]
    folders = ("decode", "sparse_decode", "operations")
    assert [unchanged.family(folder) for folder in folders] == [False, True, False]
    for folder, still in zip(folders, (False, True, False), strict=True):
        for gpu in (False, True):
            nodeid = f"tests/{folder}/logits/test_sim.py::test_it"
            item = SimpleNamespace(nodeid=nodeid, get_closest_marker={"gpu": gpu}.get)
            assert sampling.as_it_was(item) == (still and not gpu)
    for function in (unchanged.source, unchanged.family):
        function.cache_clear()
