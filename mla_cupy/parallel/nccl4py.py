"""nccl4py, NVIDIA's binding of NCCL, in the form of CuPy's: as much as `NcclTransport` calls."""

from __future__ import annotations

from typing import Any


class _Communicator:
    """Sends by nccl4py's layer of plain addresses: the layer above it imports PyTorch where it is installed."""

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
    """nccl4py, where a version of at least 0.6 is installed and finds NCCL's library."""
    try:
        from nccl import core
        from nccl.bindings import nccl as bindings
    except ImportError:
        return None
    return Nccl4Py(core, bindings) if getattr(core.get_version(), "libnccl", None) else None
