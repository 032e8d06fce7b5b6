"""The page on adding things, carried out: its files, changes and commands in a copy, and what must hold there then."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs" / "project" / "adding.md"
LEFT_OUT = shutil.ignore_patterns(
    "__pycache__", "*.egg-info", "_generated", "build", "target", ".*_cache", ".g*", ".venv*"
)
"""Files of a checkout that git does not have."""

_BLOCK = re.compile(r"^`([\w./-]+)`:$|^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Step:
    """A block of the page: `kind` is its language, `path` the file that it is about, if any."""

    kind: str
    path: str
    text: str


def steps() -> Iterator[Step]:
    """The page's blocks in order. Several changes may follow the name of one file."""
    path = ""
    for name, kind, text in _BLOCK.findall(PAGE.read_text()):
        if name:
            path = name
        elif kind == "sh" or path:
            yield Step(kind, "" if kind == "sh" else path, text)
            path = path if kind == "diff" else ""


def carry_out(step: Step, root: Path) -> None:
    """Write a file, change one, or run commands."""
    if step.kind == "sh":
        for command in step.text.splitlines():
            run(root, *shlex.split(command)[1:])
        return
    target = root / step.path
    if step.kind != "diff":
        assert not target.exists(), f"{step.path} is there already"
        target.parent.mkdir(exist_ok=True)
        target.write_text(step.text)
        return
    lines = step.text.splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if line[0] == " ")
    text = target.read_text()
    assert text.count(before) == 1, f"{step.path} has {text.count(before)} times\n{before}"
    target.write_text(text.replace(before, "".join(line[1:] for line in lines)))


def run(root: Path, *arguments: str) -> str:
    """Python's output in the copy; it must succeed."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "MLA_CUPY"))}
    environment.update(
        PYTHONPATH=os.pathsep.join(str(root / part) for part in ("", "ptxsim", "tests")),
        MLA_CUPY_JIT="lazy",
        MLA_CUPY_CACHE_DIR=str(root / "cache"),
    )
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    return done.stdout


def check(root: Path, *arguments: str) -> None:
    """Tests in the copy: some must run, and all pass."""
    said = run(root, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments)
    assert "passed" in said


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository in which the page has been carried out."""
    root = tmp_path_factory.mktemp("recipe") / "copy"
    shutil.copytree(REPOSITORY, root, ignore=LEFT_OUT)
    shutil.copy(REPOSITORY / ".gitignore", root)
    for step in steps():
        carry_out(step, root)
    return root


def test_the_page_has_all_kinds_of_steps() -> None:
    kinds = [step.kind for step in steps()]
    assert {"cuda", "py", "diff", "sh"} == set(kinds)
    assert len(kinds) > 10


def test_few_files_change(tree: Path) -> None:
    """Six for a kernel and twenty for an operation, those that commands write among them."""
    made = ("__pycache__", "cache", ".pytest_cache", ".hypothesis")
    changed = [
        path.relative_to(tree)
        for path in tree.rglob("*")
        if path.is_file() and not set(made) & set(path.relative_to(tree).parts[:1] + path.parts[-2:-1])
    ]
    changed = [path for path in changed if not _is_alike(path, tree)]
    assert len(changed) <= 26, sorted(map(str, changed))


def _is_alike(path: Path, tree: Path) -> bool:
    known = REPOSITORY / path
    return known.is_file() and known.read_bytes() == (tree / path).read_bytes()


def test_the_copy_is_what_runs(tree: Path) -> None:
    code = "import mla_cupy; from mla_cupy.kernels import KERNELS; print(mla_cupy.__file__, *KERNELS)"
    file, *names = run(tree, "-c", code).split()
    assert file == str(tree / "mla_cupy" / "__init__.py")
    assert {"toy_scale", "decode_generic_records_toy"} <= set(names)


RULES = ("tests/layering", "tests/docs", "tests/test_generate.py", "tests/stress/test_sanitized_list.py")
SLOW = ("tests/budgets", "tests/operations", "tests/bindings", "tests/test_doctests.py", "tests/test_packaging.py")
"""Tests of the copy that a new kernel or a new operation can break."""


def test_the_copy_passes_the_tests_of_its_rules(tree: Path) -> None:
    """Rules of the tree, and budgets of the new kernels: the number of builds may exceed its limit."""
    left_out = "test_headers or test_texts_are_there or test_without_ruff or CHANGELOG"  # nothing of the page
    check(tree, *RULES, "-k", f"toy or not ({left_out})")
    check(tree, "tests/budgets", "-k", "toy or golden_file")


@pytest.mark.slow
@pytest.mark.parametrize("place", SLOW)
def test_the_copy_passes_the_tests_of_all_operations(tree: Path, place: str) -> None:
    check(tree, place, "-k", "not (golden_ones or builds_are_few)")


@pytest.mark.slow
def test_the_kernel_has_the_family_s_tests(tree: Path) -> None:
    """The kernel runs in the simulator, against the oracle, at its place in the pipeline's list."""
    check(tree, "tests/decode/test_records.py", "-k", "generic_records_toy")


def test_a_struct_that_differs_is_found(tree: Path) -> None:
    """The checks that the toy passes can fail."""
    source = tree / "cuda_src" / "toy" / "scale.cu"
    text = source.read_text()
    source.write_text(text.replace("i32 n;", "i32 m;"))
    try:
        with pytest.raises(AssertionError, match=r"kernels/params\.py"):
            check(tree, "tests/test_generate.py", "-k", "out_of_date")
    finally:
        source.write_text(text)
