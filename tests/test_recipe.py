"""Adding a kernel and an operation by the recipe of cuda_src/README.md: few files, and the suite's own checks pass.

The tree is copied, a toy family is added to the copy, and the tests that follow from the registries run there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
COPIED = ("mla_cupy", "cuda_src", "ptxsim/ptxsim", "tests", "setup.cfg", "README.md")

#: What a kernel needs: its source and its host side. (Its page, its tests and its golden figures are no code.)
KERNEL = {
    "cuda_src/toy/scale.cu": """\
// out = factor * x. Grid: x = blocks of 128 elements.
#include "common/facts.cuh"
#include "ptx/control.cuh"

namespace mla::toy {
constexpr i32 kThreads = 128;

struct ScaleParams {
    const float* x;
    float* out;
    i64 x_stride_elems, out_stride_elems;
    i32 n;
    float factor;
};

MLA_FACT_LIST(params_layout, MLA_OFFSET(ScaleParams, x_stride_elems), MLA_OFFSET(ScaleParams, n),
              MLA_OFFSET(ScaleParams, factor), (int)sizeof(ScaleParams));
MLA_FACT(threads, kThreads);
MLA_FACT(elements_per_block, kThreads);

extern "C" __global__ void __launch_bounds__(kThreads) mla_toy_scale(const __grid_constant__ ScaleParams p) {
    griddepcontrol_wait();
    const i32 i = blockIdx.x * kThreads + threadIdx.x;
    if (i < p.n) p.out[i * p.out_stride_elems] = p.factor * p.x[i * p.x_stride_elems];
}
}  // namespace mla::toy
""",
    "mla_cupy/kernels/toy/scale.py": '''\
"""Host side of `toy/scale.cu`."""

from __future__ import annotations

from mla_cupy.kernels.params import ScaleParams
from mla_cupy.kernels.spec import PLAIN, KernelSpec

ELEMENTS_PER_BLOCK = 128

KERNEL: KernelSpec[object] = KernelSpec(
    "toy_scale",
    "multiplies",
    "toy/scale.cu",
    ScaleParams,
    core=PLAIN,
    facts={"elements_per_block": ELEMENTS_PER_BLOCK},
)
''',
}
#: What an operation needs besides: its pipeline, its public function with its record, its oracle.
OPERATION = {
    "mla_cupy/kernels/toy/pipeline.py": '''\
"""Scaling: one launch."""

from __future__ import annotations

from typing import NamedTuple

from mla_cupy.kernels import choice
from mla_cupy.kernels.params import ScaleParams
from mla_cupy.kernels.pipeline import Call, Launch, Layout, Pipeline, LaunchArgs, Step
from mla_cupy.kernels.spec import PLAIN
from mla_cupy.kernels.toy import scale
from mla_cupy.runtime.device import DeviceInfo


class ToyOptions(NamedTuple):
    """The numbers of a call."""

    scale: float


class ToyPipeline(Pipeline[int]):
    """The one kernel."""

    kernels = (scale.KERNEL,)

    def configure(self, problem: int, device: DeviceInfo, kernel: str | None = None) -> int:
        """See `Pipeline.configure`."""
        choice.choose("scaling", self.kernels, problem, device, kernel)
        return problem

    def workspace(self, config: int) -> Layout:
        """None is needed."""
        return Layout({})

    def steps(self, config: int, call: Call) -> list[Step]:
        """One launch."""
        params = ScaleParams(
            x="x",
            out="out",
            x_stride_elems=call.stride("x"),
            out_stride_elems=call.stride("out"),
            n=config,
            factor=call.options.scale,
        )
        blocks = -(-config // scale.ELEMENTS_PER_BLOCK)
        return [Launch(scale.KERNEL, PLAIN[0], (blocks, 1, 1), LaunchArgs(params))]


TOY = ToyPipeline()
''',
    "mla_cupy/kernels/toy/__init__.py": '''\
"""A toy."""

from mla_cupy.kernels.toy.pipeline import TOY

__all__ = ["KERNELS", "TOY"]

KERNELS = TOY.kernels
''',
    "mla_cupy/ops/toy.py": '''\
"""Scaling."""

from __future__ import annotations

from typing import Any

from mla_cupy.kernels.toy import TOY
from mla_cupy.kernels.toy.pipeline import ToyOptions
from mla_cupy.ops.call import Invocation, run
from mla_cupy.ops.checks import resolve_scale
from mla_cupy.ops.operation import Examined, Input, Operation, Output, Views


def toy_scale(x: Any, *, scale: float = 1.0, out: Any = None, workspace: Any = None, stream: Any = None) -> Any:
    """Multiply."""
    (out,) = run(Invocation(OPERATION, (x, out), (scale,), workspace, stream))
    return out


def _examine(views: Views, given: ToyOptions) -> Examined:
    x = views["x"]
    assert x is not None
    return Examined(x.shape[0], given._replace(scale=resolve_scale(given.scale, 1)))


OPERATION = Operation(
    "toy_scale",
    inputs=(Input("x", "n", ("float32",)),),
    outputs=(Output("out", "n"),),
    options=ToyOptions,
    min_sizes={"n": 1},
    examine=_examine,
    pipeline=TOY,
)
''',
    "mla_cupy/reference/toy.py": '''\
"""Scaling, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np


def toy_scale(x: Any, *, scale: float = 1.0) -> Any:
    """Multiply."""
    return np.asarray(x, np.float64) * scale
''',
}
#: Lines of the registries: file -> (what is there, what is put before it).
LINES = {
    "mla_cupy/kernels/__init__.py": (("\nfrom mla_cupy.kernels.spec", ", toy"), (")\n    for kernel in", ", toy")),
    "mla_cupy/ops/__init__.py": (
        (")\nfrom mla_cupy.ops.cache import", "    toy,\n"),
        ("from mla_cupy.ops.call", "from mla_cupy.ops.toy import toy_scale\n"),
        ('    "workspace_bytes",\n]', '    "toy_scale",\n'),
        ("        topk.OPERATION,\n", "        toy.OPERATION,\n"),
    ),
    "mla_cupy/reference/__init__.py": (
        ("from mla_cupy.reference.sparse import", "from mla_cupy.reference.toy import toy_scale\n"),
        ("]", '    "toy_scale",\n'),
    ),
    "mla_cupy/__init__.py": (
        ("        workspace_bytes,\n    )", "        toy_scale,\n"),
        ('    "workspace_bytes",\n]', '    "toy_scale",\n'),
    ),
    "setup.cfg": (("    mla_cupy.kernels.merge\n", "    mla_cupy.kernels.toy\n"),),
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository with the toy."""
    root = tmp_path_factory.mktemp("recipe")
    for name in COPIED:
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, root / name)
    for name, text in {**KERNEL, **OPERATION}.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    for name, changes in LINES.items():
        text = (root / name).read_text()
        for there, added in changes:
            assert text.count(there) == 1, f"{name}: {there!r}"
            text = text.replace(there, added + there)
        (root / name).write_text(text)
    generate = [sys.executable, "-m", "tests.generate"]
    subprocess.run(generate, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, check=True)
    return root


def run(tree: Path, *arguments: str) -> str:
    """What pytest says in the copy; it must succeed."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "MLA_CUPY"))}
    environment.update(PYTHONPATH=str(tree), MLA_CUPY_JIT="lazy", MLA_CUPY_CACHE_DIR=str(tree / "cache"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    assert "passed" in done.stdout
    return done.stdout


def test_the_copy_is_what_runs(tree: Path) -> None:
    code = "import mla_cupy; from mla_cupy.kernels import KERNELS; print(mla_cupy.__file__, 'toy_scale' in KERNELS)"
    environment = {**os.environ, "PYTHONPATH": str(tree), "MLA_CUPY_JIT": "lazy"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tree, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(tree / "mla_cupy" / "__init__.py"), "True"]


def test_layers_and_names(tree: Path) -> None:
    run(tree, "tests/layering")


def test_the_kernel_compiles_and_is_what_its_record_says(tree: Path) -> None:
    """Of one line of NVRTC; the golden file, which `tests.budgets.update` writes, is not asked."""
    said = run(
        tree, "tests/budgets/test_facts.py", "tests/budgets/test_budgets.py",
        "-k", "toy and not nvrtc13 and not golden",
    )  # fmt: skip
    assert " failed" not in said


def test_the_operation_s_own_checks(tree: Path) -> None:
    """Bad input, workspaces, repeated calls, their way, misuse: all made from its record."""
    folder = "tests/operations"
    names = ("test_bad_input", "test_workspace", "test_repeated_calls", "test_misuse_fuzz", "test_layout_fuzz")
    run(tree, *(f"{folder}/{name}.py" for name in names), "-k", "toy")
    run(tree, f"{folder}/test_way.py")


def test_a_wrong_struct_is_found(tree: Path, tmp_path: Path) -> None:
    """The checks that the toy passes can fail."""
    source = tree / "cuda_src/toy/scale.cu"
    text = source.read_text()
    wrong = text.replace("const float* x;\n    float* out;", "float* out;\n    const float* x;")
    assert wrong != text
    source.write_text(wrong)
    try:
        with pytest.raises(AssertionError, match=r"run `python -m tests.generate`"):
            run(tree, "tests/budgets/test_facts.py", "-k", "classes_are_the_structs")
    finally:
        source.write_text(text)


def rows_of(heading: str) -> list[str]:
    """The first column of the table under a heading of the page."""
    page = (REPOSITORY / "cuda_src" / "README.md").read_text()
    section = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("| `")]


def test_the_recipe_is_that_of_the_page() -> None:
    """At most five files for a kernel; what the toy adds is in the page's tables."""
    kernel, operation = rows_of("To add a kernel"), rows_of("To add an operation")
    assert 3 <= len(kernel) <= 5
    said = " ".join((*kernel, *operation))
    folders = {name.rpartition("/")[0].replace("toy", "<family>") for name in (*KERNEL, *OPERATION)}
    assert all(folder in said for folder in folders)
    assert {"mla_cupy/ops/__init__.py", "mla_cupy/__init__.py"} <= set(LINES)
    assert all(f"`{name}`" in said for name in ("mla_cupy/ops/__init__.py", "mla_cupy/__init__.py"))
