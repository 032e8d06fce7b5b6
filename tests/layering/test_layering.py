"""Who may know whom, in Python and in CUDA; and that the checks see what they are for."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from mla_cupy.launchers import SPECS
from mla_cupy.runtime import sources
from mla_cupy.selftest import catalog
from tests.layering import cuda, imports

REPOSITORY = Path(__file__).resolve().parents[2]
ENTRIES = {spec.source: spec.entry for spec in (*SPECS.values(), *catalog.SPECS.values())}


def test_python_layers() -> None:
    assert imports.violations(REPOSITORY / "mla_cupy") == []


def test_cuda_layers() -> None:
    assert cuda.violations(sources.source_root(), ENTRIES) == []


@pytest.mark.parametrize("folder", ["bench", "examples"])
def test_frameworks_are_optional(folder: str) -> None:
    """PyTorch, JAX and CuPy only when they are asked for, but for the examples that are about one of them."""
    heavy = {"torch", "jax", "cupy", "cuda"}
    about_one = {"cupy_decode.py", "jax_sparse_attention.py", "torch_sparse_attention.py"}
    found = [
        f"{path}: {entry.module}"
        for path in sorted((REPOSITORY / folder).rglob("*.py"))
        if path.name not in about_one
        for entry in imports.imports(path)
        if not (entry.lazy or entry.typing_only) and entry.module.partition(".")[0] in heavy
    ]
    assert found == []


def test_names_of_kernels() -> None:
    """Kernel <op>_<arch>: its launcher has the kernel's name, its source lies in the folder of the architecture."""
    for spec in SPECS.values():
        assert (REPOSITORY / "mla_cupy" / "launchers" / f"{spec.name}.py").is_file()
        folder, _, file = spec.source.partition("/")
        op, _, schedule = file.removesuffix(".cu").rpartition("_")
        names = {f"{op}_{folder}_{schedule}", f"{op}_{schedule}_{folder}", f"{op}_{schedule}"}
        assert spec.name in names, f"{spec.name} of {spec.source}"


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("ops/decode.py", "from mla_cupy import reference\n"),
        ("ops/decode.py", "from mla_cupy.runtime import worker\n"),
        ("reference/layer.py", "from mla_cupy.launchers import SPECS\n"),
        ("reference/layer.py", "import scipy\n"),
        ("runtime/cache.py", "import cupy\n"),
        ("runtime/cache.py", "class X:\n    import cuda.bindings\n"),
        ("runtime/cache.py", "def f():\n    import torch\n"),
        ("runtime/cache.py", "from mla_cupy import ops\n"),
        ("launchers/spec.py", "from mla_cupy.arrays import View\n"),
        ("launchers/spec.py", "import mla_cupy\n"),
        ("arrays.py", "import torch\n"),
        ("arrays.py", "from . import errors\n"),
        ("selftest/layouts.py", "import ptxsim\n"),  # what it expects is not the simulator's own opinion
        ("runtime/cache.py", "from mla_cupy import simulation\n"),
        ("fresh.py", "x = 1\n"),
    ],
)
def test_python_check_sees(tmp_path: Path, file: str, text: str) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text)
    assert len(imports.violations(tmp_path)) == 1


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("ops/backend.py", "from mla_cupy import errors, reference\nfrom mla_cupy.runtime import device\n"),
        ("runtime/cache.py", "import os\ndef f():\n    import cupy\n"),
        ("arrays.py", "import numpy\nif TYPE_CHECKING:\n    import torch\n"),
    ],
)
def test_python_check_lets_pass(tmp_path: Path, file: str, text: str) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text)
    assert imports.violations(tmp_path) == []


GOOD = {
    "common/a.cuh": "#pragma once\n",
    "ptx/b.cuh": '#pragma once\n#include "common/a.cuh"\nasm("nop;");\n',
    "sm90/k.cu": '#include "ptx/b.cuh"\nextern "C" __global__ void __launch_bounds__(3) mla_k(int x) {}  // asm\n',
}


def cuda_faults(root: Path, changed: dict[str, str]) -> list[str]:
    for name, text in {**GOOD, **changed}.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    return cuda.violations(root, {"sm90/k.cu": "mla_k"})


def test_cuda_check_lets_pass(tmp_path: Path) -> None:
    assert cuda_faults(tmp_path, {}) == []


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"common/a.cuh": '#pragma once\n#include "ptx/c.cuh"\n', "ptx/c.cuh": "#pragma once\n"}, "layer above"),
        ({"ptx/b.cuh": '#pragma once\n#include "ptx/gone.cuh"\n'}, "not there"),
        ({"ptx/b.cuh": '#pragma once\n#include "sm90/k.cu"\n'}, "not a header"),
        ({"common/a.cuh": '#pragma once\nasm volatile("nop;");\n'}, "asm outside"),
        ({"common/a.cuh": "\n"}, "pragma once"),
        ({"common/a.cuh": "#pragma once\n__global__ void f();\n"}, "kernel in a header"),
        ({"sm90/k.cu": GOOD["sm90/k.cu"] * 2}, "instead of one"),
        ({"sm90/k.cu": "__global__ void mla_k() {}\n"}, "instead of one"),
        ({"sm90/k.cu": GOOD["sm90/k.cu"].replace("mla_k", "mla_j")}, "registered as mla_k"),
        ({"sm90/l.cu": GOOD["sm90/k.cu"]}, "registered as nothing"),
        ({"tile/l.cu": GOOD["sm90/k.cu"]}, "kernel outside"),
        ({"sm90/l.cuh": "#pragma once\n"}, "header outside"),
        (
            {"ptx/c.cuh": '#pragma once\n#include "ptx/d.cuh"\n', "ptx/d.cuh": '#pragma once\n#include "ptx/c.cuh"\n'},
            "includes itself",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_cuda_check_sees(tmp_path: Path, changed: dict[str, str], fault: str) -> None:
    faults = cuda_faults(tmp_path, changed)
    assert faults
    assert any(fault in line for line in faults)


def test_the_reader_of_imports() -> None:
    text = "import a.b\nif TYPE_CHECKING:\n    import c\ndef f():\n    from d import e\n"
    read = [
        (entry.module, entry.lazy, entry.typing_only)
        for entry in imports._visit(ast.parse(text), lazy=False, typing_only=False)
    ]
    assert read == [("a.b", False, False), ("c", False, True), ("d.e", True, False)]
