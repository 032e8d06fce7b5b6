"""Everything that can be timed, one adapter a file, under one Protocol.

To add a peer: a file here with a class that has what `Implementation` asks for, and a line in one of the functions at
the end, which name the implementations of an operation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from ..device import Device
from ..errors import BenchError
from ..recorders import Call, Recorder

OWN = "mla_cupy"
EXTERNAL = ("flashmla", "fa3", "cudnn", "tilelang")
BASELINES = ("generic", "cupy")


@dataclass(frozen=True)
class Prepared:
    """An implementation made ready for one case."""

    calls: Sequence[Call]  # one an input set
    outputs: Callable[[int], Any]  # what the last call on that set wrote
    recorder: Recorder
    variant: str = ""
    figures: Mapping[str, Sequence[Call]] = field(default_factory=dict)  # further things to time, by name
    workspace_bytes: Callable[[], int] | None = None  # the most that a call allocates besides its results


class Verdict(Protocol):
    """What a check finds: a dataclass whose other fields are for the records."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def ok(self) -> bool: ...

    @property
    def reason(self) -> str: ...


class Implementation(Protocol):
    """One way to compute an operation. Cases, sets and outputs are those of the operation."""

    name: str

    def unsupported(self, case: Any, dtype: str) -> str | None:
        """Why the case is out of reach; None where it is not."""

    def prepare(self, case: Any, dtype: str, sets: Sequence[Any], device: Device) -> Prepared:
        """Makes everything that is not to be timed: plans, metadata, outputs."""


Known = Mapping[str, Callable[[], Implementation]]  # nothing is imported or loaded before one is made


@dataclass(frozen=True)
class Choices:
    """What the command line says about implementations."""

    peers_dir: Path | None = None
    variant: str | None = None

    def directory(self, name: str) -> Path:
        """Where a peer's shared object is."""
        if self.peers_dir is None:
            raise BenchError(f"peer {name!r} needs --peers-dir: the directory that holds its shared object")
        return self.peers_dir


class NotAvailable:
    """A peer that is known and cannot be had: its row says why."""

    def __init__(self, name: str, reason: str) -> None:
        self.name, self._reason = name, reason

    def unsupported(self, case: Any, dtype: str) -> str | None:
        return f"not available: {self._reason}"

    def prepare(self, case: Any, dtype: str, sets: Sequence[Any], device: Device) -> Prepared:
        raise BenchError(self._reason)


TILELANG = "TileLang's sparse MLA kernels are example scripts of its repository, not part of its wheel"


def decode_implementations(choices: Choices) -> Known:
    """Of `mla_decode`."""

    def own() -> Implementation:
        from .project import Project

        return Project(choices.variant)

    def generic() -> Implementation:
        from .generic import Generic

        return Generic()

    def cupy() -> Implementation:
        from .cupy_unfused import CupyUnfused

        return CupyUnfused()

    def flashmla() -> Implementation:
        from .flashmla import FlashMla

        return FlashMla(choices.directory("flashmla"))

    def fa3() -> Implementation:
        from .fa3 import FlashAttention3

        return FlashAttention3(choices.directory("fa3"))

    return {OWN: own, "generic": generic, "cupy": cupy, "flashmla": flashmla, "fa3": fa3}


def forward_implementations(choices: Choices) -> Known:
    """Of `sparse_mla_forward`."""

    def own() -> Implementation:
        from .sparse_project import ProjectForward

        return ProjectForward(choices.variant)

    def generic() -> Implementation:
        from .sparse_project import GENERIC_FORWARD, ProjectForward

        return ProjectForward(GENERIC_FORWARD, "generic")

    def flashmla() -> Implementation:
        from .flashmla_sparse import FlashMlaSparse

        return FlashMlaSparse(choices.directory("flashmla"))

    return {OWN: own, "generic": generic, "flashmla": flashmla, "tilelang": _tilelang}


def backward_implementations(choices: Choices) -> Known:
    """Of `sparse_mla_backward`."""

    def own() -> Implementation:
        from .sparse_project import ProjectBackward

        return ProjectBackward(choices.variant)

    def deterministic() -> Implementation:
        from .sparse_project import ProjectBackward

        return ProjectBackward(choices.variant, "deterministic", deterministic=True)

    def generic() -> Implementation:
        from .sparse_project import GENERIC_BACKWARD, ProjectBackward

        return ProjectBackward(GENERIC_BACKWARD, "generic")

    def cudnn() -> Implementation:
        from .cudnn_sparse import CudnnSparse

        return CudnnSparse()

    return {OWN: own, "deterministic": deterministic, "generic": generic, "cudnn": cudnn, "tilelang": _tilelang}


def _tilelang() -> Implementation:
    return NotAvailable("tilelang", TILELANG)


def make(names: Sequence[str], known: Known) -> list[Implementation]:
    """The project's implementation and those named, in that order; each once."""
    unknown = [name for name in names if name not in known]
    if unknown:
        raise BenchError(
            f"unknown peer {unknown[0]!r}: expected some of {', '.join(name for name in known if name != OWN)}"
        )
    return [known[name]() for name in dict.fromkeys((OWN, *names))]
