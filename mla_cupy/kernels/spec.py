"""The host's description of a kernel: source, variants, parameter struct, and the problems that it supports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Generic, TypeVar

from mla_cupy.dtypes import HALF
from mla_cupy.kernels.param_layout import ParamLayout, Params, layout_of
from mla_cupy.runtime.build import BuildRequest
from mla_cupy.runtime.device import TARGETS, DeviceInfo, number_of

ANY_ARCH: tuple[str, ...] = ()
"""Targets of kernels without architecture-specific instructions."""
SINCE_AMPERE = tuple(target for target in TARGETS if number_of(target) >= 80)
"""Targets of kernels with mma.sync of 16-bit numbers and cp.async."""
HOPPER = ("sm_90a",)
"""Targets of kernels with WGMMA."""
BLACKWELL = ("sm_100a", "sm_103a")
"""Targets of kernels with tcgen05."""


@dataclass(frozen=True, init=False)
class Variant:
    """One build of a kernel: the values of its `-D` macros, in order.

    `Variant(dtype="bfloat16", head_dim_qk=512)` defines MLA_DTYPE and MLA_HEAD_DIM_QK, and has both as attributes.
    """

    macros: tuple[tuple[str, str | int], ...]

    def __init__(self, **macros: str | int) -> None:
        object.__setattr__(self, "macros", tuple(macros.items()))

    def __getattr__(self, name: str) -> Any:
        for macro, value in self.__dict__.get("macros", ()):
            if macro == name:
                return value
        raise AttributeError(f"the variant {self} has no {name}")

    def defines(self) -> tuple[tuple[str, str], ...]:
        """The macros as the compiler gets them."""
        return tuple((f"MLA_{name.upper()}", str(value)) for name, value in self.macros)

    def extended(self, **macros: str | int) -> Variant:
        """A build with further macros."""
        return Variant(**dict(self.macros), **macros)

    def __str__(self) -> str:
        """The canonical name: in the cubin's file name, the test ids and the bench labels."""
        return "-".join(str(value) for _, value in self.macros) or "plain"


def variants(**macros: Iterable[str | int]) -> tuple[Variant, ...]:
    """Every combination of the macros' values; the last macro changes fastest."""
    return tuple(Variant(**dict(zip(macros, values, strict=True))) for values in product(*macros.values()))


PLAIN = (Variant(),)
DTYPE_VARIANTS = variants(dtype=HALF)


@dataclass(frozen=True)
class Reason:
    """Reason why a kernel does not support a problem; `fixable` if the caller could pass arrays that it supports."""

    text: str
    fixable: bool = False

    def __str__(self) -> str:
        return self.text


ProblemT = TypeVar("ProblemT")


def takes_all(problem: Any, device: DeviceInfo) -> Reason | None:
    """`unsupported` of kernels that support every problem of their pipeline's main kernel."""
    return None


def always(problem: Any, device: DeviceInfo) -> bool:
    """Default `preferred`: the order of the pipeline's list decides."""
    return True


def everywhere(variant: Variant, arch: str) -> bool:
    """`runs_on` and `is_default` of kernels with all builds for all targets."""
    return True


@dataclass(frozen=True)
class KernelSpec(Generic[ProblemT]):
    """One kernel: one entry point of one `.cu`.

    Attributes
    ----------
    name : str
        Begins with its source's folder. The `__global__` function is called "mla_" and this.
    about : str
        What it does, for `mla-cupy list`.
    source : str
        Relative to `cuda_src`.
    params : subclass of Params
        Its parameter struct.
    params_with : mapping
        Macro -> parameter struct of the builds with this macro, if it differs.
    archs : tuple of str
        Targets such as "sm_90a"; empty for any.
    variants, core : tuple of Variant
        All of its builds, and the default builds that are compiled on import.
    runs_on : callable
        `runs_on(variant, arch)`: whether GPUs of a target can run a build.
    is_default : callable
        `is_default(variant, arch)`: whether they may run it without a kernel name. Other builds are compiled at the
        first call that needs them.
    facts : mapping
        Constants of the device code that the host relies on: name -> value. Tests compare them with the cubin.
    facts_of : callable
        `facts_of(variant)`: facts that differ from build to build, and are not macros of the variant.
    unsupported : callable
        `unsupported(problem, device)`: why it does not support the problem, or None.
    preferred : callable
        `preferred(problem, device)`: whether it is chosen for a supported problem without a kernel name.
    on_request : bool
        Runs only where `kernel=` names it: not measured yet, or kept for comparison.
    unproven : bool
        Has never run on hardware: chosen by default only on GPUs where the self-test has admitted it.
    spill_bytes : int
        Bytes that a build may spill: for kernels that need all registers, where a few spilled words were measured to
        cost nothing. 0 for all others.
    fallback : bool
        Slow: a datacentre GPU that falls to it is told so once.
    base : str
        For another build of a kernel's source: the name of that kernel, which is also the function's.
    """

    name: str
    about: str
    source: str
    params: type[Params]
    archs: tuple[str, ...] = ANY_ARCH
    variants: tuple[Variant, ...] = PLAIN
    core: tuple[Variant, ...] = ()
    runs_on: Callable[[Variant, str], bool] = everywhere
    is_default: Callable[[Variant, str], bool] = everywhere
    facts: Mapping[str, int] = field(default_factory=dict, hash=False)
    facts_of: Callable[[Variant], Mapping[str, int]] = lambda variant: {}
    params_with: Mapping[str, type[Params]] = field(default_factory=dict, hash=False)
    unsupported: Callable[[ProblemT, DeviceInfo], Reason | None] = takes_all
    preferred: Callable[[ProblemT, DeviceInfo], bool] = always
    on_request: bool = False
    unproven: bool = False
    spill_bytes: int = 0
    fallback: bool = False
    base: str = ""

    def objection(self, problem: ProblemT, device: DeviceInfo) -> Reason | None:
        """Reason against the problem from any of the kernel's rules; None if it is supported."""
        return self.unsupported(problem, device)

    def admitted(self, device: DeviceInfo) -> bool:
        """True if it may be chosen on a GPU where nobody names it."""
        return not self.unproven or device.admits(self.name)

    @property
    def entry(self) -> str:
        """Name of the `__global__` function."""
        return f"mla_{self.base or self.name}"

    def params_of(self, variant: Variant) -> type[Params]:
        """The parameter struct of a build."""
        return next((struct for macro, struct in self.params_with.items() if hasattr(variant, macro)), self.params)

    def layout(self, variant: Variant) -> ParamLayout:
        """Layout of a build's parameters in memory."""
        return layout_of(self.params_of(variant))

    def supports_arch(self, arch: str) -> bool:
        """True if it compiles for a target."""
        return not self.archs or arch in self.archs

    def variants_on(self, arch: str) -> tuple[Variant, ...]:
        """The builds that GPUs of a target can run."""
        return tuple(one for one in self.variants if self.supports_arch(arch) and self.runs_on(one, arch))

    def defaults_on(self, arch: str) -> tuple[Variant, ...]:
        """The builds that GPUs of a target may run where no kernel is named: those to compile ahead."""
        return tuple(one for one in self.variants_on(arch) if self.is_default(one, arch))

    def core_on(self, arch: str) -> tuple[Variant, ...]:
        """The builds that are compiled for a target on import."""
        return tuple(one for one in self.defaults_on(arch) if one in self.core)

    def request(self, variant: Variant, arch: str) -> BuildRequest:
        """Request to compile `variant` for `arch`."""
        return BuildRequest(self.entry, self.source, arch, variant.defines(), str(variant), self.spill_bytes)


def needs_cc(device: DeviceInfo, *ccs: str) -> Reason:
    """The reason of kernels for other GPUs."""
    return Reason(f"needs compute capability {' or '.join(ccs)}, {device.name} has {device.cc[0]}.{device.cc[1]}")


def needs_ampere(device: DeviceInfo) -> Reason | None:
    """The reason of kernels with mma.sync of 16-bit numbers, where the GPU is older."""
    return needs_cc(device, "8.0 or newer") if device.cc < (8, 0) else None


def needs_alignment(arrays: str) -> Reason:
    """The reason of kernels that fetch by TMA."""
    return Reason(f"needs {arrays} to start at, and step by, multiples of 16 bytes", fixable=True)
