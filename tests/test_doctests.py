"""The examples in the docstrings, in README.md and in the documentation do what they say."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import mla_cupy

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = Path(mla_cupy.__file__).parent
#: Parts that need a library of their own: tests/bindings looks at them.
BINDINGS = ("jax", "torch", "compat", "integrations", "transformers")
MODULES = sorted(
    ".".join(("mla_cupy", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
    if path.name != "__main__.py" and path.relative_to(PACKAGE).parts[0] not in (*BINDINGS, "bench", "cuda_src")
)
#: Public calls; their docstrings must have an example.
PUBLIC = [name for name in mla_cupy.__all__ if inspect.isfunction(getattr(mla_cupy, name))]


@pytest.fixture(autouse=True)
def _numpy_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name: str) -> None:
    module = importlib.import_module(name)
    assert doctest.testmod(module, raise_on_error=False).failed == 0


@pytest.mark.parametrize("name", PUBLIC)
def test_public_calls_have_examples(name: str) -> None:
    finder = doctest.DocTestFinder(recurse=False)
    assert any(found.examples for found in finder.find(getattr(mla_cupy, name)))


def blocks(page: Path) -> list[str]:
    """The code of a page; of a notebook its cells. The simulator's notebook is long: it runs when the site is built."""
    text = page.read_text()
    fence = r"\{code-cell\}" if "file_format: mystnb" in text and "simulated(" not in text else "python"
    return re.findall(rf"^```{fence}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


PAGES = [page for page in (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))) if blocks(page)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_pages(page: Path) -> None:
    """The blocks of a page run in order. Those that import CuPy need a GPU: only syntax and names are checked."""
    if "simulated(" in page.read_text():
        pytest.importorskip("ptxsim")
    for library in ("jax", "torch"):
        if f"import {library}\n" in page.read_text():
            pytest.importorskip(library)
    names: dict[str, Any] = {}
    for number, text in enumerate(blocks(page)):
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "mla_cupy":
                assert hasattr(mla_cupy, node.attr)
        if "import cupy" not in text:
            exec(compile(tree, f"{page.name}, block {number}", "exec"), names)


def test_pages_have_examples() -> None:
    assert sum(len(blocks(page)) for page in PAGES) >= 8
    assert len(blocks(REPOSITORY / "README.md")) >= 2
