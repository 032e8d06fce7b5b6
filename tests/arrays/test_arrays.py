"""Arrays from outside: what a view says, whose array it is, what a stream is."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mla_cupy import ArgumentError, DeviceError, DTypeError, arrays

DTYPES = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float32": np.float32,
    "float64": np.float64,
    "int32": np.int32,
    "int64": np.int64,
    "uint8": np.uint8,
}


class OnGpu:
    """What DLPack asks of an array, and no more."""

    device = (2, 0)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **options: Any) -> Any:
        raise NotImplementedError


class OnHost(OnGpu):
    device = (1, 0)


# ---- NumPy -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DTYPES)
def test_view_of_numpy(name: str) -> None:
    whole = np.zeros((4, 6, 10), DTYPES[name])
    x = whole[1:, ::2, 2:7]
    view = arrays.NUMPY.view(x)
    size = whole.itemsize
    assert view == arrays.View(whole.ctypes.data + (60 + 2) * size, (3, 3, 5), (60, 20, 1), name, arrays.HOST)


def test_view_of_reversed_and_repeated_axes() -> None:
    x = np.zeros((3, 4), np.int32)
    assert arrays.NUMPY.view(x[::-1]).strides == (-4, 1)
    assert arrays.NUMPY.view(x[::-1]).ptr == x.ctypes.data + 2 * 16
    assert arrays.NUMPY.view(np.broadcast_to(x[0], (7, 4))).strides == (0, 1)


def test_peek_tells_apart_what_view_does() -> None:
    x = np.zeros((4, 6), np.float16)
    others = [x[:3], x[:, :5], x[:, ::2], np.zeros((4, 8), np.float16)[:, :6], x.view(np.int16), x.T]
    ptr, signature = arrays.NUMPY.peek(x)
    assert ptr == x.ctypes.data
    assert arrays.NUMPY.peek(x[:, :]) == (ptr, signature)
    assert arrays.NUMPY.peek(x.copy())[1] == signature
    for other in others:
        assert arrays.NUMPY.peek(other)[1] != signature


@pytest.mark.parametrize("name", DTYPES)
def test_empty_numpy(name: str) -> None:
    x = arrays.NUMPY.empty((2, 3), name, arrays.HOST, 0)
    assert (x.shape, x.dtype) == ((2, 3), np.dtype(DTYPES[name]))


def test_unknown_dtypes_have_a_name_too() -> None:
    assert arrays.NUMPY.view(np.zeros(2, np.uint16)).dtype == "uint16"
    assert arrays.NUMPY.view(np.zeros(2, ml_dtypes.float8_e4m3fn)).dtype == "float8_e4m3fn"


# ---- Families --------------------------------------------------------------------------------------------------


def test_family_of_numpy() -> None:
    class Mine(np.ndarray):
        pass

    for x in (np.zeros(2), np.zeros(2).view(Mine), np.ma.zeros(2)):
        family = arrays.family_of(x, "x")
        assert family is arrays.NUMPY
        assert (family.name, family.on_gpu, family.mutable) == ("numpy", False, True)
        assert family.adopt(x) is x
        assert family.release(x) is x


def test_family_of_a_foreign_gpu_array() -> None:
    family = arrays.family_of(OnGpu(), "x")
    assert (family.name, family.on_gpu) == ("dlpack", True)


@pytest.mark.parametrize(
    "x",
    [None, 3, 2.5, "text", [1.0], (1,), {"a": 1}, np.float32(3), OnHost(), object()],
    ids=lambda x: type(x).__name__,
)
def test_no_array(x: Any) -> None:
    with pytest.raises(DTypeError, match=rf"^mine: got a {type(x).__name__}, expected an array of NumPy"):
        arrays.family_of(x, "mine")


def test_common_family() -> None:
    x = np.zeros(2)
    assert arrays.common_family({"q": x, "seqlens": x, "out": None, "lse": None}) is arrays.NUMPY
    with pytest.raises(
        DeviceError, match="lse: got an array of dlpack on the GPU, expected an array of numpy on the CPU, like q"
    ):
        arrays.common_family({"q": x, "lse": OnGpu()})
    with pytest.raises(DTypeError, match="q: got a NoneType"):
        arrays.common_family({"q": None, "lse": x})


def test_looking_at_arrays_imports_no_library() -> None:
    code = (
        "import sys, numpy as np\n"
        "from mla_cupy import arrays\n"
        "class Foreign:\n"
        "    def __dlpack__(self): pass\n"
        "    def __dlpack_device__(self): return (2, 0)\n"
        "arrays.family_of(np.zeros(1), 'x'); arrays.family_of(Foreign(), 'x')\n"
        "print([name for name in ('cupy', 'torch', 'jax', 'cuda.bindings') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ---- Streams ---------------------------------------------------------------------------------------------------


class Protocol:
    ptr = 1

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, 42)


class Cupy:
    ptr = 43


class Torch:
    cuda_stream = 44


@pytest.mark.parametrize(("stream", "handle"), [(0, 0), (7, 7), (Protocol(), 42), (Cupy(), 43), (Torch(), 44)])
def test_stream_handle(stream: Any, handle: int) -> None:
    assert arrays.stream_handle(stream) == handle


@pytest.mark.parametrize("stream", ["0", True, 1.0, object(), None], ids=lambda x: type(x).__name__)
def test_no_stream(stream: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^stream: got .*, expected a raw handle or a stream"):
        arrays.stream_handle(stream)


# ---- CuPy ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", DTYPES)
def test_view_of_cupy(gpu: object, name: str) -> None:
    import cupy

    whole = cupy.zeros((4, 6, 10), DTYPES[name])
    x = whole[1:, ::2, 2:7]
    family: Any = arrays.family_of(x, "x")
    assert (family.name, family.on_gpu, family.mutable) == ("cupy", True, True)
    expected = arrays.View(whole.data.ptr + 62 * whole.itemsize, (3, 3, 5), (60, 20, 1), name, 0)
    assert family.view(x) == expected
    assert family.peek(x)[0] == expected.ptr
    assert family.peek(x)[1] != family.peek(whole)[1]
    made = family.empty((2, 3), name, 0, 0)
    assert (made.shape, made.dtype) == ((2, 3), np.dtype(DTYPES[name]))


@pytest.mark.gpu
def test_temporaries_come_from_the_streams_arena(gpu: object) -> None:
    """Memory that was freed on one stream is handed out again to it, not to another, which would be a race."""
    import cupy

    family: Any = arrays.cupy_family()
    first, second = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    used = family.empty((12345,), "float32", 0, first.ptr)
    freed = used.data.ptr
    del used
    assert family.empty((12345,), "float32", 0, second.ptr).data.ptr != freed
    assert family.empty((12345,), "float32", 0, first.ptr).data.ptr == freed


@pytest.mark.gpu
def test_current_stream_of_cupy(gpu: object) -> None:
    import cupy

    family: Any = arrays.cupy_family()
    stream = cupy.cuda.Stream()
    with stream:
        assert family.current_stream(0) == stream.ptr == arrays.stream_handle(stream)
    assert family.current_stream(0) == 0


@pytest.mark.gpu
def test_host_copy_waits_for_the_stream(gpu: object) -> None:
    import cupy

    family: Any = arrays.cupy_family()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x = cupy.zeros(1 << 24, cupy.float32)
        for _ in range(50):
            x += 1
    assert (family.to_numpy(x, stream.ptr) == 50).all()
