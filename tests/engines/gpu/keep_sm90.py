"""Machine code for other GPUs than Hopper is dropped from a copy of a CUDA shared object, so that it travels light.

Each fat binary is rewritten in place: its header, then its code for sm_90; where it has none, its newest PTX that such
a GPU can load; where it has neither, its smallest entry, so that it stays well-formed. What follows becomes zeros,
which compress to nothing. Addresses, host code and symbols stay as they were.
"""

from __future__ import annotations

import re
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

CONTAINER = b"\x50\xed\x55\xba"
"""Begins each fat binary."""
PTX, ELF = 1, 2
HOPPER = 90


class Entry(NamedTuple):
    """One piece of code of a fat binary."""

    kind: int
    arch: int
    begin: int
    end: int


def section(path: Path, name: str = ".nv_fatbin") -> tuple[int, int]:
    """Offset and size of a section of a shared object."""
    lines = subprocess.run(["readelf", "-SW", path], capture_output=True, text=True, check=True).stdout.splitlines()
    for line in lines:
        found = re.search(r"\]\s+(\S+)\s+\S+\s+[0-9a-f]+\s+([0-9a-f]+)\s+([0-9a-f]+)", line)
        if found and found[1] == name:
            return int(found[2], 16), int(found[3], 16)
    raise ValueError(f"{path}: got no section {name}, expected one; is it a CUDA library?")


def containers(data: bytes, begin: int, size: int) -> Iterator[tuple[int, int, int, list[Entry]]]:
    """Offset, header size, end and entries of each fat binary."""
    at = begin
    while at < begin + size:
        if data[at : at + 4] != CONTAINER:
            at += 8
            continue
        header, payload = struct.unpack_from("<HQ", data, at + 6)
        stop = at + header + payload
        yield at, header, stop, list(_entries(data, at + header, stop))
        at = stop


def _entries(data: bytes, at: int, stop: int) -> Iterator[Entry]:
    while at < stop:
        kind, _, header, padded = struct.unpack_from("<HHIQ", data, at)
        (arch,) = struct.unpack_from("<I", data, at + 28)
        if kind not in (PTX, ELF):
            raise ValueError(f"offset {at}: got an entry of kind {kind}, expected {PTX} or {ELF}")
        yield Entry(kind, arch, at, at + header + padded)
        at += header + padded


def chosen(entries: list[Entry]) -> list[Entry]:
    """The entry that a Hopper loads; the smallest if it can load none of them."""
    native = [x for x in entries if x.kind == ELF and x.arch == HOPPER]
    portable = sorted((x for x in entries if x.kind == PTX and x.arch <= HOPPER), key=lambda x: x.arch)
    return native or portable[-1:] or [min(entries, key=lambda x: x.end - x.begin)]


def shortened(data: bytes, begin: int, size: int) -> bytes:
    """The file with less code, of the same length."""
    made = bytearray(data)
    for at, header, stop, entries in containers(data, begin, size):
        kept = b"".join(data[x.begin : x.end] for x in chosen(entries))
        made[at + header : stop] = kept + bytes(stop - at - header - len(kept))
        struct.pack_into("<Q", made, at + 8, len(kept))
    return bytes(made)


def shorten(path: Path) -> None:
    """Rewrite a shared object in place."""
    path.write_bytes(shortened(path.read_bytes(), *section(path)))
