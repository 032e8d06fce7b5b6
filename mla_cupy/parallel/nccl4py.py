"""Adapter from nccl4py, NVIDIA's binding of NCCL, to the part of CuPy's interface that `NcclTransport` calls."""

from __future__ import annotations

from typing import Any


class _Communicator:
    """Communicator over nccl4py's low-level bindings; its high-level layer would import PyTorch if installed."""

    def __init__(self, bindings: Any, communicator: Any) -> None:
        self._bindings, self._communicator = bindings, communicator
        self._handle = bindings.Comm(communicator.ptr)
        self.abort = communicator.abort

    def send(self, address: int, count: int, kind: int, other: int, stream: int) -> None:
        self._bindings.send(address, count, kind, other, self._handle, stream)

    def recv(self, address: int, count: int, kind: int, other: int, stream: int) -> None:
        self._bindings.recv(address, count, kind, other, self._handle, stream)


class Nccl4Py:
    """The names of `cupy.cuda.nccl`, over the modules `nccl.core` and `nccl.bindings.nccl`."""

    def __init__(self, core: Any, bindings: Any) -> None:
        self._core, self._bindings = core, bindings
        self.NCCL_UINT8 = int(bindings.DataType.Uint8)
        self.groupStart, self.groupEnd = bindings.group_start, bindings.group_end

    def get_unique_id(self) -> bytes:
        """Identifier by which all ranks of a group meet."""
        return bytes(self._core.get_unique_id())

    def NcclCommunicator(self, world: int, unique: bytes, rank: int) -> _Communicator:  # noqa: N802
        """Communicator on the current device; returns once all ranks have come."""
        made = self._core.Communicator.init(world, rank, self._core.UniqueId.from_bytes(unique))
        return _Communicator(self._bindings, made)


def find() -> Nccl4Py | None:
    """Return nccl4py's adapter if version 0.6 or newer is installed and finds NCCL's library."""
    try:
        from nccl import core
        from nccl.bindings import nccl as bindings
    except ImportError:
        return None
    return Nccl4Py(core, bindings) if getattr(core.get_version(), "libnccl", None) else None
