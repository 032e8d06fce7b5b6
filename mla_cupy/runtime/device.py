"""Properties of a GPU that kernels depend on, and the list of GPUs."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass, replace

from mla_cupy.errors import UnsupportedDeviceError
from mla_cupy.runtime import env

_ARCHITECTURE_SPECIFIC = ("sm_90", "sm_100", "sm_103")
"""Targets with an `a` flavour that the kernels use."""


def arch_of(major: int, minor: int) -> str:
    """The target for a compute capability: "sm_90a" for (9, 0), "sm_80" for (8, 0)."""
    arch = f"sm_{major}{minor}"
    return arch + "a" if arch in _ARCHITECTURE_SPECIFIC else arch


def number_of(arch: str) -> int:
    """The compute capability of a target as NVRTC counts them: 90 for "sm_90a"."""
    return int(arch.removeprefix("sm_").rstrip("a"))


_SMEM_KB = {(7, 5): 64, (8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}
"""Shared memory that a block may have, by compute capability, where it is not 99 KB."""


def smem_per_block(cc: tuple[int, int]) -> int:
    """Bytes of shared memory that a block of a GPU of this compute capability may have."""
    return _SMEM_KB.get(cc, 99) * 1024


def smem_on(arch: str) -> int:
    """Bytes of shared memory that a block of a target's GPUs may have."""
    return smem_per_block(divmod(number_of(arch), 10))


def usable_smem(nbytes: int) -> int:
    """The bytes of shared memory per block that kernels may use, of `nbytes` on the GPU: see MLA_CUPY_SMEM_KB."""
    most = env.get("SMEM_KB")
    return nbytes if most == "all" else min(nbytes, int(most) * 1024)


TARGETS = tuple(arch_of(*divmod(number, 10)) for number in (75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121))
"""The targets of every GPU that a kernel may run on."""


EVERY_KERNEL = frozenset(("*",))
"""The `admitted` of a GPU on which every kernel may be chosen."""


@dataclass(frozen=True)
class DeviceInfo:
    """One GPU: nothing about it is assumed, everything is read from it.

    `admitted` are the kernels that the self-test has admitted on it, of those that have never run on hardware.
    """

    ordinal: int
    name: str
    cc: tuple[int, int]
    sm_count: int
    smem_optin: int
    l2_bytes: int
    total_memory: int
    admitted: frozenset[str] = frozenset()

    @property
    def arch(self) -> str:
        """The target to compile for."""
        return arch_of(*self.cc)

    def admits(self, kernel: str) -> bool:
        """True if a kernel that has never run on hardware may be chosen."""
        return kernel in self.admitted or self.admitted == EVERY_KERNEL


SAMPLES = tuple(
    DeviceInfo(0, f"a GPU of {arch}", cc, 108, smem_per_block(cc), 50 << 20, 1 << 34, EVERY_KERNEL)
    for arch, cc in ((arch, divmod(number_of(arch), 10)) for arch in TARGETS)
)
"""One GPU of each kind, so that every kernel can be chosen: stand-ins for machines without a GPU."""


@dataclass(frozen=True)
class VisibleGpu:
    """One GPU as NVML sees it, which needs neither CuPy nor a CUDA context."""

    name: str
    cc: tuple[int, int]
    total_memory: int
    driver: str

    @property
    def arch(self) -> str:
        """The target to compile for."""
        return arch_of(*self.cc)


@functools.cache
def describe(ordinal: int) -> DeviceInfo:
    """The GPU that CUDA counts as `ordinal` in this process.

    Raises
    ------
    UnsupportedDeviceError
        If there is no such GPU, or no CuPy.
    """
    count = gpu_count()
    if not 0 <= ordinal < count:
        raise UnsupportedDeviceError(f"device {ordinal}: this process sees {count} GPUs")
    import cupy

    from mla_cupy.runtime import admission  # not on import: it brings the compiler's side

    properties = cupy.cuda.runtime.getDeviceProperties(ordinal)
    info = DeviceInfo(
        ordinal=ordinal,
        name=properties["name"].decode(),
        cc=(int(properties["major"]), int(properties["minor"])),
        sm_count=int(properties["multiProcessorCount"]),
        smem_optin=usable_smem(int(properties["sharedMemPerBlockOptin"])),
        l2_bytes=int(properties["l2CacheSize"]),
        total_memory=int(properties["totalGlobalMem"]),
    )
    return replace(info, admitted=admission.admitted(info.name, info.arch))


def gpu_count() -> int:
    """Number of GPUs that CUDA shows this process; 0 without CuPy, a driver or a GPU."""
    try:
        import cupy

        return int(cupy.cuda.runtime.getDeviceCount())
    except ImportError:
        return 0
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0


def nvml_gpus() -> list[VisibleGpu]:
    """The GPUs of this machine according to NVML: no CUDA context, no `cuInit`, [] without a driver."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() != 0:
            return []
    except (OSError, AttributeError):
        return []
    try:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return []
        return [gpu for index in range(count.value) if (gpu := _nvml_gpu(nvml, index))]
    finally:
        nvml.nvmlShutdown()


def nvml_driver() -> str:
    """The version of the driver according to NVML; empty without a GPU."""
    return next((gpu.driver for gpu in nvml_gpus()), "")


def nvml_archs() -> list[str]:
    """The targets of the GPUs that this process may use, each once: see `nvml_gpus`."""
    if env.gpus_hidden():
        return []
    return list(dict.fromkeys(gpu.arch for gpu in nvml_gpus()))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def _nvml_gpu(nvml: ctypes.CDLL, index: int) -> VisibleGpu | None:
    handle = ctypes.c_void_p()
    if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) != 0:
        return None
    major, minor, memory = ctypes.c_int(), ctypes.c_int(), _Memory()
    if nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor)) != 0:
        return None
    name, driver = ctypes.create_string_buffer(96), ctypes.create_string_buffer(80)
    nvml.nvmlDeviceGetName(handle, name, len(name))
    nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    nvml.nvmlSystemGetDriverVersion(driver, len(driver))
    return VisibleGpu(name.value.decode(), (major.value, minor.value), memory.total, driver.value.decode())
