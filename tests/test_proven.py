"""What an ordinary run leaves out: never a test of what has changed, and of what has not, never a whole one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import proven
from tests.proven import Noted
from tests.support import mutants
from tests.support.mutants import Mutant, steps
from tests.support.sim_modes import MODES, SM_COUNTS

pytest_plugins = "pytester"
SOURCE = "ptx/barrier.cuh"
TEST = """
import pytest
from tests.support.mutants import Mutant, plant, steps
from tests.support.sim_driver import SimDriver

TEXTS = [Mutant(f"text {i}", "ptx/barrier.cuh", f"{i}", "") for i in range(5)]
STEPS = [Mutant("step", "decode/sm90_small.cu", *steps("bar.sync", 0, of=1))]

@pytest.mark.parametrize("mutant", TEXTS + STEPS, ids=lambda mutant: mutant.id)
def test_is_caught(mutant, plant): ...

@pytest.mark.parametrize("case", range(7))
def test_case(case): ...

@pytest.mark.parametrize("case", range(7))
def test_launch(case): ...

@pytest.mark.slow
def test_all(): ...
"""
EVERY_TEST = {
    *(f"is_caught[text_{i}]" for i in range(5)),
    "is_caught[step]",
    *(f"{kind}[{i}]" for kind in ("case", "launch") for i in range(7)),
}
LEFT_OUT_TEXTS = {f"is_caught[text_{i}]" for i in (1, 2, 4)}
LEFT_OUT_CASES = {f"case[{i}]" for i in (1, 3, 4, 6)}
CONFTEST = """
from tests import proven

def pytest_addoption(parser):
    parser.addoption("--prove")
    parser.addoption("--sim", default="quick")

def pytest_configure(config):
    file = config.getoption("--prove")
    config.pluginmanager.register(proven.Proof(file) if file else proven.Choice())
"""


@pytest.fixture(autouse=True)
def no_other_bugs() -> Iterator[None]:
    """Those of this file are not the project's."""
    known = len(mutants.KNOWN)
    yield
    del mutants.KNOWN[known:]


def texts(file: str, count: int) -> list[Mutant]:
    return [Mutant(f"{file} {i}", file, str(i), "") for i in range(count)]


def test_of_each_source_the_first_text_and_each_third_are_planted() -> None:
    one, other, alone = texts("a.cuh", 7), texts("b.cuh", 2), texts("c.cu", 1)
    step = Mutant("step", "c.cu", *steps("bar.sync", 0, of=1))
    mixed = [one[0], other[0], step, *one[1:5], alone[0], other[1], *one[5:]]
    assert set(proven.texts_left_out(mixed, ())) == {one[1], one[2], one[4], one[5], other[1]}


def test_a_bug_that_several_tests_plant_counts_once() -> None:
    one = texts("a.cuh", 3)
    assert proven.texts_left_out([*one, *one], ()) == one[1:]


def test_all_texts_of_a_source_that_has_changed_are_planted() -> None:
    one, other = texts("a.cuh", 4), texts("b.cuh", 2)
    assert proven.texts_left_out([*one, *other], {"a.cuh"}) == other[1:]


def test_repeated_cases_meet_all_modes_with_all_numbers_of_multiprocessors() -> None:
    count = proven.PERIOD * len(MODES) * len(SM_COUNTS) * 2
    kept = [i for i in range(count) if proven.is_repeated(i, count)]
    assert len(kept) == count * len(proven.REPEATED) // proven.PERIOD
    met = {(i % len(MODES), i // 2 % len(SM_COUNTS)) for i in kept}  # as sim_modes has them take turns
    assert len(met) == len(MODES) * len(SM_COUNTS)


def test_few_cases_are_all_repeated() -> None:
    assert all(proven.is_repeated(i, proven.FEWEST - 1) for i in range(proven.FEWEST - 1))


@pytest.mark.parametrize(
    ("then", "found"),
    [
        ({"test": "1", "host": "2", "a.cuh": "3"}, set()),
        ({"test": "1", "host": "2", "a.cuh": "4"}, {"a.cuh"}),
        ({"test": "1", "host": "0", "a.cuh": "3"}, {"host"}),
        ({"test": "1", "host": "2"}, {"a.cuh"}),
        ({"test": "1", "host": "2", "a.cuh": "3", "b.cuh": "4"}, {"b.cuh"}),
        ({"test": "0", "host": "2", "a.cuh": "3"}, {"test", "host", "a.cuh"}),
        ({}, {"test", "host", "a.cuh"}),
    ],
)
def test_what_has_changed(then: dict[str, str], found: set[str]) -> None:
    assert proven.changed({"test": "1", "host": "2", "a.cuh": "3"}, then) == found


def test_comments_of_sources_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proven, "SOURCES", tmp_path)
    test = tmp_path / "test_it.py"
    test.write_text("")
    found = []
    for i, text in enumerate(("int i;\n", "// An index.\nint i;  // of a row\n", "int j;\n")):
        (tmp_path / f"{i}.cuh").write_text(text)
        found.append(proven.digests(test, [f"{i}.cuh"])[f"{i}.cuh"])
    assert found[0] == found[1] != found[2]


def test_launchers_are_those_of_the_sources_families(tmp_path: Path) -> None:
    test = tmp_path / "test_it.py"
    test.write_text("")
    decode, both, merge = (
        proven.digests(test, names)[proven.OF_HOST]
        for names in (["decode/sm90_small.cu"], ["decode/sm90_small.cu", "merge/merge.cu"], ["merge/merge.cu"])
    )
    assert len({decode, both, merge}) == 3


@pytest.mark.parametrize(
    ("altered", "left_out"),
    [
        ("", LEFT_OUT_TEXTS | LEFT_OUT_CASES),
        (proven.OF_HOST, LEFT_OUT_TEXTS),
        ("decode/sm90_small.cu", LEFT_OUT_TEXTS),
        (SOURCE, set()),
        (proven.OF_TEST, set()),
        ("unknown file", set()),
    ],
)
def test_a_run_leaves_out_what_is_the_same(
    altered: str, left_out: set[str], pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = _project(pytester)
    then = proven.digests(file, [SOURCE, "decode/sm90_small.cu"])
    note = {} if altered == "unknown file" else {proven.name_of(file): Noted(then, frozenset({"test_case"}))}
    if altered in then:
        then[altered] = "another"
    monkeypatch.setattr(proven, "golden", lambda: note)
    assert _collected(pytester, "-m", "not slow") == EVERY_TEST - left_out
    assert _collected(pytester, "-m", "slow") == left_out | {"all"}
    assert _collected(pytester, "-m", "not slow", "--sim=full") == EVERY_TEST


def test_all_simulations_are_run_to_prove_them(pytester: pytest.Pytester, tmp_path: Path) -> None:
    """The planted bugs here are noted as loading nothing, and as being in a source all the same."""
    file = _project(pytester)
    text = file.read_text().replace("def test_case(case): ...", f"def test_case(case):\n{LOADS}")
    file.write_text(text)
    lines = tmp_path / "lines"
    result = pytester.runpytest_inprocess("-p", "no:hypothesispytest", f"--prove={lines}", "-k", "not is_caught")
    result.assert_outcomes(passed=14, deselected=7)
    found = proven.noted(file, lines.read_text().splitlines(), [SOURCE])
    assert found.simulate == {"test_case"}
    assert {"test", "host", "decode/sm90_small.cu", SOURCE} < set(found.digests)
    assert _collected(pytester, f"--prove={lines}") == EVERY_TEST


LOADS = """    from types import SimpleNamespace
    try:
        SimDriver.load(None, SimpleNamespace(info={"source": "decode/sm90_small.cu"}), 0)
    except AttributeError:
        pass
"""


def _project(pytester: pytest.Pytester) -> Path:
    pytester.makeini("[pytest]\nmarkers =\n    slow: long")
    pytester.makeconftest(CONFTEST)
    return pytester.makepyfile(test_it=TEST)


def _collected(pytester: pytest.Pytester, *options: str) -> set[str]:
    result = pytester.runpytest_inprocess("-p", "no:hypothesispytest", "--collect-only", "-q", *options)
    return {line.partition("::test_")[2] for line in result.outlines if "::test_" in line}


def test_noted_files_are_there() -> None:
    for name, noted in json.loads(proven.GOLDEN.read_text()).items():
        assert (proven.ROOT / name).exists(), f"{name} is gone: python -m tests.proven"
        assert {proven.OF_TEST, proven.OF_HOST, proven.SIMULATE} < set(noted)
