"""The C side of a comparison: exported modules, compiled with the stub driver and called through ctypes."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from mla_cupy.export import command
from mla_cupy.export.module import Module
from mla_cupy.export.subject import PLAN_ARGUMENTS, Argument, Subject
from mla_cupy.runtime.device import DeviceInfo
from tests.export import package

REPOSITORY = Path(__file__).resolve().parents[2]
STUB = Path(__file__).with_name("stub.c")
FLAGS = ("-Wall", "-Wextra", "-Werror", "-pedantic")
_LOG_BYTES = 1 << 20
_C_TYPES = {"size": ctypes.c_int64, "integer": ctypes.c_int32, "real": ctypes.c_double, "plan": ctypes.c_int64}


def compiler(name: str = "gcc") -> str:
    """The path of a compiler; a test that wants one skips without it."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name}")
    return found


def compiled(output: Path, sources: Sequence[Path], *options: str) -> Path:
    """Compile C sources, in C11 and without a warning; an error of the compiler is one of the test."""
    command = [compiler(), "-std=c11", *FLAGS, *map(str, sources), *options, "-o", str(output)]
    subprocess.run(command, check=True)
    return output


def simulated(*program: str | Path) -> str:
    """Output of a program with its CUDA calls sent to the simulator, which must find nothing wrong."""
    command = [sys.executable, "-m", "ptxsim", "run-host", "--sms", "2", *map(str, program)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "ptxsim"), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing found" in done.stderr
    return done.stdout


@functools.cache
def stub(folder: Path) -> Path:
    """The stub driver."""
    return compiled(folder / "libcuda-stub.so", [STUB], "-shared", "-fPIC", "-O1", "-fvisibility=hidden")


class Library:
    """A module, compiled and loaded beside a stub driver.

    Attributes
    ----------
    module : Module
    stub : ctypes.CDLL
    """

    def __init__(self, module: Module, folder: Path, *options: str) -> None:
        self.module = module
        command.write(module, folder)
        driver = stub(folder.parent)
        self.stub = ctypes.CDLL(str(driver))
        self.stub.stub_log.restype = ctypes.c_size_t
        sources = [folder / f"{module.name}.c", folder / f"{module.name}_images.c"]
        define = f'-DMLA_CUDA_LIBRARY="{driver}"'
        path = compiled(folder / f"{module.name}.so", sources, "-shared", "-fPIC", "-O1", define, *options)
        self._library = ctypes.CDLL(str(path))
        self.parameters = package.parameters(module)
        for entry, sizes in self.parameters.items():
            self.stub.stub_entry(entry.encode(), len(sizes), (ctypes.c_int * len(sizes))(*sizes))
        self._log = ctypes.create_string_buffer(_LOG_BYTES)
        self.Args = struct_of([*module.subject.arguments()])
        self.Plan = struct_of(list(PLAN_ARGUMENTS[:-1]), last=PLAN_ARGUMENTS[-1])
        self.Lengths = _lengths()

    def function(self, name: str) -> Any:
        """A function of the module, by its name without the prefix."""
        found = getattr(self._library, f"{self.module.name}_{name}")
        if name in ("why", "version"):
            found.restype = ctypes.c_char_p
        return found

    def open(self, gpu: DeviceInfo) -> ctypes.c_void_p:
        """Open the module on a GPU."""
        self.describe(gpu)
        handle = ctypes.c_void_p()
        status = self.function("open")(ctypes.byref(handle))
        assert status == 0, self.why()
        return handle

    def describe(self, gpu: DeviceInfo) -> None:
        """Make the stub pass for a GPU."""
        shape = (*gpu.cc, gpu.sm_count, gpu.smem_optin, gpu.l2_bytes)
        self.stub.stub_device(*shape, ctypes.c_size_t(gpu.total_memory))

    def call(self, name: str, handle: ctypes.c_void_p, *structs: Any, stream: int | None = package.STREAM) -> int:
        """Call a function with structs, and a stream where it takes one."""
        more = [] if stream is None else [ctypes.c_void_p(stream)]
        return int(self.function(name)(handle, *(ctypes.byref(struct) for struct in structs), *more))

    def size(self, name: str, handle: ctypes.c_void_p, struct: Any) -> int:
        """The bytes of workspace that a function tells; -1 if it refuses."""
        nbytes = ctypes.c_size_t()
        status = self.function(name)(handle, ctypes.byref(struct), ctypes.byref(nbytes))
        return -1 if status else nbytes.value

    def why(self) -> str:
        """Reason of the last refusal."""
        return str(self.function("why")().decode())

    def log(self) -> bytes:
        """Launches since the last call of `log`."""
        length = self.stub.stub_log(self._log, _LOG_BYTES)
        return self._log.raw[:length]


class RealLibrary:
    """A module that the command line has written, with the GPU's own driver."""

    def __init__(self, folder: Path, subject: Subject) -> None:
        sources = sorted(folder.glob("*.c"))
        path = compiled(folder / "module.so", sources, "-shared", "-fPIC", "-O2", "-ldl")
        self._library = ctypes.CDLL(str(path))
        self._name = sources[0].stem
        self.Args = struct_of([*subject.arguments()])
        self.Plan = struct_of(list(PLAN_ARGUMENTS[:-1]), last=PLAN_ARGUMENTS[-1])
        self.Lengths = _lengths()

    def function(self, name: str) -> Any:
        """A function of the module, by its name without the prefix."""
        found = getattr(self._library, f"{self._name}_{name}")
        if name == "why":
            found.restype = ctypes.c_char_p
        return found

    def open(self) -> ctypes.c_void_p:
        """Open the module in the current context."""
        handle = ctypes.c_void_p()
        assert self.function("open")(ctypes.byref(handle)) == 0, self.why()
        return handle

    def call(self, name: str, handle: ctypes.c_void_p, *arguments: Any) -> int:
        """Call a function with structs, and a stream last where it takes one."""
        given = [ctypes.c_void_p(x) if isinstance(x, int) else ctypes.byref(x) for x in arguments]
        return int(self.function(name)(handle, *given))

    def why(self) -> str:
        """Reason of the last refusal."""
        return str(self.function("why")().decode())


def struct_of(arguments: Sequence[Argument], last: Argument | None = None) -> type[ctypes.Structure]:
    """A struct of the interface: its own size, the arguments, the workspace."""
    fields: list[tuple[str, Any]] = [("struct_bytes", ctypes.c_size_t)]
    for argument in arguments:
        name, _, index = argument.name.removeprefix("plan.").partition("[")
        if argument.kind == "address":
            fields.append((name, ctypes.c_uint64))
        elif argument.kind == "stride":
            fields = [field for field in fields if field[0] != name]
            fields.append((name, ctypes.c_int64 * (int(index.rstrip("]")) + 1)))
        else:
            fields.append((name, _C_TYPES[argument.kind]))
    fields += [("workspace", ctypes.c_uint64), ("workspace_bytes", ctypes.c_uint64)]
    fields += [] if last is None else [(last.name.removeprefix("plan."), _C_TYPES[last.kind])]
    return type("Struct", (ctypes.Structure,), {"_fields_": fields})


def _lengths() -> type[ctypes.Structure]:
    fields = [("struct_bytes", ctypes.c_size_t), ("b", ctypes.c_int64), ("seqlens", ctypes.c_uint64)]
    return type("Lengths", (ctypes.Structure,), {"_fields_": [*fields, ("seqlens_strides", ctypes.c_int64 * 1)]})


def filled(kind: type[ctypes.Structure], values: Mapping[str, Any]) -> Any:
    """A struct with the values of a call, by the names of the arguments."""
    struct: Any = kind()
    struct.struct_bytes = ctypes.sizeof(kind)
    for field, *_ in kind._fields_:  # type: ignore[misc]
        if field in values:
            setattr(struct, field, values[field])
        for axis in range(len(getattr(struct, field)) if isinstance(getattr(struct, field), ctypes.Array) else 0):
            getattr(struct, field)[axis] = values[f"{field}[{axis}]"]
    return struct
