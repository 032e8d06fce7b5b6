"""Fat binaries for the tests, as nvcc lays them out."""

from __future__ import annotations

import struct


def entry(kind: int, arch: int, data: bytes, flags: int = 0, size: int = 0) -> bytes:
    """Return one entry of a fat binary."""
    padded = data.ljust(-(-len(data) // 8) * 8, b"\0")
    packed = len(data) if flags else 0
    return (
        struct.pack("<HHIQIIHHIIIQQQ", kind, 257, 64, len(padded), packed, 0, 6, 8, arch, 0, 0, flags, 0, size) + padded
    )


def fatbin(*entries: bytes) -> bytes:
    """Return a fat binary of these entries."""
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body
