"""Report of versions and paths, as data: for `mla-cupy info` and for bug reports."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

from mla_cupy._version import __version__
from mla_cupy.errors import KernelCompileError
from mla_cupy.runtime import admission, cache, device, env, nvrtc

_PACKAGES = (
    "numpy",
    "ml_dtypes",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "cuda-bindings",
    "nvidia-cuda-nvrtc-cu12",
    "nvidia-cuda-nvrtc",
    "torch",
    "triton",
    "jax",
    "vllm",
    "sglang",
)


def report() -> dict[str, Any]:
    """Versions, NVRTC, GPUs, the cache, admitted kernels, the environment variables, and problems.

    Imports neither CuPy nor CUDA, and never fails: users run it when something else fails.
    """
    places = cache.find_places()
    count, size = cache.usage()
    return {
        "versions": {
            "mla_cupy": __version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            **{package: _version(package) for package in _PACKAGES},
        },
        "nvrtc": _nvrtc(),
        "gpus": [
            {
                "name": gpu.name,
                "compute_capability": f"{gpu.cc[0]}.{gpu.cc[1]}",
                "target": gpu.arch,
                "memory_bytes": gpu.total_memory,
                "driver": gpu.driver,
            }
            for gpu in device.nvml_gpus()
        ],
        "cache": {
            "directory": str(places.write) if places.write else "memory only",
            "kernels": count,
            "bytes": size,
        },
        "admitted": admission.records(),
        "environment": env.table(),
        "problems": [*([places.problem] if places.problem else []), *env.problems()],
    }


def _nvrtc() -> dict[str, str]:
    try:
        library = nvrtc.load(nvrtc.find_nvrtc())
        return {"path": library.path, "version": library.exact_version()}
    except KernelCompileError as error:
        return {"error": str(error)}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
