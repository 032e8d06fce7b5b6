"""Everything that can be timed, one adapter a file, under one Protocol.

To add a peer: a file here with a class that has what `Implementation` asks for, and a line in `registry`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ..cases import DecodeCase
from ..device import Device
from ..errors import BenchError
from ..inputs import InputSet, Outputs
from ..recorders import Call, Recorder

OWN = "mla_cupy"
EXTERNAL = ("flashmla", "fa3")
BASELINES = ("generic", "cupy")


@dataclass(frozen=True)
class Prepared:
    """An implementation made ready for one case."""

    calls: Sequence[Call]  # one an input set
    outputs: Callable[[int], Outputs]  # what the last call on that set wrote
    recorder: Recorder
    variant: str = ""
    figures: Mapping[str, Sequence[Call]] = field(default_factory=dict)  # further things to time, by name


class Implementation(Protocol):
    """One way to compute the decode."""

    name: str

    def unsupported(self, case: DecodeCase, dtype: str) -> str | None:
        """Why the case is out of reach; None where it is not."""

    def prepare(self, case: DecodeCase, dtype: str, sets: Sequence[InputSet], device: Device) -> Prepared:
        """Makes everything that is not to be timed: plans, metadata, outputs."""


def registry(peers_dir: Path | None, variant: str | None) -> dict[str, Callable[[], Implementation]]:
    """The known implementations by name. Nothing is imported or loaded before one is made."""

    def own() -> Implementation:
        from .project import Project

        return Project(variant)

    def generic() -> Implementation:
        from .generic import Generic

        return Generic()

    def cupy() -> Implementation:
        from .cupy_unfused import CupyUnfused

        return CupyUnfused()

    def flashmla() -> Implementation:
        from .flashmla import FlashMla

        return FlashMla(_required(peers_dir, "flashmla"))

    def fa3() -> Implementation:
        from .fa3 import FlashAttention3

        return FlashAttention3(_required(peers_dir, "fa3"))

    return {OWN: own, "generic": generic, "cupy": cupy, "flashmla": flashmla, "fa3": fa3}


def _required(peers_dir: Path | None, name: str) -> Path:
    if peers_dir is None:
        raise BenchError(f"peer {name!r} needs --peers-dir: the directory that holds its shared object")
    return peers_dir


def make(names: Sequence[str], peers_dir: Path | None, variant: str | None) -> list[Implementation]:
    """The project's implementation and those named, in that order; each once."""
    known = registry(peers_dir, variant)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise BenchError(
            f"unknown peer {unknown[0]!r}: expected some of {', '.join(name for name in known if name != OWN)}"
        )
    return [known[name]() for name in dict.fromkeys((OWN, *names))]
