"""The rules of the CUDA sources, read from their text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

#: From the bottom up: a header may include headers of its own folder and of those before it.
HEADERS = ("common", "ptx", "tile", "attention")
KERNELS = ("generic", "sm90", "sm100")

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
_ASM = re.compile(r"\b(?:asm|__asm__)\b")
_KERNEL = re.compile(r"\b__global__\b")
_ENTRY = re.compile(r'extern "C" __global__ void[^;{]*?\b(mla_\w+)\(')


def violations(root: Path, entries: dict[str, str]) -> list[str]:
    """What breaks the rules; `entries` is source -> entry of every registered kernel."""
    files = {path.relative_to(root).as_posix(): path for path in sorted(root.rglob("*.cu*"))}
    found = [f"{source}: registered, but not there" for source in entries if source not in files]
    for name, path in files.items():
        text = _COMMENT.sub("", path.read_text())
        found.extend(f"{name}: {why}" for why in _of_any(name, text, set(files)))
        found.extend(
            f"{name}: {why}" for why in (_of_kernel if name.endswith(".cu") else _of_header)(name, text, entries)
        )
    return found + _cycles(files)


def includes(text: str) -> list[str]:
    return _INCLUDE.findall(_COMMENT.sub("", text))


def _of_any(name: str, text: str, files: set[str]) -> Iterator[str]:
    folder = name.partition("/")[0]
    for included in includes(text):
        other = included.partition("/")[0]
        if included not in files:
            yield f"includes {included}, which is not there"
        elif other not in HEADERS:
            yield f"includes {included}, which is not a header"
        elif folder in HEADERS and HEADERS.index(other) > HEADERS.index(folder):
            yield f"includes {included}, from a layer above"
    if _ASM.search(text) and folder != "ptx":
        yield "asm outside ptx/"


def _of_kernel(name: str, text: str, entries: dict[str, str]) -> Iterator[str]:
    if name.partition("/")[0] not in KERNELS:
        yield "a kernel outside " + ", ".join(KERNELS)
    names = _ENTRY.findall(text)
    if len(names) != 1 or len(_KERNEL.findall(text)) != 1:
        yield f'{len(_KERNEL.findall(text))} kernels, {len(names)} of them extern "C" mla_*, instead of one'
    elif entries.get(name) != names[0]:
        yield f"its entry {names[0]} is registered as {entries.get(name, 'nothing')}"


def _of_header(name: str, text: str, entries: dict[str, str]) -> Iterator[str]:
    if name.partition("/")[0] not in HEADERS:
        yield "a header outside " + ", ".join(HEADERS)
    if text.count("#pragma once") != 1:
        yield "no #pragma once"
    if _KERNEL.search(text):
        yield "a kernel in a header"


def _cycles(files: dict[str, Path]) -> list[str]:
    """Headers of one folder may include each other, but not in a circle."""
    graph = {name: [other for other in includes(path.read_text()) if other in files] for name, path in files.items()}
    done: set[str] = set()
    found: list[str] = []

    def walk(name: str, above: tuple[str, ...]) -> None:
        if name in above:
            found.append(f"{name}: includes itself by way of {' -> '.join(above[above.index(name) :])}")
        elif name not in done:
            for other in graph[name]:
                walk(other, (*above, name))
            done.add(name)

    for name in graph:
        walk(name, ())
    return found
