"""The examples in C, C++ and Rust, exported, compiled, and run by the simulator with the real kernels: no Python."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mla_cupy import cli, reference
from mla_cupy.export import rust
from mla_cupy.export.manifest import SCHEMA, Manifest
from tests.export.library import FLAGS, compiled, compiler, simulated

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "examples"
BATCH = (EXAMPLES / "c" / "batch.h").read_text()
BATCH_OF_RUST = (EXAMPLES / "rust" / "src" / "batch.rs").read_text()
WANTED = ("--op", "decode", "--h-q", "16", "--page-size", "64")
COMMAND = ("export", *WANTED, "--arch", "sm_90a", "--ptx", "--rust", "--out")
_IMAGE_BYTES = 2_000_000
"""The goal for the kernels of one model's decode."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dense decode, exported by the command line, as PTX."""
    made = tmp_path_factory.mktemp("examples") / "decode"
    assert cli.main([*COMMAND, str(made)]) == 0
    return made


def test_c(folder: Path) -> None:
    sources = [EXAMPLES / "c" / "decode.c", folder / "mla_decode.c", folder / "mla_decode_images.c"]
    printed = simulated(compiled(folder / "example", sources, f"-I{folder}", "-ldl", "-lm"))
    assert "refused: kv_cache: got NULL, expected an address" in printed
    assert printed.endswith("all as expected\n")


def test_cpp(folder: Path) -> None:
    """The C++ example runs with a plan."""
    objects = [folder / "mla_decode.o", folder / "mla_decode_images.o"]
    for each in objects:
        compiled(each, [each.with_suffix(".c")], "-c")
    command = [compiler("g++"), "-std=c++17", *FLAGS, f"-I{folder}", f"-I{EXAMPLES / 'c'}"]
    program = folder / "example_cpp"
    command += [str(EXAMPLES / "cpp" / "decode.cpp"), *map(str, objects), "-ldl", "-o", str(program)]
    subprocess.run(command, check=True)
    assert simulated(program).endswith("all as expected\n")


def test_rust(folder: Path) -> None:
    """Built by cargo without a warning and without a network; the linker puts the C sources in."""
    cargo = [compiler("cargo"), "build", "--offline", "--locked", "-q", "--target-dir", str(folder / "target")]
    environment = {**os.environ, "MLA_EXPORT": str(folder)}
    done = subprocess.run(
        [*cargo, "--manifest-path", str(EXAMPLES / "rust" / "Cargo.toml")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    printed = simulated(folder / "target" / "debug" / "mla-decode-example")
    assert "refused: kv_cache: got NULL, expected an address" in printed
    assert printed.endswith("all as expected\n")


def built_with_cudarc(folder: Path) -> Path:
    """The program with cudarc's types, built where cargo has that crate; copied, since cargo writes a lock file."""
    sources, target = folder / "rust", folder / "cudarc"
    shutil.copytree(EXAMPLES / "rust", sources, ignore=shutil.ignore_patterns("target"), dirs_exist_ok=True)
    build = [compiler("cargo"), "build", "--offline", "-q", "--target-dir", str(target)]
    done = subprocess.run(
        [*build, "--manifest-path", str(sources / "with_cudarc" / "Cargo.toml")],
        env={**os.environ, "MLA_EXPORT": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    if "no matching package named `cudarc`" in done.stderr:
        pytest.skip("cargo has not downloaded cudarc")
    assert (done.returncode, done.stderr) == (0, "")
    return target / "debug" / "mla-decode-with-cudarc"


def test_rust_with_cudarc_is_built(folder: Path) -> None:
    """It is not run: the simulator's driver lacks functions that cudarc wants."""
    assert built_with_cudarc(folder).is_file()


def test_bindings_for_rust(folder: Path) -> None:
    """A C compiler finds every member where they have it, and they have all functions of the header but the version."""
    told = json.loads((folder / "mla_decode.json").read_text())
    lines = ['#include "mla_decode.h"']
    for struct, (offsets, size) in rust.layouts(told).items():
        kind = f"mla_decode_{struct}"
        lines.append(f'_Static_assert(sizeof({kind}) == {size}, "size");')
        lines += [f'_Static_assert(offsetof({kind}, {name}) == {at}, "{name}");' for name, at in offsets.items()]
    assert len(lines) > 30
    (folder / "check.h").write_text("\n".join(lines))
    subprocess.run([compiler(), "-std=c11", "-fsyntax-only", str(folder / "check.h")], check=True)
    declared = set(re.findall(r"\bmla_decode_(\w+)\(", (folder / "mla_decode.h").read_text()))
    text = (folder / "mla_decode.rs").read_text()
    linked = re.findall(r'link_name = "mla_decode_(\w+)"\]\n        pub fn (\w+)\(', text)
    assert {name for name, _ in linked} == declared - {"version"}
    assert all(name == own for name, own in linked)


def test_cuda_bindings(folder: Path) -> None:
    """The manifest is enough: neither this package nor CuPy is imported."""
    pytest.importorskip("cuda.bindings.driver")
    example = EXAMPLES / "cuda_bindings_decode.py"
    code = (
        f"import runpy, sys; sys.argv[1:] = ['{folder / 'mla_decode.json'}']; "
        f"runpy.run_path('{example}', run_name='__main__'); assert not {{'mla_cupy', 'cupy'}} & set(sys.modules)"
    )
    printed = simulated(sys.executable, "-c", code)
    assert "refused: kv_cache: got NULL, expected an address" in printed
    assert printed.endswith("all as expected\n")


def test_cuda_core(folder: Path) -> None:
    pytest.importorskip("cuda.bindings.driver")
    pytest.importorskip("cuda.core")
    printed = simulated(sys.executable, EXAMPLES / "cuda_core_decode.py", folder / "mla_decode.json")
    assert printed.endswith("all as expected\n")


def test_cuda_core_takes_no_structs() -> None:
    """The example launches with cuda-bindings for this reason. If this test fails, cuda.core supports structs: say so
    in the guide, and use it.
    """
    pytest.importorskip("cuda.bindings.driver")
    handler = pytest.importorskip("cuda.core._kernel_arg_handler")
    record = np.zeros((), [("address", np.uint64), ("count", np.int32)])[()]
    struct = type("Struct", (ctypes.Structure,), {"_fields_": [("address", ctypes.c_uint64)]})()
    handler.ParamHolder((np.int32(1), 2.0))
    for given in (record, struct):
        with pytest.raises(TypeError, match="unsupported type"):
            handler.ParamHolder((given,))


def test_the_manifest_is_read(folder: Path) -> None:
    """The files are those that it names, and the images are small."""
    found = Manifest.read(folder / "mla_decode.json")
    assert (found.data["schema"], found.data["operation"]) == (SCHEMA, "mla_decode")
    images = (folder / "mla_decode_images.c").read_text()
    for kernel in found.data["kernels"]:
        assert f"{kernel['image']}[" in images
    assert sum(kernel["bytes"] for kernel in found.data["kernels"]) < _IMAGE_BYTES


def elements(shape: tuple[int, ...], first: int) -> Any:
    """The numbers of `batch.h`."""
    positions = np.arange(np.prod(shape), dtype=np.uint64) + np.uint64(first)
    mixed = (positions * np.uint64(2654435761)) & np.uint64(0xFFFFFFFF)
    return (((mixed >> np.uint64(16)) % np.uint64(17)).astype(np.float64) - 8).reshape(shape) / 8


def test_the_expected_numbers_are_the_oracles() -> None:
    q, cache = elements((2, 1, 16, 576), 0), elements((4, 64, 576), 1 << 20)
    table, seqlens = np.array([[3, 0], [2, 0]], np.int32), np.array([70, 5], np.int32)
    out, lse = reference.mla_decode(q, cache, table, seqlens, scale=192**-0.5)
    rows = re.findall(r"\{(\d+), (\d+), (\d+), (-?[\d.]+)f\}", BATCH)
    assert len(rows) == 6
    for i, h, column, number in rows:
        assert float(number) == pytest.approx(float(out[int(i), 0, int(h), int(column)]), abs=1e-6)
    rows = re.findall(r"\{(\d+), (\d+), (-?[\d.]+)f\}", BATCH)
    assert len(rows) == 3
    for i, h, number in rows:
        assert float(number) == pytest.approx(float(lse[int(i), int(h), 0]), abs=1e-6)


def test_rust_expects_the_same_numbers() -> None:
    for pattern in (r"(\d+), (\d+), (\d+), (-?[\d.]+)", r"(\d+), (\d+), (-?\d+\.\d+)"):
        assert re.findall(rf"\({pattern}\)", BATCH_OF_RUST) == re.findall(rf"\{{{pattern}f\}}", BATCH)
