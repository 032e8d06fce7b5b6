"""The examples in the docstrings, and in README.md, do what they say."""

from __future__ import annotations

import ast
import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import mla_cupy

README = Path(__file__).resolve().parents[1] / "README.md"
MODULES = sorted(
    found.name
    for found in pkgutil.walk_packages(mla_cupy.__path__, "mla_cupy.")
    if not found.name.endswith("__main__") and not found.name.startswith(("mla_cupy.bench", "mla_cupy.cuda_src"))
)
#: Public calls whose docstring must have an example.
PUBLIC = ("merge_states", "mla_decode", "plan_decode", "sparse_mla_backward", "sparse_mla_forward")


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


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("index", range(len(blocks())))
def test_readme(index: int) -> None:
    """Blocks that import CuPy need a GPU: of those only the syntax and the names of our own are looked at."""
    text = blocks()[index]
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "mla_cupy":
            assert hasattr(mla_cupy, node.attr)
    if "import cupy" not in text:
        exec(compile(tree, f"README.md, block {index}", "exec"), {})
