"""Finds the PTX in host programs: in fat binaries, compressed or not, or as plain text."""

from __future__ import annotations

import ctypes
import ctypes.util
import struct
from collections.abc import Iterator
from functools import cache

_MAGIC = 0xBA55ED50
_PTX = 1
_LZ4, _ZSTD = 0x2000, 0x8000
_ENTRY = struct.Struct("<HHIQIIHHIIIQQQ")
"""Kind, version, header bytes, padded bytes, compressed bytes, options, minor, major, architecture, name, its length,
flags, reserved, uncompressed bytes."""


class FatbinError(ValueError):
    """An image holds no PTX that can be read."""


def ptx_images(image: bytes) -> Iterator[tuple[int, str]]:
    """Yield architecture (90, 100, ...) and text of every PTX in an image.

    Raises
    ------
    FatbinError
        The image is none, holds machine code only, or is compressed in a way that cannot be read here.
    """
    if image[:4] == b"\x7fELF":
        raise FatbinError("a cubin holds machine code, which cannot be simulated; load PTX")
    if len(image) < 16 or struct.unpack_from("<I", image)[0] != _MAGIC:
        text = image.split(b"\0", 1)[0].decode("utf-8", "replace")
        if ".version" not in text:
            raise FatbinError("an image is neither PTX nor a fat binary")
        yield architecture(text), text
        return
    at = 0
    while at + 16 <= len(image) and struct.unpack_from("<I", image, at)[0] == _MAGIC:
        head, body = struct.unpack_from("<HQ", image, at + 6)
        yield from _entries(image[at + head : at + head + body])
        at += head + body


def _entries(body: bytes) -> Iterator[tuple[int, str]]:
    at = 0
    while at + _ENTRY.size <= len(body):
        kind, _, head, padded, packed, _, _, _, arch, _, _, flags, _, size = _ENTRY.unpack_from(body, at)
        data = body[at + head : at + head + padded]
        if kind == _PTX:
            if flags & _ZSTD:
                data = zstd_frame(data[:packed], size)
            elif flags & _LZ4:
                data = lz4_block(data[:packed], size)
            yield arch, data.split(b"\0", 1)[0].decode("utf-8", "replace")
        at += head + padded


def architecture(text: str) -> int:
    """Return the number in a PTX text's ``.target`` (90 of sm_90a)."""
    for line in text.splitlines():
        if line.strip().startswith(".target"):
            digits = "".join(c for c in line.split("sm_")[1].split(",")[0] if c.isdigit())
            return int(digits)
    raise FatbinError("a PTX text has no .target")


def lz4_block(data: bytes, size: int) -> bytes:
    """Decode one LZ4 block of a known decoded size."""
    out = bytearray()
    try:
        _lz4_sequences(data, size, out)
    except IndexError:
        out.clear()
    if len(out) != size:
        raise FatbinError("the LZ4 data of a fat binary is damaged")
    return bytes(out)


def _lz4_sequences(data: bytes, size: int, out: bytearray) -> None:
    """Append each sequence's output: literals, then (except for the last) a repetition of earlier bytes."""
    at = 0
    while len(out) < size:
        token = data[at]
        count, at = _extended(data, at + 1, token >> 4)
        out += data[at : at + count]
        at += count
        if len(out) >= size:
            return
        distance = data[at] | data[at + 1] << 8
        count, at = _extended(data, at + 2, token & 15)
        if not 0 < distance <= len(out):
            return
        period = bytes(out[-distance:])
        out += (period * (-(-(count + 4) // distance)))[: count + 4]


def _extended(data: bytes, at: int, count: int) -> tuple[int, int]:
    """Read a length's further bytes, each 255 until the last."""
    if count == 15:
        while data[at] == 255:
            count, at = count + 255, at + 1
        count, at = count + data[at], at + 1
    return count, at


@cache
def _libzstd() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(ctypes.util.find_library("zstd") or "libzstd.so.1")
    except OSError:
        raise FatbinError(
            "this program's PTX is compressed with zstd, and there is no libzstd here: install it, or build the "
            "program with nvcc --no-compress"
        ) from None
    library.ZSTD_decompress.restype = ctypes.c_size_t
    library.ZSTD_decompress.argtypes = (ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t)
    return library


def zstd_frame(data: bytes, size: int) -> bytes:
    """Decode a zstd frame of a known decoded size, with the system's libzstd."""
    out = ctypes.create_string_buffer(size)
    if _libzstd().ZSTD_decompress(out, size, data, len(data)) != size:
        raise FatbinError("the zstd data of a fat binary is damaged")
    return out.raw
