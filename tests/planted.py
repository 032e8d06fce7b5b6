"""Which bugs an ordinary run plants, and the command that plants all where something has changed.

    python -m tests.planted [--all] [--jobs N]

A bug that is a text needs a build of its own, which makes it dear: compiling it takes longer than most of the rest of
the run. What a planted bug checks is that a test notices it, which a change of the source that it is planted in, or of
that test, can undo, and little else. So `tests/golden/planted.json` says of each file of tests from which text of its
own, and from which texts of sources, all of its bugs were caught. Of a source that is still the same, an ordinary run
plants the first text, and then each third one; of another source, and of files of tests that have changed, all.
Comments do not count. Steps (`tests.support.mutants.steps`) need no build: a run has all of them.

The command plants all bugs of the files of tests of which something has changed, or of all files, long forms included,
and notes the files in which each was caught.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest

from tests.support.mutants import Mutant, Steps

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "cuda_src"
GOLDEN = ROOT / "tests" / "golden" / "planted.json"
EVERY = 3
OF_TEST = "test"
"""In the golden file, what stands beside a file's sources: the test itself."""

Digests = dict[str, str]
"""Of the texts that a file of tests depends on: itself, and the sources that it plants bugs in."""


def mutant_of(item: pytest.Item) -> Mutant | None:
    """The bug that a test plants; None where it plants none."""
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    planted = "plant" in getattr(item, "fixturenames", ())
    return next((value for value in parameters if planted and isinstance(value, Mutant)), None)


def left_out(mutants: Sequence[Mutant], changed: Iterable[str]) -> list[Mutant]:
    """Those of a file's bugs that an ordinary run does not plant, where some of its sources have changed."""
    fresh, kept, seen = set(changed), dict.fromkeys(mutants), dict[str, int]()
    found = []
    for mutant in kept:
        if isinstance(mutant.old, Steps) or mutant.file in fresh:
            continue
        index = seen[mutant.file] = seen.get(mutant.file, -1) + 1
        if index % EVERY:
            found.append(mutant)
    return found


def digests(test: Path, sources: Iterable[str]) -> Digests:
    """Of the test's text, and of those of sources without their comments."""
    of_test = hashlib.sha256(test.read_bytes()).hexdigest()[:16]
    return {OF_TEST: of_test, **{name: _digest(SOURCES / name) for name in sorted(set(sources))}}


@functools.cache
def _digest(source: Path) -> str:
    from tests.budgets import builds  # not in runs that plant nothing: it describes every build

    return hashlib.sha256(builds.code(source.read_bytes())).hexdigest()[:16] if source.exists() else ""


def changed(now: Digests, then: Mapping[str, str]) -> set[str]:
    """The sources whose bugs were not all caught as they are now; all, where the test is another one."""
    sources = {name: digest for name, digest in now.items() if name != OF_TEST}
    same_test = now[OF_TEST] == then.get(OF_TEST)
    return {name for name, digest in sources.items() if not same_test or digest != then.get(name)}


@functools.cache
def caught() -> dict[str, Digests]:
    """File of tests -> its digests when all of its bugs were caught."""
    found: dict[str, Digests] = json.loads(GOLDEN.read_text())
    return found


class Choice:
    """A plugin of pytest that makes long forms of the bugs that an ordinary run leaves out."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Before pytest itself looks at marks."""
        planting = [(item, mutant) for item in items if (mutant := mutant_of(item)) is not None]
        if config.getoption("--planted"):
            chosen = {id(item) for item, _ in planting}
            config.hook.pytest_deselected(items=[item for item in items if id(item) not in chosen])
            items[:] = [item for item, _ in planting]
            return
        by_file: dict[Path, list[tuple[pytest.Item, Mutant]]] = {}
        for item, mutant in planting:
            by_file.setdefault(item.path, []).append((item, mutant))
        for file, found in by_file.items():
            mutants = [mutant for item, mutant in found if item.get_closest_marker("slow") is None]
            for item, mutant in found:
                if mutant in _left_out(file, tuple(mutants)):
                    item.add_marker(pytest.mark.slow)


@functools.cache
def _left_out(file: Path, mutants: tuple[Mutant, ...]) -> frozenset[Mutant]:
    now = digests(file, {mutant.file for mutant in mutants if not isinstance(mutant.old, Steps)})
    then = caught().get(name_of(file), {})
    return frozenset(left_out(mutants, changed(now, then)))


def name_of(file: Path) -> str:
    """Of a file of tests in the golden file."""
    return file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT) else file.as_posix()


def texts_by_file() -> dict[Path, set[str]]:
    """The files of tests that plant texts, and the sources that they plant them in."""
    from tests import reanchor

    found: dict[Path, set[str]] = {}
    for path, mutant in reanchor.known():
        if not isinstance(mutant.old, Steps):
            found.setdefault(path, set()).add(mutant.file)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description=__doc__)
    parser.add_argument("--all", action="store_true", help="of all files of tests, not only of those that changed")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="processes at once")
    options = parser.parse_args(argv)
    known = texts_by_file()
    noted = {name: old for name, old in caught().items() if ROOT / name in known}
    failed = []
    for file, sources in known.items():
        name, now = name_of(file), digests(file, sources)
        if not options.all and now == noted.get(name):
            continue
        print(name, flush=True)
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not perf", "--planted", "-n", str(options.jobs), name]
        if subprocess.run(command, cwd=ROOT).returncode == 0:
            noted[name] = now
        else:
            failed.append(name)
        GOLDEN.write_text(json.dumps(noted, indent=1, sort_keys=True) + "\n")
    print(f"{GOLDEN}: {len(noted)} of {len(known)} files", *[f"not all caught in {name}" for name in failed], sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
