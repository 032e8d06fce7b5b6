"""The examples over exported modules on a GPU, with machine code: what other tests run in the simulator.

Each compares its results itself, and prints a checksum of them, equal to the checksum of the package's results.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mla_cupy
from mla_cupy import cli
from mla_cupy.runtime.device import DeviceInfo
from tests.export import test_tvm_ffi
from tests.export.library import FLAGS, compiled, compiler
from tests.export.test_examples import EXAMPLES, REPOSITORY, WANTED, built_with_cudarc, elements
from tests.support.gpu import fetch, upload

pytestmark = pytest.mark.gpu
tvm_ffi = test_tvm_ffi.tvm_ffi
RUNS = 4
CAPTURING = "--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL --xla_gpu_graph_min_graph_size=1"
"""Flags of XLA: what may be captured, and that a graph may be as small as this program."""


@pytest.fixture(scope="module")
def folder(hopper: DeviceInfo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dense decode, exported with everything that can be written beside it."""
    made = tmp_path_factory.mktemp("examples") / "decode"
    assert cli.main(["export", *WANTED, "--arch", "sm_90a", "--rust", "--xla", "--out", str(made)]) == 0
    return made


class Batch:
    """A batch of the examples, and the checksum of what the package makes of it."""

    def __init__(self, q: Any, cache: Any) -> None:
        self._arrays = [upload(x.astype(ml_dtypes.bfloat16)) for x in (q, cache)]
        self._arrays += [upload(np.array(x, np.int32)) for x in ([[3, 0], [2, 0]], [70, 5])]

    def checksum(self, plan: Any = None) -> str:
        """CRC-32 of out and lse."""
        found = mla_cupy.mla_decode(*self._arrays, scale=192**-0.5, plan=plan)
        out, lse = (fetch(x).tobytes() for x in found)
        return f"{zlib.crc32(lse, zlib.crc32(out)):08x}"

    def planned(self) -> str:
        """The example with a plan for twice as many sequences."""
        plan = mla_cupy.plan_decode(max_b=4, s_q=1, h_q=16, max_pages=2, page_size=64, dtype="bfloat16")
        plan.update(self._arrays[-1])
        return self.checksum(plan)


@pytest.fixture(scope="module")
def of_c(hopper: DeviceInfo) -> Batch:
    """The batch of `batch.h` and `batch.rs`."""
    return Batch(elements((2, 1, 16, 576), 0), elements((4, 64, 576), 1 << 20))


@pytest.fixture(scope="module")
def of_python(hopper: DeviceInfo) -> Batch:
    """The batch of the examples in Python."""
    rng = np.random.default_rng(0)
    return Batch(*(rng.integers(-8, 9, shape) / 8 for shape in ((2, 1, 16, 576), (4, 64, 576))))


def run(*command: str | Path, **environment: str) -> tuple[str, str]:
    """The checksum that an example prints, and what it writes to stderr."""
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
    told = re.search("CRC-32 of out and lse: ([0-9a-f]{8})\n", done.stdout)
    assert told is not None
    return told[1], done.stderr


def test_c(folder: Path, of_c: Batch) -> None:
    sources = [EXAMPLES / "c" / "decode.c", folder / "mla_decode.c", folder / "mla_decode_images.c"]
    program = compiled(folder / "example", sources, f"-I{folder}", "-ldl", "-lm")
    assert run(program)[0] == of_c.checksum()


def test_cpp(folder: Path, of_c: Batch) -> None:
    """The C++ example runs with a plan."""
    objects = [folder / "of_cpp.o", folder / "of_cpp_images.o"]
    for each, source in zip(objects, ("mla_decode.c", "mla_decode_images.c"), strict=True):
        compiled(each, [folder / source], "-c")
    command = [compiler("g++"), "-std=c++17", *FLAGS, f"-I{folder}", f"-I{EXAMPLES / 'c'}"]
    program = folder / "example_cpp"
    command += [str(EXAMPLES / "cpp" / "decode.cpp"), *map(str, objects), "-ldl", "-o", str(program)]
    subprocess.run(command, check=True)
    assert run(program)[0] == of_c.planned()


def test_rust(folder: Path, of_c: Batch) -> None:
    """Built here by cargo, or elsewhere: MLA_RUST_EXAMPLE is the program then."""
    built = os.environ.get("MLA_RUST_EXAMPLE")
    if built is not None:
        assert run(built)[0] == of_c.checksum()
        return
    cargo = [compiler("cargo"), "run", "--offline", "--locked", "-q", "--target-dir", str(folder / "target")]
    found, _ = run(*cargo, "--manifest-path", EXAMPLES / "rust" / "Cargo.toml", MLA_EXPORT=str(folder))
    assert found == of_c.checksum()


def test_rust_with_cudarc(folder: Path, of_c: Batch) -> None:
    """Likewise: MLA_CUDARC_EXAMPLE is a program that was built elsewhere."""
    program = os.environ.get("MLA_CUDARC_EXAMPLE") or built_with_cudarc(folder)
    assert run(program)[0] == of_c.checksum()


def test_cuda_bindings(folder: Path, of_python: Batch) -> None:
    pytest.importorskip("cuda.bindings.driver")
    found, _ = run(sys.executable, EXAMPLES / "cuda_bindings_decode.py", folder / "mla_decode.json")
    assert found == of_python.checksum()


@pytest.mark.parametrize("options", [(), ("--graph",)], ids=["", "graph"])
def test_cuda_core(folder: Path, of_python: Batch, options: tuple[str, ...]) -> None:
    pytest.importorskip("cuda.core")
    example = EXAMPLES / "cuda_core_decode.py"
    found, _ = run(sys.executable, example, folder / "mla_decode.json", *options)
    assert found == of_python.checksum()


def test_functions_of_tvm_ffi(tvm_ffi: Any, folder: Path, of_python: Batch) -> None:
    found, _ = run(sys.executable, EXAMPLES / "tvm_ffi" / "decode.py", test_tvm_ffi.built(tvm_ffi, folder))
    assert found == of_python.checksum()


@pytest.fixture(scope="module")
def jax(hopper: DeviceInfo) -> Any:
    found = pytest.importorskip("jax")
    asked = "import jax; jax.devices('cuda')"  # in another process, which gives the GPU's memory back
    if subprocess.run([sys.executable, "-c", asked], capture_output=True, timeout=120, check=False).returncode != 0:
        pytest.skip("JAX has no CUDA plugin")
    return found


def handler(jax: Any, folder: Path, name: str, *options: str) -> Path:
    """The module and its handler as a library."""
    sources = [folder / f"mla_decode{end}.c" for end in ("", "_images", "_xla")]
    shared = ("-shared", "-fPIC", "-isystem", jax.ffi.include_dir(), "-ldl", "-lm")
    return compiled(folder / name, sources, *options, *shared)


@pytest.fixture(scope="module")
def program(jax: Any, folder: Path) -> Path:
    """An exported program, which calls the module by its name."""
    made = folder / "program"
    writing = [sys.executable, str(EXAMPLES / "xla" / "export_program.py"), str(folder / "mla_decode.json"), str(made)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"}
    subprocess.run(writing, env=environment, check=True, timeout=120)
    return made


def run_program(library: Path, program: Path, flags: str) -> tuple[str, str]:
    """Run a program a few times in a process without this package, which the example sees to."""
    given = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_FLAGS": flags}
    return run(sys.executable, EXAMPLES / "xla" / "run_program.py", library, program, "--runs", str(RUNS), **given)


def test_exported_programs(jax: Any, folder: Path, program: Path, of_python: Batch) -> None:
    found, _ = run_program(handler(jax, folder, "libmla_decode.so"), program, "--xla_gpu_enable_command_buffer=")
    assert found == of_python.checksum()


def test_exported_programs_in_command_buffers(jax: Any, folder: Path, program: Path, of_python: Batch) -> None:
    """XLA captures the calls in CUDA graphs, as a library tells that stands between the module and the driver."""
    ctypes.CDLL("libcuda.so.1")
    (driver,) = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcuda.so" in line}
    source = Path(__file__).with_name("capturing.c")
    between = compiled(folder / "capturing.so", [source], "-shared", "-fPIC", "-Wl,--no-as-needed", driver)
    library = handler(jax, folder, "libcaptured.so", f'-DMLA_CUDA_LIBRARY="{between}"')
    found, told = run_program(library, program, CAPTURING)
    assert found == of_python.checksum()
    launches, captured = map(int, re.findall(r"(\d+) launches, (\d+) of them captured", told)[-1])
    assert launches >= captured > 0


def test_divided_over_gpus(jax: Any, folder: Path) -> None:
    """Each GPU calls the module for its heads, or for its heads and sequences; nobody gathers the cache."""
    asked = "import jax; print(len(jax.devices('cuda')))"  # as above
    found = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, timeout=120, check=True)
    if int(found.stdout) < 2:
        pytest.skip("needs two GPUs")
    command = [sys.executable, "-m", "tests.export.sharded_program", str(folder / "mla_decode.json")]
    command += [str(handler(jax, folder, "libdivided.so")), "CUDA"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("all as expected\n")
