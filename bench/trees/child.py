"""One source tree in a process of its own: prepares cases and times them on request.

`parent` starts this module so that `bench` is the new tree's and `mla_cupy` belongs to the tree under test. Only what
both have may therefore be used of mla_cupy: the public calls, and what `core.device` and the checks import.

Requests and replies are JSON objects, one per line, on the standard input and on what was the standard output.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import IO, Any

import mla_cupy

from ..core.device import CudaDevice, Device
from ..core.errors import BenchError
from ..core.implementation import Choices, Prepared
from ..core.operation import BenchOperation
from ..core.recorders import Call
from ..core.timer import host_us, rotation, sample, set_count

WARMUP = 2


def load(name: str) -> BenchOperation:
    """Import one operation alone: operations of later trees may need features that an older `mla_cupy` lacks."""
    folder = name.replace("-", "_")
    module = importlib.import_module(f"..ops.{folder}", __package__)
    operation: BenchOperation = getattr(module, folder.upper())
    return operation


class Tree:
    """The case that is prepared, if any; each method answers the request of its name."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._prepared: Prepared | None = None
        self._replay: Call | None = None
        self._calls = 0

    def describe(self) -> dict[str, Any]:
        """Description of the package that answers, and of its GPU."""
        return {"package": mla_cupy.__file__, "gpu": self._device.name, "arch": self._device.arch}

    def prepare(self, operation: str, case: str, dtype: str, implementation: str) -> dict[str, Any]:
        """Makes the inputs, calls everything once and records a replay."""
        self.release()
        record, device = load(operation), self._device
        one = record.parse(case)
        count = set_count(one.cost.nbytes, device.l2_bytes)
        with device.current():
            sets = [record.inputs(one, dtype, seed, device) for seed in range(count)]
            prepared = record.implementations(Choices())[implementation]().prepare(one, dtype, sets, device)
            for call in prepared.calls:
                call()
            device.synchronize()
            written = [getattr(prepared.outputs(0), name) for name in record.results]
            outputs = [array for array in written if array is not None]
            if bad := sum(map(device.count_not_finite, outputs)):
                raise ArithmeticError(f"{bad} results are not finite")
            digest = hashlib.sha256()
            for array in outputs:
                digest.update(device.to_host(array).tobytes())
        self._prepared = prepared
        return {"kernel": prepared.kernel, "digest": digest.hexdigest(), "sets": count}

    def record(self, method: str) -> dict[str, Any]:
        """Makes the replay: captured in a graph, or call by call."""
        prepared = self._ready()
        self._device.method = method
        order = rotation(len(prepared.calls))
        with self._device.current():
            self._replay = self._device.recorder().record([prepared.calls[index] for index in order])
        self._calls = len(order)
        return {}

    def sample(self, replays: int) -> dict[str, Any]:
        """Microseconds per call of some replays."""
        assert self._replay is not None
        with self._device.current():
            return {"us": sample(self._device.clock(), self._replay, self._calls, replays, WARMUP)}

    def host(self, per_batch: int) -> dict[str, Any]:
        """Host microseconds of a repeated call, and of an empty launch."""
        with self._device.current():
            call = host_us(self._ready().calls[:1], self._device.synchronize, per_batch=per_batch)
            return {"us": call, "empty_us": host_us([self._device.launch_empty], self._device.synchronize)}

    def release(self) -> dict[str, Any]:
        """Frees the case."""
        self._prepared = self._replay = None
        self._device.release()
        return {}

    def _ready(self) -> Prepared:
        assert self._prepared is not None
        return self._prepared


def serve(tree: Tree, requests: IO[str], replies: IO[str]) -> None:
    """Answers until the requests end. An exception is an answer, too."""
    for line in requests:
        request: Mapping[str, Any] = json.loads(line)
        method: Callable[..., dict[str, Any]] = getattr(tree, request["do"])
        try:
            reply = method(**{key: value for key, value in request.items() if key != "do"})
        except Exception as error:  # whatever a kernel, a driver or an unknown argument throws
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def main(make_device: Callable[[], Device] = CudaDevice) -> None:
    """Serves on the standard streams; whatever else prints goes to the standard error."""
    with os.fdopen(os.dup(1), "w") as replies:
        os.dup2(2, 1)
        try:
            tree = Tree(make_device())
        except BenchError as error:
            sys.exit(str(error))
        serve(tree, sys.stdin, replies)
