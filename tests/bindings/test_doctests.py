"""The examples in the docstrings of the bindings, and what importing the package imports."""

from __future__ import annotations

import doctest
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
LIBRARIES = ("torch", "jax")


@pytest.mark.usefixtures("_numpy_backend")
@pytest.mark.parametrize("library", LIBRARIES)
def test_docstrings(library: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(library)
    if library == "jax":
        pytest.importorskip("flatbuffers")  # jax.export wants it
    package: Any = importlib.import_module(f"mla_cupy.{library}")
    names = {getattr(package, name).__module__ for name in package.__all__}
    results = [doctest.testmod(importlib.import_module(name), raise_on_error=False) for name in sorted(names)]
    assert sum(result.attempted for result in results) > 20
    assert not any(result.failed for result in results)


@pytest.mark.parametrize("library", LIBRARIES)
def test_public_functions_have_docstrings(library: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(library)
    module: Any = importlib.import_module(f"mla_cupy.{library}")
    operations = importlib.import_module("mla_cupy.ops").OPERATIONS
    assert set(operations) <= set(module.__all__), "an operation has no binding"
    for name in operations:
        assert f"mla_cupy.{name}" in getattr(module, name).__doc__


def test_the_package_imports_no_framework() -> None:
    code = "import sys, mla_cupy, mla_cupy.ops, mla_cupy.ops.bind; print({'jax', 'torch', 'cupy'} & set(sys.modules))"
    environment = {"PYTHONPATH": str(REPOSITORY), "MLA_CUPY_JIT": "lazy", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
