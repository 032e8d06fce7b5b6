"""Where and with what a benchmark ran."""

from __future__ import annotations

import datetime
import platform
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mla_cupy._version import __version__
from mla_cupy.runtime.device import nvml_gpus

NVIDIA_SMI_FIELDS = ("clocks.sm", "clocks.mem", "clocks.max.sm", "power.limit", "temperature.gpu")


def describe(gpu: str, arch: str, tag: str) -> dict[str, Any]:
    """The environment as plain data; None for what cannot be found out."""
    import cupy

    runtime = cupy.cuda.runtime
    return {
        "gpu": gpu,
        "arch": arch,
        "cuda_driver": _dotted(runtime.driverGetVersion()),
        "cuda_runtime": _dotted(runtime.runtimeGetVersion()),
        "nvrtc": nvrtc_version(),
        "cupy": cupy.__version__,
        "driver": next((gpu.driver for gpu in nvml_gpus()), None),
        "smi": nvidia_smi(),
        "mla_cupy": __version__,
        "git": git_commit(),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "tag": tag,
    }


def command_line(arguments: Sequence[str]) -> str:
    """The command that makes a row, to be run again from a checkout."""
    return shlex.join(["python", "-m", "bench", *arguments])


def nvidia_smi() -> dict[str, str] | None:
    """Clocks, power limit and temperature of the first GPU as nvidia-smi tells them."""
    query = f"--query-gpu={','.join(NVIDIA_SMI_FIELDS)}"
    text = _output(["nvidia-smi", query, "--format=csv,noheader", "--id=0"])
    if text is None:
        return None
    return dict(zip(NVIDIA_SMI_FIELDS, (part.strip() for part in text.split(",")), strict=False))


def git_commit() -> str | None:
    """The checkout's commit, with `-dirty` where tracked files are changed; None outside a checkout."""
    root = str(Path(__file__).resolve().parent)
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
