"""Shared by the tests of the public calls."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from mla_cupy import dtypes, reference
from mla_cupy.kernels.decode.problem import DecodeProblem
from mla_cupy.runtime import driver, launching
from mla_cupy.runtime.device import DeviceInfo
from tests.support.cases import DecodeInputs
from tests.support.flat import plan_decode
from tests.support.kernels import DECODE_KERNELS

Array = npt.NDArray[Any]

ALL_KERNELS = tuple(DECODE_KERNELS)


def need(kernel: str, device: DeviceInfo, dtype: str = "bfloat16") -> None:
    """Skip where the kernel cannot run."""
    reason = DECODE_KERNELS[kernel].unsupported(DecodeProblem(1, 16, dtype), device)
    if reason:
        pytest.skip(f"{kernel} {reason}")


def plan_of(inputs: DecodeInputs, **options: Any) -> Any:
    """A plan that fits the inputs."""

    case = inputs.case
    sizes = {
        "max_b": case.b,
        "s_q": case.s_q,
        "h_q": case.h_q,
        "max_pages": inputs.block_table.shape[1],
        "page_size": case.page_size,
        "d_qk": case.d_qk,
        "dtype": "float8_e4m3fn" if case.queries else case.dtype,
        "record": case.record or None,
        "math": case.math,
    }
    return plan_decode(**{**sizes, **options})


def oracle(inputs: DecodeInputs, out_dtype: str | None = None, **options: Any) -> tuple[Array, Array]:
    """The oracle's answer in the dtypes of the public call."""
    out, lse = reference.mla_decode(*inputs.arguments, **options)
    name = out_dtype or inputs.case.dtype
    return dtypes.round_to(out, name).astype(dtypes.numpy_dtype(name)), lse.astype(np.float32)


def assert_same(got: Any, expected: Any) -> None:
    """Equal bit by bit, dtype and shape included."""
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    assert np.ascontiguousarray(got).tobytes() == np.ascontiguousarray(expected).tobytes()


def on_host(results: tuple[Any, Any]) -> tuple[Array, Array]:
    """CuPy results as NumPy arrays."""
    import cupy

    return cupy.asnumpy(results[0]), cupy.asnumpy(results[1])


class NoLaunch:
    """The driver at hand, but every launch is a failure of the test."""

    def __init__(self) -> None:
        self._real = driver.current()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def prepare(self, kernel: launching.LoadedKernel, *rest: Any) -> launching.PreparedLaunch:
        def enqueue(stream: int) -> None:
            raise AssertionError(f"launched {kernel.entry}")

        return enqueue

    def in_order(self, launches: Sequence[launching.PreparedLaunch]) -> launching.PreparedLaunch:
        return launching.one_by_one(launches)


@contextlib.contextmanager
def no_launch() -> Iterator[None]:
    """Fail on every launch."""
    with driver.use(NoLaunch()):
        yield
