"""PTX is found in fat binaries, however they are compressed."""

from __future__ import annotations

import ctypes
import ctypes.util
import struct

import pytest

from ptxsim.host.fatbin import FatbinError, lz4_block, ptx_images
from simtest.fatbins import entry, fatbin

TEXT = b".version 8.6\n.target sm_90a\n.address_size 64\n" + b"// the same words again and again\n" * 40


def literals(data: bytes) -> bytes:
    """Return an LZ4 sequence of literals only."""
    head = bytes([min(len(data), 15) << 4])
    left = len(data) - 15
    while left >= 0:
        head += bytes([min(left, 255)])
        left -= 255
    return head + data


def lz4(data: bytes, start: int, period: int) -> bytes:
    """Compress data that repeats its last ``period`` bytes from ``start`` on, ending in five literals."""
    count = len(data) - 5 - start
    head = literals(data[:start])
    extra = count - 4 - 15
    match = struct.pack("<H", period) + b"\xff" * (extra // 255) + bytes([extra % 255])
    return bytes([head[0] | 15]) + head[1:] + match + literals(data[-5:])


def zstd(data: bytes) -> bytes:
    name = ctypes.util.find_library("zstd")
    if name is None:
        pytest.skip("needs libzstd")
    library = ctypes.CDLL(name)
    library.ZSTD_compress.restype = ctypes.c_size_t
    out = ctypes.create_string_buffer(len(data) + 1000)
    size = library.ZSTD_compress(out, ctypes.c_size_t(len(out)), data, ctypes.c_size_t(len(data)), 3)
    return out.raw[:size]


def test_lz4() -> None:
    period = len(b"// the same words again and again\n")
    packed = lz4(TEXT, len(TEXT) - 39 * period, period)
    assert len(packed) < len(TEXT) / 4
    assert lz4_block(packed, len(TEXT)) == TEXT
    assert lz4_block(literals(TEXT), len(TEXT)) == TEXT
    with pytest.raises(FatbinError, match="damaged"):
        lz4_block(packed[:-9], len(TEXT))
    with pytest.raises(FatbinError, match="damaged"):
        lz4_block(b"\x0f\x09\x00\x09", 40)


def test_entries() -> None:
    machine = entry(2, 90, b"\x7fELF")
    image = fatbin(machine, entry(1, 90, TEXT + b"\0"), entry(1, 100, TEXT.replace(b"90a", b"100a")))
    assert [arch for arch, _ in ptx_images(image)] == [90, 100]
    assert next(text for _, text in ptx_images(image)) == TEXT.decode()
    assert [*ptx_images(fatbin(machine))] == []
    assert [*ptx_images(TEXT + b"\0")] == [(90, TEXT.decode())]


def test_compressed() -> None:
    period = len(b"// the same words again and again\n")
    packed = lz4(TEXT, len(TEXT) - 39 * period, period)
    small = zstd(TEXT)
    image = fatbin(entry(1, 90, packed, 0x2000, len(TEXT)), entry(1, 100, small, 0x8000, len(TEXT)))
    assert [text for _, text in ptx_images(image)] == [TEXT.decode()] * 2
    with pytest.raises(FatbinError, match="damaged"):
        [*ptx_images(fatbin(entry(1, 90, small[:-6], 0x8000, len(TEXT))))]


@pytest.mark.parametrize(
    ("image", "reason"), [(b"\x7fELF" + bytes(60), "machine code"), (b"hello" * 9, "neither PTX nor"), (b"", "neither")]
)
def test_refused(image: bytes, reason: str) -> None:
    with pytest.raises(FatbinError, match=reason):
        [*ptx_images(image)]
