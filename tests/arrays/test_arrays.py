"""Arrays from outside: what a view says, whose array it is, what a stream is."""

from __future__ import annotations

import subprocess
import sys
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mla_cupy import ArgumentError, DeviceError, DTypeError, ShapeError, arrays
from mla_cupy.arrays.dlpack import InFlight
from mla_cupy.arrays.torch import TorchFamily
from mla_cupy.errors import kind_of

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
    """The attributes that DLPack needs of an array, and no more."""

    device = (2, 0)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **options: Any) -> Any:
        raise NotImplementedError


class OnHost(OnGpu):
    device = (1, 0)


class Event:
    """A point of a stream that comes when the test says so."""

    done = False

    def synchronize(self) -> None:
        self.done = True


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


def signature(family: Any, *given: Any) -> tuple[list[int], arrays.Signature]:
    found = family.signature(given)
    assert found is not None
    assert found[0][0] == 0
    hash(found[1])
    return found[0][1:], found[1]


def test_signatures_tell_apart_what_views_do() -> None:
    whole = np.zeros((8, 16), np.float16)
    x = whole[:4, :6]
    frozen = whole[:4, :6]
    frozen.flags.writeable = False
    others = [x[:3], x[:, :5], x[:, ::2], np.zeros((4, 8), np.float16)[:, :6], x.view(np.int16), x.T, frozen]
    addresses, mine = signature(arrays.NUMPY, x)
    assert addresses == [x.ctypes.data]
    assert signature(arrays.NUMPY, x[:, :]) == (addresses, mine)
    assert signature(arrays.NUMPY, whole[4:, :6]) == ([addresses[0] + 4 * 32], mine)
    for other in others:
        assert signature(arrays.NUMPY, other)[1] != mine
    assert signature(arrays.NUMPY, whole[:4, 1:7])[1] != mine  # 2 bytes past a multiple of 16
    assert signature(arrays.NUMPY, whole[:4, 8:14])[1] == mine


def test_signatures_of_several_arrays() -> None:
    x, y = np.zeros(3), np.zeros(3, np.int32)
    addresses, _ = signature(arrays.NUMPY, x, None, y)
    assert addresses == [x.ctypes.data, 0, y.ctypes.data]
    found = {signature(arrays.NUMPY, *given)[1] for given in ((x, None, y), (x, y, None), (None, x, y), (y, None, x))}
    assert len(found) == 4


def test_arrays_of_others_have_no_signature() -> None:
    class Mine(np.ndarray):
        pass

    for x in (OnGpu(), [1.0], 3, np.zeros(2).view(Mine)):
        assert arrays.NUMPY.signature([np.zeros(2), x]) is None


# ---- Strides and addresses that are no multiples of the items ---------------------------------------------------


def odd_stride() -> Any:
    """Items of 4 bytes in steps of 5."""
    return np.zeros((5, 5), np.uint8)[:, :4].view(np.int32)[:, 0]


def test_strides_between_items_are_refused() -> None:
    x = odd_stride()
    assert x.strides == (5,)
    for bad in (x, x[::-1]):
        with pytest.raises(ShapeError, match=r"^seqlens\.strides: got .*5,\) bytes, expected multiples of its 4-byte"):
            arrays.NUMPY.view(bad, "seqlens")
    assert arrays.NUMPY.view(x[:1], "seqlens").shape == (1,)  # its stride means nothing


def test_addresses_between_items_are_refused() -> None:
    x = np.zeros(17, np.uint8)[1:].view(np.int32)
    with pytest.raises(ShapeError, match=r"^seqlens's address: got 0x[0-9a-f]+, expected a multiple of its 4-byte"):
        arrays.NUMPY.view(x, "seqlens")


@pytest.mark.parametrize(
    ("shape", "strides"), [((3, 4), (4, 1)), ((3, 4), (-9, 2)), ((2, 3), (0, -1)), ((0, 3), (3, 1))]
)
def test_span(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    """The bytes of its elements, found one by one."""
    view = arrays.View(1000, shape, strides, "int32", arrays.HOST)
    begins = [4 * int(np.dot(index, strides)) for index in np.ndindex(*shape)]
    expected = (min(begins), max(begins) + 4) if begins else (0, 0)
    assert view.span(4) == expected


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

    for x in (np.zeros(2), np.zeros(2).view(Mine)):
        family = arrays.family_of(x, "x")
        assert family is arrays.NUMPY
        assert (family.name, family.on_gpu, family.mutable) == ("numpy", False, True)
        assert family.adopt(x) is x
        assert family.release(x) is x


def test_masked_arrays_are_refused() -> None:
    """Masked arrays are refused: their hidden elements would be read."""
    with pytest.raises(DTypeError, match=r"^x: got a masked array, expected an array without a mask"):
        arrays.family_of(np.ma.zeros(2), "x")


def test_family_of_a_foreign_gpu_array() -> None:
    family = arrays.family_of(OnGpu(), "x")
    assert (family.name, family.on_gpu) == ("dlpack", True)


@pytest.mark.parametrize(
    "x",
    [None, 3, 2.5, "text", [1.0], (1,), {"a": 1}, np.float32(3), object(), OnGpu],
    ids=lambda x: type(x).__name__,
)
def test_no_array(x: Any) -> None:
    with pytest.raises(DTypeError, match=rf"^mine: got {kind_of(x)}, expected an array of NumPy"):
        arrays.family_of(x, "mine")


def test_arrays_of_other_libraries_on_the_cpu() -> None:
    with pytest.raises(DTypeError, match=r"^x: got an OnHost on the CPU, expected one on a GPU, .*numpy\.from_dlpack"):
        arrays.family_of(OnHost(), "x")


def test_arrays_without_memory() -> None:
    """Arrays without memory, such as the tracers of jax.jit."""

    class Tracer(OnGpu):
        def __dlpack_device__(self) -> tuple[int, int]:
            raise RuntimeError("abstract")

    with pytest.raises(DTypeError, match=r"^x: got a Tracer without memory, expected .*under jit, .*mla_cupy\.jax"):
        arrays.family_of(Tracer(), "x")


def test_common_family() -> None:
    x = np.zeros(2)
    assert arrays.common_family({"q": x, "seqlens": x, "out": None, "lse": None}, ("out", "lse")) is arrays.NUMPY
    with pytest.raises(
        DeviceError, match="lse: got an array of dlpack on the GPU, expected an array of numpy on the CPU, like q"
    ):
        arrays.common_family({"q": x, "lse": OnGpu()})
    with pytest.raises(DTypeError, match="q: got None"):
        arrays.common_family({"q": None, "lse": x}, ("lse",))
    with pytest.raises(DTypeError, match="lse: got None"):
        arrays.common_family({"q": x, "lse": None}, ("out",))


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


class Mock:
    """Has every attribute, and none of them is a handle."""

    ptr = "nothing"


@pytest.mark.parametrize(
    "stream", ["0", True, 1.0, object(), None, Protocol, Mock(), -1, 2**64], ids=lambda x: str(x)[:12]
)
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
    assert signature(family, x)[0] == [expected.ptr]
    assert signature(family, x)[1] != signature(family, whole)[1]
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


def test_arrays_in_flight_are_held_until_their_own_event() -> None:
    held, events = InFlight(), [Event(), Event(), Event()]
    made = [np.zeros(1) for _ in events]
    alive = [weakref.ref(x) for x in made]

    def left() -> list[bool]:
        return [x() is not None for x in alive[: 3 - len(made)]]

    held.hold(events[0], [made.pop(0)])
    held.hold(events[1], [made.pop(0)])
    assert left() == [True, True]
    events[0].done = True
    held.hold(events[2], [made.pop(0)])
    assert left() == [False, True, True]
    held.drain()
    assert left() == [False, False, False]
    assert events[1].done
    assert events[2].done


@pytest.mark.parametrize(("handle", "named"), [(0, "default 3"), (1, "default 3"), (2, "2 on 3"), (99, "99 on 3")])
def test_a_handle_names_its_stream_in_pytorch(handle: int, named: str) -> None:
    """PyTorch's ExternalStream reads a handle of 0 as "no stream given" and returns a stream of its pool."""
    cuda = SimpleNamespace(
        stream=nullcontext,
        default_stream=lambda device: f"default {device}",
        ExternalStream=lambda handle, device: f"{handle} on {device}",
    )
    family = object.__new__(TorchFamily)
    family._torch = SimpleNamespace(cuda=cuda)
    with family._on(handle, 3) as stream:
        assert stream == named
