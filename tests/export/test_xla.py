"""Handlers of XLA: called by jaxlib's CPU client, with a driver that writes down what the package would launch.

A handler is for the GPU's platform, whose calls have a stream. Between jaxlib and the handler stands a function of the
test that gives it one; buffers, attributes and errors are jaxlib's.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mla_cupy import cli
from mla_cupy.errors import ArgumentError, DTypeError, ShapeError
from mla_cupy.export import command, xla
from mla_cupy.export.module import Module
from mla_cupy.export.operations import OPERATIONS
from tests.export import modules, package
from tests.export.library import FLAGS, Library, compiled, compiler, simulated
from tests.export.package import Call

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "xla"
GPU = package.device("sm_90a", 132)
STAGES = ("instantiate", "prepare", "initialize", "execute")


@pytest.fixture(scope="module")
def jax() -> Any:
    found = pytest.importorskip("jax")
    found.config.update("jax_platforms", "cpu")
    if not (Path(found.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h").is_file():
        pytest.skip("jaxlib has no header of XLA's foreign function interface")
    return found


class Handler:
    """A module's handler, compiled beside the stub driver and registered for the CPU, with a stream of ours.

    Attributes
    ----------
    library : Library
    addresses : list of int
        Of the operands and results of the last call.
    traits : int
        What the handler answered when it was registered.
    """

    def __init__(self, jax: Any, made: Module, folder: Path) -> None:
        abi = self._abi = importlib.import_module("mla_cupy.jax.abi")
        command.write(made, folder, ["xla"])
        self.library = Library(made, folder, f"-I{folder}")
        driver = f'-DMLA_CUDA_LIBRARY="{self.library.stub._name}"'
        sources = [folder / f"{made.name}{end}.c" for end in ("", "_images", "_xla")]
        options = ("-shared", "-fPIC", driver, "-isystem", jax.ffi.include_dir())
        self.shared = ctypes.CDLL(str(compiled(folder / "handler.so", sources, *options)))
        self.handler = getattr(self.shared, f"{made.name}_xla")
        self.handler.restype, self.handler.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
        self.target, self.manifest = xla.target(made.name), folder / f"{made.name}.json"
        self.addresses: list[int] = []
        self.api, self.traits = 0, 0
        self._stream = abi.Function(self._give_stream)
        self._between = abi.Function(self._handle)
        capsule = jax.ffi.pycapsule(ctypes.cast(self._between, ctypes.c_void_p).value)
        jax.ffi.register_ffi_target(self.target, dict.fromkeys(STAGES, capsule), platform="cpu")

    def _give_stream(self, address: int) -> None:
        self._abi.StreamGetArgs.from_address(address).stream = package.STREAM

    def _handle(self, address: int) -> int | None:
        frame = self._abi.CallFrame.from_address(address)
        if frame.extension:
            error: int | None = self.handler(address)
            self.traits = frame.extension.contents.metadata.contents.traits
            return error
        self.api = ctypes.addressof(frame.api.contents)
        size = frame.api.contents.struct_size
        copied = ctypes.create_string_buffer(ctypes.string_at(self.api, size), max(size, ctypes.sizeof(self._abi.Api)))
        ours = self._abi.Api.from_buffer(copied)
        ours.Stream_Get = ctypes.cast(self._stream, ctypes.c_void_p)
        if frame.stage == self._abi.EXECUTE:
            buffers = [part.items[i].contents for part in (frame.args, frame.results) for i in range(part.size)]
            self.addresses = [buffer.data or 0 for buffer in buffers]
        ctypes.c_void_p.from_address(address + self._abi.CallFrame.api.offset).value = ctypes.addressof(ours)
        error = self.handler(address)
        ctypes.c_void_p.from_address(address + self._abi.CallFrame.api.offset).value = self.api
        return error


@pytest.fixture(scope="module")
def decode(jax: Any, tmp_path_factory: pytest.TempPathFactory) -> Handler:
    return Handler(jax, modules.decode(), tmp_path_factory.mktemp("xla") / "decode")


ARRAYS = {"q": (3, 1, 16, 576), "kv_cache": (5, 64, 576), "block_table": (3, 4), "seqlens": (3,)}
RESULTS = {"out": (3, 1, 16, 512), "lse": (3, 16, 1)}


def arrays(jax: Any, **shapes: tuple[int, ...]) -> list[Any]:
    dtypes = {"q": "bfloat16", "kv_cache": "bfloat16"}
    return [jax.numpy.ones(shapes.get(name, ARRAYS[name]), dtypes.get(name, "int32")) for name in ARRAYS]


def call(jax: Any, decode: Handler, nbytes: int = 1 << 20, arguments: Any = None, **attributes: Any) -> Any:
    """A call by the name alone, as another program makes it."""
    types = [jax.ShapeDtypeStruct(RESULTS["out"], "bfloat16"), jax.ShapeDtypeStruct(RESULTS["lse"], "float32")]
    attributes.setdefault("scale", np.float32(0.25))
    run = jax.ffi.ffi_call(decode.target, [*types, jax.ShapeDtypeStruct((nbytes,), "uint8")])
    found = jax.jit(lambda *x: run(*x, **attributes))(*(arguments or arrays(jax)))
    return jax.block_until_ready(found)


def test_launches_are_the_packages(jax: Any, decode: Handler) -> None:
    """Launches use XLA's stream and context, with attributes of both widths; kernels are loaded before they are
    called.
    """
    decode.library.describe(GPU)
    decode.library.stub.stub_context(0)
    try:
        call(jax, decode, scale=np.float32(0.25), causal=np.int64(0), empty_lse=np.float64(-3.0))
    finally:
        decode.library.stub.stub_context(1)
    assert decode.traits == importlib.import_module("mla_cupy.jax.abi").COMMAND_BUFFER_COMPATIBLE
    values: dict[str, Any] = {"b": 3, "num_pages": 5, "max_pages": 4, "scale": 0.25, "causal": 0, "kv_scale": 1.0}
    values |= {"cp_world": 1, "cp_rank": 0, "empty_lse": -3.0}
    *addresses, workspace = decode.addresses
    for (name, shape), address in zip({**ARRAYS, **RESULTS}.items(), addresses, strict=True):
        values[name] = address
        values |= {f"{name}_strides[{i}]": int(np.prod(shape[i + 1 :])) for i in range(len(shape))}
    values["workspace"] = -(-workspace // xla.ALIGNMENT) * xla.ALIGNMENT
    values["workspace_bytes"] = (1 << 20) - (values["workspace"] - workspace)
    with package.writing(decode.library.parameters) as writer:
        Call(decode.library.module.subject, values).run(GPU)
        assert decode.library.log() == writer.take() != b""


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "attribute": ({"scales": np.float32(1)}, "attribute scales: expected one of scale, causal, cp_world"),
    "real": ({"scale": np.int32(1)}, "scale: expected float64 or float32"),
    "integer": ({"causal": np.float32(1)}, "causal: expected int64, int32 or bool"),
    "wide": ({"cp_world": np.int64(1 << 40)}, "cp_world: got 1099511627776, expected 32 bits"),
    "text": ({"scale": "1"}, "scale: expected a number"),
    "rule": ({"scale": np.float32(-1)}, "scale: got -1"),
    "workspace": ({"nbytes": 300}, "workspace.shape[0]: got "),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_calls_are_told(jax: Any, decode: Handler, case: str) -> None:
    decode.library.describe(GPU)
    given, expected = WRONG[case]
    with pytest.raises(jax.errors.JaxRuntimeError) as refused:
        call(jax, decode, **given)
    assert f"mla_cupy.decode.v1: {expected}" in str(refused.value)
    assert decode.library.log() == b""


WRONG_ARRAYS: dict[str, tuple[Callable[[Any], list[Any]], str]] = {
    "fixed": (lambda jax: arrays(jax, kv_cache=(5, 32, 576)), "kv_cache.shape[1]: got 32, expected page_size = 64"),
    "free": (lambda jax: arrays(jax, seqlens=(4,)), "seqlens.shape[0]: got 4, expected b of (b)"),
    "ndim": (lambda jax: arrays(jax, seqlens=(3, 1)), "seqlens.ndim: got 2, expected 1: (b)"),
    "dtype": (lambda jax: [x.astype("float32") for x in arrays(jax)], "q.dtype: expected bfloat16"),
    "count": (lambda jax: arrays(jax)[:3], "got 3 operands and 3 results, expected 4 and 2"),
}


@pytest.mark.parametrize("case", WRONG_ARRAYS)
def test_wrong_arrays_are_told(jax: Any, decode: Handler, case: str) -> None:
    decode.library.describe(GPU)
    make, expected = WRONG_ARRAYS[case]
    with pytest.raises(jax.errors.JaxRuntimeError) as refused:
        call(jax, decode, arguments=make(jax))
    assert f"mla_cupy.decode.v1: {expected}" in str(refused.value)


def test_other_gpus_and_platforms_are_refused(jax: Any, tmp_path: Path) -> None:
    """The module refuses them with its own message; without a stream XLA does."""
    made = replace(modules.merge(), prefix="refused_")
    handler = Handler(jax, made, tmp_path / "merge")
    handler.library.describe(package.device("sm_75", 40))
    merge = importlib.import_module("mla_cupy.jax").ExportedCall(handler.manifest)
    given = jax.numpy.ones((2, 3, 1, 16, 512)), jax.numpy.ones((2, 3, 16, 1))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"got compute capability 7\.5 .*expected one of sm_90a"):
        jax.block_until_ready(merge(*given))
    handler.library.describe(GPU)
    out, lse = jax.block_until_ready(jax.jit(merge)(*given))
    assert (out.shape, lse.shape) == ((3, 1, 16, 512), (3, 16, 1))
    assert handler.library.log().startswith(b"Lmla_merge_states")
    capsule = jax.ffi.pycapsule(ctypes.cast(handler.handler, ctypes.c_void_p).value)
    jax.ffi.register_ffi_target("mla_cupy.without_stream", dict.fromkeys(STAGES, capsule), platform="cpu")
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (out, lse)]
    with pytest.raises(jax.errors.JaxRuntimeError):
        jax.block_until_ready(jax.ffi.ffi_call("mla_cupy.without_stream", types)(*given))


def test_the_entry_registers(jax: Any, decode: Handler, tmp_path: Path) -> None:
    """Through XLA's own interface, as a program without Python does."""
    made = replace(modules.merge(), prefix="entry_")
    command.write(made, tmp_path / "entry", ["xla"])
    sources = [tmp_path / "entry" / f"entry_merge_states{end}.c" for end in ("", "_images", "_xla")]
    options = ("-shared", "-fPIC", "-DMLA_XLA_HOST", '-DMLA_CUDA_LIBRARY="libnone.so.1"')
    options += ("-isystem", jax.ffi.include_dir())
    library = ctypes.CDLL(str(compiled(tmp_path / "entry.so", sources, *options)))
    decode.library.describe(GPU)
    call(jax, decode)
    decode.library.log()
    register = library.entry_merge_states_xla_register
    register.restype, register.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_char_p)
    assert register(decode.api, b"Host") is None
    merge = importlib.import_module("mla_cupy.jax").ExportedCall(tmp_path / "entry" / "entry_merge_states.json")
    given = jax.numpy.ones((2, 3, 1, 16, 512)), jax.numpy.ones((2, 3, 16, 1))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"entry_merge_states\.v1: no CUDA driver: libnone"):
        jax.block_until_ready(merge(*given))


def test_arrays_that_change_in_place(jax: Any, tmp_path: Path) -> None:
    """The result has the operand's memory; XLA copies the operand first where the caller keeps it."""
    made = modules.made("cache_append", ("sm_90a",), kv_format="v32", page_size=64)
    handler = Handler(jax, made, tmp_path / "append")
    handler.library.describe(GPU)
    append = importlib.import_module("mla_cupy.jax").ExportedCall(handler.manifest)
    given = jax.numpy.ones((5, 512), "bfloat16"), jax.numpy.ones((5, 64), "bfloat16")
    x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else importlib.import_module("jax.experimental").enable_x64
    with x64(True):
        slots = jax.numpy.zeros(5, "int64")
        (cache,) = jax.block_until_ready(jax.jit(append)(*given, jax.numpy.ones((4, 64, 656), "uint8"), slots))
    assert (cache.shape, str(cache.dtype)) == ((4, 64, 656), "uint8")
    assert handler.library.log().startswith(b"L")
    assert handler.addresses[2] == handler.addresses[4]
    apart = jax.ffi.ffi_call(handler.target, [jax.ShapeDtypeStruct(cache.shape, cache.dtype)])
    refused = pytest.raises(jax.errors.JaxRuntimeError, match="cache: expected the memory of result 0")
    with x64(True), refused:
        jax.block_until_ready(apart(*given, cache, slots))


def test_exported_calls_are_checked_while_jax_traces(jax: Any, decode: Handler) -> None:
    exported = importlib.import_module("mla_cupy.jax").ExportedCall(decode.manifest)
    assert exported.target == "mla_cupy.decode.v1"
    given = arrays(jax)
    for wrong, error, text in (
        (given[:3], ArgumentError, "arrays: got 3, expected 4: q, kv_cache, block_table, seqlens"),
        ([given[0].astype("float16"), *given[1:]], DTypeError, "q.dtype: got float16, expected bfloat16"),
        (arrays(jax, q=(3, 16, 576)), ShapeError, "q.ndim: got 3, expected 4: b, s_q, h_q, d_qk"),
        (arrays(jax, q=(3, 1, 8, 576)), ShapeError, "q.shape[2]: got 8, expected h_q=16"),
        (arrays(jax, seqlens=(2,)), ShapeError, "seqlens.shape[0]: got 2, expected b=3"),
    ):
        with pytest.raises(error) as refused:
            exported(*wrong, scale=0.25)
        assert text in str(refused.value)
    with pytest.raises(ArgumentError, match="scales: got 1, expected one of scale, causal"):
        exported(*given, scale=0.25, scales=1)
    with pytest.raises(ArgumentError, match="scale: got None, expected a number"):
        exported(*given)
    with pytest.raises(ArgumentError, match="scale: got -1"):
        exported(*given, scale=-1)


@pytest.fixture(scope="module")
def for_the_host(jax: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Decode as PTX, compiled with a handler that copies the CPU's buffers to the simulator's GPU and back."""
    folder = tmp_path_factory.mktemp("host")
    wanted = ("--op", "decode", "--h-q", "16", "--page-size", "64", "--arch", "sm_90a", "--ptx", "--xla")
    assert cli.main(["export", *wanted, "--out", str(folder)]) == 0
    options = ("-shared", "-fPIC", "-DMLA_XLA_HOST", "-isystem", jax.ffi.include_dir(), "-ldl", "-lm")
    compiled(folder / "libmla_decode.so", sorted(folder.glob("*.c")), *options)
    return folder


@pytest.mark.slow
def test_the_example(for_the_host: Path) -> None:
    """A process without this package runs the program."""
    program, manifest = for_the_host / "program", for_the_host / "mla_decode.json"
    writing = [sys.executable, str(EXAMPLES / "export_program.py"), str(manifest), str(program)]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parents[1]), "JAX_PLATFORMS": "cpu"}
    subprocess.run([*writing, "--platform", "cpu", "--sm-count", "2"], env=environment, check=True, timeout=120)
    running = EXAMPLES / "run_program.py"
    printed = simulated(sys.executable, running, for_the_host / "libmla_decode.so", program)
    assert printed.endswith("all as expected\n")


@pytest.mark.slow
def test_heads_over_devices(jax: Any, for_the_host: Path) -> None:
    if not hasattr(jax, "shard_map"):
        pytest.skip("JAX has no jax.shard_map")
    code = f"import sys; sys.path.insert(0, '{EXAMPLES.parents[1]}'); from tests.export.sharded_program import main; "
    code += f"main('{for_the_host / 'mla_decode.json'}', '{for_the_host / 'libmla_decode.so'}')"
    printed = simulated(sys.executable, "-c", code)
    assert printed.endswith("all as expected\n")


@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATIONS)
def test_handlers_of_all_operations_compile(jax: Any, operation: str, tmp_path: Path) -> None:
    sizes = {"h_q": 64, "page_size": 64, "topk": 64, "kv_format": "v32"}
    made = modules.made(operation, ("sm_90a",), **{name: sizes[name] for name in OPERATIONS[operation].required})
    command.write(made, tmp_path, ["xla"])
    for more in ((), ("-DMLA_XLA_HOST",)):
        check = [compiler(), "-std=c11", *FLAGS, *more, "-fsyntax-only", "-isystem", jax.ffi.include_dir()]
        subprocess.run([*check, str(tmp_path / f"{made.name}_xla.c")], check=True)
