"""Checks of an installation, for `mla-cupy info --check`: problems, and the commands that fix them."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

import numpy as np

from mla_cupy.dtypes import numpy_dtype
from mla_cupy.errors import KernelNotBuiltError, MlaError
from mla_cupy.kernels.merge.pipeline import KERNEL
from mla_cupy.runtime import cache, device, env, loader, nvrtc
from mla_cupy.runtime.remedies import INSTALL_CUPY, INSTALL_NVRTC

OK, ABSENT, WRONG = "ok", "absent", "wrong"
"""States; absent things are not needed here."""
FRAMEWORKS = {"torch": (2, 4), "jax": (0, 5), "transformers": (5,)}
"""The oldest versions that the extras of setup.cfg accept."""
OLDEST_CUPY = (14,)
_CUPY_WHEELS = ("cupy-cuda12x", "cupy-cuda13x")
_DRIVER_FILES = ("/dev/nvidiactl", "/dev/dxg")
"""The second exists on WSL."""
_DEFAULT_ARCH = "sm_90a"
_DIFFERS = "run, and its result differs from NumPy's"
_REPORT = "if the lines above do not explain it, report it with the output of `mla-cupy info --check --json`"
_TOLERANCE = 2.0**-6
"""Two bfloat16 roundings of values of up to 2."""


@dataclass(frozen=True)
class Check:
    """One finding; `fix` is the remedy for the state `WRONG`."""

    name: str
    state: str
    found: str
    fix: str = ""

    def as_dict(self) -> dict[str, str]:
        """Plain data."""
        return asdict(self)


def checks() -> Iterator[Check]:
    """Every check, in the order in which each needs those before it."""
    gpus = device.nvml_gpus()
    yield from (_driver(gpus), _nvrtc(), _cupy(gpus), _cache(), *_environment(), *map(_framework, FRAMEWORKS))
    yield _kernel(gpus)


def _driver(gpus: list[device.VisibleGpu]) -> Check:
    if gpus:
        names = ", ".join(dict.fromkeys(gpu.name for gpu in gpus))
        return Check("driver", OK, f"{gpus[0].driver}, for CUDA {_dotted(driver_cuda() or (0,))}: {names}")
    if any(map(os.path.exists, _DRIVER_FILES)):
        fix = "run `nvidia-smi`; in a container start it with `--gpus all`"
        return Check("driver", WRONG, "a GPU, and no driver library that answers", fix)
    return Check("driver", ABSENT, "no GPU: NumPy computes, kernels can be compiled and simulated")


def driver_cuda() -> tuple[int, int] | None:
    """The version of CUDA that the driver is of; None without one."""
    version = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return version.value // 1000, version.value % 1000 // 10


def _nvrtc() -> Check:
    try:
        library = nvrtc.load(nvrtc.find_nvrtc())
    except MlaError as error:
        found = str(error).partition("; ")[0]
        if env.get("NVRTC"):
            return Check("NVRTC", WRONG, found, "unset MLA_CUPY_NVRTC, or " + INSTALL_NVRTC)
        if env.get("CUBIN_DIR"):
            return Check("NVRTC", ABSENT, "none: kernels come from MLA_CUPY_CUBIN_DIR")
        return Check("NVRTC", WRONG, found, INSTALL_NVRTC)
    driver = driver_cuda()
    found = f"{_dotted(library.version)}, {library.path}"
    if driver and driver[0] < library.version[0]:
        fix = f"the driver loads none of its kernels: install the extra cu{driver[0]}, or a newer driver"
        return Check("NVRTC", WRONG, found, fix)
    return Check("NVRTC", OK, found)


def _cupy(gpus: list[device.VisibleGpu]) -> Check:
    wheels = [name for name in _CUPY_WHEELS if _version(name)]
    if len(wheels) > 1:
        return Check("CuPy", WRONG, " and ".join(wheels), f"pip uninstall {' '.join(wheels)}, then install one of them")
    if not wheels and not _version("cupy"):
        return Check("CuPy", WRONG, "none", INSTALL_CUPY) if gpus else Check("CuPy", ABSENT, "not needed without a GPU")
    name = wheels[0] if wheels else "cupy"
    found = f"{name} {_version(name)}"
    if _numbers(_version(name)) < OLDEST_CUPY:
        return Check("CuPy", WRONG, found, INSTALL_CUPY)
    if gpus and not env.gpus_hidden() and not device.gpu_count():
        fix = "check CUDA_VISIBLE_DEVICES and the CUDA of the driver: python3 -c 'import cupy; cupy.show_config()'"
        return Check("CuPy", WRONG, f"{found}, which sees no GPU", fix)
    return Check("CuPy", OK, found)


def _cache() -> Check:
    places = cache.find_places()
    if places.problem:
        what, _, fix = places.problem.partition("; ")
        return Check("cache", WRONG, what, fix)
    return Check("cache", OK, str(places.write))


def _environment() -> Iterator[Check]:
    for problem in env.problems():
        what, _, fix = problem.partition("; ")
        yield Check("environment", WRONG, what, fix or "correct or unset it")


def _framework(name: str) -> Check:
    found, oldest = _version(name), FRAMEWORKS[name]
    if not found:
        return Check(name, ABSENT, "not installed, and not needed")
    if _numbers(found) < oldest:
        return Check(name, WRONG, found, f'pip install --upgrade "{name}>={_dotted(oldest)}"')
    return Check(name, OK, found)


def _kernel(gpus: list[device.VisibleGpu]) -> Check:
    """Compile the smallest kernel; on a GPU run it, and compare it with NumPy."""
    arch = next(iter(device.nvml_archs()), _DEFAULT_ARCH)
    start = time.perf_counter()
    try:
        build = loader.obtain(KERNEL.request(KERNEL.variants[0], arch))
        seconds = time.perf_counter() - start
        ran = _run() if device.gpu_count() else "no GPU to run it on"
    except KernelNotBuiltError as error:
        what, _, fix = str(error).partition(": ")
        return Check("kernel", WRONG, what, fix)
    except (MlaError, OSError, RuntimeError) as error:
        return Check("kernel", WRONG, str(error).partition("\n")[0], _REPORT)
    found = f"{KERNEL.name} for {arch}: {build.info['registers']} registers, {seconds:.1f} s; {ran}"
    return Check("kernel", WRONG if ran == _DIFFERS else OK, found, "run `mla-cupy selftest`" * (ran == _DIFFERS))


def _run() -> str:
    """Merge two states on the GPU."""
    from mla_cupy import reference
    from mla_cupy.ops import merge_states

    rng = np.random.default_rng(0)
    outs = rng.uniform(-1, 1, (2, 1, 1, 4, 64)).astype(numpy_dtype("bfloat16"))
    lses = rng.standard_normal((2, 1, 4, 1), np.float32)
    got, want = merge_states(outs, lses), reference.merge_states(outs, lses)
    same = all(
        np.allclose(one.astype(float), other, rtol=0, atol=_TOLERANCE) for one, other in zip(got, want, strict=True)
    )
    return "run, and right" if same else _DIFFERS


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _numbers(version: str) -> tuple[int, ...]:
    """The first numbers of a version: (2, 13) of "2.13.0+cpu"."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def failed(found: Iterable[Check]) -> bool:
    """True if anything is wrong."""
    return any(check.state == WRONG for check in found)
