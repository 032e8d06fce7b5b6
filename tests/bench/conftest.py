"""A device of the benchmark that is plain NumPy with a clock that we set: the flow runs on any machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from bench.cases import DecodeCase
from bench.inputs import InputSet, Outputs, cache_shape, q_shape, shuffled_table
from bench.limits import Limits
from bench.peers import Prepared
from bench.recorders import Eager
from mla_cupy import reference

DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16), "float32": np.dtype(np.float32)}


class FakeClock:
    """Time passes only when a call says so."""

    def __init__(self) -> None:
        self.now_us = 0.0
        self.begin = 0.0

    def start(self) -> None:
        self.begin = self.now_us

    def stop_us(self) -> float:
        return self.now_us - self.begin


class HostDevice:
    """What `bench.device.Device` asks for, in NumPy."""

    name, arch, l2_bytes, stream = "host", "sm_0", 1000, None

    def __init__(self) -> None:
        self.watch = FakeClock()

    def current(self) -> nullcontext[None]:
        return nullcontext()

    def recorder(self) -> Eager:
        return Eager()

    def clock(self) -> FakeClock:
        return self.watch

    def synchronize(self) -> None:
        pass

    def release(self) -> None:
        pass

    def inputs(self, case: DecodeCase, dtype: str, seed: int) -> InputSet:
        rng = np.random.default_rng(seed)
        table = shuffled_table(case, seed)
        seqlens = np.full(case.b, case.s_kv, np.int32)
        q, cache = (rng.standard_normal(shape).astype(DTYPES[dtype]) for shape in (q_shape(case), cache_shape(case)))
        return InputSet(q, cache, table, seqlens, table, seqlens)

    def upload(self, array: Any) -> Any:
        return array.copy()

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        return np.full(shape, np.nan, DTYPES[dtype])

    def poison(self, array: Any) -> None:
        array[...] = np.nan

    def to_host(self, array: Any) -> Any:
        return np.array(array)

    def pages(self, kv_cache: Any, pages: Any, kv_head: int) -> Any:
        return kv_cache[pages][:, :, kv_head]

    def count_not_finite(self, array: Any) -> int:
        return int((~np.isfinite(array.astype(np.float32))).sum())


class FakeImplementation:
    """The oracle as an implementation of a given speed; `spoil` changes its results, `refuse` makes it unsupported."""

    def __init__(self, name: str, us: float, device: HostDevice, spoil: Any = None, refuse: str | None = None) -> None:
        self.name, self.us, self.device, self.spoil, self.refuse = name, us, device, spoil, refuse
        self.calls = 0

    def unsupported(self, case: DecodeCase, dtype: str) -> str | None:
        return self.refuse

    def prepare(self, case: DecodeCase, dtype: str, sets: Sequence[InputSet], device: Any) -> Prepared:
        answers = [reference.mla_decode(s.q, s.kv_cache, s.block_table, s.seqlens, scale=case.scale) for s in sets]
        results = [Outputs(device.empty(out.shape, dtype), device.empty(lse.shape, "float32")) for out, lse in answers]

        def call(index: int) -> None:
            self.calls += 1
            self.device.watch.now_us += self.us
            results[index].out[...] = answers[index][0]
            results[index].lse[...] = answers[index][1]
            if self.spoil:
                self.spoil(self.calls, results[index])

        def update() -> None:
            self.device.watch.now_us += self.us / 4

        return Prepared(
            calls=[lambda index=index: call(index) for index in range(len(sets))],
            outputs=lambda index: results[index],
            recorder=device.recorder(),
            figures={"plan_update": [update] * len(sets)},
        )


@pytest.fixture
def device() -> HostDevice:
    return HostDevice()


@pytest.fixture
def limits() -> Limits:
    return Limits(4.0, 700.0, "given", "given")


@pytest.fixture
def fake(device: HostDevice) -> Callable[..., FakeImplementation]:
    """Makes implementations on `device`: fake(name, us, spoil=None, refuse=None)."""

    def make(name: str, us: float, **behaviour: Any) -> FakeImplementation:
        return FakeImplementation(name, us, device, **behaviour)

    return make
