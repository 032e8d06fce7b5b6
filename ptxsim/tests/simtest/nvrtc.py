"""Compiles CUDA sources to PTX through the NVRTC wheels, without a GPU."""

from __future__ import annotations

import ctypes
import functools
import site
import sysconfig
from pathlib import Path

import pytest

KERNELS = Path(__file__).parent / "kernels"
_NAMES = {12: "cuda_nvrtc/lib/libnvrtc.so.12", 13: "cu13/lib/libnvrtc.so.13"}


@functools.cache
def library(major: int) -> ctypes.CDLL | None:
    """Return the NVRTC library of a CUDA major version, or None."""
    roots = {*site.getsitepackages(), sysconfig.get_paths()["purelib"]}
    for root in roots:
        path = Path(root) / "nvidia" / _NAMES[major]
        if path.exists():
            return ctypes.CDLL(str(path))
    return None


def available() -> list[int]:
    """Return the CUDA major versions whose NVRTC is installed."""
    return [major for major in _NAMES if library(major) is not None]


@functools.cache
def compile_ptx(source: str, arch: str = "sm_90a", major: int | None = None, defines: tuple[str, ...] = ()) -> str:
    """Compile CUDA source to PTX; skips the test when no NVRTC is installed."""
    majors = available()
    if not majors or (major is not None and major not in majors):
        pytest.skip("NVRTC is not installed")
    lib = library(major or majors[0])
    program = ctypes.c_void_p()
    lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
    virtual = arch.replace("sm_", "compute_")  # gives the same PTX, and does not assemble it
    options = [f"-arch={virtual}", "-std=c++17", f"-I{KERNELS}", *(f"-D{d}" for d in defines)]
    array = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
    status = lib.nvrtcCompileProgram(program, len(options), array)
    size = ctypes.c_size_t()
    if status:
        lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        lib.nvrtcGetProgramLog(program, log)
        raise RuntimeError(log.value.decode())
    lib.nvrtcGetPTXSize(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    lib.nvrtcGetPTX(program, text)
    lib.nvrtcDestroyProgram(ctypes.byref(program))
    return text.value.decode()


def kernel_ptx(name: str, arch: str = "sm_90a", major: int | None = None, defines: tuple[str, ...] = ()) -> str:
    """Compile a file of ``kernels/``."""
    return compile_ptx((KERNELS / name).read_text(), arch, major, defines)
