"""The example of TVM-FFI: in the simulator, and beside a driver that writes down what the package would launch."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mla_cupy import cli
from tests.export import modules, package
from tests.export.library import Library, compiled, compiler, simulated
from tests.export.package import Call
from tests.export.test_examples import COMMAND, EXAMPLES

SHAPES = {"q": (3, 1, 16, 576), "kv_cache": (5, 64, 576), "block_table": (3, 4), "seqlens": (3,)}
SHAPES |= {"out": (3, 1, 16, 512), "lse": (3, 16, 1)}
GPU = package.device("sm_90a", 132)


@pytest.fixture(scope="module")
def tvm_ffi() -> Any:
    """TVM-FFI, which is not to build anything of its own for PyTorch."""
    os.environ["TVM_FFI_DISABLE_TORCH_C_DLPACK"] = "1"
    return pytest.importorskip("tvm_ffi")


def built(tvm_ffi: Any, folder: Path, *options: str) -> Path:
    """The functions of decode.cc with a module that has been exported to a folder, by the commands in decode.cc."""
    objects = [folder / "mla_decode.o", folder / "mla_decode_images.o"]
    for each in objects:
        compiled(each, [each.with_suffix(".c")], "-c", "-fPIC", *options)
    libinfo = importlib.import_module("tvm_ffi.libinfo")
    headers = {libinfo.find_include_path(), libinfo.find_dlpack_include_path()}
    command = [compiler("g++"), "-std=c++17", "-Wall", "-Werror", "-fPIC", "-shared", f"-I{folder}"]
    command += [word for header in headers for word in ("-isystem", header)]
    command += [str(EXAMPLES / "tvm_ffi" / "decode.cc"), *map(str, objects)]
    library = Path(libinfo.find_libtvm_ffi())
    command += [f"-L{library.parent}", "-ltvm_ffi", "-ldl", "-lm", "-o", str(folder / "libdecode.so")]
    subprocess.run(command, check=True)
    return folder / "libdecode.so"


@functools.cache
def example() -> Any:
    """The example's script, kept as long as tensors may hold its arrays."""
    spec = importlib.util.spec_from_file_location("example_of_tvm_ffi", EXAMPLES / "tvm_ffi" / "decode.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_example(tvm_ffi: Any, tmp_path: Path) -> None:
    assert cli.main([*COMMAND, str(tmp_path)]) == 0
    library = built(tvm_ffi, tmp_path)
    printed = simulated(sys.executable, EXAMPLES / "tvm_ffi" / "decode.py", library)
    assert "refused: seqlens.ndim: got 2, expected 1" in printed
    assert printed.endswith("all as expected\n")


def test_launches_are_the_packages(tvm_ffi: Any, tmp_path: Path) -> None:
    """Launches use TVM-FFI's current stream, and the strides of the tensors."""
    beside = Library(modules.decode(), tmp_path / "module")
    beside.describe(GPU)
    module = tvm_ffi.load_module(str(built(tvm_ffi, tmp_path / "module", f'-DMLA_CUDA_LIBRARY="{beside.stub._name}"')))
    gpu_array = example().GpuArray
    addresses = iter(range(1 << 20, 1 << 40, 1 << 24))

    def call(name: str, *arguments: Any) -> None:
        if name.startswith("cuMemAlloc"):
            arguments[0]._obj.value = next(addresses)

    driver, kinds = SimpleNamespace(call=call), {"q": np.uint16, "kv_cache": np.uint16, "out": np.uint16}
    values: dict[str, Any] = {"b": 3, "num_pages": 5, "max_pages": 4, "scale": 0.25, "causal": 1}
    values |= {"cp_world": 1, "cp_rank": 0, "kv_scale": 1.0, "empty_lse": -np.inf}
    arrays = {}
    for name, shape in SHAPES.items():
        dtype = kinds.get(name, np.float32 if name == "lse" else np.int32)
        padded = np.zeros((*shape[:-2], shape[-2] + 2, shape[-1]) if len(shape) > 1 else shape, dtype)
        x = padded[..., : shape[-2], :] if len(shape) > 1 else padded
        arrays[name] = gpu_array(driver, x, "bfloat16" if name in kinds else "")
        values[name] = arrays[name]._address.value
        values |= {f"{name}_strides[{i}]": step // x.itemsize for i, step in enumerate(x.strides)}
    tensors = {name: tvm_ffi.from_dlpack(x) for name, x in arrays.items()}
    needed = module.workspace_bytes(*tensors.values())
    workspace = gpu_array(driver, np.zeros(needed, np.uint8))
    values |= {"workspace": workspace._address.value, "workspace_bytes": needed}
    with tvm_ffi.use_raw_stream(tensors["q"].device, package.STREAM):
        module.decode(*tensors.values(), tvm_ffi.from_dlpack(workspace), 0.25, True)
    with package.writing(beside.parameters) as writer:
        given = Call(beside.module.subject, values)
        assert needed == given.nbytes(GPU)
        given.run(GPU)
        assert beside.log() == writer.take() != b""
    with pytest.raises(ValueError, match=r"workspace.shape\[0\]: got 8, expected at least"):
        module.decode(*tensors.values(), tvm_ffi.from_dlpack(gpu_array(driver, np.zeros(8, np.uint8))), 0.25, True)
    assert beside.log() == b""
