"""The handler: layouts, what it answers XLA, exported programs."""

from __future__ import annotations

import ctypes
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.bindings.cases import decode, forward
from tests.support.calls import assert_same
from tests.support.flat import flat

REPOSITORY = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.usefixtures("_numpy_backend")


@pytest.fixture(scope="session")
def abi(jax: Any) -> Any:
    return importlib.import_module("mla_cupy.jax.abi")


@pytest.fixture(scope="session")
def ffi(jax: Any) -> Any:
    return importlib.import_module("mla_cupy.jax.ffi")


#: Our structure -> XLA's, and our members -> XLA's.
LAYOUTS = {
    "Version": ("XLA_FFI_Api_Version", {"major": "major_version", "minor": "minor_version"}),
    "Metadata": ("XLA_FFI_Metadata", {"api_version": "api_version", "traits": "traits"}),
    "MetadataExtension": ("XLA_FFI_Metadata_Extension", {"metadata": "metadata"}),
    "Buffer": ("XLA_FFI_Buffer", {"dtype": "dtype", "data": "data", "rank": "rank", "dims": "dims"}),
    "Buffers": ("XLA_FFI_Args", {"size": "size", "types": "types", "items": "args"}),
    "ByteSpan": ("XLA_FFI_ByteSpan", {"ptr": "ptr", "len": "len"}),
    "Attributes": ("XLA_FFI_Attrs", {"size": "size", "types": "types", "names": "names", "values": "attrs"}),
    "Api": (
        "XLA_FFI_Api",
        {
            "version": "api_version",
            **{name: f"XLA_FFI_{name}" for name in ("Error_Create", "Stream_Get", "DeviceOrdinal_Get")},
        },
    ),
    "CallFrame": (
        "XLA_FFI_CallFrame",
        {
            **{name: name for name in ("api", "stage", "args")},
            "extension": "extension_start",
            "context": "ctx",
            "results": "rets",
            "attributes": "attrs",
        },
    ),
    "ErrorCreateArgs": ("XLA_FFI_Error_Create_Args", {"message": "message", "code": "errc"}),
    "StreamGetArgs": ("XLA_FFI_Stream_Get_Args", {"context": "ctx", "stream": "stream"}),
    "DeviceOrdinalGetArgs": ("XLA_FFI_DeviceOrdinal_Get_Args", {"context": "ctx", "ordinal": "device_ordinal"}),
}
CONSTANTS = {
    "COMMAND_BUFFER_COMPATIBLE": "XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE",
    "INSTANTIATE": "XLA_FFI_ExecutionStage_INSTANTIATE",
    "EXECUTE": "XLA_FFI_ExecutionStage_EXECUTE",
    "STRING": "XLA_FFI_AttrType_STRING",
    "INTERNAL": "XLA_FFI_Error_Code_INTERNAL",
}


def test_layouts_are_those_of_the_header(abi: Any, tmp_path: Path) -> None:
    """A C compiler says where the members are; in older interfaces some are missing."""
    compiler = shutil.which("cc")
    headers = Path(importlib.import_module("jaxlib").__file__).parent / "include"
    header = headers / "xla" / "ffi" / "api" / "c_api.h"
    if compiler is None or not header.is_file():
        pytest.skip("needs a C compiler, and the header in jaxlib")
    text = header.read_text()
    lines, wanted = [], []
    known = {name: layout for name, layout in LAYOUTS.items() if layout[0] in text}
    for name, (struct, members) in known.items():
        for ours, theirs in members.items():
            if theirs.startswith("XLA_FFI_") and f"({theirs})" not in text:
                continue
            lines.append(f'printf("%zu\\n", offsetof({struct}, {theirs}));')
            wanted.append((f"{name}.{ours}", getattr(getattr(abi, name), ours).offset))
    for ours, theirs in CONSTANTS.items():
        lines.append(f'printf("%zu\\n", (size_t){theirs});')
        wanted.append((ours, getattr(abi, ours)))
    for ours in {"ErrorCreateArgs", "StreamGetArgs", "DeviceOrdinalGetArgs"} & set(known):
        lines.append(f'printf("%zu\\n", sizeof({LAYOUTS[ours][0]}));')
        wanted.append((f"sizeof {ours}", ctypes.sizeof(getattr(abi, ours))))
    source = tmp_path / "layout.c"
    includes = "#include <stddef.h>\n#include <stdio.h>\n#include <xla/ffi/api/c_api.h>\n"
    source.write_text(f"{includes}int main(void) {{\n{chr(10).join(lines)}\nreturn 0;\n}}\n")
    program = tmp_path / "layout"
    subprocess.run([compiler, "-I", str(headers), "-o", str(program), str(source)], check=True, timeout=120)
    printed = subprocess.run([str(program)], check=True, capture_output=True, text=True, timeout=60).stdout
    assert [(name, int(x)) for (name, _), x in zip(wanted, printed.split(), strict=True)] == wanted


class Asked:
    """A handler's answer to XLA's question about it."""

    def __init__(self, abi: Any, ffi: Any, major: int | None, minor: int) -> None:
        self.messages: list[bytes] = []

        def create(address: int) -> int:
            self.messages.append(abi.ErrorCreateArgs.from_address(address).message)
            return 1

        self._create = abi.Function(create)
        self.metadata = abi.Metadata()
        extension = abi.MetadataExtension(type=1, metadata=ctypes.pointer(self.metadata))
        frame = abi.CallFrame(extension=ctypes.pointer(extension))
        if major is None:
            self.error = ffi._handle(False, ctypes.addressof(frame))
            return
        api = abi.Api(Error_Create=ctypes.cast(self._create, ctypes.c_void_p))
        api.version.major, api.version.minor = major, minor
        frame.api = ctypes.pointer(api)
        self.error = ffi._handle(False, ctypes.addressof(frame))


@pytest.mark.parametrize(("offered", "answered"), [(None, 1), (1, 1), (3, 3), (5, 5), (99, 5)])
def test_it_answers_with_the_version_that_it_knows(abi: Any, ffi: Any, offered: int | None, answered: int) -> None:
    """The oldest interfaces do not say theirs."""
    asked = Asked(abi, ffi, None if offered is None else 0, offered or 0)
    assert asked.error is None
    version = asked.metadata.api_version
    assert (version.major, version.minor, asked.metadata.traits) == (0, answered, 1)


def test_it_refuses_an_interface_that_it_does_not_know(abi: Any, ffi: Any) -> None:
    asked = Asked(abi, ffi, 1, 0)
    assert asked.error == 1
    assert asked.messages == [b"UnsupportedDeviceError: XLA's foreign function interface 1.0 is not known"]


def test_a_call_that_makes_no_sense_is_an_error(jax: Any, ffi: Any) -> None:
    """Nothing that a program can hold crashes the process."""
    ffi.register()
    good = np.zeros((2, 1, 1, 1, 8), np.float32), np.zeros((2, 1, 1, 1), np.float32)
    types = [jax.ShapeDtypeStruct((1, 1, 1, 8), np.float32), jax.ShapeDtypeStruct((1, 1, 1), np.float32)]
    other = '["merge_states", [[[2, 1, 1, 1, 4], "float32"], [[2, 1, 1, 1], "float32"], null, null], ["e", 0.0, null]]'
    for attributes, text in (
        ({"call": "no JSON"}, "JSONDecodeError"),
        ({"call": '["no_such_operation", [], []]'}, "KeyError: 'no_such_operation'"),
        ({"call": other}, "the buffers have other shapes"),
        ({"call": np.int64(3)}, "1 attributes instead of one string"),
        ({}, "0 attributes instead of one string"),
    ):
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=text):
            jax.block_until_ready(jax.jit(lambda *x: jax.ffi.ffi_call(ffi.TARGET, types)(*x, **attributes))(*good))  # noqa: B023


RUN = """
import sys
import jax, numpy as np
from jax import export
from mla_cupy.jax import ffi

ffi.register()
stored = np.load(sys.argv[1])
program = export.deserialize(bytearray(stored["program"].tobytes()))
arrays = [stored[f"x{i}"] for i in range(4)]
arrays = [x.view(jax.numpy.bfloat16) if x.dtype == np.int16 else x for x in arrays]
out, lse = program.call(*arrays)
np.savez(sys.argv[2], out=np.asarray(out).view(np.int16), lse=np.asarray(lse))
"""


def test_another_process_runs_an_exported_program(jax: Any, ffi: Any, tmp_path: Path) -> None:
    pytest.importorskip("flatbuffers")
    mla = importlib.import_module("mla_cupy.jax")
    call = decode()
    arrays = list(call.arrays.values())
    step = jax.jit(lambda *x: flat(mla.mla_decode)(*x, exportable=True))
    export = importlib.import_module("jax.export").export
    exported = export(step, disabled_checks=mla.disabled_checks())(*arrays).serialize()
    plain = [x.view(np.int16) if x.dtype.name == "bfloat16" else x for x in arrays]
    stored = {f"x{i}": x for i, x in enumerate(plain)}
    np.savez(tmp_path / "in.npz", program=np.frombuffer(exported, np.uint8), **stored)
    (tmp_path / "run.py").write_text(RUN)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu", "MLA_CUPY_JIT": "lazy"}
    command = [sys.executable, "run.py", "in.npz", "out.npz"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    got, (out, lse) = np.load(tmp_path / "out.npz"), call.eager()
    assert_same(got["out"], out.view(np.int16))
    assert_same(got["lse"], lse)


def test_callbacks_cannot_be_exported(jax: Any) -> None:
    pytest.importorskip("flatbuffers")
    mla = importlib.import_module("mla_cupy.jax")
    if importlib.import_module("mla_cupy.jax.lowering").buffer_callback is None:
        pytest.skip("this JAX has no buffer callbacks")
    step = jax.jit(lambda *x: mla.sparse_mla_forward(*x, scale=576**-0.5))
    arrays = list(forward().arrays.values())[:3]
    export = importlib.import_module("jax.export").export
    with pytest.raises(Exception, match=r"custom call|callback"):
        export(step, disabled_checks=mla.disabled_checks())(*arrays).serialize()
