"""Run-time behaviour of asynchronous copies: what they read and write, when, and whom they signal."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np

from ..arithmetic.numeric import LaneSet, count_nonzero
from ..errors import DescriptorError, MemoryFault, PoisonError
from ..memory.spaces import BUFFER_SHIFT, GENERIC_BASE, RANK_SHIFT, space_of
from ..memory.tensormap import Decoded, decode
from ..memory.tma import (
    check_load,
    check_store,
    combine,
    defined_words,
    destination,
    flipped,
    inside_bytes,
    load_tile,
    store_tile,
)
from ..parsing.ir import Instr
from ..state.accesses import Where
from ..state.machine import AsyncOp
from ..state.warp import Warp
from .mbarrier import find, shared_target
from .tensormap_edits import check_fenced

_CLUSTER, _GPU = 2, 3  # how strong reductions are (see Order.strength)


@dataclass(frozen=True)
class TensorTarget:
    """Target of a bulk load: destination, mbarrier, multicast mask, pair group."""

    address: int
    barrier: int
    mask: int | None
    group: int


def read_bytes(W: Warp, ins: Instr, address: int, size: int) -> np.ndarray:
    """Return bytes at a generic address in global, constant or parameter memory."""
    space = space_of(address)
    if space == "global":
        try:
            return W.memory.slice(address, size)
        except MemoryFault as error:
            W.fail(MemoryFault, ins, str(error))
    buffer = {"param": W.params, "const": W.constants}.get(space)
    offset = address - GENERIC_BASE[space]
    if buffer is None or offset + size > buffer.size:
        W.fail(MemoryFault, ins, f"address {address:#x} cannot be read here")
    return buffer.bytes[offset : offset + size]


def tensor_map(W: Warp, ins: Instr, address: int) -> Decoded:
    """Decode the tensor map at an address (a parameter's address may be in its own space)."""
    if address < 1 << BUFFER_SHIFT:
        address += GENERIC_BASE["param"]
    if address % 64:
        W.fail(DescriptorError, ins, f"tensor map address {address:#x} is not a multiple of 64")
    if W.launch.maps:
        check_fenced(W, ins, address)
    try:
        return decode(bytes(read_bytes(W, ins, address, 128)))
    except DescriptorError as error:
        W.fail(DescriptorError, ins, str(error))


def tile_rows(W: Warp, ins: Instr, tmap: Decoded, coords: tuple[int, ...], mode: str) -> list[tuple[int, ...]]:
    """Return the coordinates of each box of a tensor copy, checking that map and instruction fit."""
    if tmap.im2col != mode.startswith("im2col"):
        kind = "an im2col" if tmap.im2col else "a tiled"
        W.fail(DescriptorError, ins, f".{mode} with {kind} tensor map")
    if mode in ("tile::gather4", "tile::scatter4"):
        if tmap.rank != 2 or tmap.box[1] != 1:
            W.fail(DescriptorError, ins, f"{mode[6:]} needs a 2-D map with a box of one row")
        return [(coords[0], r) for r in coords[1:]]
    if len(coords) != tmap.rank:
        W.fail(DescriptorError, ins, f"{len(coords)}-D copy with a map of rank {tmap.rank}")
    return [coords]


def check_inside(W: Warp, ins: Instr, tmap: Decoded, rows: list[tuple[int, ...]]) -> None:
    """Report boxes wholly outside their tensor, where the launch asks for it."""
    if not W.launch.tma_outside:
        return
    for row in rows:
        if not inside_bytes(W.memory, tmap, row).any():
            W.fail(MemoryFault, ins, f"the box at coordinates {row} lies wholly outside its tensor of {tmap.dims}")


def touched_words(
    W: Warp, ins: Instr, tmap: Decoded, rows: list[tuple[int, ...]], offsets: tuple[int, ...] = ()
) -> tuple | None:
    """Return the shadow and words of global memory that tiles cover, when races there are looked for."""
    if W.shadows is None:
        return None
    try:
        return W.shadows.tile_words(tmap, rows, offsets)
    except (DescriptorError, MemoryFault) as error:
        W.fail(type(error), ins, str(error))


def words_of(chunks: np.ndarray) -> np.ndarray:
    """Return the word indices of 16-byte chunks."""
    return (chunks[:, None] * 4 + np.arange(4)).reshape(-1)


class BulkLoad:
    """Copies into shared memory that complete on mbarriers."""

    def __init__(self, W: Warp, ins: Instr) -> None:
        self.W, self.ins = W, ins

    def tensor(
        self, into: TensorTarget, map_address: int, coords: tuple[int, ...], mode: str, offsets: tuple[int, ...] = ()
    ) -> None:
        """Load a tile (or four gathered rows, or a column of pixels) through a tensor map."""
        W, ins = self.W, self.ins
        tmap = tensor_map(W, ins, map_address)
        rows = tile_rows(W, ins, tmap, coords, mode)
        check_inside(W, ins, tmap, rows)
        if into.address % 128:
            W.fail(MemoryFault, ins, f"shared address {into.address:#x} of a tensor copy is not a multiple of 128")
        memory = W.memory

        def read() -> np.ndarray:
            try:
                for row in rows:
                    check_load(tmap, row)
                return np.concatenate([load_tile(memory, tmap, row, offsets) for row in rows])
            except (MemoryFault, DescriptorError) as error:
                W.fail(type(error), ins, str(error))

        touched = touched_words(W, ins, tmap, rows, offsets)
        self._submit(into, tmap.box_bytes * len(rows), tmap.tx_bytes * len(rows), read, tmap, touched)

    def linear(self, into: TensorTarget, source: int, size: int) -> None:
        """Load contiguous bytes."""
        W, ins = self.W, self.ins
        if size % 16 or source % 16 or into.address % 16:
            W.fail(MemoryFault, ins, "a bulk copy's addresses and size must be multiples of 16")
        if size == 0:
            return
        touched = W.shadows.words(source, size) if W.shadows else None
        self._submit(into, size, size, lambda: read_bytes(W, ins, source, size).copy(), None, touched)

    def _submit(
        self,
        into: TensorTarget,
        size: int,
        tx: int,
        read: Callable[[], np.ndarray],
        tmap: Decoded | None = None,
        touched: tuple | None = None,
    ) -> None:
        """Issue the copies, one per destination block; ``touched`` tells the race detector what they read."""
        for address, barrier_address in self._targets(into):
            self._one(address, barrier_address, size, tx, read, tmap, touched)
        self.W.traffic[5] += tx

    def _targets(self, into: TensorTarget) -> list[tuple[int, int]]:
        """Return (destination, mbarrier) addresses, one per destination block."""
        W = self.W
        low = (1 << RANK_SHIFT) - 1
        if into.mask is None:
            same = (into.address - 1024) >> RANK_SHIFT == (into.barrier - 1024) >> RANK_SHIFT
            if not same and into.group != 2:
                W.fail(MemoryFault, self.ins, "destination and mbarrier of a bulk copy are in different blocks")
            return [(into.address, into.barrier)]
        if into.mask >> len(W.cta.cluster.ctas):
            W.fail(MemoryFault, self.ins, f"multicast mask {into.mask:#x} names blocks that do not exist")
        parity = (into.barrier - 1024) >> RANK_SHIFT & 1
        result = []
        for rank in range(16):
            if into.mask >> rank & 1:
                signal = rank if into.group == 1 else (rank & ~1) | parity
                result.append(
                    ((into.address & low) + (rank << RANK_SHIFT), (into.barrier & low) + (signal << RANK_SHIFT))
                )
        return result

    def _one(
        self,
        address: int,
        barrier_address: int,
        size: int,
        tx: int,
        read: Callable,
        tmap: Decoded | None,
        touched: tuple | None,
    ) -> None:
        W, ins = self.W, self.ins
        mode = tmap.swizzle if tmap else 0
        written = defined_words(tmap) if tmap else 0x01010101
        cta, offset = shared_target(W, ins, address, True)
        if offset + size > cta.shared.limit:
            W.fail(MemoryFault, ins, f"{size} bytes at shared byte {offset} exceed the block's {cta.shared.limit}")
        barrier = find(W, ins, barrier_address, asynchronous=True)
        # Swizzles work on the address in the shared window, whose first bytes are the system's.
        chunks = destination(offset + 1024, size, tmap) - 64
        if int(chunks.max()) * 16 + 16 > len(cta.shared.bytes):
            W.fail(MemoryFault, ins, f"a tile at shared byte {offset} exceeds the block's {cta.shared.limit}")
        detector, shadow = W.cta.cluster.detector, cta.shadow
        words = None
        if shadow is not None:
            words = words_of(chunks)
            view = detector.async_view(W.agent)
            detector.async_write(W.agent, view, shadow, words, barrier.agent, Where(W, ins))
        if touched:
            # The source may be overwritten once the mbarrier has completed: the reads carry its clock.
            view = detector.global_view(W.agent)
            detector.async_read(W.agent, view, *touched, barrier.agent, barrier.phase + 1, Where(W, ins))
        memory = cta.shared
        memory.chunks[chunks] = 0xFFFFFFFF
        memory.chunk_init[chunks] = 0
        known = detector.knowledge(W.agent) if detector else None

        def finish() -> None:
            data = read()
            barrier.gather_known(known)
            if not cta.alive:
                W.sync_error(ins, "a bulk copy arrives in a block that has exited")
            memory.chunks[chunks] = flipped(data.view("u4").reshape(-1, 4), chunks, mode)
            memory.chunk_init[chunks] = written
            if shadow is not None:
                detector.finish_write(shadow, words, barrier.agent, barrier.phase + 1)
            barrier.complete_tx(tx)

        W.cta.cluster.submit(None, AsyncOp("bulk load", finish))


class BulkStore:
    """Copies out of shared memory, tracked by bulk groups of the issuing thread."""

    def __init__(self, W: Warp, ins: Instr, lane: int) -> None:
        self.W, self.ins, self.lane = W, ins, lane

    def tensor(self, map_address: int, coords: tuple[int, ...], source: int, reduction: str | None, mode: str) -> None:
        """Store or reduce a tile through a tensor map."""
        W, ins = self.W, self.ins
        tmap = tensor_map(W, ins, map_address)
        rows = tile_rows(W, ins, tmap, coords, mode)
        check_inside(W, ins, tmap, rows)
        if source % 128:
            W.fail(MemoryFault, ins, f"shared address {source:#x} of a tensor copy is not a multiple of 128")
        memory = W.memory
        try:
            for row in rows:
                check_store(tmap, row, reduction)
        except DescriptorError as error:
            W.fail(DescriptorError, ins, str(error))

        def write(data: np.ndarray, defined: np.ndarray) -> None:
            try:
                for index, row in enumerate(rows):
                    part = slice(index * tmap.box_bytes, (index + 1) * tmap.box_bytes)
                    if not defined[part].all() and (~defined[part] & inside_bytes(memory, tmap, row)).any():
                        W.fail(PoisonError, ins, "undefined shared memory reaches global memory")
                    with W.launch.exclusive if reduction else nullcontext():
                        store_tile(memory, tmap, row, data[part], reduction)
            except (MemoryFault, DescriptorError) as error:
                W.fail(type(error), ins, str(error))

        touched = touched_words(W, ins, tmap, rows)
        self._submit(source, tmap.box_bytes * len(rows), tmap, write, touched, _GPU * (reduction is not None))

    def linear(
        self, target: int, source: int, size: int, reduction: str | None, kind: str, mask: int | None = None
    ) -> None:
        """Store or reduce contiguous bytes; bit i of ``mask`` lets byte i of every 16 be written."""
        W, ins = self.W, self.ins
        if size % 16 or source % 16 or target % 16:
            W.fail(MemoryFault, ins, "a bulk copy's addresses and size must be multiples of 16")
        if size == 0:
            return

        wanted = np.ones(size, bool)
        if mask is not None:
            wanted = np.tile((mask >> np.arange(16) & 1).astype(bool), size // 16)

        def write(data: np.ndarray, defined: np.ndarray) -> None:
            if not defined[wanted].all():
                W.fail(PoisonError, ins, "undefined shared memory reaches global memory")
            try:
                into = W.memory.slice(target, size, True)
            except MemoryFault as error:
                W.fail(MemoryFault, ins, str(error))
            if reduction is None:
                into[wanted] = data[wanted]
            else:
                code = f"u{int(kind.lstrip('bfsu').split('x')[0]) // 8}"
                with W.launch.exclusive:
                    into.view(code)[...] = combine(into.view(code), data.view(code), reduction, kind)

        touched = W.shadows.words(target, size) if W.shadows else None
        self._submit(source, size, None, write, touched, _GPU * (reduction is not None))

    def _submit(
        self, source: int, size: int, tmap: Decoded | None, write: Callable, touched: tuple | None, strength: int
    ) -> None:
        """Issue the copy; ``touched`` tells the race detector what it writes, and how strongly."""
        W, ins = self.W, self.ins
        cta, offset = shared_target(W, ins, source, False)
        if offset + size > cta.shared.limit:
            W.fail(MemoryFault, ins, f"{size} bytes at shared byte {offset} exceed the block's {cta.shared.limit}")
        swizzle = tmap.swizzle if tmap else 0
        chunks = destination(offset + 1024, size, tmap) - 64
        if int(chunks.max()) * 16 + 16 > len(cta.shared.bytes):
            W.fail(MemoryFault, ins, f"a tile at shared byte {offset} exceeds the block's {cta.shared.limit}")
        group = bulk_state(W, self.lane)
        group.issued += 1
        detector, shadow = W.cta.cluster.detector, cta.shadow
        if shadow is not None:
            view = detector.async_view(W.agent)
            where = Where(W, ins)
            detector.async_read(W.agent, view, shadow, words_of(chunks), group.agent, group.issued, where)
        if touched:
            writer, where = group.writer, Where(W, ins)
            detector.async_write(W.agent, detector.global_view(W.agent), *touched, writer, where, strength)
        clock = group.issued
        held: list[np.ndarray] = []

        def read() -> None:
            held.append(flipped(cta.shared.chunks[chunks], chunks, swizzle).reshape(-1).view("u1"))
            held.append(cta.shared.chunk_init[chunks].reshape(-1).view("u1") == 1)
            group.read += 1

        def finish() -> None:
            write(*held)
            group.written += 1
            if touched:
                detector.finish_write(*touched, group.writer, clock)

        key = ("bulk", id(W), self.lane)
        W.cta.cluster.submit(key, AsyncOp("bulk store read", read))
        W.cta.cluster.submit(key, AsyncOp("bulk store", finish))
        W.traffic[6] += size


class BulkGroups:
    """Bulk-group bookkeeping of one thread: counts of operations issued, read and written, and group ends."""

    def __init__(self, W: Warp, lane: int) -> None:
        self.issued = self.read = self.written = self.waited = 0
        self.ends: list[int] = []
        detector = W.cta.cluster.detector
        name = f"bulk group of {W.name} lane {lane}"
        self.agent = detector.new_agent(name, False, W.home) if detector else 0
        self.writer = detector.new_agent(name, False, W.home) if detector else 0


def bulk_state(W: Warp, lane: int) -> BulkGroups:
    """Return a thread's bulk groups."""
    key = ("bulk", lane)
    if key not in W.state:
        W.state[key] = BulkGroups(W, lane)
    return W.state[key]


def commit_bulk(W: Warp, L: LaneSet) -> None:
    """cp.async.bulk.commit_group of every active lane that has bulk operations."""
    for lane in range(32) if L is None else L:
        if ("bulk", int(lane)) in W.state or L is not None:
            group = bulk_state(W, int(lane))
            group.ends.append(group.issued)


def wait_bulk(W: Warp, L: LaneSet, keep: int, read: bool) -> None:
    """cp.async.bulk.wait_group: all but the newest ``keep`` groups are done (or only read)."""
    for lane in range(32) if L is None else L:
        group = W.state.get(("bulk", int(lane)))
        if group is None or len(group.ends) <= keep:
            continue
        need = group.ends[len(group.ends) - 1 - keep]
        key = ("bulk", id(W), int(lane))
        done = (lambda g=group, n=need: g.read >= n) if read else (lambda g=group, n=need: g.written >= n)
        W.cta.cluster.drain(key, done)
        group.waited = max(group.waited, need)
        detector = W.cta.cluster.detector
        if detector:
            for agent in (group.agent,) if read else (group.agent, group.writer):
                detector.learn(W.agent, agent, need)


def copy_shared_to_shared(
    W: Warp, ins: Instr, into: TensorTarget, source: int, size: int, reduction: str | None, kind: str
) -> None:
    """Copy (or reduce) a run of this block's shared memory into a block of the cluster."""
    if size % 16 or source % 16 or into.address % 16:
        W.fail(MemoryFault, ins, "a bulk copy's addresses and size must be multiples of 16")
    cta, offset = shared_target(W, ins, source, False)
    target, place = shared_target(W, ins, into.address, True)
    if offset + size > cta.shared.limit or place + size > target.shared.limit:
        W.fail(MemoryFault, ins, f"{size} bytes exceed shared memory")
    barrier = find(W, ins, into.barrier, asynchronous=True)
    if barrier.cta is not target:
        W.fail(MemoryFault, ins, "destination and mbarrier of a bulk copy are in different blocks")
    detector = W.cta.cluster.detector if W.launch.check else None
    read_words = np.arange(offset // 4, (offset + size) // 4)
    words = np.arange(place // 4, (place + size) // 4)
    if detector:
        view, where = detector.async_view(W.agent), Where(W, ins)
        # The source is free once the destination's mbarrier has completed: its reads carry that barrier's clock.
        detector.async_read(W.agent, view, cta.shadow, read_words, barrier.agent, barrier.phase + 1, where)
        strength = _CLUSTER * (reduction is not None)
        detector.async_write(W.agent, view, target.shadow, words, barrier.agent, where, strength)

    def finish() -> None:
        if not target.alive:
            W.sync_error(ins, "a bulk copy arrives in a block that has exited")
        data, defined = cta.shared.bytes[offset : offset + size], cta.shared.init[offset : offset + size]
        out = target.shared.bytes[place : place + size]
        if reduction is None:
            out[...] = data
            target.shared.init[place : place + size] = defined
        else:
            code = f"u{int(kind[1:]) // 8}"
            out.view(code)[...] = combine(out.view(code), data.view(code), reduction, kind)
            target.shared.init[place : place + size] &= defined
        if detector:
            detector.finish_write(target.shadow, words, barrier.agent, barrier.phase + 1)
        barrier.complete_tx(size)

    W.cta.cluster.submit(None, AsyncOp("bulk copy between blocks", finish))


def st_async_together(
    W: Warp, ins: Instr, addresses: np.ndarray, barrier_address: int, data: np.ndarray, poison: np.ndarray,
    reduction: str | None, kind: str,
) -> None:  # fmt: skip
    """Perform st.async or red.async of lanes whose addresses differ, in one block and for one of its mbarriers.

    ``data`` are each lane's bytes [lane, byte]; ``poison`` tells which lanes' are undefined.
    """
    target, _ = shared_target(W, ins, int(addresses[0]), True)
    places = addresses.astype(np.int64) - target.shared.base
    size = data.shape[1]
    bad = (places % size != 0) | (places < 0) | (places + size > target.shared.limit)
    if count_nonzero(bad):
        address = int(addresses[bad][0])
        W.fail(MemoryFault, ins, f"shared address {address:#x} is misaligned or out of range for {size} bytes")
    barrier = find(W, ins, barrier_address, asynchronous=True)
    if barrier.cta is not target:
        W.fail(MemoryFault, ins, "destination and mbarrier of an asynchronous store are in different blocks")
    detector = W.cta.cluster.detector if W.launch.check else None
    words, agent = (places[:, None] // 4 + np.arange((size + 3) // 4)).reshape(-1), barrier.store_agent()
    if detector:
        # The access itself is generic (a reduction is relaxed); only its completion is asynchronous.
        view, where = detector.generic_view(W.agent), Where(W, ins)
        strength = _CLUSTER * (reduction is not None)
        detector.async_write(W.agent, view, target.shadow, words, agent, where, strength)
    index = places[:, None] + np.arange(size)

    def finish() -> None:
        if not target.alive:
            W.sync_error(ins, "an asynchronous store arrives in a block that has exited")
        defined = np.uint8(1) - poison[:, None].astype("u1")
        memory = target.shared
        if reduction is None:
            memory.bytes[index] = data
            memory.init[index] = defined
        else:
            code = f"u{int(kind[1:]) // 8}"
            memory.bytes[index] = combine(memory.bytes[index].view(code), data.view(code), reduction, kind).view("u1")
            memory.init[index] &= defined
        if detector:
            detector.finish_write(target.shadow, words, agent, barrier.phase + 1)
        for _ in range(len(data)):
            barrier.complete_tx(size)

    W.cta.cluster.submit(None, AsyncOp("asynchronous store", finish))
