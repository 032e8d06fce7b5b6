"""Arguments are laid out as the driver reads them, and CudaDriver says to it what the launcher said.

There is no GPU here: a shared library in place of libcuda records what it is given.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_kernels import TINY_REQUEST

from mla_cupy.errors import UnsupportedDeviceError
from mla_cupy.runtime import cuda_driver, device, driver, loader
from mla_cupy.runtime.build import Build, compile_kernel
from mla_cupy.runtime.launching import ArgumentBlock, LoadedKernel
from mla_cupy.runtime.tensormap import TensorMapSpec

Python = Callable[..., "subprocess.CompletedProcess[str]"]
FAKE = Path(__file__).parent / "fake_cuda.c"
SPEC = TensorMapSpec("float16", 0x7000, (576, 64, 9), (1152, 73728), (64, 32, 1))

PRELUDE = """
import ctypes, struct, threading
from mla_cupy.runtime.cuda_driver import CudaDriver
from mla_cupy.runtime.launching import ArgumentBlock, LoadedKernel
fake = ctypes.CDLL("libcuda.so.1")
class Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_uint32), ("pad", ctypes.c_uint32), ("value", ctypes.c_uint32 * 16)]
class Seen(ctypes.Structure):
    _fields_ = [("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3), ("smem", ctypes.c_uint32),
                ("stream", ctypes.c_void_p), ("at", ctypes.c_void_p), ("count", ctypes.c_uint32),
                ("pad", ctypes.c_uint32),
                ("attrs", Attribute * 4), ("function", ctypes.c_void_p), ("first", ctypes.c_void_p),
                ("context", ctypes.c_void_p), ("argument", ctypes.c_char * 16), ("launches", ctypes.c_int),
                ("pushes", ctypes.c_int), ("pops", ctypes.c_int)]
seen = Seen.in_dll(fake, "mla_seen")
status = ctypes.c_int.in_dll(fake, "mla_status")
cuda = CudaDriver()
kernel = LoadedKernel("mla_tiny", 0, 0x1234, 0xC0)
args = ArgumentBlock([48, 128])
"""


@pytest.fixture
def with_fake_cuda(python: Python, shared_library: Callable[[Path, str], Path]) -> Callable[[str], None]:
    """Run code with the replacement of libcuda; it must succeed."""
    pytest.importorskip("cuda.bindings")
    pytest.importorskip("cupy")
    library = shared_library(FAKE, "libcuda.so.1")

    def run(code: str) -> None:
        done = python(PRELUDE + code, LD_LIBRARY_PATH=str(library.parent))
        assert done.returncode == 0, done.stderr

    return run


@pytest.mark.parametrize("sizes", [[], [8], [48, 128, 128, 4], [129, 1]])
def test_argument_block(sizes: list[int]) -> None:
    block = ArgumentBlock(sizes)
    pointers = (ctypes.c_void_p * max(1, len(sizes))).from_address(block.pointers)
    for index, size in enumerate(sizes):
        assert len(block.views[index]) == size
        assert pointers[index] % 128 == 0
        block.views[index][:] = bytes([index + 1]) * size
    for index, size in enumerate(sizes):
        assert ctypes.string_at(pointers[index], size) == bytes([index + 1]) * size


def test_launch_reaches_the_driver_as_said(with_fake_cuda: Callable[[str], None]) -> None:
    with_fake_cuda("""
args.views[0][:8] = struct.pack("<q", 0x1122334455)
cuda.prepare(kernel, (132, 2, 3), (384, 1, 2), (2, 1, 1), 200000, args, True)(0x77)
assert list(seen.grid) == [132, 2, 3] and list(seen.block) == [384, 1, 2], (list(seen.grid), list(seen.block))
assert (seen.smem, seen.stream, seen.function, seen.count) == (200000, 0x77, 0x1234, 2)
assert (seen.attrs[0].id, list(seen.attrs[0].value[:3])) == (4, [2, 1, 1])  # cluster dimension
assert (seen.attrs[1].id, seen.attrs[1].value[0]) == (6, 1)  # programmatic stream serialization
assert seen.first % 128 == 0 and ctypes.string_at(ctypes.addressof(seen) + Seen.argument.offset, 8) == args.views[0][:8]
cuda.prepare(kernel, (7, 1, 1), (384, 1, 2), (2, 1, 1), 200000, args, True)(0)
assert list(seen.grid) == [7, 1, 1] and not seen.stream and seen.count == 2
cuda.prepare(kernel, (1, 1, 1), (128, 1, 1), (1, 1, 1), 0, args, False)(0)
assert list(seen.block) == [128, 1, 1] and (seen.count, seen.smem) == (0, 0)
assert (seen.launches, seen.pushes) == (3, 0)
""")


def test_the_kernels_context_is_current_for_the_call_only(with_fake_cuda: Callable[[str], None]) -> None:
    with_fake_cuda("""
context = ctypes.c_void_p.in_dll(fake, "mla_context")
for before in (0xC0, None):  # another device's context, and none: a thread that is new to CUDA
    context.value = before
    cuda.prepare(LoadedKernel("mla_tiny", 1, 0x1234, 0xC1), (1, 1, 1), (128, 1, 1), (1, 1, 1), 0, args, False)(0)
    assert seen.context == 0xC1 and context.value == before
assert (seen.launches, seen.pushes, seen.pops) == (2, 2, 2)
""")


def test_a_prepared_launch_can_be_repeated(with_fake_cuda: Callable[[str], None]) -> None:
    """A repetition on another stream and with other arguments; other launches keep theirs."""
    with_fake_cuda("""
first = cuda.prepare(kernel, (3, 1, 1), (128, 1, 1), (1, 1, 1), 0, args, True)
other = cuda.prepare(kernel, (4, 1, 1), (64, 1, 1), (1, 1, 1), 16, args, False)
for stream, word in ((0x11, 5), (0x22, 6)):
    other(0x33)
    args.views[0][:8] = struct.pack("<q", word)
    first(stream)
    assert (list(seen.grid), list(seen.block), seen.smem, seen.stream) == ([3, 1, 1], [128, 1, 1], 0, stream)
    assert ctypes.string_at(ctypes.addressof(seen) + Seen.argument.offset, 8) == struct.pack("<q", word)
""")


def test_errors_have_a_name_and_a_remedy(with_fake_cuda: Callable[[str], None]) -> None:
    with_fake_cuda("""
for code, words in (
    (3, "CUDA_ERROR_NOT_INITIALIZED (3); the process was forked"),
    (701, "registers or shared memory"),
    (700, "CUDA_ERROR_ILLEGAL_ADDRESS (700)"),
):
    status.value = code
    try:
        cuda.prepare(kernel, (5, 1, 1), (128, 1, 1), (1, 1, 1), 0, args, False)(0)
    except RuntimeError as error:
        assert words in str(error) and "launching mla_tiny, grid (5, 1, 1)" in str(error), error
    else:
        raise SystemExit("no error")
    try:
        cuda.memset(0x1000, 0, 4, 0)
    except RuntimeError as error:
        assert "cuMemsetD8Async" in str(error)
    else:
        raise SystemExit("no error")
""")


def test_memset_and_capture(with_fake_cuda: Callable[[str], None]) -> None:
    with_fake_cuda("""
words = (ctypes.c_uint64 * 32).in_dll(fake, "mla_map")
cuda.memset(0x1000, 7, 4096, 0x55)
assert list(words[:4]) == [0x1000, 7, 4096, 0x55]
assert not cuda.is_capturing(0x55)
ctypes.c_int.in_dll(fake, "mla_capturing").value = 1
assert cuda.is_capturing(0x55)
""")


def test_tensor_map_reaches_the_driver_aligned(with_fake_cuda: Callable[[str], None]) -> None:
    with_fake_cuda("""
from mla_cupy.runtime.tensormap import TensorMapSpec
spec = TensorMapSpec("bfloat16", 0x7000, (576, 64, 9), (1152, 73728), (64, 32, 1))
words = struct.unpack("<16Q", cuda.encode_tiled(spec))
assert words[0] % 128 == 0
assert words[1:14] == (9, 3, 0x7000, 576, 9, 73728, 64, 1, 1, 0, 3, 3, 0), words
again = TensorMapSpec("bfloat16", 0x7000, (576, 64, 9), (1152, 73728), (64, 32, 1))
assert cuda.encode_tiled(again) is cuda.encode_tiled(spec)
status.value = 1
try:
    cuda.encode_tiled(TensorMapSpec("float16", 0x7000, (576, 64), (1152,), (64, 64)))
except RuntimeError as error:
    assert "refused" in str(error) and "error 1" in str(error)
else:
    raise SystemExit("no error")
""")


class FakeCupy:
    """CuPy as far as loading goes: it reads the file when asked, as the driver would, and remembers modules by path."""

    def __init__(self) -> None:
        self.modules: dict[str, bytes] = {}
        self.smem: list[int] = []
        runtime = SimpleNamespace(getDevice=lambda: 0)
        fault = type("CUDADriverError", (RuntimeError,), {"status": 209})
        self.cuda = SimpleNamespace(runtime=runtime, driver=SimpleNamespace(CUDADriverError=fault))

    def RawModule(self, path: str) -> Any:  # noqa: N802 - CuPy's name
        if path not in self.modules:
            self.modules[path] = Path(path).read_bytes()
        if not self.modules[path].startswith(b"\x7fELF"):
            raise self.cuda.driver.CUDADriverError("CUDA_ERROR_NO_BINARY_FOR_GPU: no kernel image")
        outer = self

        class Raw:
            kernel = SimpleNamespace(ptr=0x99)

            def __setattr__(self, name: str, value: int) -> None:
                assert name == "max_dynamic_shared_size_bytes"
                outer.smem.append(value)

        return SimpleNamespace(get_function=lambda entry: Raw())


@pytest.fixture
def loading() -> cuda_driver.CudaDriver:
    """A CudaDriver whose CuPy is fake."""
    made = object.__new__(cuda_driver.CudaDriver)
    made._cupy = FakeCupy()
    made._images = []
    made._context = lambda: 0xC0  # type: ignore[method-assign]
    return made


@pytest.mark.parametrize("memfd", [True, False])
def test_load_gives_every_image_a_path_of_its_own(
    cuda_src: Path, loading: cuda_driver.CudaDriver, monkeypatch: pytest.MonkeyPatch, memfd: bool
) -> None:
    """CuPy keeps modules by path: a path that comes back would give the old kernel."""

    def missing(name: str) -> int:
        raise OSError(38, "Function not implemented")

    if not memfd:
        monkeypatch.setattr(cuda_driver.os, "memfd_create", missing)
    cubin = compile_kernel(TINY_REQUEST).cubin
    first = loading.load(Build(cubin, b"", {"entry": "mla_tiny", "facts": {"smem_bytes": 2048}}), 0)
    loading.load(Build(cubin + b"\0", b"", {"entry": "mla_tiny", "facts": {}}), 0)
    assert list(loading._cupy.modules.values()) == [cubin, cubin + b"\0"]
    assert loading._cupy.smem == [2048]
    assert (first.handle, first.context, first.device) == (0x99, 0xC0, 0)
    assert first.owner is not None
    assert len(set(loading._images)) == 2


def test_a_refused_image_is_explained(loading: cuda_driver.CudaDriver) -> None:
    with pytest.raises(RuntimeError, match=r"loading mla_tiny on device 0: .*\(209\); the kernel was compiled for"):
        loading.load(Build(b"junk", b"", {"entry": "mla_tiny", "facts": {}}), 0)


def test_without_a_driver_library_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy")

    def missing(name: str) -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(cuda_driver.ctypes, "PyDLL", missing)
    with pytest.raises(UnsupportedDeviceError, match="no CUDA driver"):
        cuda_driver.CudaDriver()


@pytest.mark.gpu
def test_a_kernel_runs(fresh: Path, gpu: object) -> None:
    """Loaded, launched with a cluster, the programmatic attribute and on a stream of the caller's, and captured."""
    import cupy

    target = driver.current()
    request = replace(TINY_REQUEST, arch=_arch())
    kernel = loader.loaded(request, 0)
    x = cupy.arange(128, dtype=cupy.float32)
    args = ArgumentBlock([8])
    args.views[0][:] = x.data.ptr.to_bytes(8, "little")
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    target.prepare(kernel, (1, 1, 1), (128, 1, 1), (1, 1, 1), 2048, args, True)(stream.ptr)
    stream.synchronize()
    assert (x.get() == 6.0 * cupy.arange(127, -1, -1).get()).all()
    with stream:
        stream.begin_capture()
        assert target.is_capturing(stream.ptr)
        target.prepare(kernel, (1, 1, 1), (128, 1, 1), (1, 1, 1), 2048, args, False)(stream.ptr)
        graph = stream.end_capture()
    graph.launch(stream)
    stream.synchronize()
    assert (x.get() == 36.0 * cupy.arange(128).get()).all()
    target.memset(x.data.ptr, 0, 512, stream.ptr)
    stream.synchronize()
    assert not x.get().any()


def _arch() -> str:
    return device.describe(0).arch


@pytest.mark.gpu
def test_a_tensor_map_is_encoded(gpu: object) -> None:
    import cupy

    x = cupy.zeros((9, 64, 576), dtype=cupy.float16)
    made = driver.current().encode_tiled(replace(SPEC, base=x.data.ptr))
    assert len(made) == 128
    assert any(made)


def test_a_thread_without_a_context_gets_one(loading: cuda_driver.CudaDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver refuses tensor maps and fills where the thread has not called the runtime yet."""
    chosen: list[int] = []
    loading._cupy.cuda.runtime.setDevice = chosen.append
    monkeypatch.setattr(cuda_driver.tensormap, "encode", lambda spec: bytes(128))
    monkeypatch.setattr(loading, "_context", lambda: 0xC0)
    loading.encode_tiled(SPEC)
    with loading.device_guard(0):
        assert chosen == []
    monkeypatch.setattr(loading, "_context", lambda: 0)
    loading.encode_tiled(SPEC)
    with loading.device_guard(0):
        assert chosen == [0, 0]


@pytest.mark.gpu
def test_the_first_call_of_a_thread_may_be_ours(gpu: object) -> None:
    import threading

    import cupy

    x = cupy.zeros((9, 64, 576), dtype=cupy.float16)
    cupy.cuda.Device().synchronize()
    made: list[bytes] = []

    def work() -> None:
        made.append(driver.current().encode_tiled(replace(SPEC, base=x.data.ptr)))
        with driver.device_guard(0):
            driver.current().memset(x.data.ptr, 7, x.nbytes, 0)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert any(made[0])
    assert (x.view(cupy.uint8) == 7).all()


@pytest.mark.gpu
def test_a_new_thread_can_launch(fresh: Path, gpu: object) -> None:
    import threading

    import cupy

    request = replace(TINY_REQUEST, arch=_arch())
    kernel = loader.loaded(request, 0)
    x = cupy.ones(128, dtype=cupy.float32)
    cupy.cuda.Device().synchronize()

    def work() -> None:
        args = ArgumentBlock([8])
        args.views[0][:] = x.data.ptr.to_bytes(8, "little")
        driver.current().prepare(kernel, (1, 1, 1), (128, 1, 1), (1, 1, 1), 2048, args, False)(0)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    cupy.cuda.Device().synchronize()
    assert (x.get() == 6.0).all()


@pytest.mark.gpu
def test_a_kernel_on_another_device_than_the_current_one(fresh: Path, gpu: object) -> None:
    import cupy

    if device.gpu_count() < 2:
        pytest.skip("needs two GPUs")
    request = replace(TINY_REQUEST, arch=device.describe(1).arch)
    kernel = loader.loaded(request, 1)
    with driver.device_guard(1):
        x = cupy.ones(128, dtype=cupy.float32)
        cupy.cuda.Device(1).synchronize()
    args = ArgumentBlock([8])
    args.views[0][:] = x.data.ptr.to_bytes(8, "little")
    assert cupy.cuda.runtime.getDevice() == 0
    driver.current().prepare(kernel, (1, 1, 1), (128, 1, 1), (1, 1, 1), 2048, args, False)(0)
    assert cupy.cuda.runtime.getDevice() == 0
    cupy.cuda.Device(1).synchronize()
    with driver.device_guard(1):
        assert (x.get() == 6.0).all()


def test_kernel_identity() -> None:
    """Kernels are handles: two that look alike are not the same."""
    assert LoadedKernel("mla_tiny", 0, 1) != LoadedKernel("mla_tiny", 0, 1)
