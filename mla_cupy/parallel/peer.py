"""Exchange through peer memory: one launch merges pieces, stores into the other GPUs, and merges again."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from mla_cupy import arrays
from mla_cupy.arrays import Family, View
from mla_cupy.dtypes import TABLE, name_of
from mla_cupy.errors import ArgumentError, DeviceError, DTypeError, ParallelError, ShapeError, explain
from mla_cupy.kernels.merge import exchange
from mla_cupy.kernels.merge.exchange import MAILBOX, MAX_WORLD, REPORT, STATE, UNSPLIT, Exchange, Splits
from mla_cupy.kernels.pipeline import Launch, Layout, Prepared
from mla_cupy.ops import overlap
from mla_cupy.ops.checks import check_lse, is_integer
from mla_cupy.parallel.group import Group, LocalGroup, check_timeout, weakly
from mla_cupy.parallel.transport import OfGroup, Result, heads_per_rank
from mla_cupy.runtime import device as devices

_CHUNK = exchange.CHUNK_BYTES
_FAILURES = {
    1: "has not sent its part in time",
    2: "has made another call: other shapes, dtypes or lse_base",
    3: "was waited for when another rank was gone",
}


class _Own(NamedTuple):
    """Memory of a rank; each array owns its allocation."""

    slabs: Any
    flags: Any
    states: Any
    mailboxes: Any
    report: tuple[np.ndarray[Any, Any], int]


class PeerTransport(OfGroup):
    """GPUs of one host that reach each other's memory; one process, or one thread, per GPU.

    After a decode one launch stores each rank's partial results into the others' memory, waits for theirs and merges.
    If the decode has a plan, that launch also merges the split requests and replaces the decode's own
    merge. The host takes no part, so it can be captured in a CUDA graph. Waits are bounded: after a timeout, a rank
    returns NaN from then on, and the next call or `check` says why.

    Parameters
    ----------
    group : Group
        A `Rendezvous`, or a member of a `LocalGroup`; it exchanges memory handles once.
    device : int, optional
        CUDA ordinal. Default: CuPy's current device.
    max_rows : int
        Largest b * s_q * h_q / world of a call.
    max_d : int
        Largest width of the values.
    timeout : float
        Seconds that a kernel waits for the other ranks.

    Raises
    ------
    ArgumentError
        If a size does not fit.
    UnsupportedDeviceError, ParallelError
        If the GPUs do not reach each other, or are not on one host.

    Notes
    -----
    It allocates a little over 2 * world * (max_rows * (4 * max_d + 16) + 2^15) bytes; an exchange uses half of them.
    """

    def __init__(
        self,
        group: Group,
        *,
        device: int | None = None,
        max_rows: int = 4096,
        max_d: int = 512,
        timeout: float = 10.0,
    ) -> None:
        for name, size in {"max_rows": max_rows, "max_d": max_d}.items():
            if not is_integer(size) or size < 1:
                raise ArgumentError(explain(name, repr(size), "an integer of at least 1"))
        self._timeout_ns = int(check_timeout(timeout) * 1e9)
        super().__init__(group)
        if group.world > MAX_WORLD:
            raise ArgumentError(explain("world", group.world, f"at most {MAX_WORLD}"))
        self._cupy = arrays.cupy_family()
        self._device = self._cupy.current_device() if device is None else device
        self._slab = exchange.slab_bytes(max_rows, -(-max_d // 4) * 4)
        self._own = self._allocate()
        self._report = self._own.report[0].view(REPORT)
        self._prepared: dict[Hashable, Prepared] = {}
        self._meet()
        group.on_loss(weakly(self._abort))

    @classmethod
    def for_devices(cls, devices: Sequence[int], **options: Any) -> list[PeerTransport]:
        """Make one transport per device, all in this process; one thread may make the calls of all ranks in turn.

        `options` are the options of the class. A rank's call completes only once all ranks have made it.
        """
        group = LocalGroup(len(devices))

        def make(rank: int) -> PeerTransport:
            return cls(group.member(rank), device=devices[rank], **options)

        with ThreadPoolExecutor(len(devices)) as threads:
            return list(threads.map(make, range(len(devices))))

    def check(self) -> None:
        """Raise ParallelError if another rank is gone, or an earlier exchange has failed."""
        failure = int(self._report["failure"][0])
        if failure:
            what, rank, epoch = _FAILURES.get(failure & 0xFF, "has failed"), failure >> 8 & 0xFF, failure >> 32
            remedy = "start all ranks anew"
            raise ParallelError(explain(f"exchange {epoch}", f"rank {rank} {what}", "the same call of all", remedy))
        super().check()

    def merge(self, outs: Any, lses: Any, result: Result) -> tuple[Any, Any]:
        """See `Transport.merge`."""
        return self.merge_splits(outs, lses, UNSPLIT, result)

    def merge_splits(self, outs: Any, lses: Any, splits: Splits, result: Result) -> tuple[Any, Any]:
        """See `MergesSplits.merge_splits`."""
        self.check()
        family = arrays.common_family(
            {"outs": outs, "lses": lses, "out": result.out, "lse": result.lse}, ("out", "lse")
        )
        if not family.on_gpu:
            raise DeviceError(explain("outs", f"an array of {family.name} on the CPU", "one on the GPU"))
        native, lent = family.native, [family.adopt(outs), family.adopt(lses)]
        views = [native.view(lent[0], "outs"), native.view(lent[1], "lses")]
        handle = native.current_stream(self._device) if result.stream is None else arrays.stream_handle(result.stream)
        call = self._call(views[0], views[1], result)
        made = self._results(family, call, views[0].dtype, result, handle)
        views += [native.view(x) for x in made]
        overlap.check_apart(dict(zip(("outs", "lses", "out", "lse"), views, strict=True)), ["out", "lse"])
        key = (call, splits[3:], tuple(view._replace(ptr=0) for view in views), result.lse_options)
        if key not in self._prepared:
            self._prepared[key] = self._prepare(call, views, splits, result, handle)
        own = self._own
        shared = own.mailboxes.ptr, own.states.ptr, own.report[1]
        self._prepared[key].enqueue([0, *(view.ptr for view in views), *splits[:3], *shared], 0, handle)
        family.settle((*lent, *made))
        if family.count_writes is not None:
            family.count_writes([x for x in (result.out, result.lse) if x is not None])
        kept = [x if x is not None else family.release(y) for x, y in zip((result.out, result.lse), made, strict=True)]
        return kept[0], kept[1]

    # ---- Setting up ----------------------------------------------------------------------------------------------

    def _allocate(self) -> _Own:
        world, cupy = self._group.world, self._cupy
        own = _Own(
            slabs=cupy.own_memory(exchange.slabs_bytes(world, self._slab), self._device),
            flags=cupy.own_memory(flags := exchange.flags_bytes(world), self._device),
            states=cupy.own_memory(STATE.itemsize, self._device),
            mailboxes=cupy.own_memory(world * MAILBOX.itemsize, self._device),
            report=cupy.host_memory(REPORT.itemsize),
        )
        self._write(own.flags.ptr, np.zeros(flags, np.uint8))
        self._write(own.states.ptr, np.zeros(STATE.itemsize, np.uint8))
        return own

    def _write(self, address: int, data: np.ndarray[Any, Any]) -> None:
        """Copy to the GPU, and wait for the copy."""
        self._cupy.write(address, np.ascontiguousarray(data), self._device)

    def _meet(self) -> None:
        """Learn where the other ranks keep their slabs and flags."""
        cupy, own = self._cupy, self._own
        me = {
            "host": f"{socket.gethostname()} {_boot()}",
            "process": os.getpid(),
            "device": self._device,
            "slab": self._slab,
            "blocks": exchange.max_blocks(devices.describe(self._device).sm_count),
            "memory": [own.slabs.ptr, own.flags.ptr],
        }
        members = [json.loads(payload) for payload in self._group.gather(json.dumps(me).encode())]
        for rank, member in enumerate(members):
            if member["host"] != me["host"]:
                remedy = "use NcclTransport across hosts"
                raise ParallelError(explain("the group", f"rank {rank} on another host", "one host", remedy))
            if member["slab"] != self._slab:
                raise ParallelError(explain("max_rows, max_d", f"others on rank {rank}", "the same on all ranks"))
        self._max_blocks = min(member["blocks"] for member in members)
        local = [member["device"] for member in members if member["process"] == me["process"]]
        cupy.open_peers(self._device, local)
        # Not every system can share memory between processes; a single process needs no sharing.
        alone = len(local) == self.world
        handles = [] if alone else [cupy.share(x).hex() for x in (own.slabs, own.flags)]
        shared = [json.loads(payload) for payload in self._group.gather(json.dumps(handles).encode())]
        mailboxes = np.zeros(self.world, MAILBOX)
        for rank, member in enumerate(members):
            if member["process"] == me["process"]:
                mailboxes[rank] = tuple(member["memory"])
            else:
                mailboxes[rank] = tuple(cupy.open_shared(bytes.fromhex(x), self._device) for x in shared[rank])
        self._write(own.mailboxes.ptr, mailboxes.view(np.uint8))
        self._group.gather(b"ready")  # no rank writes a flag before it is zero

    def _abort(self) -> None:
        self._report["abort"][0] = 1

    # ---- Calls ---------------------------------------------------------------------------------------------------

    def _call(self, outs: View, lses: View, result: Result) -> Exchange:
        heads = heads_per_rank(outs.shape, lses.shape, self.world)
        b, s_q, _, d = outs.shape
        if lses.dtype != "float32":
            raise DTypeError(explain("lses.dtype", lses.dtype, "float32"))
        if outs.dtype not in ("float32", "bfloat16", "float16"):
            raise DTypeError(explain("outs.dtype", outs.dtype, "float32, bfloat16 or float16"))
        if {outs.device, lses.device} != {self._device}:
            raise DeviceError(explain("outs' device", outs.device, f"{self._device}, the transport's"))
        if 0 not in outs.shape and not _in_chunks(outs):
            raise ShapeError(explain("outs.strides", outs.strides, f"a start, rows and steps of {_CHUNK} bytes"))
        lse_base, _ = check_lse(*result.lse_options)
        call = Exchange(self.world, b, s_q, heads, d, outs.dtype, lse_base, self._max_blocks)
        if call.slab_bytes > self._slab:
            got = f"b * s_q * h_q / world = {call.rows} rows of {d} {outs.dtype}"
            expected = f"at most {self._slab} bytes with {_CHUNK} for each slice of a row"
            raise ShapeError(explain("outs", got, expected, "make the transport with more max_rows"))
        return call

    def _results(self, family: Family, call: Exchange, dtype: str, result: Result, stream: int) -> list[Any]:
        """Check the caller's output arrays, or make new ones."""
        native = family.native
        shapes = ((call.b, call.s_q, call.heads, call.d), (call.b, call.heads, call.s_q))
        wanted = name_of(result.out_dtype) if result.out_dtype is not None else dtype
        made = []
        for name, given, shape in zip(("out", "lse"), (result.out, result.lse), shapes, strict=True):
            arrays.check_writable(family, {name: given})
            if given is None:
                made.append(native.empty(shape, wanted if name == "out" else "float32", self._device, stream))
                continue
            lent = family.adopt(given)
            view = native.view(lent, name)
            if view.shape != shape or view.device != self._device:
                expected = f"{shape} on device {self._device}"
                raise ShapeError(explain(f"{name}", f"{view.shape} on device {view.device}", expected))
            allowed = ("float32",) if name == "lse" else ("float32", "bfloat16", "float16")
            if view.dtype not in allowed:
                raise DTypeError(explain(f"{name}.dtype", view.dtype, " or ".join(allowed)))
            if name == "out" and view.strides[3] != 1:
                raise ShapeError(explain("out.strides", view.strides, "a contiguous last axis"))
            made.append(lent)
        return made

    def _prepare(self, call: Exchange, views: list[View], splits: Splits, result: Result, stream: int) -> Prepared:
        steps = [] if not call.rows else [self._launch(call, views, splits, result)]
        return Prepared(steps, exchange.ADDRESSES, Layout({}), devices.describe(self._device), stream)

    def _launch(self, call: Exchange, views: list[View], splits: Splits, result: Result) -> Launch:
        grid_of_one = [view._replace(shape=(1, *view.shape), strides=(0, *view.strides)) for view in views]
        return exchange.launch(
            call,
            (grid_of_one[0], grid_of_one[1], grid_of_one[2], grid_of_one[3]),
            result.lse_options,
            slab=self._slab,
            timeout_ns=self._timeout_ns,
            rank=self.rank,
            splits=splits,
        )


def _in_chunks(outs: View) -> bool:
    """True if every row of `outs` is whole, aligned chunks."""
    steps = (outs.shape[3], *outs.strides[:3])
    return outs.strides[3] == 1 and not any(
        x % _CHUNK for x in (outs.ptr, *(TABLE[outs.dtype].nbytes * y for y in steps))
    )


def _boot() -> str:
    """Boot identifier, which distinguishes hosts of the same name; "" if the system has none."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""
