"""The calls for compute-sanitizer leave no kernel out: they run on a GPU that only writes down what it is to launch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mla_cupy import UnsupportedDeviceError
from mla_cupy.kernels import KERNELS, pipeline
from mla_cupy.ops import COMPOSITE_OPERATIONS, OPERATIONS, POOL_OPERATIONS, call
from tests.stress.sanitized import Call
from tests.stress.sanitized.families import FAMILIES
from tests.support.recorder import H200, Recorder

LEFT_OUT = {
    "merge_exchange": "ranks wait for each other, each in a process of its own: tests/parallel runs them",
}
"""Kernels without a call, and why."""
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # sums of uncomputed memory


class ReadError(Exception):
    """A call reads its results, which nobody has computed: it has launched what it launches."""


class Pointer(SimpleNamespace):
    """An address, as CuPy's pointers are added to."""

    def __add__(self, offset: int) -> Pointer:
        return Pointer(address=self.address + offset)


class Listed:
    """Recorded launches."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.kernels: set[str] = set()
        self.operations: set[str] = set()

    def make(self, made: Call) -> None:
        """A call until it reads its results; it has launched something by then, or this GPU is not its own."""
        self.recorder.launches.clear()
        try:
            made.run()
        except UnsupportedDeviceError:
            return
        except ReadError:
            reads = True
        else:
            reads = False
        assert reads, f"{made.name} looks at no result"
        assert self.recorder.launches, f"{made.name} reads before it has launched anything"


def fake_cupy(kept: list[Any]) -> ModuleType:
    """The parts of CuPy that the calls use, over host memory; nothing can be read back."""

    def as_array(x: Any) -> Any:
        kept.append(x)
        return SimpleNamespace(data=Pointer(address=x.__array_interface__["data"][0]))

    def view(shape: tuple[int, ...], dtype: Any, at: Pointer, strides: tuple[int, ...] | None = None) -> Any:
        raw = f"|V{np.dtype(dtype).itemsize}"
        interface = {"data": (at.address, False), "shape": shape, "strides": strides, "typestr": raw, "version": 3}
        return np.asarray(SimpleNamespace(__array_interface__=interface)).view(dtype)

    def read(name: str) -> Any:
        raise ReadError(name)

    fake: Any = ModuleType("cupy")
    fake.asarray, fake.ndarray, fake.__getattr__ = as_array, view, read  # whatever else is looked up is for reading
    return fake  # type: ignore[no-any-return]


@pytest.fixture
def listed(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> Listed:
    """A GPU like an H200, with nothing asked for yet."""
    found, bound, known = Listed(recorder), pipeline._bound, call._known

    def binds(launch: pipeline.Launch, *arguments: Any) -> Any:
        found.kernels.add(launch.kernel.name)
        return bound(launch, *arguments)

    def knows(invocation: call.Invocation) -> Any:
        found.operations.add(invocation.operation.name)
        return known(invocation)

    monkeypatch.setattr(pipeline, "_bound", binds)
    monkeypatch.setattr(call, "_known", knows)
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy([]))
    return found


def calls_of(family: str) -> Iterator[Call]:
    return iter(import_module(f"tests.stress.sanitized.{family}").calls())


@pytest.mark.slow
def test_every_kernel_and_operation_has_a_call(listed: Listed) -> None:
    """Every kernel that an H200 can run has a call. A new one needs a call in a family, or a reason."""
    for family in FAMILIES:
        for made in calls_of(family):
            listed.make(made)
    assert listed.kernels | LEFT_OUT.keys() == {n for n, kernel in KERNELS.items() if kernel.supports_arch(H200.arch)}
    assert not listed.kernels & LEFT_OUT.keys()
    assert listed.operations == {**OPERATIONS, **POOL_OPERATIONS, **COMPOSITE_OPERATIONS}.keys()


@pytest.mark.parametrize("family", ["cache", "topk", "merge"])
def test_each_call_launches_something_and_reads_it(listed: Listed, family: str) -> None:
    """Families with small calls launch something and read it."""
    for made in calls_of(family):
        listed.make(made)
    assert listed.kernels
