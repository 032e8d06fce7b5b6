"""Our own handler in XLA's foreign function interface, written with ctypes.

There is one for each platform, for all operations: a call describes itself in an attribute, so that a program can be
serialised and run in another process. XLA runs the handler once when it makes a program ready, which loads the
kernels, and then for every call, or for every capture of a CUDA graph.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from mla_cupy.arrays import cupy_family
from mla_cupy.dtypes import TABLE
from mla_cupy.errors import ShapeError, UnsupportedDeviceError, explain
from mla_cupy.jax import abi
from mla_cupy.jax.devices import gpu_ordinals, launcher
from mla_cupy.ops.bind import Shaped, Signature

__all__ = ["disabled_checks"]

TARGET = "mla_cupy.call.v1"
"""The name of the handlers; it changes whenever the meaning of the attribute does."""
_PLATFORMS = ("cpu", "CUDA")
_STAGES = ("instantiate", "prepare", "initialize", "execute")
"""Older versions of jaxlib crash where one is missing."""

_keep: list[Any] = []
"""XLA holds the handlers' addresses as long as the process lives."""


def disabled_checks() -> list[Any]:
    """List the checks for `jax.export.export(..., disabled_checks=...)`, which rejects unknown custom calls.

    The process that runs the exported program must have called `mla_cupy.jax.ffi.register`, and its GPU must need no
    more workspace than the one that the program was traced for.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from jax import export
    >>> import mla_cupy.jax as mla
    >>> step = jax.jit(lambda outs, lses: mla.merge_states(outs, lses, lse_base="2", exportable=True))
    >>> outs, lses = jnp.array([1.0, 3.0]).reshape(2, 1, 1, 1, 1), jnp.zeros((2, 1, 1, 1))
    >>> stored = export.export(step, disabled_checks=mla.disabled_checks())(outs, lses).serialize()
    >>> out, lse = export.deserialize(stored).call(outs, lses)
    >>> float(out[0, 0, 0, 0]), float(lse[0, 0, 0])
    (2.0, 1.0)
    """
    from jax import export

    return [export.DisabledSafetyCheck.custom_call(TARGET)]


@functools.cache
def register() -> None:
    """Make the handlers known to XLA: before the first call, also of a program that another process exported."""
    for platform in _PLATFORMS:
        handler = abi.Function(functools.partial(_handle, platform == "CUDA"))
        _keep.append(handler)
        capsule = jax.ffi.pycapsule(ctypes.cast(handler, ctypes.c_void_p).value)
        jax.ffi.register_ffi_target(TARGET, dict.fromkeys(_STAGES, capsule), platform=platform)


def _handle(on_gpu: bool, address: int) -> int | None:
    """XLA's call. No exception may leave it: ctypes would return garbage."""
    frame = abi.CallFrame.from_address(address)
    try:
        if frame.extension:
            _introduce(frame)
        elif frame.stage == abi.INSTANTIATE:
            _instantiate(frame, on_gpu)
        elif frame.stage == abi.EXECUTE:
            (_enqueue if on_gpu else _compute)(frame)
    except BaseException as error:
        return _error(frame.api, f"{type(error).__name__}: {error}")
    return None


def _introduce(frame: abi.CallFrame) -> None:
    """Answer XLA's query at the registration of the handler."""
    major, minor = _version(frame)
    if major != 0:
        raise UnsupportedDeviceError(f"XLA's foreign function interface {major}.{minor} is not known")
    metadata = frame.extension.contents.metadata.contents
    metadata.api_version.major, metadata.api_version.minor = 0, min(minor, abi.MAX_MINOR)
    metadata.traits = abi.COMMAND_BUFFER_COMPATIBLE


def _version(frame: abi.CallFrame) -> tuple[int, int]:
    """The version of the interface; the oldest ones do not report it."""
    if not frame.api:
        return 0, 1
    version = frame.api.contents.version
    return version.major, version.minor


def _instantiate(frame: abi.CallFrame, on_gpu: bool) -> None:
    text = _attribute(frame)
    if on_gpu:
        launcher(_signature(text), gpu_ordinals())
    else:
        _signature(text).request  # noqa: B018 (raises what does not fit)


def _enqueue(frame: abi.CallFrame) -> None:
    ready = launcher(_signature(_attribute(frame)), gpu_ordinals())
    results = _items(frame.results)
    nbytes = results[-1].dims[0] if ready.nbytes and results[-1].rank == 1 else 0
    if nbytes < ready.nbytes:
        remedy = "export the program for this GPU"
        raise ShapeError(explain("workspace", f"{nbytes} bytes", f"at least {ready.nbytes}", remedy))
    addresses = [buffer.data or 0 for buffer in (*_items(frame.args), *results)]
    ready.enqueue(_ordinal(frame), addresses, _stream(frame))


def _compute(frame: abi.CallFrame) -> None:
    signature = _signature(_attribute(frame))
    given = [shaped for shaped in signature.arrays if shaped is not None]
    made = [shaped for shaped in signature.results if shaped is not None]
    signature.on_host(_arrays(frame.args, given), _arrays(frame.results, made))


@functools.lru_cache(maxsize=1024)
def _signature(text: str) -> Signature:
    return Signature.from_text(text)


def _attribute(frame: abi.CallFrame) -> str:
    attributes = frame.attributes
    if attributes.size != 1 or attributes.types[0] != abi.STRING:
        raise ValueError(f"{attributes.size} attributes instead of one string")
    span = attributes.values[0].contents
    return ctypes.string_at(span.ptr, span.len).decode()


def _items(buffers: abi.Buffers) -> list[abi.Buffer]:
    return [buffers.items[i].contents for i in range(buffers.size)]


def _arrays(buffers: abi.Buffers, wanted: Sequence[Shaped]) -> list[np.ndarray[Any, Any]]:
    """The memory of buffers as arrays of the shapes and dtypes that the call was traced with."""
    items = _items(buffers)
    if [tuple(buffer.dims[: buffer.rank]) for buffer in items] != [shape for shape, _ in wanted]:
        raise ValueError("the buffers have other shapes than the call says")
    return [_array(buffer.data, *shaped) for buffer, shaped in zip(items, wanted, strict=True)]


def _array(address: int | None, shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    kind = TABLE[dtype].numpy
    nbytes = int(np.prod(shape)) * kind.itemsize
    if not nbytes or not address:
        return np.empty(shape, kind)
    memory = memoryview((ctypes.c_uint8 * nbytes).from_address(address))
    found: np.ndarray[Any, Any] = np.ndarray(shape, kind, memory)
    return found


def _stream(frame: abi.CallFrame) -> int:
    asked = abi.StreamGetArgs(ctypes.sizeof(abi.StreamGetArgs), None, frame.context, None)
    _call(frame.api.contents, "Stream_Get", asked)
    return asked.stream or 0


def _ordinal(frame: abi.CallFrame) -> int:
    api = frame.api.contents
    if api.struct_size < ctypes.sizeof(abi.Api):
        return cupy_family().current_device()
    asked = abi.DeviceOrdinalGetArgs(ctypes.sizeof(abi.DeviceOrdinalGetArgs), None, frame.context, 0)
    _call(api, "DeviceOrdinal_Get", asked)
    return int(asked.ordinal)


def _call(api: abi.Api, name: str, arguments: ctypes.Structure) -> None:
    if abi.Function(getattr(api, name))(ctypes.addressof(arguments)):
        raise RuntimeError(f"XLA's {name} failed")


def _error(api: Any, message: str) -> int | None:
    if not api:
        return None
    size = ctypes.sizeof(abi.ErrorCreateArgs)
    arguments = abi.ErrorCreateArgs(size, None, message.encode(), abi.INTERNAL)
    created: int | None = abi.Function(api.contents.Error_Create)(ctypes.addressof(arguments))
    return created
