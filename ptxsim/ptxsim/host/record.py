"""Records launches with the memory before and after them, to run them again without the host program."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import SimError
from ..memory.spaces import Memory
from ..module import Module
from ..state.report import Report
from .heap import Heap, shared_heap

LIMIT = 4 << 30
"""Bytes of memory that a recorded launch may have."""


class Recording:
    """Writes launches to a directory: the PTX, and per launch its arguments and all memory.

    Parameters
    ----------
    directory : Path
        Made if it is not there; launches are numbered on from those that it holds.
    kernels : str, optional
        Record only kernels whose name contains this.
    """

    def __init__(self, directory: Path, kernels: str = "") -> None:
        self.directory, self.kernels = directory, kernels
        directory.mkdir(parents=True, exist_ok=True)

    def before(self, heap: Heap, name: str) -> dict[int, np.ndarray] | None:
        """Return a copy of all memory, if launches of this kernel are recorded."""
        if self.kernels not in name:
            return None
        if heap.used > LIMIT:
            raise SimError(f"{heap.used} bytes of memory are too many to record")
        return {at: heap.array(at, size).copy() for at, (size, _) in heap.live.items() if size}

    def save(
        self,
        name: str,
        module: Module,
        text: str,
        shape: dict,
        args: list[bytes],
        before: dict[int, np.ndarray],
        heap: Heap,
    ) -> None:
        """Write one launch."""
        path = self.directory / f"launch-{1 + sum(1 for _ in self.directory.glob('launch-*')):04}"
        path.mkdir()
        source = self.directory / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.ptx"
        source.write_text(text)
        changed = {at: data for at, data in before.items() if not np.array_equal(data, heap.array(at, data.size))}
        after = {f"after_{at:x}": heap.array(at, data.size) for at, data in changed.items()}
        images: dict[str, Any] = {f"before_{at:x}": data for at, data in before.items()} | after
        np.savez_compressed(path / "memory.npz", **images)
        variables = {"": module.constants.bytes, **module.globals}
        places = {name: array.ctypes.data for name, array in variables.items() if array.size}
        record = {
            "kernel": name,
            "ptx": source.name,
            **shape,
            "args": [each.hex() for each in args],
            "variables": places,
        }
        (path / "launch.json").write_text(json.dumps(record, indent=1) + "\n")


class _ReplayMemory(Memory):
    """Global memory with a recorded launch's allocations and variables at their recorded addresses."""

    def __init__(self, sizes: dict[int, int], variables: dict[str, int]) -> None:
        super().__init__()
        self._sizes, self._variables = sizes, variables
        for address, size in sizes.items():
            self.register(shared_heap().array(address, size), f"allocation of {size} bytes at {address:#x}")

    def fresh(self) -> Memory:
        """Return another view of the same memory."""
        return _ReplayMemory(self._sizes, self._variables)

    def store(self, name: str, data: np.ndarray) -> np.ndarray:
        """Return the recorded place of a variable."""
        if not data.size:
            return data
        array = shared_heap().array(self._variables[name], data.size)
        array[:] = data
        return array

    def map(self, array: np.ndarray, name: str = "") -> int:
        """Register an array at its own address."""
        return self.register(array, name)


class Replay:
    """A recorded launch.

    Parameters
    ----------
    path : Path
        The directory of one launch.
    strict, allow : optional
        As for :class:`ptxsim.Module`.

    Attributes
    ----------
    kernel : str
        Name of the kernel.
    module : Module
        Its module.
    steps : int
        Basic blocks that the last run executed.
    """

    def __init__(self, path: Path, strict: bool = True, allow: tuple[str, ...] = ()) -> None:
        try:
            record = json.loads((path / "launch.json").read_text())
            self.kernel = record["kernel"]
            self._args = [bytes.fromhex(each) for each in record["args"]]
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise SimError(f"{path} is no recorded launch: {type(error).__name__}: {error}") from error
        self.steps = 0
        self._shape = {key: record[key] for key in ("grid", "block", "smem", "cluster", "cooperative") if key in record}
        with np.load(path / "memory.npz") as stored:
            data = {name: stored[name] for name in stored.files}
        self._before = _by_address(data, "before_")
        self._after = {**self._before, **_by_address(data, "after_")}
        memory = _ReplayMemory({at: each.size for at, each in self._before.items()}, record["variables"])
        self.module = Module((path.parent / record["ptx"]).read_text(), strict=strict, allow=allow, memory=memory)

    def run(self, module: Module | None = None, **options: Any) -> Report:
        """Restore the memory and launch the kernel; ``module`` is the recorded one or one with a bug planted."""
        for address, data in self._before.items():
            shared_heap().array(address, data.size)[:] = data
        return (module or self.module).launch(self.kernel, args=self._args, **{**self._shape, **options})

    def differences(self, dtype: str = "u1", rtol: float = 0.0, atol: float = 0.0) -> dict[int, int]:
        """Compare memory with the recorded launch's; return the wrong elements per allocation's address.

        ``dtype`` tells how the bytes are read where tolerances are given (sums that atomics add in any order).
        """
        wrong = {}
        for address, data in self._after.items():
            got = shared_heap().array(address, data.size)
            if np.array_equal(got, data):
                continue
            usable = data.size // np.dtype(dtype).itemsize * np.dtype(dtype).itemsize
            first, second = (each[:usable].view(dtype).astype("f8") for each in (got, data))
            near = np.isclose(first, second, rtol=rtol, atol=atol, equal_nan=True)
            count = int(np.count_nonzero(~near)) + int(np.count_nonzero(got[usable:] != data[usable:]))
            if count:
                wrong[address] = count
        return wrong


def _by_address(data: dict[str, np.ndarray], prefix: str) -> dict[int, np.ndarray]:
    return {int(name.removeprefix(prefix), 16): each for name, each in data.items() if name.startswith(prefix)}
