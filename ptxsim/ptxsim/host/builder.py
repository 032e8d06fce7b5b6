"""Builds the stub libraries with the machine's C compiler, once per version of their sources."""

from __future__ import annotations

import enum
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from ..errors import SimError

VERSIONS = (12, 13)
"""Versions of the CUDA runtime with a stub (``libcudart.so.N``)."""

_SOURCES = Path(__file__).with_name("stub")


class Op(enum.IntEnum):
    """Requests of the stub libraries."""

    HELLO = 1
    UNSUPPORTED = 2
    ERROR = 3
    LOAD = 4
    REGISTER_FUNCTION = 5
    REGISTER_VARIABLE = 6
    SYMBOL = 7
    GET_FUNCTION = 8
    GET_VARIABLE = 9
    ALLOCATE = 10
    FREE = 11
    RANGE = 12
    MEMORY_INFO = 13
    ATTRIBUTE = 14
    PROPERTIES = 15
    FUNCTION_ATTRIBUTES = 16
    FUNCTION_ATTRIBUTE = 17
    SET_FUNCTION_ATTRIBUTE = 18
    PARAMETERS = 19
    LAUNCH = 20
    OCCUPANCY = 21
    CLUSTERS = 22
    TENSOR_TILED = 23
    TENSOR_IM2COL = 24
    TENSOR_ADDRESS = 25


def stub_directory() -> Path:
    """Return the directory of the stub libraries, which are built on first use.

    Raises
    ------
    SimError
        There is no C compiler (``CC``, else ``cc``, ``gcc`` or ``clang``), or it fails.
    """
    sources = sorted(_SOURCES.iterdir())
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources))
    digest.update(repr([*Op]).encode())
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ptxsim"
    final = root / f"stubs-{digest.hexdigest()[:16]}"
    if final.is_dir():
        return final
    compiler = os.environ.get("CC") or next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        raise SimError("running a host program needs a C compiler (cc, gcc or clang; CC names another)")
    root.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=root))
    try:
        _build(compiler, work)
        os.rename(work, final)
    except OSError:
        if not final.is_dir():  # else another process was faster
            raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return final


def _build(compiler: str, out: Path) -> None:
    common = [*compiler.split(), "-std=gnu11", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", f"-I{_SOURCES}"]
    common += [f"-DOP_{op.name}={op.value}" for op in Op]
    driver = [str(_SOURCES / name) for name in ("connection.c", "driver.c")]
    _run([*common, *driver, "-Wl,-soname,libcuda.so.1", "-o", str(out / "libcuda.so.1"), "-lpthread", "-ldl"])
    defined = _SOURCES.joinpath("runtime.c").read_text()
    absent = [name for name in _SOURCES.joinpath("absent.txt").read_text().split() if f" {name}(" not in defined]
    body = '__attribute__((visibility("default"))) int {0}(void) {{ return ptxsim_unsupported("{0}"); }}\n'
    out.joinpath("absent.c").write_text('#include "stub.h"\n' + "".join(map(body.format, absent)))
    for version in VERSIONS:
        name = f"libcudart.so.{version}"
        out.joinpath("versions.map").write_text(f"{name} {{ global: *; }};\n")
        soname = [f"-Wl,-soname,{name}", f"-Wl,--version-script,{out / 'versions.map'}"]
        files = [str(_SOURCES / "runtime.c"), str(out / "absent.c"), str(out / "libcuda.so.1")]
        _run([*common, f"-DCUDART={version}", *files, *soname, "-o", str(out / name)])


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise SimError(f"the stub libraries of host programs cannot be built: {result.stderr.strip()}")
