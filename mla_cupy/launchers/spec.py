"""What a kernel is to the host: its source, its variants, the record of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from mla_cupy.runtime.build import BuildRequest


@dataclass(frozen=True)
class Variant:
    """Base of the variants: each field is one `-D` macro of the kernel, named `MLA_` + the field's name in capitals."""

    def defines(self) -> tuple[tuple[str, str], ...]:
        return tuple((f"MLA_{field.name.upper()}", str(getattr(self, field.name))) for field in fields(self))

    def __str__(self) -> str:
        """The canonical name: in the cubin's file name, the test ids and the bench labels."""
        return "-".join(str(getattr(self, field.name)) for field in fields(self)) or "plain"


@dataclass(frozen=True)
class KernelSpec:
    """One kernel: one `.cu`, one entry point.

    `core` are the variants that are compiled on import; `supports_arch` takes a target such as "sm_90a".
    `params` is the NumPy record that the kernel's parameter struct must equal (None: no struct).
    """

    name: str
    source: str
    variants: tuple[Variant, ...]
    core: tuple[Variant, ...]
    supports_arch: Callable[[str], bool]
    params: np.dtype[Any] | None = None

    @property
    def entry(self) -> str:
        return f"mla_{self.name}"

    def request(self, variant: Variant, arch: str) -> BuildRequest:
        """What to compile for `variant` on `arch`."""
        return BuildRequest(self.entry, self.source, arch, variant.defines(), str(variant))


Registry = Mapping[str, KernelSpec]
