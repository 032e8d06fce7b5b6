"""The examples over exported modules on a GPU, with machine code: what other tests run in the simulator."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mla_cupy import cli
from mla_cupy.runtime.device import DeviceInfo
from tests.export import test_tvm_ffi
from tests.export.library import compiled, compiler
from tests.export.test_examples import EXAMPLES, REPOSITORY, WANTED

pytestmark = pytest.mark.gpu
tvm_ffi = test_tvm_ffi.tvm_ffi


@pytest.fixture(scope="module")
def folder(hopper: DeviceInfo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dense decode, exported with everything that can be written beside it."""
    made = tmp_path_factory.mktemp("examples") / "decode"
    assert cli.main(["export", *WANTED, "--arch", "sm_90a", "--rust", "--xla", "--out", str(made)]) == 0
    return made


def passed(*command: str | Path, **environment: str) -> None:
    """Run an example, which compares its results itself."""
    done = subprocess.run(
        [str(word) for word in command],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("all as expected\n")


def test_rust(folder: Path) -> None:
    cargo = [compiler("cargo"), "run", "--offline", "--locked", "-q", "--target-dir", folder / "target"]
    passed(*cargo, "--manifest-path", EXAMPLES / "rust" / "Cargo.toml", MLA_EXPORT=str(folder))


def test_cuda_bindings(folder: Path) -> None:
    passed(sys.executable, EXAMPLES / "cuda_bindings_decode.py", folder / "mla_decode.json")


def test_functions_of_tvm_ffi(tvm_ffi: Any, folder: Path) -> None:
    passed(sys.executable, EXAMPLES / "tvm_ffi" / "decode.py", test_tvm_ffi.built(tvm_ffi, folder))


def test_exported_programs(folder: Path) -> None:
    jax = pytest.importorskip("jax")
    try:
        jax.devices("cuda")
    except RuntimeError:
        pytest.skip("JAX has no CUDA plugin")
    sources = [folder / f"mla_decode{end}.c" for end in ("", "_images", "_xla")]
    options = ("-shared", "-fPIC", "-isystem", jax.ffi.include_dir(), "-ldl", "-lm")
    library, program = compiled(folder / "libmla_decode.so", sources, *options), folder / "program"
    writing = [
        sys.executable,
        str(EXAMPLES / "xla" / "export_program.py"),
        str(folder / "mla_decode.json"),
        str(program),
    ]
    subprocess.run(writing, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, check=True, timeout=120)
    running = EXAMPLES / "xla" / "run_program.py"
    passed(sys.executable, running, library, program, XLA_PYTHON_CLIENT_PREALLOCATE="false")
