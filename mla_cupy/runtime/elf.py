"""Read just enough of a 64-bit little-endian ELF file: symbols and code of a cubin, the build id of a library."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_NOTE = struct.Struct("<III")
_ATTRIBUTE = struct.Struct("<BBH")  # format, attribute, value or size of the data
_PER_SYMBOL = struct.Struct("<II")

_SYMTAB, _NOTES, _NO_BITS, _CUDA_INFO = 2, 7, 8, 0x70000000
_SIZED, _REGISTER_COUNT = 4, 0x2F  # of attributes
_FUNCTION, _ENTRY = 2, 0x10
_GNU_BUILD_ID = 3
_MAX_NOTES = 1 << 16


@dataclass(frozen=True)
class _Section:
    kind: int
    offset: int
    size: int
    link: int


@dataclass(frozen=True)
class Symbol:
    """A symbol with its bytes; `data` is empty where the file holds none, `is_entry` marks a kernel."""

    name: str
    data: bytes
    is_entry: bool


@dataclass(frozen=True)
class Entry:
    """A kernel in a cubin: its machine code, including its callees, and its registers per thread."""

    name: str
    code: bytes
    registers: int


def symbols(image: bytes) -> list[Symbol]:
    """The symbols of a cubin.

    Raises
    ------
    ValueError
        If it is not one.
    """
    try:
        return list(_symbols(image))
    except (struct.error, IndexError) as error:
        raise ValueError(f"a broken ELF file ({error})") from error


def entries(cubin: bytes) -> list[Entry]:
    """The kernels of a cubin.

    Raises
    ------
    ValueError
        If it is not one.
    """
    try:
        return list(_kernels(cubin))
    except (struct.error, IndexError, KeyError) as error:
        raise ValueError(f"a broken ELF file ({error})") from error


def build_id(file: BinaryIO) -> str:
    """The GNU build id of a library, or ""; reads a few hundred bytes only.

    Raises
    ------
    ValueError
        If it is no library.
    """
    try:
        return _build_id(file)
    except (struct.error, OverflowError) as error:
        raise ValueError(f"a broken ELF file ({error})") from error


def _symbols(image: bytes) -> Iterator[Symbol]:
    for sections, strings, entry in _symbol_entries(image):
        yield _symbol(image, sections, strings, entry)


def _symbol_entries(image: bytes) -> Iterator[tuple[list[_Section], bytes, tuple[int, ...]]]:
    sections = _sections(image[: _HEADER.size], lambda offset, size: image[offset : offset + size])
    for table in (section for section in sections if section.kind == _SYMTAB):
        names = sections[table.link]
        strings = image[names.offset : names.offset + names.size]
        for entry in _SYMBOL.iter_unpack(image[table.offset : table.offset + table.size]):
            yield sections, strings, entry


def _kernels(image: bytes) -> Iterator[Entry]:
    for number, (sections, strings, entry) in enumerate(_symbol_entries(image)):
        symbol = _symbol(image, sections, strings, entry)
        if symbol.is_entry:
            section = sections[entry[3]]
            code = image[section.offset : section.offset + section.size]
            yield Entry(symbol.name, code, dict(_register_counts(image, sections))[number])


def _register_counts(image: bytes, sections: list[_Section]) -> Iterator[tuple[int, int]]:
    """Registers of a thread by number of symbol."""
    for section in (section for section in sections if section.kind == _CUDA_INFO):
        at, end = section.offset, section.offset + section.size
        while at < end:
            form, attribute, value = _ATTRIBUTE.unpack_from(image, at)
            at += _ATTRIBUTE.size
            if form == _SIZED:
                if attribute == _REGISTER_COUNT:
                    yield _PER_SYMBOL.unpack_from(image, at)
                at += value


def _build_id(file: BinaryIO) -> str:

    def read(offset: int, size: int) -> bytes:
        file.seek(offset)
        return file.read(size)

    for section in _sections(read(0, _HEADER.size), read):
        if section.kind == _NOTES and section.size <= _MAX_NOTES:
            note = read(section.offset, section.size)
            name_size, size, kind = _NOTE.unpack_from(note)
            start = _NOTE.size + (name_size + 3) // 4 * 4
            if kind == _GNU_BUILD_ID and note[_NOTE.size :].startswith(b"GNU\0"):
                return note[start : start + size].hex()
    return ""


def _sections(header: bytes, read: Callable[[int, int], bytes]) -> list[_Section]:
    if len(header) < _HEADER.size or header[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    fields = _HEADER.unpack(header)
    offset, entry_size, count = fields[6], fields[11], fields[12]
    if entry_size != _SECTION.size:
        raise ValueError(f"section headers of {entry_size} bytes")
    table = _SECTION.iter_unpack(read(offset, entry_size * count))
    return [_Section(row[1], row[4], row[5], row[6]) for row in table]


def _symbol(image: bytes, sections: list[_Section], strings: bytes, entry: tuple[int, ...]) -> Symbol:
    name_at, info, other, index, value, size = entry
    name = strings[name_at : strings.index(b"\0", name_at)].decode()
    kind = info & 0xF
    data = b""
    if 0 < index < len(sections) and kind != _FUNCTION and sections[index].kind != _NO_BITS:
        start = sections[index].offset + value
        data = image[start : start + size]
    return Symbol(name, data, kind == _FUNCTION and bool(other & _ENTRY))
