"""The rules of the CUDA sources, read from their text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from mla_cupy.kernels import KERNELS
from mla_cupy.selftest import catalog

#: From the bottom up: a header may include headers of its own folder and of those before it.
HEADERS = ("common", "ptx", "tile", "trace", "attention")
#: The folders with kernels: one per family of operations, the probes', and `attention`, shared by families.
FAMILIES = tuple(
    dict.fromkeys(kernel.source.partition("/")[0] for kernel in (*KERNELS.values(), *catalog.KERNELS.values()))
)

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
_ASM = re.compile(r"\b(?:asm|__asm__)\b")
_KERNEL = re.compile(r"\b__global__\b")
_ENTRY = re.compile(r'extern "C" __global__ void[^;{]*?\b(mla_\w+)\(')
_NAMESPACE = re.compile(r"^namespace ([\w:]+) \{", re.MULTILINE)
_MACRO = re.compile(r"\bMLA_\w+")
_CONSTANT = re.compile(r"\bconstexpr \w+ (k[A-Z]\w*)")
_TYPE = re.compile(r"^(?:struct|enum(?: class)?)(?: alignas\(\w+\))? ([A-Z]\w*)", re.MULTILINE)
_FUNCTION = re.compile(r"^MLA_DEVICE [^(;=]*?\b([a-z]\w*)\(", re.MULTILINE)
#: Declarations of a file itself: member functions, parameters and members, further constants of a declaration, aliases.
_LOCAL = re.compile(
    r"^ +MLA_DEVICE [^(;=]*?\b(\w+)\(|\b(?:i32|u32|bool|class) (\w+)|, (k[A-Z]\w*) =|^using (\w+) =", re.MULTILINE
)
_USE = re.compile(r"(?<![\w.>:])(?:(k[A-Z]\w*|[A-Z]\w*)\b|([a-z]\w*)(?=\(|<))")
_DEFINED = re.compile(r"^\s*#\s*define\s+(MLA_\w+)", re.MULTILINE)


def violations(root: Path, entries: dict[str, str]) -> list[str]:
    """Violations of the rules; `entries` is source -> entry of every registered kernel."""
    files = {path.relative_to(root).as_posix(): path for path in sorted(root.rglob("*.cu*"))}
    found = [f"{source}: registered, but not there" for source in entries if source not in files]
    texts = {name: _COMMENT.sub("", path.read_text()) for name, path in files.items()}
    own = {macro for name, text in texts.items() if name.endswith(".cuh") for macro in _DEFINED.findall(text)}
    for name, text in texts.items():
        found.extend(f"{name}: {why}" for why in _of_any(name, text, set(files)))
        found.extend(
            f"{name}: {why}"
            for why in (_of_kernel(name, text, entries) if name.endswith(".cu") else _of_header(name, text, own))
        )
    return found + _undeclared(texts) + _cycles(files)


def includes(text: str) -> list[str]:
    return _INCLUDE.findall(_COMMENT.sub("", text))


def namespaces(name: str) -> list[str]:
    """The namespaces that a file may open: its folder's and, in a family, one within it for its instructions."""
    *folders, stem = name.removesuffix(".cuh").removesuffix(".cu").split("/")
    if folders[0] in ("common", "ptx", "tile", "trace"):
        return ["mla"]
    space = "::".join(["mla", *folders])
    arch = stem.partition("_")[0]
    return [space, f"{space}::{arch}"] if re.fullmatch(r"sm\d+|mma", arch) else [space]


def _of_any(name: str, text: str, files: set[str]) -> Iterator[str]:
    folder, inner = name.partition("/")[0], name.rpartition("/")[0]
    for included in includes(text):
        other = included.partition("/")[0]
        if included not in files:
            yield f"includes {included}, which is not there"
        elif not included.endswith(".cuh"):
            yield f"includes {included}, which is not a header"
        elif folder in HEADERS and (other not in HEADERS or HEADERS.index(other) > HEADERS.index(folder)):
            yield f"includes {included}, from a layer above"
        elif other not in HEADERS and not f"{inner}/".startswith(f"{(home := included.rpartition('/')[0])}/"):
            yield f"includes {included}, which is private to {home}"
    if _ASM.search(text) and folder != "ptx":
        yield "asm outside ptx/"
    if any(space not in namespaces(name) for space in _NAMESPACE.findall(text)):
        yield "a namespace other than " + " or ".join(namespaces(name))


def _of_kernel(name: str, text: str, entries: dict[str, str]) -> Iterator[str]:
    if name.partition("/")[0] not in FAMILIES:
        yield "a kernel outside " + ", ".join(FAMILIES)
    names = _ENTRY.findall(text)
    if len(names) != 1 or len(_KERNEL.findall(text)) != 1:
        yield f'{len(_KERNEL.findall(text))} kernels, {len(names)} of them extern "C" mla_*, instead of one'
    elif entries.get(name) != names[0]:
        yield f"its entry {names[0]} is registered as {entries.get(name, 'nothing')}"


def _of_header(name: str, text: str, own: set[str]) -> Iterator[str]:
    if name.partition("/")[0] not in (*HEADERS, *FAMILIES):
        yield "a header outside " + ", ".join((*HEADERS, *FAMILIES))
    if text.count("#pragma once") != 1:
        yield "no #pragma once"
    if _KERNEL.search(text):
        yield "a kernel in a header"
    # No kernel includes what is in trace/, so none can give it parameters: a traced build's macros do.
    if not name.startswith("trace/") and (read := sorted(set(_MACRO.findall(text)) - own)):
        yield f"reads {', '.join(read)}: a header is configured by template parameters"


def _undeclared(texts: dict[str, str]) -> list[str]:
    """Names of headers that a file uses without including one that declares them, itself or by way of others.

    A compiler does not look into a template that nothing instantiates, so that a header compiles alone is not enough.
    """
    headers = [name for name in texts if name.endswith(".cuh")]
    declared = {
        name: {found for what in (_CONSTANT, _TYPE, _FUNCTION) for found in what.findall(texts[name])} for name in texts
    }
    found = []
    for name, text in texts.items():
        reached, pending = {name}, [name]
        while pending:
            new = {other for other in includes(texts[pending.pop()]) if other in texts} - reached
            reached |= new
            pending.extend(new)
        known = {local for names in _LOCAL.findall(text) for local in names}
        known.update(*(declared[other] for other in reached))
        for use in sorted({constant or function for constant, function in _USE.findall(text)} - known):
            if homes := [header for header in headers if use in declared[header]]:
                found.append(f"{name}: uses {use}, of {' or '.join(homes)}, which it does not include")
    return found


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
