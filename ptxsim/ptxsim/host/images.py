"""Images of PTX that a host program has loaded, and the kernels in them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import SimError
from ..memory.spaces import Memory
from ..module import Module
from ..translation.program import Program
from .device import DEFAULT_SHARED, OPT_IN_SHARED, REGISTERS


class HostError(Exception):
    """A call fails with a CUDA error code, and a reason for the user.

    ``bad`` tells that this is no answer which a program may expect, but a broken kernel or something not modelled.
    """

    def __init__(self, code: int, reason: str = "", bad: bool = True) -> None:
        super().__init__(reason)
        self.code, self.reason, self.bad = code, reason, bad and bool(reason)


@dataclass
class Image:
    """PTX by architecture; the text that fits the device is parsed when it is first used."""

    texts: list[tuple[int, str]]
    text: str = ""
    loaded: Module | None = None

    def module(self, arch: int, strict: bool, memory: Memory) -> Module:
        """Return the module for an architecture."""
        if self.loaded is None:
            self.text = self._fitting(arch)
            try:
                self.loaded = Module(self.text, strict=strict, memory=memory)
            except SimError as error:
                raise HostError(218, str(error)) from None
        return self.loaded

    def _fitting(self, arch: int) -> str:
        """Return the newest text that the architecture runs."""
        fitting = [each for each in self.texts if each[0] <= arch]
        if not fitting:
            has = ", ".join(f"compute_{each}" for each, _ in self.texts) or "none"
            raise HostError(
                209,
                f"no PTX for sm_{arch} in an image (it has {has}): build with nvcc "
                "-gencode arch=compute_90a,code=compute_90a (or 100a)",
            )
        best = max(each for each, _ in fitting)
        return [text for each, text in fitting if each == best][-1]


@dataclass
class Kernel:
    """A kernel that the program can launch, and the attributes that it has set."""

    image: Image
    name: str
    dynamic: int = -1
    any_cluster: bool = False

    def program(self, module: Module) -> Program:
        """Return the kernel, checked for unknown instructions."""
        if self.name not in module.kernels:
            raise HostError(98)
        try:
            return module.program(self.name)
        except SimError as error:
            raise HostError(218, str(error)) from None

    def attributes(self, program: Program, arch: int) -> dict[int, int]:
        """Return the function attributes by number, which the driver and the runtime share."""
        directives = program.function.directives
        threads = math.prod(directives.get("maxntid") or directives.get("reqntid") or (1024,))
        cluster = (*(directives.get("reqnctapercluster") or (0,)), 0, 0)[:3]
        required = [max(each, 1) if cluster[0] else 0 for each in cluster]
        dynamic = self.dynamic if self.dynamic >= 0 else DEFAULT_SHARED - program.static_shared
        registers = min(255, REGISTERS // threads // 8 * 8)  # the most that fit, because a kernel's use is unknown
        first = dict(enumerate((threads, program.static_shared, 0, 0, registers, arch, arch, 0, dynamic, -1, 0)))
        return {**first, **dict(zip((11, 12, 13), required, strict=True)), 14: self.any_cluster, 15: 0}

    def set_attribute(self, program: Program, number: int, value: int) -> None:
        """Set a function attribute."""
        if number == 8:
            if value + program.static_shared > OPT_IN_SHARED:
                reason = f"{self.name}: {value} bytes of dynamic shared memory exceed what a block can have"
                raise HostError(1, reason, bad=False)
            self.dynamic = value
        elif number == 14:
            self.any_cluster = bool(value)
        elif number not in (9, 15):
            raise HostError(1, f"function attribute {number} cannot be set")

    def check(self, program: Program, grid: tuple, block: tuple, cluster: tuple, shared: int) -> None:
        """Refuse launches that the driver refuses."""
        if min(*grid, *block) < 1 or math.prod(block) > 1024:
            raise HostError(9, f"{self.name}: grid {grid}, block {block}")
        dynamic = self.attributes(program, 0)[8]
        if shared > dynamic:
            raise HostError(
                1,
                f"{self.name}: {shared} bytes of dynamic shared memory, but only {dynamic} are set "
                "(cudaFuncAttributeMaxDynamicSharedMemorySize)",
            )
        if math.prod(cluster) > 8 and not self.any_cluster:
            raise HostError(
                912,
                f"{self.name}: a cluster of {math.prod(cluster)} blocks is not portable "
                "(cudaFuncAttributeNonPortableClusterSizeAllowed)",
            )
