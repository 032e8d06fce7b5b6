"""GPUs are found through NVML, without a CUDA context."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from mla_cupy.errors import UnsupportedDeviceError
from mla_cupy.runtime import device
from mla_cupy.simulation import fake_gpu

Python = Callable[..., "subprocess.CompletedProcess[str]"]

NVML = r"""
#include <string.h>
typedef struct { unsigned long long total, free, used; } Memory;
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned* count) { *count = 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** handle) {
    *handle = (void*)(index + 1ul);
    return index == 2 ? 15 : 0;
}
int nvmlDeviceGetCudaComputeCapability(void* handle, int* major, int* minor) { *major = 9; *minor = 0; return 0; }
int nvmlDeviceGetName(void* handle, char* name, unsigned size) { strcpy(name, "Some H200"); return 0; }
int nvmlDeviceGetMemoryInfo(void* handle, Memory* memory) { memory->total = 1ull << 37; return 0; }
int nvmlSystemGetDriverVersion(char* version, unsigned size) { strcpy(version, "575.57"); return 0; }
"""


@pytest.mark.parametrize(
    ("cc", "arch"),
    [
        ((7, 5), "sm_75"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((10, 3), "sm_103a"),
        ((12, 0), "sm_120"),
    ],
)
def test_arch(cc: tuple[int, int], arch: str) -> None:
    assert device.arch_of(*cc) == arch
    assert device.DeviceInfo(0, "some", cc, 1, 1, 1, 1).arch == arch


def test_nvml(python: Python, shared_library: Callable[[str, str], Path]) -> None:
    library = shared_library(NVML, "libnvidia-ml.so.1")
    code = "from mla_cupy.runtime import device; print(device.nvml_gpus(), device.nvml_archs())"
    done = python(code, LD_LIBRARY_PATH=str(library.parent), CUDA_VISIBLE_DEVICES="0")
    gpu = "VisibleGpu(name='Some H200', cc=(9, 0), total_memory=137438953472, driver='575.57')"
    assert (done.stdout, done.stderr) == (f"[{gpu}, {gpu}] ['sm_90a']\n", "")
    done = python(code, LD_LIBRARY_PATH=str(library.parent), CUDA_VISIBLE_DEVICES="-1")
    assert done.stdout.endswith(" []\n")


def test_no_nvml_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(device.ctypes, "CDLL", missing)
    assert device.nvml_gpus() == []
    assert device.nvml_archs() == []


def test_describing_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "gpu_count", lambda: 2)
    for ordinal in (2, -1):
        with pytest.raises(UnsupportedDeviceError, match=f"device {ordinal}: this process sees 2 GPUs"):
            device.describe(ordinal)


@pytest.mark.in_99kb
def test_less_shared_memory_on_request() -> None:
    assert fake_gpu(1, (9, 0)).smem_optin == 99 << 10
    assert fake_gpu(1, (7, 5)).smem_optin == 64 << 10


@pytest.mark.gpu
def test_describe(gpu: object) -> None:
    info = device.describe(0)
    assert info.sm_count > 0
    assert info.smem_optin >= 48 * 1024
    assert info.total_memory > info.l2_bytes > 0
    assert info.arch in device.nvml_archs()
