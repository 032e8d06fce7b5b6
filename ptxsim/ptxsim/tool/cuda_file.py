"""Compiles a CUDA file to PTX for the command line, with the NVRTC of cuda-bindings."""

from __future__ import annotations

import os
import site
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from ..errors import SimError


def toolkit_headers() -> list[Path]:
    """Return the directories of CUDA's own headers: of a toolkit, and of the wheels."""
    homes = [os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    candidates = [Path(home) / "include" for home in homes if home]
    for root in dict.fromkeys((sysconfig.get_paths()["purelib"], *site.getsitepackages())):
        candidates += [Path(root) / "nvidia" / part / "include" for part in ("cuda_runtime", "cu13")]
    return [path for path in candidates if (path / "cuda_runtime.h").exists()][:1]


def compile_cuda(path: Path, arch: str, includes: Sequence[Path] = (), defines: Sequence[str] = ()) -> str:
    """Compile a CUDA file to PTX; its own directory and CUDA's headers are searched too."""
    try:
        from cuda.bindings import nvrtc
    except ImportError:
        raise SimError(
            "compiling CUDA needs the package cuda-bindings, of ptxsim's extra `cuda`; a .ptx file does not"
        ) from None

    error, program = nvrtc.nvrtcCreateProgram(path.read_bytes(), path.name.encode(), 0, None, None)
    options = [f"-arch={arch}", "-std=c++17", "-lineinfo", *(f"-D{each}" for each in defines)]
    options += [f"-I{each}" for each in (*includes, path.parent, *toolkit_headers())]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), [each.encode() for each in options])
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        raise SimError(log.rstrip(b"\0 ").decode())
    _, size = nvrtc.nvrtcGetPTXSize(program)
    text = b" " * size
    nvrtc.nvrtcGetPTX(program, text)
    return text.rstrip(b"\0 ").decode()
