"""The project's plain CUDA kernel, without tensor cores: what a straightforward kernel reaches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..cases import DecodeCase
from ..device import Device
from ..inputs import InputSet
from . import Prepared
from .project import Project

KERNEL = "dense_decode_generic"


class Generic(Project):
    """The same public call with the kernel forced."""

    name = "generic"

    def __init__(self) -> None:
        super().__init__(KERNEL)

    def prepare(self, case: DecodeCase, dtype: str, sets: Sequence[InputSet], device: Device) -> Prepared:
        return replace(super().prepare(case, dtype, sets, device), figures={})
