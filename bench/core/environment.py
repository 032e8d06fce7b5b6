"""The machine and the software of a run."""

from __future__ import annotations

import datetime
import platform
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from mla_cupy._version import __version__
from mla_cupy.runtime.device import nvml_gpus

from .errors import BenchError

HERE = Path(__file__).resolve().parent
NVIDIA_SMI_FIELDS = ("clocks.sm", "clocks.mem", "clocks.max.sm", "power.limit", "temperature.gpu")


def describe(gpu: str, arch: str, tag: str) -> dict[str, Any]:
    """The environment as plain data; None for what is unknown."""
    import cupy

    runtime = cupy.cuda.runtime
    return {
        "gpu": gpu,
        "arch": arch,
        "cuda_driver": _dotted(runtime.driverGetVersion()),
        "cuda_runtime": _dotted(runtime.runtimeGetVersion()),
        "cupy": cupy.__version__,
        **machine(),
        "mla_cupy": __version__,
        "git": git_commit(),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "tag": tag,
    }


def machine() -> dict[str, Any]:
    """Facts about the machine and the time that need no CuPy."""
    return {
        "driver": next((gpu.driver for gpu in nvml_gpus()), None),
        "nvrtc": nvrtc_version(),
        "smi": nvidia_smi(),
        "date": now(),
    }


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def open_to_append(path: Path) -> IO[str]:
    """The file of `--json`."""
    try:
        return path.open("a", encoding="utf-8")
    except OSError as error:
        raise BenchError(f"--json: cannot write {path}: {error.strerror}") from error


def command_line(arguments: Sequence[str]) -> str:
    """The command that reproduces a row from a checkout."""
    return shlex.join(["python", "-m", "bench", *arguments])


def nvidia_smi() -> dict[str, str] | None:
    """Clocks, power limit and temperature of the first GPU as nvidia-smi reports them."""
    query = f"--query-gpu={','.join(NVIDIA_SMI_FIELDS)}"
    text = _output(["nvidia-smi", query, "--format=csv,noheader", "--id=0"])
    if text is None:
        return None
    return dict(zip(NVIDIA_SMI_FIELDS, (part.strip() for part in text.split(",")), strict=False))


def git_commit(checkout: Path = HERE) -> str | None:
    """A checkout's commit, with `-dirty` if tracked files are changed; None outside a checkout."""
    root = str(checkout)
    commit = _output(["git", "-C", root, "rev-parse", "HEAD"])
    if commit is None:
        return None
    changed = _output(["git", "-C", root, "status", "--porcelain", "--untracked-files=no"])
    return f"{commit}-dirty" if changed else commit


def nvrtc_version() -> str | None:
    """The version of the NVRTC that compiles the project's kernels."""
    try:
        from mla_cupy.runtime.nvrtc import find_nvrtc, load

        return ".".join(map(str, load(find_nvrtc()).version))
    except Exception:  # prebuilt cubins need none
        return None


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
