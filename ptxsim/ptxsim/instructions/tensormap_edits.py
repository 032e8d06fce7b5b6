"""Emitters of tensormap.replace and tensormap.cp_fenceproxy: tensor maps that a kernel edits, and their proxy."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np

from ..arithmetic.numeric import LaneSet, Poison, count_nonzero
from ..errors import DescriptorError, MemoryFault, SyncError
from ..memory.spaces import GENERIC_BASE, space_of
from ..memory.tensormap import _FORMAT as FORMAT
from ..memory.tensormap import MAGIC
from ..parsing.ir import Imm, Instr
from ..state.warp import Warp
from ..translation.codegen import Codegen
from ..translation.registry import Mods, op

_SIZE = 128
_MODE, _RANK, _FILL, _ADDRESS = 3, 2, 4, 6
_ARRAYS = {"global_dim": (7, 5), "global_stride": (12, 4), "box_dim": (16, 5), "element_stride": (21, 5)}
"""Offsets and numbers of entries of the per-dimension fields in the unpacked map."""

_SINGLE = ("global_address", "rank", "elemtype", "interleave_layout", "swizzle_mode", "swizzle_atomicity", "fill_mode")
_TYPES = (0, 1, 2, 3, 4, 5, 6, 7, 10, 8, 9, 11, 12, 13, 14, 15)
"""CUtensorMapDataType of each value of the field elemtype (ISA: tensormap.replace)."""


def replaced(raw: bytes, field: str, index: int, value: int) -> bytes:
    """Return a tensor map with one field replaced; all zeros count as an empty map.

    Parameters
    ----------
    raw : bytes
        A map as :func:`~..memory.tensormap.encode_tiled` makes it.
    field : str
        Name of the field, as in the instruction.
    index : int
        Dimension, for fields that have one value each.
    value : int
        The new value in the instruction's encoding.
    """
    if raw[:8] != MAGIC:
        if any(raw):
            raise DescriptorError("this tensor map was not encoded with ptxsim.encode_tiled")
        raw = struct.pack(FORMAT, MAGIC, 0, 1, 0, 0, False, 0, *(0,) * 9, *(1,) * 10, *(0,) * 6).ljust(_SIZE, b"\0")
    fields = list(struct.unpack_from(FORMAT, raw))
    if field in _ARRAYS:
        start, count = _ARRAYS[field]
        if not 0 <= index < count:
            raise DescriptorError(f"dimension {index} of .{field} does not exist")
        fields[start + index] = value - 1 if field == "global_dim" else value
    elif field == "global_address":
        fields[_ADDRESS] = value
    elif field == "rank":
        fields[_RANK] = value + 1
    elif field == "elemtype":
        if value >= len(_TYPES):
            raise DescriptorError(f"element type {value} is unknown")
        fields[1] = _TYPES[value]
    elif field == "fill_mode":
        fields[_FILL] = value
    elif field == "interleave_layout":
        if value:
            raise DescriptorError("interleaved layouts are not modelled")
    else:
        fields[_MODE] = _swizzle(fields[_MODE], field, value)
    try:
        return struct.pack(FORMAT, *fields).ljust(_SIZE, b"\0")
    except struct.error as error:
        raise DescriptorError(f"value {value} does not fit .{field}") from error


def _swizzle(mode: int, field: str, value: int) -> int:
    """Return the swizzle with its span (none, 32, 64, 128 B) or its atom (16, 32, 32 with a flip, 64 B) replaced."""
    span, atom = min(mode, 3), max(0, mode - 3)
    if value > 3:
        raise DescriptorError(f"value {value} of .{field} is unknown")
    if field == "swizzle_mode":
        return value + atom if value == 3 else value
    if value and span != 3:
        raise DescriptorError("wide swizzle atoms need the 128-byte swizzle")
    return span + value


def map_bytes(W: Warp, ins: Instr, address: int) -> np.ndarray:
    """Return the 128 bytes of a map at a generic address in this block's shared memory or in global memory."""
    if address % 64:
        W.fail(DescriptorError, ins, f"tensor map address {address:#x} is not a multiple of 64")
    if space_of(address) == "shared":
        offset = address - GENERIC_BASE["shared"] - int(W.cta.shared_base)
        if not 0 <= offset <= W.cta.shared.limit - _SIZE:
            W.fail(MemoryFault, ins, f"the tensor map at {address:#x} is outside the block's shared memory")
        return W.cta.shared.bytes[offset : offset + _SIZE]
    try:
        return W.memory.slice(address, _SIZE, write=True)
    except MemoryFault as error:
        W.fail(MemoryFault, ins, str(error))


def edited(W: Warp, address: int) -> None:
    """Remember that a map in global memory has changed: its users need an acquiring proxy fence."""
    maps = W.launch.maps
    maps[address] = maps.get(address, 0) + 1


def check_fenced(W: Warp, ins: Instr, address: int) -> None:
    """Refuse the use of a map in global memory that was edited since the last acquiring fence on it before this.

    The fence may be another warp's of the block, if a barrier or the like orders it before the use. It then lies on the
    path of base causality order from the edit to the use, which is all that the ISA's memory consistency model asks of
    a fence between proxies. In another block it does not count: proxies belong to a block.
    """
    version = W.launch.maps.get(address, 0)
    if not version:
        return
    detector = W.cta.cluster.detector
    fences = W.home.state.get("maps", {}).get(address, {}).items()
    current = [(agent, clock) for agent, (seen, clock) in fences if seen >= version]
    if any(agent == W.agent or not detector or detector.knows(W.agent, agent) >= clock for agent, clock in current):
        return
    why = f"the tensor map at {address:#x} was edited; no fence.proxy.tensormap::generic.acquire makes that visible"
    if current:
        why += " here (another warp's fence has, and nothing orders it before this)"
    W.bend("tensormap-fence", SyncError, ins, why)


def acquire_maps(W: Warp, address: np.ndarray) -> None:
    """fence.proxy.tensormap::generic.acquire of some maps."""
    maps = W.home.state.setdefault("maps", {})
    detector = W.cta.cluster.detector
    clock = int(detector.V[W.agent, W.agent]) if detector else 0
    for each in {int(a) for a in address}:
        maps.setdefault(each, {})[W.agent] = W.launch.maps.get(each, 0), clock


@op("tensormap", "call", dsts=0)
def _tensormap(cg: Codegen, ins: Instr, mods: Mods) -> None:
    if mods.flag("cp_fenceproxy"):
        return _copy(cg, ins, mods)
    mods.choose("replace")
    mods.choose("tile")
    field = mods.choose(*_SINGLE, *_ARRAYS)
    space = mods.choose("global", "shared::cta", default="generic")
    mods.choose("b1024")
    type_name = mods.type("b32", "b64")
    address, *rest = mods.args(3 if field in _ARRAYS else 2)
    if field in _ARRAYS and not isinstance(rest[0], Imm):
        mods.fail("the dimension must be an immediate")
    index = rest[0].value if field in _ARRAYS else 0
    base = GENERIC_BASE["shared"] if space == "shared::cta" else 0

    def run(W: Warp, L: LaneSet, a: np.ndarray, qa: Poison, v: np.ndarray, qv: Poison) -> None:
        for q in (qa, qv):
            if q is not None:
                W.poisoned(q, ins, "a tensor map", L)
        for lane in range(len(a)):
            place = int(a[lane]) + base
            data = map_bytes(W, ins, place)
            try:
                data[:] = np.frombuffer(replaced(bytes(data), field, index, int(v[lane])), np.uint8)
            except DescriptorError as error:
                W.fail(DescriptorError, ins, str(error))
            if space_of(place) == "global":
                edited(W, place)
            else:
                _touch(W, ins, place, W.shared_write)

    sources = [(address, "addr32" if base else "addr64"), (rest[-1], type_name)]
    return cg.call(run, sources, [])


def _touch(W: Warp, ins: Instr, place: int, tell: Callable) -> None:
    """Tell the race detector about a map in shared memory, which stays defined."""
    offset = place - GENERIC_BASE["shared"] - int(W.cta.shared_base)
    W.cta.shared.init[offset : offset + _SIZE] = 1
    if W.cta.shadow is not None:
        tell(W.cta.shadow, np.array([offset], "u4"), 4, _SIZE // 4, ins)


def _copy(cg: Codegen, ins: Instr, mods: Mods) -> None:
    """Emit tensormap.cp_fenceproxy: a map from shared to global memory, released to the tensor-map proxy."""
    for name in ("global", "shared::cta", "tensormap::generic", "release"):
        mods.choose(name)
    mods.choose("cta", "cluster", "gpu", "sys")
    mods.choose("sync")
    mods.choose("aligned")
    target, source, size = mods.args(3)
    if not isinstance(size, Imm) or size.value != _SIZE:
        mods.fail("copies 128 bytes")

    def run(W: Warp, L: LaneSet, a: np.ndarray, qa: Poison, s: np.ndarray, qs: Poison) -> None:
        for q in (qa, qs):
            if q is not None:
                W.poisoned(q, ins, "an address", L)
        if L is not None or count_nonzero(a != a[0]) or count_nonzero(s != s[0]):
            W.sync_error(ins, "all lanes of the warp must name the same maps", L)
        place = int(s[0]) + GENERIC_BASE["shared"]
        data = map_bytes(W, ins, place)
        _touch(W, ins, place, W.shared_read)
        map_bytes(W, ins, int(a[0]))[:] = data
        edited(W, int(a[0]))

    return cg.call(run, [(target, "addr64"), (source, "addr32")], [])
