"""Properties of every module: opening, contexts, errors of the driver, several modules in one program."""

from __future__ import annotations

import ctypes
import importlib.util
import random
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from mla_cupy.export import command
from mla_cupy.export.module import Module
from tests.export import draws, modules, package
from tests.export.library import FLAGS, Library, compiled, compiler, filled

H200 = package.device("sm_90a", 132)
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def made() -> Module:
    return modules.decode()


@pytest.fixture(scope="module")
def library(made: Module, tmp_path_factory: pytest.TempPathFactory) -> Library:
    return Library(made, tmp_path_factory.mktemp("export") / "decode")


def test_other_gpus_are_refused(library: Library) -> None:
    handle = ctypes.c_void_p()
    for gpu in (package.device("sm_75", 40), package.device("sm_100a", 148), replace(H200, smem_optin=100 << 10)):
        library.describe(gpu)
        assert library.function("open")(ctypes.byref(handle)) == -6
        major, minor = gpu.cc
        assert f"got compute capability {major}.{minor} with {gpu.sm_count} " in library.why()
        assert "expected one of sm_90a, sm_80;" in library.why()
        assert handle.value is None
        assert library.stub.stub_loaded() == 0


def test_a_module_is_of_the_context_that_it_was_opened_in(library: Library) -> None:
    handle = library.open(H200)
    args = filled(library.Args, draws.values(library.module.subject, random.Random(1), {}))
    library.stub.stub_context(2)
    try:
        assert library.call("call", handle, args) == -4
        assert "context: got another one" in library.why()
        library.stub.stub_context(0)
        assert library.function("open")(ctypes.byref(ctypes.c_void_p())) == -4
        assert "context: got none" in library.why()
    finally:
        library.stub.stub_context(1)
    assert library.log() == b""


def test_errors_of_the_driver(library: Library) -> None:
    handle = library.open(H200)
    args = filled(library.Args, {**draws.values(library.module.subject, random.Random(1), {}), "b": 2})
    library.stub.stub_fail(701)
    try:
        assert library.call("call", handle, args) == 701
        assert "reports CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES (701)" in library.why()
        loaded = library.stub.stub_loaded()
        assert library.function("open")(ctypes.byref(ctypes.c_void_p())) == 701
        assert library.stub.stub_loaded() == loaded
    finally:
        library.stub.stub_fail(0)
    library.log()


def test_closing_unloads(library: Library) -> None:
    before = library.stub.stub_loaded()
    handle = library.open(H200)
    assert library.stub.stub_loaded() == before + sum(kernel.target == 0 for kernel in library.module.kernels)
    library.function("close")(handle)
    assert library.stub.stub_loaded() == before
    library.function("close")(None)


def test_structs_of_another_version_are_refused(library: Library) -> None:
    handle = library.open(H200)
    args = filled(library.Args, draws.values(library.module.subject, random.Random(1), {}))
    for size in (0, args.struct_bytes - 8, args.struct_bytes + 8):
        args.struct_bytes = size
        assert library.call("call", handle, args) == -1
        assert f"struct_bytes: got {size}, expected" in library.why()
    assert library.function("call")(handle, None, None) == -1
    assert library.function("call")(None, ctypes.byref(args), None) == -1
    assert library.log() == b""


def test_defaults(library: Library) -> None:
    """Defaults are the package's, with contiguous arrays."""
    args = library.Args()
    library.function("defaults")(ctypes.byref(args))
    args.b, args.num_pages, args.max_pages = 3, 10, 7
    library.function("contiguous")(ctypes.byref(args))
    assert (args.scale, args.causal, args.cp_world, args.kv_scale) == (0, 1, 1, 1.0)
    assert [*args.kv_cache_strides] == [64 * 576, 576]
    assert [*args.block_table_strides] == [7, 1]
    assert [*args.out_strides] == [16 * 512, 16 * 512, 512]
    assert args.struct_bytes == ctypes.sizeof(args)


def test_modules_link_into_one_program(tmp_path: Path) -> None:
    """Their names with external linkage begin with the prefix."""
    made = modules.merge()
    other = replace(made, prefix="other_")
    sources = []
    for each in (made, other):
        sources += [path for path in command.write(each, tmp_path / each.prefix) if path.suffix == ".c"]
    includes = "".join(f'#include "{each.prefix}/{each.name}.h"\n' for each in (made, other))
    main = tmp_path / "main.c"
    main.write_text(f"{includes}int main(void) {{ return mla_merge_states_why() == other_merge_states_why(); }}\n")
    program = compiled(tmp_path / "program", [main, *sources], f"-I{tmp_path}", "-ldl")
    assert subprocess.run([program], check=False).returncode == 0
    symbols = subprocess.run(["nm", "--defined-only", "-g", program], capture_output=True, text=True, check=True).stdout
    names = {line.split()[-1] for line in symbols.splitlines()}
    assert {name for name in names if "merge" in name} >= {"mla_merge_states_open", "other_merge_states_open"}
    assert not names & {"launch", "refuse", "KERNELS", "open_module"}


def test_the_header_is_cpp(made: Module, tmp_path: Path) -> None:
    """The header is C++17 without warnings, like the examples."""
    command.write(made, tmp_path)
    check = [compiler("g++"), "-std=c++17", *FLAGS, "-fsyntax-only", f"-I{tmp_path}", f"-I{EXAMPLES / 'c'}"]
    subprocess.run([*check, str(EXAMPLES / "cpp" / "decode.cpp")], check=True)


def test_without_a_driver(tmp_path: Path) -> None:
    command.write(modules.merge(), tmp_path)
    main = tmp_path / "main.c"
    main.write_text(
        '#include <stdio.h>\n#include "mla_merge_states.h"\nint main(void) { mla_merge_states_module* m;\n'
        "int status = mla_merge_states_open(&m); puts(mla_merge_states_why());\n"
        "return status == MLA_MERGE_STATES_DEVICE_ERROR; }\n"
    )
    sources = [main, tmp_path / "mla_merge_states.c", tmp_path / "mla_merge_states_images.c"]
    program = compiled(tmp_path / "program", sources, '-DMLA_CUDA_LIBRARY="libnone.so.1"', "-ldl")
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout.startswith("no CUDA driver: libnone.so.1")


def test_declarations_are_those_of_cuda(tmp_path: Path) -> None:
    """With MLA_CUDA_H the compiler compares sizes and numbers with the header's."""
    spec = importlib.util.find_spec("nvidia")
    places = spec.submodule_search_locations if spec else None
    headers = [path.parent for place in places or () for path in sorted(Path(place).glob("*/include/cuda.h"))]
    if not headers:
        pytest.skip("no cuda.h is installed")
    command.write(modules.merge(), tmp_path)
    source = tmp_path / "mla_merge_states.c"
    for headers_of in headers:
        include = ("-isystem", str(headers_of))
        compiled(source.with_suffix(".o"), [source], "-c", "-DMLA_CUDA_H", *include)
    wrong = source.read_text().replace("kAttributeSms = 16,", "kAttributeSms = 17,")
    source.write_text(wrong)
    with pytest.raises(subprocess.CalledProcessError):
        compiled(source.with_suffix(".o"), [source], "-c", "-DMLA_CUDA_H", "-isystem", str(headers[0]))
