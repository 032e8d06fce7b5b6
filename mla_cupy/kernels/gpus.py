"""GPUs by name, with the rates that their makers publish, and where kernels have been run."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from mla_cupy.kernels.spec import KernelSpec
from mla_cupy.runtime.device import SAMPLES, DeviceInfo, smem_per_block


@dataclass(frozen=True)
class Gpu:
    """One model of GPU. The rates are published peaks of dense matmuls and of memory; None where not listed here.

    Attributes
    ----------
    info : DeviceInfo
    tbps : float or None
        TB/s of memory.
    tflops, fp8_tflops : float or None
        TFLOP/s of 16-bit numbers with sums in float32, and of 8-bit floats.
    tested : bool
        Whether this project has run its kernels on one.
    """

    info: DeviceInfo
    tbps: float | None = None
    tflops: float | None = None
    fp8_tflops: float | None = None
    tested: bool = False

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.info.name

    def has_run(self, kernel: KernelSpec) -> bool:  # type: ignore[type-arg]
        """True if this project has run a kernel on such a GPU."""
        return self.tested and not kernel.unproven


def _info(name: str, cc: tuple[int, int], sm_count: int, l2_mib: int, memory_gib: int) -> DeviceInfo:
    return DeviceInfo(0, name, cc, sm_count, smem_per_block(cc), l2_mib << 20, memory_gib << 30)


GPUS = (
    Gpu(_info("H200", (9, 0), 132, 50, 141), 4.8, 989, 1979, tested=True),
    Gpu(_info("H100", (9, 0), 132, 50, 80), 3.35, 989, 1979, tested=True),
    Gpu(_info("B200", (10, 0), 148, 126, 180), 8.0, 2250, 4500),
    Gpu(_info("B300", (10, 3), 148, 126, 270), 8.0, 2250, 4500),
    Gpu(_info("A100", (8, 0), 108, 40, 80), 2.04, 312),
    Gpu(_info("RTX 4090", (8, 9), 128, 72, 24), 1.01, 165, 330),
    Gpu(_info("RTX 5090", (12, 0), 170, 96, 32), 1.79, 210, 419),
    Gpu(_info("T4", (7, 5), 40, 4, 16), 0.32, 65),
)
"""The first GPU of a target represents it."""


def gpu_of(arch: str) -> Gpu:
    """The GPU that represents a target; one without rates for targets that are not in the table."""
    known = {gpu.info.arch: gpu for gpu in reversed(GPUS)}
    samples = {info.arch: info for info in SAMPLES}
    return known.get(arch) or Gpu(samples[arch])


def described(info: DeviceInfo) -> Gpu:
    """A GPU of this machine with the rates of its model."""
    model = next((gpu for gpu in GPUS if re.search(rf"\b{gpu.name}\b", info.name)), Gpu(info))
    return replace(model, info=info)
