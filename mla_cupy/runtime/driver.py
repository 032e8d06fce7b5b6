"""The driver that launches go to: CUDA's, unless a test or the simulator replaces it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from mla_cupy.runtime.launching import Driver

active: Driver | None = None
"""Driver that `current` returns, once it has been asked."""


def current() -> Driver:
    """The driver that launches go to: CUDA's, unless a test replaces it."""
    global active
    if active is None:
        from mla_cupy.runtime.cuda_driver import CudaDriver

        active = CudaDriver()
    return active


@contextmanager
def use(driver: Driver) -> Iterator[Driver]:
    """Send every launch of the process to `driver`, within a with statement: for tests."""
    global active
    previous, active = active, driver
    try:
        yield driver
    finally:
        active = previous


def device_guard(device: int) -> AbstractContextManager[object]:
    """Make `device` current within a with statement; costs next to nothing where it is current already."""
    return current().device_guard(device)
