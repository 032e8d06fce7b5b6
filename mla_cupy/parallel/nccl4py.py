"""nccl4py, NVIDIA's binding of NCCL, in the form of CuPy's: as much as `NcclTransport` calls."""

from __future__ import annotations

from typing import Any


class _Memory:
    """GPU memory, as nccl4py takes it."""

    def __init__(self, address: int, count: int, typestr: str) -> None:
        place = {"data": (address, False), "shape": (count,), "strides": None}
        self.__cuda_array_interface__ = {**place, "typestr": typestr, "version": 3}


class _Communicator:
    def __init__(self, communicator: Any) -> None:
        self._communicator = communicator
        self.abort = communicator.abort

    def send(self, address: int, count: int, kind: str, other: int, stream: int) -> None:
        if count:  # nothing has no address
            self._communicator.send(_Memory(address, count, kind), other, stream=stream)

    def recv(self, address: int, count: int, kind: str, other: int, stream: int) -> None:
        if count:
            self._communicator.recv(_Memory(address, count, kind), other, stream=stream)


class Nccl4Py:
    """The names of `cupy.cuda.nccl`, over the module `nccl.core`."""

    NCCL_UINT8 = "|u1"

    def __init__(self, core: Any) -> None:
        self._core = core
        self.groupStart, self.groupEnd = core.group_start, core.group_end

    def get_unique_id(self) -> bytes:
        """What all ranks of a group need to meet."""
        return bytes(self._core.get_unique_id())

    def NcclCommunicator(self, world: int, unique: bytes, rank: int) -> _Communicator:  # noqa: N802
        """On the current device; returns once all ranks have come."""
        return _Communicator(self._core.Communicator.init(world, rank, self._core.UniqueId.from_bytes(unique)))


def find() -> Nccl4Py | None:
    """nccl4py, where a version of at least 0.6 is installed and finds NCCL's library."""
    try:
        from nccl import core
    except ImportError:
        return None
    return Nccl4Py(core) if getattr(core.get_version(), "libnccl", None) else None
