"""Functions that the compiler leaves as calls: vprintf, __assertfail, malloc and free."""

from __future__ import annotations

import re
import struct
from typing import Any

import numpy as np

from ..arithmetic.numeric import LaneSet, Poison
from ..errors import KernelTrap, MemoryFault
from ..memory.spaces import GENERIC_BASE, space_of
from ..parsing.ir import Instr
from ..state.warp import Warp
from ..translation.codegen import Codegen
from ..translation.registry import Mods, op
from .load_store import make_load, make_store

_CONVERSION = re.compile(r"%([-+ #0]*)(\*|\d+)?(?:\.(\*|\d+))?(hh|h|ll|l|z|j|t)?([diouxXeEfFgGaAcsp%])")
_LONG = ("ll", "l", "z", "j", "t")


def bytes_at(W: Warp, lane: int, address: int, size: int) -> bytes:
    """Return bytes at a generic address of one lane (global, constant, parameter or its local memory)."""
    space = space_of(address)
    offset = address - GENERIC_BASE[space]
    if space == "global":
        return bytes(W.memory.slice(address, size))
    if space == "local":
        start = lane * W.local.size + offset
        return bytes(W.local.bytes[start : start + size])
    buffer = {"param": W.params, "const": W.constants}.get(space)
    if buffer is None or offset + size > buffer.size:
        raise MemoryFault(f"address {address:#x} cannot be read here")
    return bytes(buffer.bytes[offset : offset + size])


def text_at(W: Warp, lane: int, address: int) -> str:
    """Return a zero-terminated string."""
    raw = b""
    while not raw.endswith(b"\0"):
        raw += bytes_at(W, lane, address + len(raw), 1)
    return raw[:-1].decode(errors="replace")


def format_text(W: Warp, lane: int, form: str, arguments: int) -> str:
    """Format as printf does; the arguments lie one after the other, each aligned to its size."""
    at = arguments

    def take(code: str, size: int) -> int | float:
        nonlocal at
        at = -(-at // size) * size
        (value,) = struct.unpack("<" + code, bytes_at(W, lane, at, size))
        at += size
        return value

    def convert(match: re.Match[str]) -> str:
        flags, width, precision, length, kind = match.groups()
        if kind == "%":
            return "%"
        width = str(take("i", 4)) if width == "*" else width or ""
        precision = str(take("i", 4)) if precision == "*" else precision
        spec = f"%{flags}{width}" + ("" if precision is None else f".{precision}")
        if kind == "s":
            return (spec + "s") % text_at(W, lane, int(take("Q", 8)))
        if kind == "c":
            return (spec + "c") % chr(int(take("i", 4)) & 255)
        if kind == "p":
            return (spec + "s") % hex(int(take("Q", 8)))
        if kind in "eEfFgGaA":
            value = float(take("d", 8))
            return value.hex() if kind in "aA" else (spec + kind) % value
        wide = length in _LONG
        signed = kind in "di"
        value = int(take(("q" if signed else "Q") if wide else ("i" if signed else "I"), 8 if wide else 4))
        if length in ("h", "hh"):
            bits = 16 if length == "h" else 8
            value &= (1 << bits) - 1
            value -= (1 << bits) if signed and value >> (bits - 1) else 0
        return (spec + ("d" if kind in "diu" else kind)) % value

    return _CONVERSION.sub(convert, form)


@op("builtin_call", "call", dsts=0)
def _builtin(cg: Codegen, ins: Instr, mods: Mods) -> None:
    if mods.flag("__assertfail"):
        return _assert_fail(cg, ins)
    if mods.flag("malloc"):
        return _malloc(cg, ins)
    if mods.flag("free"):
        return _free(cg, ins)
    mods.flag("vprintf")
    load, store = make_load("local", "u8", 1, ins), make_store("local", "u4", 1, ins)

    def run(
        W: Warp,
        L: LaneSet,
        a: np.ndarray,
        qa: Poison,
        b: np.ndarray,
        qb: Poison,
        *result: Any,
    ) -> None:
        forms, arguments = (load(W, L, place, None)[0] for place in (a, b))
        lanes = range(32) if L is None else L
        try:
            for form, argument, lane in zip(forms, arguments, lanes, strict=True):
                W.launch.printed.append(format_text(W, int(lane), text_at(W, int(lane), int(form)), int(argument)))
        except MemoryFault as error:
            W.fail(MemoryFault, ins, str(error))
        if result:
            store(W, L, result[0], None, np.ones(len(a), "u4"), None)

    return cg.call(run, [(place, "addr64") for place in ins.args], [])


def _assert_fail(cg: Codegen, ins: Instr) -> None:
    """Emit the end of a failed ``assert``: message, file, line and function are its first four arguments."""
    load, number = make_load("local", "u8", 1, ins), make_load("local", "u4", 1, ins)

    def fail(W: Warp, L: LaneSet, *places: Any) -> None:
        lane = 0 if L is None else int(L[0])
        texts = []
        for place in (places[0], places[2], places[6]):
            texts.append(text_at(W, lane, int(load(W, L, place, None)[0][0])))
        line = int(number(W, L, places[4], None)[0][0])
        message, file, function = texts
        W.fail(KernelTrap, ins, f"assertion `{message}` failed at {file}:{line} in {function}", L)

    cg.call(fail, [(place, "addr64") for place in ins.args[:4]], [])


def _malloc(cg: Codegen, ins: Instr) -> None:
    """Emit an allocation for each lane; there is always room."""
    load, store = make_load("local", "u8", 1, ins), make_store("local", "u8", 1, ins)

    def run(W: Warp, L: LaneSet, a: np.ndarray, qa: Poison, b: np.ndarray, qb: Poison) -> None:
        sizes, poison = load(W, L, a, None)
        if poison is not None:
            W.poisoned(poison, ins, "a size", L)
        store(W, L, b, None, np.array([W.memory.grow(int(size)) for size in sizes], "u8"), None)

    cg.call(run, [(place, "addr64") for place in ins.args], [])


def _free(cg: Codegen, ins: Instr) -> None:
    """Emit the end of allocations; later uses are out of bounds."""
    load = make_load("local", "u8", 1, ins)

    def run(W: Warp, L: LaneSet, a: np.ndarray, qa: Poison) -> None:
        addresses, poison = load(W, L, a, None)
        if poison is not None:
            W.poisoned(poison, ins, "an address", L)
        for address in addresses:
            if address and not W.memory.shrink(int(address)):
                what = f"free of {int(address):#x}, which malloc has not returned, or is free already"
                W.fail(MemoryFault, ins, what, L)

    cg.call(run, [(place, "addr64") for place in ins.args], [])
