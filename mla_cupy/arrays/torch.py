"""PyTorch tensors, on a GPU and on the CPU. PyTorch is never imported: a caller with a tensor has imported it."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from mla_cupy.arrays.dynamo import breaks_graphs, methods_break_graphs
from mla_cupy.arrays.numpy import NUMPY
from mla_cupy.arrays.view import (
    ARRAY_ALIGNMENT,
    Counter,
    Matcher,
    Native,
    NativeFamily,
    Signature,
    View,
    view_of,
)
from mla_cupy.dtypes import TABLE
from mla_cupy.errors import DTypeError, explain, kind_of


@methods_break_graphs
class TorchFamily(NativeFamily):
    """PyTorch tensors on a GPU. Temporaries come from PyTorch's allocator."""

    name, on_gpu = "torch", True

    def __init__(self) -> None:
        torch = self._torch = sys.modules["torch"]
        self._kind = torch.Tensor
        self._dtypes = {name: getattr(torch, name) for name in TABLE if hasattr(torch, name)}
        self._names = {dtype: name for name, dtype in self._dtypes.items()}
        self._uint8 = torch.uint8
        # The handle alone is much cheaper than a Stream object; the function is private, so it may be missing.
        self._raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        self._guards = _tensor_guards(torch)
        self._forward_mode = torch.autograd.forward_ad
        self._has_transforms = torch._C._are_functorch_transforms_active
        self.count_writes = write_counter(torch)

    @property
    def native(self) -> Native:
        return self

    def view(self, x: Any, argument: str = "an array") -> View:
        dtype, itemsize = x.dtype, x.element_size()
        strides = [stride * itemsize for stride in x.stride()]
        name = self._names.get(dtype) or str(dtype)
        return view_of(argument, x.data_ptr(), tuple(x.shape), strides, itemsize, name, x.get_device())

    def signature(self, arrays: Sequence[Any]) -> tuple[list[int], Signature] | None:
        kind, recording = self._kind, self._torch.is_grad_enabled()
        addresses: list[int] = [0]
        key: list[Any] = []
        if self._forward_mode._current_level >= 0 or self._has_transforms():
            return None
        try:
            for x in arrays:
                if x is None:
                    addresses.append(0)
                    key.append(None)
                elif type(x) is kind and not (recording and x.requires_grad) and not x.is_neg():
                    address = x.data_ptr()
                    addresses.append(address)
                    # Strides that follow from the shape need not be fetched, which takes longer than to ask.
                    key += (
                        x.shape,
                        x.is_contiguous() or x.stride(),
                        x.dtype,
                        x.get_device(),
                        address % ARRAY_ALIGNMENT,
                    )
                else:
                    return None
        except RuntimeError:  # a tensor without memory
            return None
        return addresses, tuple(key)

    def matcher(self, arrays: Sequence[Any]) -> Matcher | None:
        """One comparison in C++ of everything about all tensors."""
        forward_mode = self._forward_mode
        absent = [index for index, x in enumerate(arrays) if x is None]
        present = [index for index, x in enumerate(arrays) if x is not None]
        if self._guards is None or len(present) < 2:  # of one, itemgetter makes no tuple
            return None
        pick = operator.itemgetter(*present)
        tensors = pick(arrays)
        if any(x.requires_grad or x.data_ptr() % ARRAY_ALIGNMENT for x in tensors):
            return None
        try:
            alike = self._guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
            if not alike(*tensors):
                return None
        except (TypeError, RuntimeError):  # of a version that differs
            return None

        address_of = self._kind.data_ptr
        place = {index: at for at, index in enumerate(present, 1)}
        spread = operator.itemgetter(0, *[place.get(index, 0) for index in range(len(arrays))])
        latest: tuple[list[int], list[int]] = [], []  # aligned ones, without and with zeros for absent arrays

        def match(others: Sequence[Any]) -> list[int] | None:
            nonlocal latest
            tensors = pick(others)
            if not alike(*tensors) or forward_mode._current_level >= 0:
                return None
            for index in absent:
                if others[index] is not None:
                    return None
            found = [0, *map(address_of, tensors)]
            if found != latest[0]:
                bits = 0
                for address in found:
                    bits |= address
                if bits % ARRAY_ALIGNMENT:
                    return None
                latest = found, [*spread(found)]
            return latest[1].copy()

        return match

    def address(self, x: Any) -> int:
        return int(x.data_ptr())

    def empty(self, shape: tuple[int, ...], dtype: str, device: int, stream: int) -> Any:
        return self._empty(shape, self._dtypes[dtype], device, stream)

    def transposed(self, x: Any, axes: tuple[int, ...]) -> Any:
        return x.permute(axes)

    def contiguous(self, x: Any, stream: int) -> Any:
        with self._on(stream, x.get_device()):
            return x.contiguous()

    def scratch(self, nbytes: int, device: int, stream: int) -> tuple[object, int]:
        memory = self._empty((nbytes,), self._uint8, device, stream)
        return memory, memory.data_ptr()

    def _empty(self, shape: tuple[int, ...], dtype: Any, device: int, stream: int) -> Any:
        torch = self._torch
        if stream == self.current_stream(device):
            return torch.empty(shape, dtype=dtype, device=device)
        with self._on(stream, device):
            return torch.empty(shape, dtype=dtype, device=device)

    def _on(self, stream: int, device: int) -> AbstractContextManager[object]:
        """Make the stream with this handle PyTorch's current stream.

        `ExternalStream` takes a handle of 0 to mean "none" and returns a stream of PyTorch's pool, which nothing orders
        after the caller's work.
        """
        cuda = self._torch.cuda
        default = stream in _DEFAULT_STREAM
        named = cuda.default_stream(device) if default else cuda.ExternalStream(stream, device=device)
        guard: AbstractContextManager[object] = cuda.stream(named)
        return guard

    def current_stream(self, device: int) -> int:
        if self._raw_stream is not None:
            return int(self._raw_stream(device))
        return int(self._torch.cuda.current_stream(device).cuda_stream)

    def to_numpy(self, x: Any, stream: int) -> np.ndarray[Any, Any]:
        with self._on(stream, x.get_device()):
            return _to_numpy(self._torch, x.cpu())

    def current_device(self) -> int | str:
        """The CUDA ordinal that is current in PyTorch; "cpu" without a GPU."""
        cuda = self._torch.cuda
        return int(cuda.current_device()) if cuda.is_available() else "cpu"

    def view_as(self, x: Any, shape: tuple[int, ...], dtype: str, strides_bytes: tuple[int, ...]) -> Any:
        """The memory of a tensor of bytes, from its first element on, as another tensor."""
        return _view_as(self._torch, x, shape, dtype, strides_bytes)

    def synchronize(self, device: int) -> None:
        """Wait for all work on a device."""
        self._torch.cuda.synchronize(device)

    def on_device(self, device: int) -> AbstractContextManager[object]:
        """Within a with statement, `device` is the current one."""
        guard: AbstractContextManager[object] = self._torch.cuda.device(device)
        return guard


#: Handles of CUDA's legacy default stream: the null stream, and cudaStreamLegacy.
_DEFAULT_STREAM = (0, 1)
#: Dtypes that NumPy does not have, and the integers of their size.
_UNKNOWN = {"bfloat16": "int16", "float8_e4m3fn": "uint8", "float8_e8m0fnu": "uint8"}


@methods_break_graphs
class TorchCpuFamily:
    """PyTorch tensors on the CPU: the same memory as NumPy arrays."""

    name, on_gpu, mutable, takes_stream = "torch", False, True, True

    @property
    def native(self) -> Native:
        return NUMPY

    @property
    def count_writes(self) -> Counter:
        return write_counter(sys.modules["torch"])

    def adopt(self, x: Any) -> Any:
        return _to_numpy(sys.modules["torch"], x.detach())

    def release(self, x: Any) -> Any:
        torch: Any = sys.modules["torch"]
        kind = x.dtype.name
        if kind in _UNKNOWN:
            return torch.from_numpy(x.view(_UNKNOWN[kind])).view(getattr(torch, kind))
        return torch.from_numpy(x)

    def view_as(self, x: Any, shape: tuple[int, ...], dtype: str, strides_bytes: tuple[int, ...]) -> Any:
        """The memory of a tensor of bytes, from its first element on, as another tensor."""
        return _view_as(sys.modules["torch"], x, shape, dtype, strides_bytes)

    def settle(self, lent: Iterable[Any]) -> None:
        """Nothing to do: work on the host's memory is done when a call returns."""


def _view_as(torch: Any, x: Any, shape: tuple[int, ...], dtype: str, strides_bytes: tuple[int, ...]) -> Any:
    words = x.view(getattr(torch, dtype))
    return words.as_strided(shape, [stride // words.element_size() for stride in strides_bytes])


def _tensor_guards(torch: Any) -> Any:
    """The class with which torch.compile compares tensors in C++; None where it is not: it is private."""
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    return getattr(guards, "TensorGuards", None)


@functools.cache
def write_counter(torch: Any) -> Counter:
    """Function that increments tensors' versions, so that autograd detects overwritten saved tensors."""
    increment: Counter = torch._C._increment_version
    try:
        increment(())
    except (RuntimeError, TypeError):
        return functools.partial(_increment_each, torch.autograd.graph.increment_version)
    return increment


def _increment_each(increment: Any, tensors: Iterable[Any]) -> None:
    """Do the same for PyTorch 2.4, which accepts one tensor that has a version."""
    for x in tensors:
        if not x.is_inference():
            increment(x)


@breaks_graphs
def check_tensor(x: Any, argument: str) -> None:
    """Check that a tensor has plain memory, and that no derivatives are requested.

    Raises
    ------
    DTypeError
    """
    torch: Any = sys.modules["torch"]
    if derivative := _derivative(torch, x):
        expected = "a constant: the functions of mla_cupy have no derivatives"
        raise DTypeError(explain(argument, f"a tensor that {derivative}", expected, _DETACH))
    if torch._C._are_functorch_transforms_active():
        raise DTypeError(explain(argument, "a tensor under a transform", "no transform of torch.func", _BINDING))
    check_plain(x, argument)
    if (place := x.device.type) not in ("cpu", "cuda"):
        remedy = f"for shapes alone {_BINDING}" if place == "meta" else "move it"
        raise DTypeError(explain(argument, f"a tensor on {place}", "one on the CPU or a CUDA GPU", remedy))
    if type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or not _has_memory(x):
        raise DTypeError(explain(argument, f"{kind_of(x)} without memory", "one that has its own", _UNWRAP))
    name = str(x.dtype).removeprefix("torch.")
    if name not in TABLE and not hasattr(np, name):
        raise DTypeError(explain(f"{argument}.dtype", name, "one that NumPy or ml_dtypes has", f"convert {argument}"))


def _has_memory(x: Any) -> bool:
    """Tell whether a tensor has an address, if it has elements. Some fakes raise, others are at 0."""
    try:
        return bool(x.data_ptr()) or not x.numel()
    except RuntimeError:
        return False


def check_plain(x: Any, argument: str) -> None:
    """Check that a tensor is dense, and that its memory holds its values as they are."""
    if x.is_nested:
        remedy = "pass its values() and the starts of sequences"
        raise DTypeError(explain(argument, "a nested tensor", "a dense one", remedy))
    if str(x.layout) != "torch.strided":
        raise DTypeError(explain(argument, f"a tensor of layout {x.layout}", "a dense one", "call its to_dense()"))
    if x.is_quantized:
        raise DTypeError(explain(argument, "a quantised tensor", "its values", "call its dequantize()"))
    if x.is_neg() or x.is_conj():
        raise DTypeError(explain(argument, "a lazily negated or conjugated tensor", "its values", _RESOLVE))
    if x._is_zerotensor():
        raise DTypeError(explain(argument, "a tensor of zeros without memory", "one that has its own", "clone it"))


_DETACH = (
    "detach it, or call under torch.no_grad(); mla_prefill, sparse_mla_forward, indexer_warmup_objective and "
    "indexer_sparse_objective of mla_cupy.torch have gradients"
)
_BINDING = "call the function of that name of mla_cupy.torch"
_UNWRAP = f"for fake tensors {_BINDING}; of a DTensor pass to_local()"
_RESOLVE = "call its resolve_neg() or resolve_conj()"


def _derivative(torch: Any, x: Any) -> str:
    """A tensor's role in reverse or forward mode; "" if it has none."""
    forward_mode = torch.autograd.forward_ad
    if x.requires_grad and torch.is_grad_enabled():
        return "requires grad, in grad mode"
    if forward_mode._current_level < 0 or torch._C._functorch.is_batchedtensor(x):
        return ""
    return "has a tangent" if forward_mode.unpack_dual(x).tangent is not None else ""


def _to_numpy(torch: Any, x: Any) -> np.ndarray[Any, Any]:
    kind = str(x.dtype).removeprefix("torch.")
    if kind in _UNKNOWN:
        return np.asarray(x.view(getattr(torch, _UNKNOWN[kind])).numpy()).view(TABLE[kind].numpy)
    return np.asarray(x.numpy())


torch_family = functools.cache(TorchFamily)
TORCH_CPU = TorchCpuFamily()
