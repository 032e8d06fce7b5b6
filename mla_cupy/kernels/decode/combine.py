"""Launcher of `generic/split_combine.cu`."""

from __future__ import annotations

from mla_cupy.launchers import decode_problem
from mla_cupy.launchers.spec import DTYPE_VARIANTS, KernelSpec, any_arch
from mla_cupy.runtime.device import DeviceInfo

BLOCKS_PER_SM = 3

SPEC = KernelSpec(
    "split_combine",
    "generic/split_combine.cu",
    variants=DTYPE_VARIANTS,
    core=DTYPE_VARIANTS,
    supports_arch=any_arch,
    params=decode_problem.PARAMS,
)


def blocks(device: DeviceInfo) -> int:
    """The blocks share out whatever there is to merge, so their number follows the GPU."""
    return BLOCKS_PER_SM * device.sm_count
