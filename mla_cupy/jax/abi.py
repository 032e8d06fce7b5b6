"""The structures of XLA's foreign function interface that the handler reads, on 64-bit machines.

Described for interface versions 0.1 to 0.5 (jaxlib 0.5.0 to 0.12), which agree on everything here; later members of a
structure are left out. A test compares the layouts with the header that jaxlib ships.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_int, c_int32, c_int64, c_size_t, c_uint32, c_void_p

MAX_MINOR = 5
"""The newest minor version of the interface that this description is known to fit."""
COMMAND_BUFFER_COMPATIBLE = 1
"""The trait: a call always enqueues the same work, so that a CUDA graph may replay it."""
INSTANTIATE, EXECUTE = 0, 3
"""Stages: once per compiled program, and once per call or capture."""
STRING = 4
"""The kind of an attribute."""
INTERNAL = 13
"""The code of errors."""


class Version(Structure):
    """XLA_FFI_Api_Version."""

    _fields_ = (("struct_size", c_size_t), ("extension", c_void_p), ("major", c_int), ("minor", c_int))


class Metadata(Structure):
    """XLA_FFI_Metadata."""

    _fields_ = (("struct_size", c_size_t), ("api_version", Version), ("traits", c_uint32))


class MetadataExtension(Structure):
    """XLA_FFI_Metadata_Extension: XLA's query of a handler's metadata."""

    _fields_ = (
        *(("struct_size", c_size_t), ("type", c_int), ("next", c_void_p)),
        ("metadata", POINTER(Metadata)),
    )


class Buffer(Structure):
    """XLA_FFI_Buffer."""

    _fields_ = (
        *(("struct_size", c_size_t), ("extension", c_void_p), ("dtype", c_int)),
        *(("data", c_void_p), ("rank", c_int64), ("dims", POINTER(c_int64))),
    )


class Buffers(Structure):
    """XLA_FFI_Args and XLA_FFI_Rets."""

    _fields_ = (
        *(("struct_size", c_size_t), ("extension", c_void_p), ("size", c_int64)),
        *(("types", POINTER(c_int)), ("items", POINTER(POINTER(Buffer)))),
    )


class ByteSpan(Structure):
    """XLA_FFI_ByteSpan."""

    _fields_ = (("ptr", c_void_p), ("len", c_size_t))


class Attributes(Structure):
    """XLA_FFI_Attrs, all of them strings."""

    _fields_ = (
        *(("struct_size", c_size_t), ("extension", c_void_p), ("size", c_int64)),
        *(("types", POINTER(c_int)), ("names", POINTER(POINTER(ByteSpan))), ("values", POINTER(POINTER(ByteSpan)))),
    )


class Api(Structure):
    """XLA_FFI_Api: the functions of XLA. `DeviceOrdinal_Get` exists from version 0.2 on: compare `struct_size`."""

    _fields_ = (
        *(("struct_size", c_size_t), ("extension", c_void_p), ("version", Version), ("internal", c_void_p)),
        *(("Error_Create", c_void_p), ("Error_GetMessage", c_void_p), ("Error_Destroy", c_void_p)),
        *(("Handler_Register", c_void_p), ("Stream_Get", c_void_p), ("Type_Register", c_void_p)),
        *(("ExecutionContext_Get", c_void_p), ("State_Set", c_void_p), ("State_Get", c_void_p)),
        *(("DeviceMemory_Allocate", c_void_p), ("DeviceMemory_Free", c_void_p)),
        *(("ThreadPool_Schedule", c_void_p), ("ThreadPool_NumThreads", c_void_p)),
        *(("Future_Create", c_void_p), ("Future_SetAvailable", c_void_p), ("Future_SetError", c_void_p)),
        *(("RunId_Get", c_void_p), ("DeviceOrdinal_Get", c_void_p)),
    )


class CallFrame(Structure):
    """XLA_FFI_CallFrame."""

    _fields_ = (
        *(("struct_size", c_size_t), ("extension", POINTER(MetadataExtension)), ("api", POINTER(Api))),
        *(("context", c_void_p), ("stage", c_int), ("args", Buffers), ("results", Buffers)),
        ("attributes", Attributes),
    )


class ErrorCreateArgs(Structure):
    """XLA_FFI_Error_Create_Args."""

    _fields_ = (("struct_size", c_size_t), ("extension", c_void_p), ("message", c_char_p), ("code", c_int))


class StreamGetArgs(Structure):
    """XLA_FFI_Stream_Get_Args."""

    _fields_ = (("struct_size", c_size_t), ("extension", c_void_p), ("context", c_void_p), ("stream", c_void_p))


class DeviceOrdinalGetArgs(Structure):
    """XLA_FFI_DeviceOrdinal_Get_Args."""

    _fields_ = (("struct_size", c_size_t), ("extension", c_void_p), ("context", c_void_p), ("ordinal", c_int32))


Function = ctypes.CFUNCTYPE(c_void_p, c_void_p)
"""The type of every function here, XLA's and ours: the argument is a structure, the result an error or NULL."""
