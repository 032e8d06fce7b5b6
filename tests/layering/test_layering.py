"""Allowed imports, in Python and in CUDA; and the checks find violations."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from mla_cupy.kernels import KERNELS
from mla_cupy.runtime import sources
from mla_cupy.selftest import catalog
from tests.layering import cuda, imports

REPOSITORY = Path(__file__).resolve().parents[2]
ENTRIES = {spec.source: spec.entry for spec in (*KERNELS.values(), *catalog.KERNELS.values())}


def test_python_layers() -> None:
    assert imports.violations(REPOSITORY / "mla_cupy") == []


def test_cuda_layers() -> None:
    assert cuda.violations(sources.source_root(), ENTRIES) == []


@pytest.mark.parametrize("folder", ["bench", "examples"])
def test_frameworks_are_optional(folder: str) -> None:
    """PyTorch, JAX and CuPy only when they are asked for, but for the examples that are about one of them."""
    heavy = {"torch", "jax", "cupy", "cuda"}
    about_one = ("cuda_", "cupy_", "dsa_from_dense", "jax_", "torch_", "transformers_")
    found = [
        f"{path}: {entry.module}"
        for path in sorted((REPOSITORY / folder).rglob("*.py"))
        if not (path.name.startswith(about_one) or path.parent.name == "xla")
        for entry in imports.imports(path)
        if not (entry.lazy or entry.typing_only) and entry.module.partition(".")[0] in heavy
    ]
    assert found == []


def test_names_of_kernels() -> None:
    """A kernel's name begins with its source's folder. One file of the host's folder with that path has the name."""
    for name, kernel in KERNELS.items():
        folder = kernel.source.rpartition("/")[0]
        assert name.startswith(folder.replace("/", "_") + "_")
        files = (REPOSITORY / "mla_cupy" / "kernels" / folder).glob("*.py")
        assert sum(f'"{name}"' in path.read_text() for path in files) == 1


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("ops/decode.py", "from mla_cupy import reference\n"),
        ("ops/decode.py", "from mla_cupy.runtime import worker\n"),
        ("reference/layer.py", "from mla_cupy.kernels import KERNELS\n"),
        ("reference/layer.py", "import scipy\n"),
        ("runtime/cache.py", "import cupy\n"),
        ("runtime/cache.py", "class X:\n    import cuda.bindings\n"),
        ("runtime/cache.py", "def f():\n    import torch\n"),
        ("runtime/cache.py", "from mla_cupy import ops\n"),
        ("kernels/spec.py", "from mla_cupy.arrays import View\n"),
        ("kernels/spec.py", "import mla_cupy\n"),
        ("arrays.py", "import torch\n"),
        ("arrays.py", "from . import errors\n"),
        ("selftest/layouts.py", "import ptxsim\n"),  # what it expects is not the simulator's own opinion
        ("runtime/cache.py", "from mla_cupy import simulation\n"),
        ("__init__.py", "from mla_cupy import jax\n"),
        ("ops/bind.py", "from mla_cupy.torch import mla_decode\n"),
        ("torch/plan.py", "from mla_cupy import compat\n"),
        ("compat/xtuner.py", "import jax\n"),
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
        ("jax/ffi.py", "import jax\nfrom mla_cupy.ops.bind import Launcher\n"),
        ("compat/xtuner.py", "import torch\nfrom mla_cupy.torch import sparse_mla_forward\n"),
    ],
)
def test_python_check_lets_pass(tmp_path: Path, file: str, text: str) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text)
    assert imports.violations(tmp_path) == []


GOOD = {
    "common/a.cuh": "#pragma once\n#define MLA_DEVICE\nnamespace mla {\nMLA_DEVICE void f();\n}\n",
    "decode/sm90_b.cuh": "#pragma once\nnamespace mla::decode::sm90 {\n}\n",
    "ptx/b.cuh": '#pragma once\n#include "common/a.cuh"\nasm("nop;");\n',
    "decode/k.cu": '#include "ptx/b.cuh"\nextern "C" __global__ void __launch_bounds__(3) mla_k(int x) {}  // asm\n',
}


def cuda_faults(root: Path, changed: dict[str, str]) -> list[str]:
    for name, text in {**GOOD, **changed}.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    return cuda.violations(root, {"decode/k.cu": "mla_k"})


def test_cuda_check_lets_pass(tmp_path: Path) -> None:
    assert cuda_faults(tmp_path, {}) == []


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"common/a.cuh": '#pragma once\n#include "ptx/c.cuh"\n', "ptx/c.cuh": "#pragma once\n"}, "layer above"),
        ({"ptx/b.cuh": '#pragma once\n#include "ptx/gone.cuh"\n'}, "not there"),
        ({"ptx/b.cuh": '#pragma once\n#include "decode/k.cu"\n'}, "not a header"),
        ({"common/a.cuh": '#pragma once\nasm volatile("nop;");\n'}, "asm outside"),
        ({"common/a.cuh": "\n"}, "pragma once"),
        ({"common/a.cuh": "#pragma once\n__global__ void f();\n"}, "kernel in a header"),
        ({"common/a.cuh": "#pragma once\nusing Element = MLA_DTYPE;\n"}, "reads MLA_DTYPE"),
        (
            {
                "tile/c.cuh": "#pragma once\nconstexpr i32 kC = 1;\n",
                "tile/d.cuh": "#pragma once\nint d() { return kC; }",
            },
            "uses kC, of tile/c.cuh",
        ),
        (
            {
                "ptx/c.cuh": "#pragma once\nMLA_DEVICE void c(int x) {}\n",
                "tile/d.cuh": "#pragma once\nint d() { c(1); }",
            },
            "uses c, of ptx/c.cuh",
        ),
        ({"common/a.cuh": "#pragma once\nnamespace mla::common {\n}\n"}, "a namespace other than mla"),
        ({"decode/l.cuh": "#pragma once\nnamespace mla::merge {\n}\n"}, "a namespace other than mla::decode"),
        ({"decode/k.cu": GOOD["decode/k.cu"] * 2}, "instead of one"),
        ({"decode/k.cu": "__global__ void mla_k() {}\n"}, "instead of one"),
        ({"decode/k.cu": GOOD["decode/k.cu"].replace("mla_k", "mla_j")}, "registered as mla_k"),
        ({"decode/l.cu": GOOD["decode/k.cu"]}, "registered as nothing"),
        ({"tile/l.cu": GOOD["decode/k.cu"]}, "kernel outside"),
        ({"sm90/l.cuh": "#pragma once\n"}, "header outside"),
        ({"ptx/b.cuh": '#pragma once\n#include "decode/l.cuh"\n', "decode/l.cuh": "#pragma once\n"}, "layer above"),
        (
            {"merge/l.cuh": '#pragma once\n#include "decode/l.cuh"\n', "decode/l.cuh": "#pragma once\n"},
            "private to decode",
        ),
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
