"""Names in pages exist: files, functions, environment variables. The logs describe the past, and are left out."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest

import mla_cupy
from mla_cupy.kernels import KERNELS
from mla_cupy.runtime import env

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path
    for folder in ("docs", "cuda_src", "bench", "tests", ".")
    for path in ((REPOSITORY / folder).glob("*.md") if folder == "." else (REPOSITORY / folder).rglob("*.md"))
    if "log" not in path.parts and path.name != "adding.md"
)
ROOTS = ("", "cuda_src", "mla_cupy", "docs", "ptxsim", "ptxsim/ptxsim", "tests")
_FILE = re.compile(r"`([\w./-]+/[\w.-]+\.(?:py|cu|cuh|md|jsonl|json))`")
_SOURCE = re.compile(r"`(\w+\.cuh?)`")
_NAME = re.compile(r"`(mla_cupy(?:\.\w+)+)[`(]")
_VARIABLE = re.compile(r"\b(MLA_CUPY_[A-Z_]+[A-Z])\b")


def exists(page: Path, name: str) -> bool:
    return any((folder / name).exists() for folder in (page.parent, *(REPOSITORY / root for root in ROOTS)))


def is_a_source(page: Path, name: str) -> bool:
    """Tell whether a kernel's page, which leaves out folders, names a source of some folder."""
    return REPOSITORY / "cuda_src" not in page.parents or any((REPOSITORY / "cuda_src").rglob(name))


def resolves(name: str) -> bool:
    """Resolve a dotted name: True if it is a module, or an attribute of one."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError as error:
            if error.name and not error.name.startswith("mla_cupy"):
                return True  # of a library that is not installed here
            continue
        for part in parts[end:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_names_in_prose_resolve(page: Path) -> None:
    text = page.read_text()
    missing = [name for name in _FILE.findall(text) if not exists(page, name)]
    missing += [name for name in _SOURCE.findall(text) if not is_a_source(page, name)]
    missing += [name for name in _NAME.findall(text) if not resolves(name)]
    missing += [name for name in _VARIABLE.findall(text) if name.removeprefix("MLA_CUPY_") not in env.VARIABLES]
    assert missing == []


def test_the_page_of_tasks_has_every_function() -> None:
    text = (REPOSITORY / "docs" / "which-function.md").read_text()
    functions = [name for name in mla_cupy.__all__ if inspect.isfunction(getattr(mla_cupy, name))]
    assert [name for name in functions if name not in text] == []


def test_missing_names_are_found() -> None:
    assert not resolves("mla_cupy.mla_encode")
    assert resolves("mla_cupy.reference.mla_decode")
    assert not exists(PAGES[0], "attention/exact_addition.cuh")
    kernels = REPOSITORY / "cuda_src" / "README.md"
    assert [is_a_source(page, "exact_addition.cuh") for page in (kernels, REPOSITORY / "README.md")] == [False, True]
    assert is_a_source(kernels, KERNELS["indexer_topk_select"].source.rpartition("/")[2])
