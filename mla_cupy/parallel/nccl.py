"""Partial results through NCCL: one all-to-all, then `merge_states`."""

from __future__ import annotations

import json
import math
from typing import Any

from mla_cupy import arrays
from mla_cupy.dtypes import TABLE
from mla_cupy.errors import DeviceError, ParallelError, explain
from mla_cupy.ops.merge import merge_states
from mla_cupy.parallel import nccl4py
from mla_cupy.parallel.group import Group, weakly
from mla_cupy.parallel.transport import OfGroup, Result, check_alike, heads_per_rank

_BY_HEAD = {4: (2, 0, 1, 3), 3: (1, 0, 2)}
"""Axes of outs and of lses with heads first, so that the data for one rank is contiguous."""
_STATES = {5: (0, 2, 3, 1, 4), 4: (0, 2, 1, 3)}
"""The inverse permutations, after the axis of the ranks."""


class NcclTransport(OfGroup):
    """GPUs that NCCL connects, on one host or several; one process, or one thread, per GPU.

    Needs CuPy with NCCL, or nccl4py. Ranks first compare a call of new shapes through the group; after
    that the host does not wait, and the exchange can be captured in a CUDA graph. Calls must be the same, in the same
    order, on every rank. Use it from one thread and one stream at a time; it keeps a receive buffer for every shape.

    Parameters
    ----------
    group : Group
        A `Rendezvous`, or a member of a `LocalGroup`; it exchanges NCCL's unique id once.
    device : int, optional
        CUDA ordinal. Default: CuPy's current device.
    """

    def __init__(self, group: Group, *, device: int | None = None) -> None:
        self._nccl: Any = arrays.cupy_family().nccl() or nccl4py.find()
        if self._nccl is None:
            wheel = "the wheel nvidia-nccl-cu12 or nvidia-nccl-cu13"
            remedy = f"install NCCL for CuPy ({wheel}) or nccl4py 0.6 or later, or use PeerTransport"
            raise ParallelError(explain("NCCL", "none", "cupy.cuda.nccl or nccl4py", remedy))
        super().__init__(group)
        self._device = arrays.cupy_family().current_device() if device is None else device
        uid = self._nccl.get_unique_id() if group.rank == 0 else ()
        # CuPy before 14 returns bytes as signed characters, so the numbers may be negative.
        shared = group.gather(bytes(x & 0xFF for x in uid))[0]
        with arrays.cupy_family().on_device(self._device):
            self._communicator = self._join(shared)
        group.on_loss(weakly(self._abort))
        self._aborted = False
        self._received: dict[Any, Any] = {}  # kept because CUDA graphs may still use them
        self._compared: set[bytes] = set()

    def _join(self, unique: bytes) -> Any:
        """Make an NCCL communicator: CuPy 14 accepts the identifier as bytes, earlier versions as signed numbers."""
        world, rank = self._group.world, self._group.rank
        try:
            return self._nccl.NcclCommunicator(world, unique, rank)
        except TypeError:
            signed = tuple(x - 256 if x > 127 else x for x in unique)
            return self._nccl.NcclCommunicator(world, signed, rank)

    def check(self) -> None:
        """Raise ParallelError if another rank is gone."""
        super().check()
        if self._aborted:
            raise ParallelError(explain("the transport", "aborted", "all ranks at work", "start all of them anew"))

    def merge(self, outs: Any, lses: Any, result: Result) -> tuple[Any, Any]:
        """See `Transport.merge`."""
        self.check()
        family = arrays.common_family({"outs": outs, "lses": lses})
        if not family.on_gpu:
            raise DeviceError(explain("outs", f"an array of {family.name} on the CPU", "one on the GPU"))
        native = family.native
        outs, lses = family.adopt(outs), family.adopt(lses)
        view = native.view(outs)
        handle = native.current_stream(view.device) if result.stream is None else arrays.stream_handle(result.stream)
        heads_per_rank(view.shape, native.view(lses).shape, self.world)
        self._compare(json.dumps([view.shape, view.dtype, result.lse_options.lse_base]).encode())
        received = self._all_to_all(native, (outs, lses), view.device, handle)
        states = [native.transposed(x, _STATES[len(native.view(x).shape)]) for x in received]
        out, lse = merge_states(*states, **result._replace(stream=handle).arguments)
        family.settle((outs, lses))
        return family.release(out), family.release(lse)

    def _compare(self, call: bytes) -> None:
        """Compare each new call once, because NCCL waits forever if ranks exchange different numbers of bytes."""
        if call not in self._compared:
            check_alike(self._group.gather(call), self.rank)
            self._compared.add(call)

    def _all_to_all(self, native: arrays.Native, given: tuple[Any, Any], device: int, stream: int) -> list[Any]:
        """Exchange data: returns every rank's values of this rank's heads, (world, heads, ...)."""
        nccl, world = self._nccl, self.world
        received, pieces = [], []
        for x in given:
            send = native.contiguous(native.transposed(x, _BY_HEAD[len(native.view(x).shape)]), stream)
            view = native.view(send)
            shape = (world, view.shape[0] // world, *view.shape[1:])
            key = type(send), shape, view.dtype
            if key not in self._received:
                self._received[key] = native.empty(shape, view.dtype, device, stream)
            made = self._received[key]
            nbytes = TABLE[view.dtype].nbytes * math.prod(shape[1:])
            received.append(made)
            pieces.append((send, view.ptr, native.address(made), nbytes))
        nccl.groupStart()
        for _, source, target, nbytes in pieces:
            for other in range(world):
                self._communicator.send(source + other * nbytes, nbytes, nccl.NCCL_UINT8, other, stream)
                self._communicator.recv(target + other * nbytes, nbytes, nccl.NCCL_UINT8, other, stream)
        nccl.groupEnd()
        return received

    def _abort(self) -> None:
        self._aborted = True
        self._communicator.abort()
