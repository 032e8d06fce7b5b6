"""Emitters and run-time behaviour of ld and st in every state space."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..arithmetic import undefined
from ..arithmetic.numeric import LaneSet, Poison, constant, count_nonzero
from ..memory.spaces import FIRST_WINDOW, GENERIC_BASE, INIT_ONES, space_of
from ..parsing.ir import SINK, TYPE_BITS, Addr, Instr, Reg, Sym, Vec
from ..state.warp import Warp
from ..synchronisation.strong import SCOPES, Order
from ..translation.cfg import VIEWS
from ..translation.codegen import Codegen
from ..translation.registry import Mods, op
from .async_forms import st_async, st_bulk

_CACHE_HINTS = ("ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc")
_LEVELS = (
    "L1::evict_normal", "L1::evict_unchanged", "L1::evict_first", "L1::evict_last", "L1::no_allocate",
    "L2::evict_normal", "L2::evict_first", "L2::evict_last", "L2::64B", "L2::128B", "L2::256B",
)  # fmt: skip
SPACES = ("global", "shared", "shared::cta", "shared::cluster", "local", "const", "param", "param::entry")


def memory_mods(mods: Mods, atomic: bool = False) -> tuple[str, Order | None]:
    """Take the modifiers common to memory accesses; return the space, and how strong the access is (None: weak)."""
    volatile = mods.flag("volatile") | mods.flag("mmio")
    sem = mods.choose("weak", "relaxed", "acquire", "release", "acq_rel", default="weak")
    scope = mods.choose(*SCOPES, default="sys" if volatile else "gpu")
    space = mods.choose(*SPACES, default="generic")
    for hint in (*_CACHE_HINTS, *_LEVELS):
        mods.flag(hint)
    if sem == "weak" and not volatile and not atomic:
        return space, None
    return space, Order(sem in ("acquire", "acq_rel"), sem in ("release", "acq_rel"), scope)


def vector_count(mods: Mods) -> int:
    """Take .v2/.v4/.v8 and return the number of elements."""
    return int(mods.choose("v2", "v4", "v8", default="v1")[1:])


def resolve_space(cg: Codegen, space: str, address: Addr) -> str:
    """Turn the written state space into the one accessed (a call's .param variables live in local memory)."""
    if space.startswith("param"):
        name = address.base.name if isinstance(address.base, Sym) else None
        return "local" if name in cg.cfg.code.variables else "param"
    return space


_OF_VIEW = {"f4": "f32", "f8": "f64", "u4": "u32", "i4": "s32", "u8": "u64", "i8": "s64"}


def _stored_type(cg: Codegen, items: tuple, type_name: str) -> str:
    """Return the type of a load's bits in which its first register is kept, so that it needs no view later."""
    first = items[0]
    if not isinstance(first, Reg) or first.bits != TYPE_BITS[type_name]:
        return type_name
    return _OF_VIEW.get(cg.cfg.storage[first.index], type_name)


@op("ld ldu", "call")
def _ld(cg: Codegen, ins: Instr, mods: Mods) -> None:
    space, order = memory_mods(mods)
    count, type_name = vector_count(mods), mods.type()
    hint = mods.flag("L2::cache_hint")
    dst, address, *_ = mods.args(3 if hint else 2)
    items = dst.items if isinstance(dst, Vec) else (dst,)
    if len(items) != count:
        mods.fail("vector length differs from the operand")
    space = resolve_space(cg, space, address)
    if type_name == "b128":
        load = make_load(space, "u8", 2 * count, ins, order)

        def run(W: Warp, L: LaneSet, a: np.ndarray, qa: Poison) -> tuple:
            parts = load(W, L, a, qa)
            out = []
            for k in range(0, len(parts), 4):
                out += [np.stack([parts[k], parts[k + 2]], 1), parts[k + 1]]
            return tuple(out)

    else:
        type_name = _stored_type(cg, items, type_name)
        run = make_load(space, VIEWS[type_name], count, ins, order)
    bits = 32 if space.startswith("shared") else 64
    cg.call(run, [(address, f"addr{bits}")], [(item, type_name) for item in items], bits=True)


@op("st", "call", dsts=0)
def _st(cg: Codegen, ins: Instr, mods: Mods) -> None:
    space, order = memory_mods(mods)
    if mods.flag("async") and space != "global":  # st.async.mmio.release to global memory is a store like others here
        return st_async(cg, ins, mods, space)
    if mods.flag("bulk"):
        return st_bulk(cg, ins, mods)
    count, type_name = vector_count(mods), mods.type()
    hint = mods.flag("L2::cache_hint")
    address, value, *_ = mods.args(3 if hint else 2)
    items = list(value.items) if isinstance(value, Vec) else [value]
    if len(items) != count:
        mods.fail("vector length differs from the operand")
    space = resolve_space(cg, space, address)
    code = f"u{TYPE_BITS[type_name] // 8}"
    raw = f"b{TYPE_BITS[type_name]}"
    bits = 32 if space.startswith("shared") else 64
    if type_name == "b128":
        inner = make_store(space, "u8", 2 * count, ins, order)

        def run(W: Warp, L: LaneSet, a: np.ndarray, qa: Poison, *values: Any) -> None:
            halves = []
            for value, poison in zip(values[::2], values[1::2], strict=False):
                halves += [value[:, 0].copy(), poison, value[:, 1].copy(), poison]
            inner(W, L, a, qa, *halves)

    else:
        run = make_store(space, code, count, ins, order)
    return cg.call(run, [(address, f"addr{bits}")] + [(item, raw) for item in items if item is not SINK], [])


def make_load(space: str, code: str, count: int, ins: Instr, order: Order | None = None) -> Callable:
    """Return the run-time function of a load: ``(W, L, address, poison) -> (value, poison, ...)``."""
    if space.startswith("shared"):
        return _load_shared(code, count, ins, space == "shared::cluster", order)
    if space == "global":
        return _load_global(code, count, ins, order)
    if space == "local":
        return _load_local(code, count, ins)
    if space in ("param", "const"):
        return _load_image(space, code, count, ins)
    loaders = {s: make_load(s, code, count, ins, order) for s in ("global", "local", "const", "param")}
    loaders["shared"] = make_load("shared::cluster", code, count, ins, order)

    def generic(W: Warp, L: LaneSet, a: np.ndarray, qa: Poison) -> tuple:
        return by_space(W, L, a, qa, (), loaders, ins, 2 * count)

    return generic


def by_space(
    W: Warp,
    L: LaneSet,
    a: np.ndarray,
    qa: Poison,
    extra: tuple,
    table: dict,
    ins: Instr,
    outputs: int,
) -> tuple | None:
    """Dispatch a generic access by state space; lanes may be in different ones."""
    if qa is not None:
        W.poisoned(qa, ins, "an address", L)
    tops = a >> np.uint64(40)
    if count_nonzero(tops != tops[0]) == 0 or int(a.max()) < FIRST_WINDOW:
        space = space_of(int(a[0]))
        local = a if space == "global" else a - np.uint64(GENERIC_BASE[space])
        if space == "shared":
            local = local.astype("u4")
        return table[space](W, L, local, None, *extra)
    lanes = np.arange(32) if L is None else L
    results: list = [None] * outputs
    for space in {space_of(int(x)) for x in a}:
        pick = np.array([space_of(int(x)) == space for x in a])
        local = a[pick] - np.uint64(GENERIC_BASE[space])
        if space == "shared":
            local = local.astype("u4")
        given = [None if x is None else x[pick] for x in extra]
        part = table[space](W, lanes[pick], local, None, *given)
        for k in range(outputs):
            if results[k] is None:
                dtype = bool if k % 2 else part[k].dtype
                results[k] = np.zeros(len(a), dtype)
            results[k][pick] = False if part[k] is None else part[k]
    return tuple(results) if outputs else None


def _load_shared(code: str, count: int, ins: Instr, remote: bool, order: Order | None) -> Callable:
    width = int(code[1:])
    shift = constant(width.bit_length() - 1, "u4")
    align, wide = constant(width * count - 1, "u4"), width * count > 1
    ones = INIT_ONES[width]
    nonzero = count_nonzero

    def load(W: Warp, L: LaneSet, a: np.ndarray, qa: Poison) -> tuple:
        if qa is not None:
            W.poisoned(qa, ins, "an address", L)
        cta = W.cta
        offset = a - cta.shared_base
        if wide and nonzero(offset & align):
            W.misaligned(ins, a, width * count, L)
        index = (offset >> shift).astype(np.intp)  # gathers by native integers are several times faster
        memory, shadow = cta.shared, cta.shadow
        view, init = memory.view(code), memory.init_view(width)
        try:
            out = []
            for k in range(count):
                at = index + k if k else index
                defined = init[at]
                out += [view[at], None if nonzero(defined == ones) == len(a) else undefined.of_bytes(defined)]
        except IndexError:
            if remote:
                return W.remote_shared(ins, a, L, load, (), 2 * count)
            W.out_of_shared(ins, a, L)
        if shadow is not None:
            W.shared_read(shadow, offset, width, count, ins, order)
        if cta.lanes is not None:
            cta.lanes.read(W, ins, offset, width * count, L)
        W.traffic[0] += len(a) * width * count
        if W.banks is not None:
            W.banks.access(ins, offset, width * count)
        return tuple(out)

    return load


def make_store(space: str, code: str, count: int, ins: Instr, order: Order | None = None) -> Callable:
    """Return the run-time function of a store: ``(W, L, address, poison, value, poison, ...)``."""
    if space.startswith("shared"):
        return _store_shared(code, count, ins, space == "shared::cluster", order)
    if space == "global":
        return _store_global(code, count, ins, order)
    if space == "local":
        return _store_local(code, count, ins)
    if space in ("param", "const"):

        def refuse(W: Warp, L: LaneSet, *args: Any) -> None:
            W.fault(ins, f"store to .{space} memory", L)

        return refuse
    table = {s: make_store(s, code, count, ins, order) for s in ("global", "local", "const", "param")}
    table["shared"] = make_store("shared::cluster", code, count, ins, order)

    def generic(W: Warp, L: LaneSet, a: np.ndarray, qa: Poison, *values: Any) -> None:
        by_space(W, L, a, qa, values, table, ins, 0)

    return generic


def _store_shared(code: str, count: int, ins: Instr, remote: bool, order: Order | None) -> Callable:
    width = int(code[1:])
    shift = constant(width.bit_length() - 1, "u4")
    align, wide = constant(width * count - 1, "u4"), width * count > 1
    ones = INIT_ONES[width]
    nonzero = count_nonzero

    def store(W: Warp, L: LaneSet, a: np.ndarray, qa: Poison, *values: Any) -> Any:
        if qa is not None:
            W.poisoned(qa, ins, "an address", L)
        cta = W.cta
        offset = a - cta.shared_base
        if wide and nonzero(offset & align):
            W.misaligned(ins, a, width * count, L)
        index = (offset >> shift).astype(np.intp)  # gathers by native integers are several times faster
        memory, shadow = cta.shared, cta.shadow
        try:
            view, init = memory.view(code), memory.init_view(width)
            if index.max() + count > len(view):
                raise IndexError
        except IndexError:
            if remote:
                return W.remote_shared(ins, a, L, store, values, 0)
            W.out_of_shared(ins, a, L)
        if shadow is not None:
            W.shared_write(shadow, offset, width, count, ins, order, stored=(view, index, values))
        if cta.lanes is not None:
            cta.lanes.write(W, ins, offset, width * count, L)
        for k in range(count):
            at = index + k if k else index
            value, poison = values[2 * k], values[2 * k + 1]
            view[at] = value
            init[at] = ones if poison is None else undefined.bytes_of(poison, value)
            if shadow is not None and nonzero(view[at] != value):
                W.lane_conflict(ins, a, L, view[at], value)
        W.traffic[1] += len(a) * width * count
        if W.banks is not None:
            W.banks.access(ins, offset, width * count)
        return None

    return store


def _locate(W: Warp, ins: Instr, a: np.ndarray, L: LaneSet, size: int) -> tuple:
    """Return the buffer of lane 0 and the byte offsets of all lanes in it; misalignment is an error."""
    buffer = W.memory.find(int(a[0]))
    if buffer is None:
        W.unmapped(ins, a, L)
    offset = a - np.uint64(buffer.base)
    if size > 1 and count_nonzero(a & np.uint64(size - 1)):
        W.misaligned(ins, a, size, L)
    return buffer, offset


def _several_buffers(W: Warp, a: np.ndarray, buffer: Any) -> bool:
    """Tell whether lanes outside one buffer are in another."""
    outside = (a < np.uint64(buffer.base)) | (a >= np.uint64(buffer.base + buffer.size))
    return any(W.memory.find(int(x)) not in (None, buffer) for x in a[outside])


def by_buffer(W: Warp, L: LaneSet, a: np.ndarray, function: Callable, extra: tuple, outputs: int) -> tuple | None:
    """Run an access once per buffer and merge the results."""
    lanes = np.arange(32) if L is None else L
    owners = [id(W.memory.find(int(x))) for x in a]
    results: list = [None] * outputs
    for owner in dict.fromkeys(owners):
        pick = np.array([each == owner for each in owners])
        given = [None if x is None else x[pick] for x in extra]
        part = function(W, lanes[pick], a[pick], None, *given)
        for k in range(0, outputs, 2):
            if results[k] is None:
                results[k] = np.zeros(len(a), part[k].dtype)
            results[k][pick] = part[k]
    return tuple(results) if outputs else None


def _load_global(code: str, count: int, ins: Instr, order: Order | None) -> Callable:
    width = int(code[1:])
    shift = constant(width.bit_length() - 1, "u8")

    def load(W: Warp, L: LaneSet, a: np.ndarray, qa: Poison) -> tuple:
        if qa is not None:
            W.poisoned(qa, ins, "an address", L)
        buffer, offset = _locate(W, ins, a, L, width * count)
        index = (offset >> shift).view(np.intp)
        view = buffer.view(code)
        if int(offset.max()) + width * count > buffer.size:
            if _several_buffers(W, a, buffer):
                return by_buffer(W, L, a, load, (), 2 * count)
            W.out_of_bounds(ins, buffer, offset, width * count, L)
        out = []
        for k in range(count):
            out += [view[index + k if k else index], None]
        if W.shadows is not None or order is not None:
            W.global_read(buffer, offset, width * count, ins, order)
        W.traffic[2] += len(a) * width * count
        return tuple(out)

    return load


def _store_global(code: str, count: int, ins: Instr, order: Order | None) -> Callable:
    width = int(code[1:])
    shift = constant(width.bit_length() - 1, "u8")

    def store(W: Warp, L: LaneSet, a: np.ndarray, qa: Poison, *values: Any) -> Any:
        if qa is not None:
            W.poisoned(qa, ins, "an address", L)
        for value, poison in zip(values[::2], values[1::2], strict=True):
            if poison is not None and (mask := undefined.narrowed(poison, value)) is not None:
                W.poisoned(mask, ins, "a global store", L)
        buffer, offset = _locate(W, ins, a, L, width * count)
        index = (offset >> shift).view(np.intp)
        view = buffer.view(code)
        if int(offset.max()) + width * count > buffer.size:
            if _several_buffers(W, a, buffer):
                return by_buffer(W, L, a, store, values, 0)
            W.out_of_bounds(ins, buffer, offset, width * count, L)
        if not buffer.writable:
            W.fault(ins, f"store to read-only {buffer.name}", L)
        if W.shadows is not None or order is not None:
            W.global_write(buffer, offset, width * count, ins, order, stored=(view, index, values))
        for k in range(count):
            at = index + k if k else index
            view[at] = values[2 * k]
            if count_nonzero(view[at] != values[2 * k]):
                W.lane_conflict(ins, a, L, view[at], values[2 * k])
        W.traffic[3] += len(a) * width * count
        return None

    return store


def _local_index(W: Warp, ins: Instr, a: np.ndarray, L: LaneSet, width: int, count: int) -> np.ndarray:
    local = W.local
    if int(a.max()) + width * count > local.size:
        W.fault(ins, f"local address {int(a.max()):#x} is outside the thread's {local.size} bytes", L)
    if count_nonzero(a & np.uint64(width * count - 1)):
        W.misaligned(ins, a, width * count, L)
    base = local.lane_base if L is None else local.lane_base[L]
    return ((a + base) >> np.uint64(width.bit_length() - 1)).view(np.intp)


def _load_local(code: str, count: int, ins: Instr) -> Callable:
    width = int(code[1:])
    ones = INIT_ONES[width]

    def load(W: Warp, L: LaneSet, a: np.ndarray, qa: Poison) -> tuple:
        if qa is not None:
            W.poisoned(qa, ins, "an address", L)
        index = _local_index(W, ins, a, L, width, count)
        view, init = W.local.view(code), W.local.init_view(width)
        out = []
        for k in range(count):
            at = index + k
            defined = init[at]
            out += [view[at], undefined.of_bytes(defined) if count_nonzero(defined != ones) else None]
        return tuple(out)

    return load


def _store_local(code: str, count: int, ins: Instr) -> Callable:
    width = int(code[1:])
    ones = INIT_ONES[width]

    def store(W: Warp, L: LaneSet, a: np.ndarray, qa: Poison, *values: Any) -> Any:
        if qa is not None:
            W.poisoned(qa, ins, "an address", L)
        index = _local_index(W, ins, a, L, width, count)
        view, init = W.local.view(code), W.local.init_view(width)
        for k in range(count):
            at = index + k
            view[at] = values[2 * k]
            poison = values[2 * k + 1]
            init[at] = ones if poison is None else undefined.bytes_of(poison, values[2 * k])

    return store


def _load_image(space: str, code: str, count: int, ins: Instr) -> Callable:
    width = int(code[1:])

    def load(W: Warp, L: LaneSet, a: np.ndarray, qa: Poison) -> tuple:
        if qa is not None:
            W.poisoned(qa, ins, "an address", L)
        buffer = W.params if space == "param" else W.constants
        if int(a.max()) + width * count > buffer.size:
            W.out_of_bounds(ins, buffer, a, width * count, L)
        if count_nonzero(a & np.uint64(width - 1)):
            W.misaligned(ins, a, width, L)
        index = (a >> np.uint64(width.bit_length() - 1)).view(np.intp)
        view = buffer.view(code)
        out = []
        for k in range(count):
            out += [view[index + k], None]
        return tuple(out)

    return load
