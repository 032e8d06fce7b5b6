"""A device of the benchmark that is plain NumPy with a clock that we set: the flow runs on any machine."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import pytest

from bench.core import host, report
from bench.core.implementation import Choices, Prepared, make
from bench.core.limits import Limits
from bench.core.runner import Options, run_case
from bench.ops.decode import DecodeOutputs
from bench.ops.sparse import SparseOutputs
from bench.ops.sparse_backward import Gradients
from mla_cupy import reference


class FakeClock:
    """Time passes only when a call says so."""

    def __init__(self) -> None:
        self.now_us = 0.0
        self.begin = 0.0

    def start(self) -> None:
        self.begin = self.now_us

    def stop_us(self) -> float:
        return self.now_us - self.begin


class HostDevice(host.HostDevice):
    """The host with a clock that the fake implementations set."""

    def __init__(self) -> None:
        self.watch = FakeClock()
        self.empty_launches = 0

    def clock(self) -> FakeClock:
        return self.watch

    def allocated_by(self, call: Callable[[], object]) -> int:
        call()
        return 12345

    def launch_empty(self) -> None:
        self.empty_launches += 1


def answer(case: Any, inputs: Any) -> dict[str, Any]:
    """The oracle's results, by the names that the outputs of the case's operation have."""
    if case.op == "mla_decode":
        values = reference.mla_decode(inputs.q, inputs.kv_cache, inputs.block_table, inputs.seqlens, scale=case.scale)
        return dict(zip(("out", "lse"), values, strict=True))
    if case.op == "sparse_mla_forward":
        values = reference.sparse_mla_forward(inputs.q, inputs.kv, inputs.indices, scale=case.scale)
        return dict(zip(("out", "lse", "max_logits"), values, strict=True))
    arrays = inputs.q, inputs.kv, inputs.out, inputs.dout, inputs.lse, inputs.indices
    dq, dkv, _ = reference.sparse_mla_backward(*arrays, scale=case.scale)
    return {"dq": dq, "dkv": dkv}


OUTPUTS = {"mla_decode": DecodeOutputs, "sparse_mla_forward": SparseOutputs, "sparse_mla_backward": Gradients}
SINGLE = ("lse", "max_logits")


class FakeImplementation:
    """The oracle as an implementation of a given speed; `spoil` changes its results, `refuse` makes it unsupported."""

    def __init__(self, name: str, us: float, device: HostDevice, spoil: Any = None, refuse: str | None = None) -> None:
        self.name, self.us, self.device, self.spoil, self.refuse = name, us, device, spoil, refuse
        self.calls = 0

    def unsupported(self, case: Any, dtype: str) -> str | None:
        return self.refuse

    def prepare(self, case: Any, dtype: str, sets: Sequence[Any], device: Any) -> Prepared:
        answers = [answer(case, inputs) for inputs in sets]
        results = [
            OUTPUTS[case.op](**{k: device.empty(x.shape, "float32" if k in SINGLE else dtype) for k, x in one.items()})
            for one in answers
        ]

        def call(index: int) -> None:
            self.calls += 1
            self.device.watch.now_us += self.us
            for name, value in answers[index].items():
                getattr(results[index], name)[...] = value
            if self.spoil:
                self.spoil(self.calls, results[index])

        def update() -> None:
            self.device.watch.now_us += self.us / 4

        return Prepared(
            calls=[lambda index=index: call(index) for index in range(len(sets))],
            outputs=lambda index: results[index],
            recorder=device.recorder(),
            figures={"plan_update": [update] * len(sets)} if case.op == "mla_decode" else {},
            workspace_bytes=lambda: 5000,
        )


@pytest.fixture(autouse=True)
def no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that a fake call moves by microseconds would make the load of a second long."""
    monkeypatch.setattr("bench.core.runner.LOAD_US", 0.0)


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


@pytest.fixture
def numpy_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """The public calls compute with NumPy, also where there is a GPU."""
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")


@pytest.fixture
def rows_of(
    device: HostDevice, limits: Limits, numpy_backend: None, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, dict[str, Any]]]:
    """Runs a case: rows_of(operation, case or its name, peers=(), choices=None, dtype="bfloat16").

    Rows by implementation, all of them valid. The clock ticks by itself, so times mean nothing, and few calls, which
    compute with NumPy, are as good as many.
    """
    ticks = itertools.count()
    device.method, device.stream = "events", SimpleNamespace(ptr=77)
    device.watch = SimpleNamespace(start=lambda: None, stop_us=lambda: 1.0 + next(ticks) % 2)
    monkeypatch.setattr("bench.core.timer.MIN_CALLS", 1)
    monkeypatch.setattr("bench.core.runner.WARMUP", 0)
    monkeypatch.setattr("bench.core.runner.host_us", lambda calls, synchronize, **options: 1.0)

    def run(
        operation: Any, case: Any, peers: Sequence[str] = (), choices: Choices | None = None, dtype: str = "bfloat16"
    ) -> dict[str, dict[str, Any]]:
        options = Options(dtype, replays=1, check=True, limits=limits, env={"gpu": "host"}, repro="bench")
        implementations = make(list(peers), operation.implementations(choices or Choices()))
        case = operation.parse(case) if isinstance(case, str) else case
        rows = run_case(operation, case, implementations, device, options)
        for row in rows:
            report.validate(row)
        return {row["implementation"]: row for row in rows}

    return run
