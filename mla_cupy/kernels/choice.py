"""Choice among an operation's kernels: the first that fits, or the one that the caller names."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from mla_cupy.errors import ArgumentError, UnsupportedDeviceError, explain, nearest
from mla_cupy.kernels.spec import KernelSpec, ProblemT, Reason
from mla_cupy.runtime.device import SAMPLES, DeviceInfo

logger = logging.getLogger("mla_cupy")

NOT_ADMITTED = Reason(
    "has never run on hardware, and runs where it is named, or once `mla-cupy selftest` has passed on this GPU"
)
"""The reason of kernels that are `unproven`, where no record of the self-test names them."""

KernelT = TypeVar("KernelT", bound=KernelSpec)  # type: ignore[type-arg]


def check_kernel(kernels: Sequence[KernelSpec[ProblemT]], name: object) -> None:
    """Raise ArgumentError unless `name` is one of the kernels' names, or None."""
    names = [kernel.name for kernel in kernels]
    if name is not None and not (isinstance(name, str) and name in names):
        remedy = nearest(str(name), names, "see `mla-cupy list`")
        raise ArgumentError(explain("kernel", repr(name), "None, or one of " + ", ".join(names), remedy))


def check_somewhere(operation: str, name: object, configure: Callable[[DeviceInfo], object]) -> None:
    """Check, without a GPU, that the kernel that the caller names, if any, supports the problem on some GPU.

    Raises
    ------
    ArgumentError, UnsupportedDeviceError
        As on the GPU that comes nearest to it.
    """
    if not name:
        return
    reasons = []
    for device in SAMPLES:
        try:
            configure(device)
        except UnsupportedDeviceError as error:
            reasons.append(str(error))
        else:
            _say_not_run(operation, str(name))
            return
    # Most are of other architectures than the kernel's: what is rarest says most about the problem.
    raise UnsupportedDeviceError(min(reasons, key=reasons.count))


def of_math(kernels: Sequence[KernelT], math: str, name: str | None) -> tuple[KernelT, ...]:
    """The attention kernels with this arithmetic; `name`, unless None, must be one of them."""
    check_kernel(kernels, name)
    found = tuple(kernel for kernel in kernels if math in _maths(kernel))
    names = [kernel.name for kernel in found]
    if name is not None and name not in names:
        expected = f"for fp8.math={math!r} one of " + ", ".join(names)
        raise ArgumentError(explain("kernel", repr(name), expected, "leave kernel or fp8.math out"))
    return found


def _maths(kernel: KernelT) -> tuple[str, ...]:
    """The arithmetic of the kernel's builds; the default is a kernel for 16-bit elements."""
    return getattr(kernel, "math", "exact"), *getattr(kernel, "other_math", ())


def choose(
    operation: str, kernels: Sequence[KernelT], problem: object, device: DeviceInfo, name: str | None = None
) -> KernelT:
    """The first of `kernels`, the fastest first, that supports the problem; or the one called `name`, if it does.

    The user of a GPU that could do better is warned once that it runs on a fallback, with the fast kernel's
    requirements; or that a kernel waits for the self-test.
    """
    check_kernel(kernels, name)
    reasons: dict[str, Reason] = {}
    waiting = ""
    for kernel in kernels:
        if kernel.on_request if name is None else kernel.name != name:
            continue
        reason = kernel.objection(problem, device)
        if reason is None and name is None and not kernel.preferred(problem, device):
            continue
        if reason is None and name is None and not kernel.admitted(device):
            reason, waiting = NOT_ADMITTED, waiting or kernel.name
        if reason is None:
            if waiting:
                _say_waiting(operation, device.name, kernel.name, waiting)
            elif kernel.fallback and reasons and device.cc >= (8, 0):
                fixable = [reason for reason in reasons.values() if reason.fixable]
                _say_slow(operation, device.name, kernel.name, str((fixable or list(reasons.values()))[-1]))
            return kernel
        reasons[kernel.name] = reason
    raise UnsupportedDeviceError("no kernel fits: " + "; ".join(f"{name} {why}" for name, why in reasons.items()))


def passed_over(
    kernels: Sequence[KernelT], problem: object, device: DeviceInfo, chosen: str, name: str | None = None
) -> dict[str, str]:
    """Each kernel but the one that is chosen, and why `choose` does not choose it."""
    return {kernel.name: _why_not(kernel, problem, device, name or "") for kernel in kernels if kernel.name != chosen}


def _why_not(kernel: KernelT, problem: object, device: DeviceInfo, named: str) -> str:
    reason = kernel.objection(problem, device)
    math = getattr(problem, "math", "exact")
    if reason is not None:
        return str(reason)
    if math not in _maths(kernel):
        return f"multiplies with fp8.math={' or '.join(map(repr, _maths(kernel)))} only"
    if named:
        return f"fits, but the call names {named}"
    if kernel.on_request:
        return "runs only where kernel= names it"
    if not kernel.preferred(problem, device):
        return "fits, but another is preferred for this size"
    return "fits, but comes later in the order of preference" if kernel.admitted(device) else str(NOT_ADMITTED)


@functools.cache
def _say_not_run(operation: str, kernel: str) -> None:
    """Log once that a kernel that is named does not run."""
    logger.warning("%s does not run %s: there is no GPU, and the NumPy backend computes", operation, kernel)


@functools.cache
def _say_slow(operation: str, device: str, kernel: str, reason: str) -> None:
    """Log each kernel and reason once."""
    logger.warning("%s runs on the slow kernel %s on %s: the fast one %s", operation, kernel, device, reason)


@functools.cache
def _say_waiting(operation: str, device: str, kernel: str, waiting: str) -> None:
    """Log once that a kernel waits for the self-test."""
    logger.warning(
        "%s runs on %s on %s: %s has never run on hardware; `mla-cupy selftest` tries it, and admits it if all is well",
        operation,
        kernel,
        device,
        waiting,
    )
