"""A thin ctypes wrapper of NVRTC, and how the library is found.

ctypes and not `cuda.bindings.nvrtc`, because then compiling needs the NVRTC wheel alone, and because both lines
(CUDA 12 and 13) can be used in one process: the tests compile every kernel with both.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mla_cupy.errors import KernelCompileError, explain
from mla_cupy.runtime import elf, env
from mla_cupy.runtime.remedies import INSTALL_NVRTC

OLDEST = (12, 9)
"""The first NVRTC with every target and option that the kernels need."""

_SYSTEM_NAMES = ("libnvrtc.so.{major}", "libnvrtc.so")
_WHEEL_PATHS = {12: "cuda_nvrtc/lib/libnvrtc.so.12", 13: "cu13/lib/libnvrtc.so.13"}
_WHEEL_NAMES = {12: "nvidia-cuda-nvrtc-cu12", 13: "nvidia-cuda-nvrtc"}


@dataclass(frozen=True)
class Output:
    """Results of one compilation: `cubin` and `ptx` are empty where it failed."""

    ok: bool
    log: str
    cubin: bytes
    ptx: bytes


class Nvrtc:
    """One NVRTC library.

    Parameters
    ----------
    path : str
        Of the library; a bare name is looked up by the dynamic linker.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._builtins = _builtins_beside(path)
            self._library = ctypes.CDLL(path)
            self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        except (OSError, AttributeError) as error:
            raise KernelCompileError(
                explain("NVRTC", f"{path} ({error})", "a loadable libnvrtc", INSTALL_NVRTC)
            ) from error
        self.version = self._version()
        if self.version < OLDEST:
            raise KernelCompileError(
                explain(
                    "NVRTC", f"{path}, version {_dotted(self.version)}", f"{_dotted(OLDEST)} or newer", INSTALL_NVRTC
                )
            )

    def compile(self, name: str, source: bytes, headers: Mapping[str, bytes], options: Sequence[str]) -> Output:
        """Compile `source`; `headers` are the files that it may include, by the names it includes them by."""
        program = ctypes.c_void_p()
        names = (ctypes.c_char_p * len(headers))(*(header.encode() for header in headers))
        texts = (ctypes.c_char_p * len(headers))(*headers.values())
        flags = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        self._check("nvrtcCreateProgram", ctypes.byref(program), source, name.encode(), len(headers), texts, names)
        try:
            ok = self._library.nvrtcCompileProgram(program, len(options), flags) == 0
            log = self._text(program, "ProgramLog").rstrip(b"\0").decode("utf-8", "replace").strip()
            cubin = self._text(program, "CUBIN") if ok else b""
            ptx = self._text(program, "PTX").rstrip(b"\0") if ok else b""
        finally:
            self._check("nvrtcDestroyProgram", ctypes.byref(program))
        return Output(ok, log, cubin, ptx)

    def compute_capabilities(self) -> list[int]:
        """Compute capabilities that it compiles for, such as 75 and 100."""
        count = ctypes.c_int()
        self._check("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        found = (ctypes.c_int * count.value)()
        self._check("nvrtcGetSupportedArchs", found)
        return list(found)

    def exact_version(self) -> str:
        """Such as "12.9.86": NVRTC itself tells only the minor version, but it signs the PTX it writes."""
        return exact_version(self.compile("empty.cu", b"", {}, ("-arch=sm_90",)).ptx)

    def _version(self) -> tuple[int, int]:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def _text(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._check(f"nvrtcGet{what}", program, text)
        return text.raw

    def _check(self, function: str, *arguments: object) -> None:
        code = getattr(self._library, function)(*arguments)
        if code != 0:
            name = self._library.nvrtcGetErrorString(code).decode()
            raise KernelCompileError(f"{function} of {self.path} failed: {name}")


@functools.cache
def load(path: str) -> Nvrtc:
    """The library at `path`, loaded once."""
    return Nvrtc(path)


def find_nvrtc() -> str:
    """The path of the NVRTC to use.

    `MLA_CUPY_NVRTC` if set; else an installed NVIDIA wheel of the CUDA line of CuPy or cuda-bindings; else the result
    of cuda-pathfinder (conda, a toolkit); else the result of the dynamic linker.

    Raises
    ------
    KernelCompileError
        If there is none. That it is new enough is checked when it is loaded.
    """
    if given := env.get("NVRTC"):
        if not os.path.isfile(given):  # Path.is_file raises for a name that is too long
            raise KernelCompileError(explain("MLA_CUPY_NVRTC", repr(given), "the path of a libnvrtc"))
        return given
    for path in _candidates():
        return path
    raise KernelCompileError(explain("NVRTC", "none", "an installed libnvrtc", INSTALL_NVRTC))


def identity(path: str) -> str:
    """Identity of this build of NVRTC, found without loading it: for cache keys.

    `nvrtcVersion` returns only the minor version, and loading the library takes 0.1 s; the build id takes no time.

    Raises
    ------
    KernelCompileError
        If the file cannot be read.
    """
    try:
        file = Path(path).resolve()
        stat = file.stat()
        return _identity(str(file), stat.st_size, stat.st_mtime_ns)
    except OSError as error:
        raise KernelCompileError(explain("NVRTC", f"{path} ({error.strerror})", "a readable libnvrtc")) from error


def exact_version(ptx: bytes) -> str:
    """The version of the NVRTC that wrote `ptx`, such as "12.9.86"."""
    match = re.search(rb"Cuda compilation tools, release [\d.]+, V([\d.]+)", ptx)
    return match[1].decode() if match else "unknown"


@functools.cache
def _identity(path: str, size: int, mtime_ns: int) -> str:
    with open(path, "rb") as file:
        try:
            found = elf.build_id(file)
        except ValueError:
            found = ""
        if found:
            return found
        total = hashlib.sha256()
        file.seek(0)
        while block := file.read(1 << 20):
            total.update(block)
    return total.hexdigest()


def _candidates() -> Iterator[str]:
    lines = _lines()
    yield from _wheels(lines)
    yield from _pathfinder()
    yield from _system(lines)


def _lines() -> tuple[int, ...]:
    """The CUDA lines, the one of the installed bindings first: a driver may be too old for cubins of the other."""
    for package, major in (("cupy-cuda12x", 12), ("cupy-cuda13x", 13)):
        if _installed(package):
            return (major, 25 - major)
    return (13, 12) if _installed("cuda-bindings").startswith("13.") else (12, 13)


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _wheels(lines: Sequence[int]) -> Iterator[str]:
    spec = importlib.util.find_spec("nvidia")
    places = list(spec.submodule_search_locations or ()) if spec else []
    for major in sorted(lines, key=_is_too_old):  # a PyTorch pins one, and another may be there, too
        for place in places:
            path = Path(place) / _WHEEL_PATHS[major]
            if path.is_file():
                yield str(path)


def _is_too_old(major: int) -> bool:
    """True if the wheel of a CUDA line is older than `OLDEST`."""
    numbers = re.match(r"(\d+)\.(\d+)", _installed(_WHEEL_NAMES[major]))
    return numbers is not None and (int(numbers[1]), int(numbers[2])) < OLDEST


def _pathfinder() -> Iterator[str]:
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib
    except ImportError:
        return
    try:
        path = load_nvidia_dynamic_lib("nvrtc").abs_path
    except Exception:  # its own kinds of "not found"
        return
    if path:
        yield str(path)


def _system(lines: Sequence[int]) -> Iterator[str]:
    for root in (*env.cuda_roots(), "/usr/local/cuda"):
        toolkit = Path(root) / "lib64" / "libnvrtc.so"
        if toolkit.is_file():
            yield str(toolkit.resolve())
    for major in lines:
        for name in _SYSTEM_NAMES:
            if path := _linked(name.format(major=major)):
                yield path


def _builtins_beside(path: str) -> list[ctypes.CDLL]:
    """Load the libraries that NVRTC opens by name: the wheel of 13.0 does not find those in its own folder."""
    folder = Path(path).parent
    return [ctypes.CDLL(str(found)) for found in folder.glob("libnvrtc-builtins.so.*")] if folder.is_absolute() else []


def _linked(name: str) -> str:
    """The file that the dynamic linker loads for `name`, or ""."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return ""
    with open("/proc/self/maps") as maps:
        files = {line.split(maxsplit=5)[5].strip() for line in maps if "libnvrtc.so" in line}
    return min(files, default="")


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
