"""Which of an operation's kernels runs: the first that fits, or the one that the caller names."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from mla_cupy.errors import ArgumentError, UnsupportedDeviceError, explain
from mla_cupy.runtime.device import DeviceInfo

logger = logging.getLogger("mla_cupy")


def check_variant(kernels: Mapping[str, ModuleType], variant: str | None) -> None:
    """Raise ArgumentError unless it names one of the kernels, or None."""
    if variant is not None and variant not in kernels:
        raise ArgumentError(explain("variant", repr(variant), "one of " + ", ".join(kernels)))


def choose(
    operation: str, kernels: Mapping[str, ModuleType], problem: Any, device: DeviceInfo, variant: str | None
) -> str:
    """The first of `kernels`, the fastest first, that can take the problem; or `variant`, if it can.

    Each kernel's module has `unsupported(problem, device)`: why it cannot, empty if it can. One that sets `ON_REQUEST`
    runs only as `variant`: it has not been measured yet, or is there to be compared with. A GPU that could do better
    is told once that it runs on a slow kernel.
    """
    check_variant(kernels, variant)
    reasons = {}
    candidates = [name for name, module in kernels.items() if not getattr(module, "ON_REQUEST", False)]
    for name in candidates if variant is None else (variant,):
        reasons[name] = kernels[name].unsupported(problem, device)
        if not reasons[name]:
            faster = [reason for reason in reasons.values() if reason]
            mendable = [reason for reason in faster if "compute capability" not in reason] or faster
            if "generic" in name and faster and device.cc >= (8, 0):
                say_slow(operation, device.name, name, mendable[-1])
            return name
    raise UnsupportedDeviceError("no kernel fits: " + "; ".join(f"{name} {why}" for name, why in reasons.items()))


@functools.cache
def say_slow(operation: str, device: str, kernel: str, reason: str) -> None:
    """Once for each of them."""
    logger.warning("%s runs on the slow kernel %s on %s: the fast one %s", operation, kernel, device, reason)
