"""An exported module as data: what is recorded for each target, and the builds that it launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mla_cupy.export import explore
from mla_cupy.export.expressions import Expression
from mla_cupy.export.record import RecordedFill, RecordedLaunch, RecordedStep, Refusal, Target
from mla_cupy.export.subject import Subject
from mla_cupy.kernels.param_layout import ParamLayout, Params, layout_of
from mla_cupy.kernels.spec import KernelSpec, Variant
from mla_cupy.runtime.build import Build, BuildRequest

INTERFACE_VERSION = 1
"""Version of the C interface: of its structs and functions."""


@dataclass(frozen=True)
class Kernel:
    """A build that the module launches on one of its targets.

    Attributes
    ----------
    target : int
        Which.
    spec : KernelSpec
    variant : Variant
    build : Build
    ptx : bool
        Whether the image is PTX, which the driver compiles, in place of machine code.
    """

    target: int
    spec: KernelSpec[Any]
    variant: Variant
    build: Build
    ptx: bool = False

    @property
    def params(self) -> type[Params]:
        """Its parameter struct."""
        return self.spec.params_of(self.variant)

    @property
    def image(self) -> bytes:
        """The image, as the driver takes it: PTX ends with a zero."""
        return self.build.ptx.rstrip(b"\0") + b"\0" if self.ptx else self.build.cubin

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return int(self.build.facts["threads"])

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return int(self.build.facts.get("cluster", 1))

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self.build.dynamic_smem


@dataclass(frozen=True)
class Module:
    """A module to be written.

    Attributes
    ----------
    prefix : str
        Of all names with external linkage.
    subject : Subject
    targets : tuple of Target
    kernels : tuple of Kernel
    """

    prefix: str
    subject: Subject
    targets: tuple[Target, ...]
    kernels: tuple[Kernel, ...]

    @property
    def name(self) -> str:
        """The beginning of all names with external linkage, and of the files."""
        return self.prefix + self.subject.operation.name.removeprefix("mla_")

    @property
    def is_planned(self) -> bool:
        """True if there are plans."""
        return "plan_make" in self.targets[0].procedures

    @cached_property
    def structs(self) -> dict[str, ParamLayout]:
        """The parameter structs of the launches, by name."""
        kinds = {kernel.params.__name__: kernel.params for kernel in self.kernels}
        return {name: layout_of(kinds[name]) for name in sorted(kinds)}

    def index(self, target: int, build: tuple[str, Variant]) -> int:
        """The place of a build among the kernels."""
        return next(
            at
            for at, kernel in enumerate(self.kernels)
            if kernel.target == target and (kernel.spec.name, kernel.variant) == build
        )


def requests(targets: tuple[Target, ...]) -> list[tuple[int, KernelSpec[Any], Variant, BuildRequest]]:
    """The builds that the procedures of the targets may launch, each once."""
    found: dict[tuple[int, str, Variant], None] = {}
    for at, target in enumerate(targets):
        for procedure in target.procedures.values():
            for steps in explore.outcomes(procedure.steps):
                for step in steps if isinstance(steps, tuple) else ():
                    if isinstance(step, RecordedLaunch):
                        kernel, variant = step.build
                        found[at, kernel, variant] = None
    kernels = {(at, name): kernel for at, target in enumerate(targets) for name, kernel in target.kernels.items()}
    return [
        (at, kernels[at, name], variant, kernels[at, name].request(variant, targets[at].arch))
        for at, name, variant in found
    ]


def built(
    prefix: str,
    subject: Subject,
    targets: tuple[Target, ...],
    obtain: Callable[[BuildRequest], Build],
    *,
    ptx: bool = False,
) -> Module:
    """The module of what is recorded, with the builds that `obtain` returns."""
    kernels = tuple(Kernel(at, spec, variant, obtain(request), ptx) for at, spec, variant, request in requests(targets))
    return Module(prefix, subject, targets, kernels)


def expressions_of(outcome: Any) -> Iterator[Expression]:
    """Every expression in the outcome of a diagram."""
    if isinstance(outcome, Expression):
        yield outcome
    elif isinstance(outcome, Refusal):
        yield from (piece[0] for piece in outcome.text if not isinstance(piece, str))
    elif isinstance(outcome, tuple):
        for step in outcome:
            yield from _expressions_of_step(step)


def _expressions_of_step(step: RecordedStep) -> Iterator[Expression]:
    if isinstance(step, RecordedFill):
        yield from (step.address, step.nbytes)
        return
    yield from (*step.grid, *step.args.values)
    for each in step.args.maps:
        yield from (each.base, *each.dims, *each.strides_bytes, *each.box)
