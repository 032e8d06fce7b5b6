"""Find the CUDA sources, and determine which bytes a kernel is made of.

Includes are written `#include "folder/file.cuh"`, relative to the root of the sources, and nothing else: so the
files that a kernel is made of can be read off the text, handed to NVRTC from memory, and hashed into the cache key.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from mla_cupy.errors import KernelCompileError, explain
from mla_cupy.runtime import env

_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include\b[ \t]*(.*?)[ \t\r]*$", re.MULTILINE)
_QUOTED = re.compile(r'"([^"]+)"(?:\s*//.*|\s*/\*.*)?')


def source_root() -> Path:
    """The directory of the CUDA sources: `MLA_CUPY_CUDA_SRC`, the installed ones, or the checkout's."""
    if given := env.get("CUDA_SRC"):
        root = Path(given)
        if not os.path.isdir(root):  # Path.is_dir raises for a name that is too long
            raise KernelCompileError(explain("MLA_CUPY_CUDA_SRC", repr(given), "a directory of CUDA sources"))
        return root.resolve()
    package = Path(__file__).resolve().parents[1]
    for root in (package / "cuda_src", package.parent / "cuda_src"):
        if root.is_dir():
            return root
    raise KernelCompileError(
        explain("CUDA sources", "none", f"a directory {package / 'cuda_src'}", "install the package again")
    )


def gather(source: str, root: Path | None = None) -> dict[str, bytes]:
    """`source` and every file that it includes, directly or not: root-relative name -> bytes, `source` first.

    Raises
    ------
    KernelCompileError
        If a file is missing, or an include is not of the form `#include "folder/file.cuh"`.
    """
    root = source_root() if root is None else root
    files: dict[str, bytes] = {}
    pending = [(source, "the kernel's specification")]
    while pending:
        name, origin = pending.pop()
        if name in files:
            continue
        files[name] = _read(root, name, origin)
        pending.extend((included, name) for included in reversed(_includes(files[name], name)))
    return files


def digest(files: Mapping[str, bytes]) -> str:
    """SHA-256 over the names and bytes of `files`, in hexadecimal; the order does not matter."""
    total = hashlib.sha256()
    for name in sorted(files):
        total.update(f"{name}\0{len(files[name])}\0".encode())
        total.update(files[name])
    return total.hexdigest()


def _read(root: Path, name: str, origin: str) -> bytes:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "." in path.parts or str(path) != name:
        raise KernelCompileError(
            explain(f"file named in {origin}", repr(name), "a plain path relative to the root of the CUDA sources")
        )
    try:
        return (root / name).read_bytes()
    except OSError as error:
        raise KernelCompileError(
            explain(f"file named in {origin}", f"{name!r} ({error.strerror})", f"a file under {root}")
        ) from error


@functools.lru_cache(maxsize=512)
def _includes(text: bytes, name: str) -> tuple[str, ...]:
    """Files that a text includes; the texts of a process are a few, each read for many builds."""
    found = []
    for operand in _INCLUDE.findall(text.decode("utf-8", "replace")):
        match = _QUOTED.fullmatch(operand)
        if match is None:
            raise KernelCompileError(
                explain(f"include in {name}", operand, '"folder/file.cuh", relative to the root of the CUDA sources')
            )
        found.append(match[1])
    return tuple(found)
