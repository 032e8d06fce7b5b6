"""What an ordinary run leaves out of tests in the simulator, because it was run on the very same sources.

    python -m tests.proven [--all] [--jobs N] [FILE ...]

Simulations are most of what a run of all tests takes, and what they find follows from the kernels' sources, the
launchers, and the test. So `tests/golden/proven.json` notes, of each file of tests whose every simulation has passed,
what those were made of: a digest of the file, of the sources of the kernels that it has loaded, without comments, and
of the Python that launches them or that they are compared with. Of what is still the same, an ordinary run repeats a
part:

- of the planted bugs that are texts, in each source the first one and each third: these need a build of their own;
- of a test of six or more cases, two in five.

All bugs are planted in a source that is another one, and all cases run where anything is. Steps
(`tests.support.mutants.steps`) need no build: a run has all of them. What is left out is marked `slow`; with
`--sim=full` that is nothing. The simulator itself is not in the digests: `ptxsim/tests` are its own.

The command runs what is left out, too, and all long forms of planted bugs, in the files of which something has changed
(or of all), and notes the files that have passed. It is run after a change of kernels, as `tests.budgets.update` is.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mla_cupy.runtime import sources
from tests.support.mutants import Mutant, Steps
from tests.support.sim_driver import SimDriver

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "cuda_src"
GOLDEN = ROOT / "tests" / "golden" / "proven.json"
EVERY = 3
"""Of which of a source's texts an ordinary run plants one."""
FEWEST = 6
"""Cases of a test that an ordinary run repeats a part of."""
REPEATED = (0, 2)
PERIOD = 5
"""Which cases, by their places in each so many: modes and numbers of SMs, which take turns, are all among them."""
OF_TEST, OF_HOST, SIMULATE = "test", "host", "simulate"
"""In the golden file, what stands beside the sources: the file itself, the launchers, and which tests simulate."""


class Noted(NamedTuple):
    """What the simulations of a file of tests are made of."""

    digests: dict[str, str]
    simulate: frozenset[str]
    """The names of the tests that load a kernel."""

    def as_json(self) -> dict[str, Any]:
        return {**self.digests, SIMULATE: sorted(self.simulate)}


def changed(now: Mapping[str, str], then: Mapping[str, str]) -> set[str]:
    """What was another one when it was noted; everything, where the test was."""
    if now.get(OF_TEST) != then.get(OF_TEST):
        return set(now)
    return {name for name in {*now, *then} if now.get(name) != then.get(name)}


def texts_left_out(mutants: Iterable[Mutant], fresh: Iterable[str]) -> list[Mutant]:
    """Those of a file's bugs that an ordinary run does not plant, where some sources have changed."""
    fresh, seen, found = set(fresh), dict[str, int](), []
    for mutant in dict.fromkeys(mutants):
        if isinstance(mutant.old, Steps) or mutant.file in fresh:
            continue
        index = seen[mutant.file] = seen.get(mutant.file, -1) + 1
        if index % EVERY:
            found.append(mutant)
    return found


def is_repeated(index: int, count: int) -> bool:
    """Whether an ordinary run repeats a case of a test that has so many."""
    return count < FEWEST or index % PERIOD in REPEATED


def digests(test: Path, names: Iterable[str]) -> dict[str, str]:
    """Of a file of tests, of sources by their names, and of what launches the kernels of their families."""
    names = sorted(set(names) - {OF_TEST, OF_HOST, SIMULATE})
    host = _host_digest(frozenset(name.partition("/")[0] for name in names))
    return {
        OF_TEST: _sha([test.read_bytes()]),
        OF_HOST: host,
        **{name: _source_digest(SOURCES, name) for name in names},
    }


@functools.cache
def _source_digest(root: Path, name: str) -> str:
    from tests.budgets import builds  # not in runs that simulate nothing: it describes every build

    return _sha([builds.code((root / name).read_bytes())]) if (root / name).exists() else ""


@functools.cache
def _host_digest(families: frozenset[str]) -> str:
    package = ROOT / "mla_cupy"
    folders = [package / name for name in ("ops", "reference", "kernels/attention", "kernels/exact_sums")]
    folders += [package / "kernels" / family for family in families]
    files = {*package.glob("*.py"), *(package / "kernels").glob("*.py"), *(ROOT / "tests" / "support").glob("*.py")}
    files |= {file for folder in folders for file in folder.rglob("*.py")}
    return _sha(_file_digest(file) for file in sorted(files))


@functools.cache
def _file_digest(file: Path) -> bytes:
    return _sha([file.relative_to(ROOT).as_posix().encode(), file.read_bytes()]).encode()


def _sha(texts: Iterable[bytes]) -> str:
    total = hashlib.sha256()
    for text in texts:
        total.update(b"%d\n" % len(text) + text)
    return total.hexdigest()[:16]


@functools.cache
def golden() -> dict[str, Noted]:
    """File of tests -> what was noted of it when all of its simulations had passed."""
    found = json.loads(GOLDEN.read_text())
    return {name: Noted(noted, frozenset(noted.pop(SIMULATE))) for name, noted in found.items()}


def name_of(file: Path) -> str:
    """Of a file of tests in the golden file."""
    return file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT) else file.as_posix()


def mutant_of(item: pytest.Item) -> Mutant | None:
    """The bug that a test plants; None where it plants none."""
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    planted = "plant" in getattr(item, "fixturenames", ())
    return next((value for value in parameters if planted and isinstance(value, Mutant)), None)


def function_of(item: pytest.Item) -> str:
    """The name of its test, without parameters."""
    return getattr(item, "originalname", None) or item.name


class Choice:
    """A plugin of pytest: what has passed on the same sources becomes a long form."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Before pytest itself looks at marks."""
        if config.getoption("--sim") == "full":
            return
        by_file: dict[Path, list[pytest.Item]] = {}
        for item in items:
            if name_of(item.path) in golden() and item.get_closest_marker("slow") is None:
                by_file.setdefault(item.path, []).append(item)
        for file, found in by_file.items():
            for item in left_out(file, found):
                item.add_marker(pytest.mark.slow)


def left_out(file: Path, items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    """The items of a file that is in the golden one that an ordinary run does not repeat."""
    then = golden()[name_of(file)]
    fresh = changed(digests(file, then.digests), then.digests)
    planting = [(item, mutant) for item in items if (mutant := mutant_of(item)) is not None]
    if OF_TEST not in fresh:
        dropped = {id(mutant) for mutant in texts_left_out((mutant for _, mutant in planting), fresh)}
        yield from (item for item, mutant in planting if id(mutant) in dropped)
    if fresh:
        return
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if function_of(item) in then.simulate and mutant_of(item) is None:
            cases.setdefault(function_of(item), []).append(item)
    for found in cases.values():
        yield from (item for index, item in enumerate(found) if not is_repeated(index, len(found)))


class Proof:
    """A plugin of pytest: runs everything, and adds to a file what the tests have loaded, one line a process."""

    def __init__(self, file: str) -> None:
        self._file, self._loaded, self._item = file, dict[str, dict[str, set[str]]](), None

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Long forms of planted bugs too, but no others."""
        long = [item for item in items if item.get_closest_marker("slow") is not None and mutant_of(item) is None]
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in set(long)]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Before a test plants a bug, so that it plants it in what notes kernels."""
        load, loaded = (
            SimDriver.load,
            self._loaded.setdefault(name_of(item.path), {}).setdefault(function_of(item), set()),
        )

        def noting(driver: SimDriver, build: Any, device: int) -> Any:
            loaded.add(build.info["source"])
            return load(driver, build, device)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SimDriver, "load", noting)
            return (yield)

    def pytest_sessionfinish(self) -> None:
        """One line, at once: other processes write theirs."""
        found = {name: {test: sorted(of) for test, of in tests.items()} for name, tests in self._loaded.items()}
        if found:
            with open(self._file, "a") as file:
                file.write(json.dumps(found) + "\n")


def noted(file: Path, lines: Iterable[str], planted: Iterable[str]) -> Noted:
    """What the lines of a run say of a file of tests, which plants bugs in some sources."""
    loaded: dict[str, set[str]] = {}
    for line in lines:
        for test, of in json.loads(line).get(name_of(file), {}).items():
            loaded.setdefault(test, set()).update(of)
    own = {
        source for of in loaded.values() for source in of if (SOURCES / source).exists()
    }  # not one of the test's own
    names = {name for source in own for name in sources.gather(source)}
    return Noted(digests(file, {*names, *planted}), frozenset(test for test, of in loaded.items() if of))


def candidates() -> dict[Path, set[str]]:
    """The files of tests that simulate kernels or plant texts, and the sources that they plant those in."""
    from tests import reanchor

    texts = {path: path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py"))}
    found = {path: set[str]() for path, text in texts.items() if "simulated(" in text}
    for path, mutant in reanchor.known():
        if not isinstance(mutant.old, Steps):
            found.setdefault(path, set()).add(mutant.file)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.proven", description=__doc__)
    parser.add_argument("--all", action="store_true", help="files of which nothing has changed, too")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="processes at once")
    parser.add_argument("files", nargs="*", metavar="FILE", help="of tests; by default all that simulate kernels")
    options = parser.parse_args(argv)
    known = candidates()
    if unknown := {name for name in options.files if ROOT / name not in known}:
        parser.error(f"got {', '.join(sorted(unknown))}, expected files below tests that simulate kernels")
    kept = {name: old for name, old in golden().items() if ROOT / name in known}
    chosen = [file for file in known if not options.files or name_of(file) in options.files]
    failed = []
    for file in chosen:
        old = kept.get(name_of(file))
        if not options.all and old is not None and not changed(digests(file, old.digests), old.digests):
            continue
        print(name_of(file), flush=True)
        found = prove(file, known[file], options.jobs)
        if found is None:
            failed.append(name_of(file))
            continue
        kept[name_of(file)] = found
        text = {name: one.as_json() for name, one in kept.items()}
        GOLDEN.write_text(json.dumps(text, indent=1, sort_keys=True) + "\n")
    print(f"{GOLDEN}: {len(kept)} of {len(known)} files", *[f"not all passed in {name}" for name in failed], sep="\n")
    return 1 if failed else 0


def prove(file: Path, planted: Iterable[str], jobs: int) -> Noted | None:
    """Run all simulations of a file; None where they do not pass."""
    with tempfile.NamedTemporaryFile("r") as lines:
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not perf", f"--prove={lines.name}", name_of(file)]
        done = subprocess.run([*command, *(["-n", str(jobs)] if jobs > 1 else [])], cwd=ROOT)
        return noted(file, lines.readlines(), planted) if done.returncode == 0 else None


if __name__ == "__main__":
    sys.exit(main())
