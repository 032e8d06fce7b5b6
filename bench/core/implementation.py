"""Implementations, which can be timed: their protocol, and how one is selected by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from .device import Device
from .errors import BenchError
from .recorders import Call, Recorder

Result = TypeVar("Result")

OWN = "mla_cupy"
DETERMINISTIC = "deterministic"
EXTERNAL = ("flashmla", "flashmla_fp8", "fa3", "fa4", "triton", "cudnn", "tilelang", "deep_gemm", "torch")
BASELINES = ("generic", "cupy")


@dataclass(frozen=True)
class Prepared:
    """An implementation ready to run one case."""

    calls: Sequence[Call]  # one per input set
    outputs: Callable[[int], Any]  # what the last call on that set wrote
    recorder: Recorder
    kernel: str = ""  # which kernel runs, where that is worth saying
    includes: str = ""  # what its time includes, and what was done before, where implementations differ
    figures: Mapping[str, Sequence[Call]] = field(default_factory=dict)  # further things to time, by name
    workspace_bytes: Callable[[], int] | None = None  # the peak that a call allocates besides its results
    excuse: Callable[[Any], str] = lambda verdict: ""  # why a result that misses the tolerance is timed; "": it is not


class Implementation(Protocol):
    """One way to compute an operation. Cases, input sets and outputs belong to the operation."""

    name: str

    def unsupported(self, case: Any, dtype: str) -> str | None:
        """Reason that it cannot compute the case; None if it can."""

    def prepare(self, case: Any, dtype: str, sets: Sequence[Any], device: Device) -> Prepared:
        """Makes everything that is not timed: plans, metadata, outputs."""


class Own:
    """Our public call: base of one class per operation.

    Without `kernel` the call chooses one. `deterministic` is for operations that have the option; `options` are further
    arguments of the call.
    """

    def __init__(
        self,
        kernel: str | None = None,
        name: str = OWN,
        *,
        deterministic: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.name, self._kernel, self._deterministic, self._options = name, kernel, deterministic, options or {}

    def unsupported(self, case: Any, dtype: str) -> str | None:
        return None

    def prepare(self, case: Any, dtype: str, sets: Sequence[Any], device: Device) -> Prepared:
        raise NotImplementedError

    def prepared(self, calls: Sequence[Call], results: Sequence[Any], device: Device, **more: Any) -> Prepared:
        """Calls with their results, one of each per input set; `more` are further fields of `Prepared`."""
        return Prepared(
            calls=calls,
            outputs=lambda index: results[index],
            recorder=device.recorder(),
            kernel=self._kernel or "",
            workspace_bytes=lambda: device.allocated_by(calls[0]),
            **more,
        )


Known = Mapping[str, Callable[[], Implementation]]  # a library is loaded only when its implementation is created


@dataclass(frozen=True)
class Choices:
    """Implementations that the command line names."""

    peers_dir: Path | None = None
    kernel: str | None = None

    def from_dir(self, peer: Callable[[Path], Implementation], name: str) -> Callable[[], Implementation]:
        """A peer whose shared object is in `--peers-dir`."""

        def load() -> Implementation:
            if self.peers_dir is None:
                raise BenchError(f"peer {name!r} needs --peers-dir: the directory that holds its shared object")
            return peer(self.peers_dir)

        return load


class NotAvailable:
    """A known peer that cannot be run; its row gives the reason."""

    def __init__(self, name: str, reason: str) -> None:
        self.name, self._reason = name, reason

    def unsupported(self, case: Any, dtype: str) -> str | None:
        return f"not available: {self._reason}"

    def prepare(self, case: Any, dtype: str, sets: Sequence[Any], device: Device) -> Prepared:
        raise BenchError(self._reason)


def make(names: Sequence[str], known: Known) -> list[Implementation]:
    """Our own implementation, then the named ones in order, each once."""
    unknown = [name for name in names if name not in known]
    if unknown:
        raise BenchError(
            f"unknown peer {unknown[0]!r}: expected some of {', '.join(name for name in known if name != OWN)}"
        )
    return [known[name]() for name in dict.fromkeys((OWN, *names))]


def own_kernels(
    own: type[Own], choices: Choices, generic: str, named: Sequence[str] = (), *, deterministic: bool = False
) -> dict[str, Callable[[], Implementation]]:
    """Ours with the kernel that it chooses or `--kernel` names, with the one without tensor cores, and with others.

    With `deterministic` also the first one as the option `--deterministic` wants it.
    """
    kernels = {"generic": generic, **{name: name for name in named}}
    return {
        OWN: partial(own, choices.kernel),
        **({DETERMINISTIC: partial(own, choices.kernel, DETERMINISTIC, deterministic=True)} if deterministic else {}),
        **{name: partial(own, kernel, name) for name, kernel in kernels.items()},
    }


def batch_invariant(own: type[Own]) -> dict[str, Callable[[], Implementation]]:
    """Our batch-invariant call, with pieces of 4,096 tokens, the default, and of 256."""
    pieces = {"batch_invariant": 4096, "batch_invariant_256": 256}
    return {
        name: partial(own, None, name, options={"batch_invariant": True, "split_tokens": tokens})
        for name, tokens in pieces.items()
    }


def copies(nbytes: int, count: int, device: Device) -> dict[str, list[Call]]:
    """The figure `copy` of `count` input sets: copies that read and write `nbytes` bytes together."""

    def copy() -> Call:
        source, destination = (device.empty((nbytes // 2,), "uint8") for _ in range(2))

        def call() -> None:
            destination[...] = source

        return call

    return {"copy": [copy() for _ in range(count)]}


def with_kernel(function: Callable[..., Result], kernel: str | None) -> Callable[..., Result]:
    """A public function of mla_cupy that runs the named kernel, or the one it chooses itself if `kernel` is None."""
    return partial(function, kernel=kernel) if kernel else function
