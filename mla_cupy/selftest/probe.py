"""Probes, their findings, and the run of one that launches a single kernel."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from mla_cupy import arrays
from mla_cupy.kernels.param_layout import NULL, Params, layout_of, values_of
from mla_cupy.kernels.pipeline import bind
from mla_cupy.kernels.spec import SINCE_AMPERE, KernelSpec, Variant
from mla_cupy.runtime import driver, launching
from mla_cupy.runtime.build import BuildRequest
from mla_cupy.runtime.launching import Dim3
from mla_cupy.runtime.tensormap import MAP_BYTES, TensorMapSpec

Array = npt.NDArray[Any]

BLACKWELL = ("sm_100a", "sm_103a")
HOPPER = ("sm_90a",)
TMA_ARCHS = HOPPER + BLACKWELL
ARCHS = SINCE_AMPERE
"""All targets that have probes: those with mma.sync of 16-bit numbers."""
AXES = {
    "dump": ("lane", "column"),
    "dumps": ("block", "lane", "column"),
    "loaded": ("warp", "register", "thread"),
    "sw_tile": ("row", "place"),
    "sums": ("group", "element"),
    "q": ("query", "head", "column"),
}
"""Names of the arrays that probes compare, so that a report can be read without the source."""
INSTRUCTION_SECONDS = 20.0
"""After which the probe of an instruction is taken to hang."""


class UnfitError(Exception):
    """The probe does not apply, such as a kernel for other sizes: not a failure."""


class Machine(NamedTuple):
    """Machine that runs the probes: a GPU, or the simulator in its place."""

    arch: str
    device: int
    simulated: bool

    def upload(self, x: Array) -> Any:
        """An array on the device. In the simulator CuPy's family is replaced, see `simulation.simulated`."""
        family = arrays.cupy_family()
        return family.from_numpy(x, self.device, family.current_stream(self.device))

    def download(self, x: Any) -> Array:
        """Its copy here, once all work is done."""
        family = arrays.cupy_family()
        return family.to_numpy(x, family.current_stream(self.device))


class Finding(NamedTuple):
    """Finding of a probe: "" or the first difference, and a description of the comparison."""

    difference: str
    compared: str


class Probe(Protocol):
    """One line of the report."""

    @property
    def name(self) -> str:
        """Such as "mma/bfloat16/s-m64n32": the stage first."""

    @property
    def about(self) -> str:
        """Description of the trial, in one line."""

    @property
    def archs(self) -> tuple[str, ...]:
        """Architectures that support the probe."""

    @property
    def needs(self) -> tuple[str, ...]:
        """Names (with wildcards) of the probes that must pass for this one to mean anything."""

    @property
    def seconds(self) -> float:
        """After which it is taken to hang on a GPU."""

    def requests(self, arch: str) -> list[BuildRequest]:
        """Builds that it needs, as far as they are known beforehand."""

    def run(self, machine: Machine) -> Finding:
        """Launch, and compare. Raises UnfitError if there is nothing to try on this machine."""


@dataclass(frozen=True)
class BoxMap:
    """A tensor map over one of the arrays of a case: the innermost dimension first, sizes in elements."""

    array: str
    dtype: str
    dims: tuple[int, ...]
    strides_elems: tuple[int, ...]
    box: tuple[int, ...]

    def spec(self, base: int) -> TensorMapSpec:
        """Specification for the array at `base`."""
        strides = tuple(2 * stride for stride in self.strides_elems)
        return TensorMapSpec(self.dtype, base, self.dims, strides, self.box, "128B")


@dataclass(frozen=True)
class Case:
    """One launch.

    arrays
        Initial contents of memory, by name.
    params
        Parameters of the kernel.
    expected
        Exact final contents of some of the arrays.
    """

    arrays: Mapping[str, Array]
    params: Params
    expected: Mapping[str, Array]
    grid: Dim3 = (1, 1, 1)
    box_map: BoxMap | None = None


@dataclass(frozen=True)
class InstructionProbe:
    """One launch of a kernel that does nothing but the instruction."""

    name: str
    about: str
    kernel: KernelSpec[Any]
    variant: Variant
    make: Callable[[], Case] = field(repr=False)
    archs: tuple[str, ...] = BLACKWELL
    needs: tuple[str, ...] = ()
    seconds: float = INSTRUCTION_SECONDS

    def requests(self, arch: str) -> list[BuildRequest]:
        """Its one kernel."""
        return [self.kernel.request(self.variant, arch)]

    def run(self, machine: Machine) -> Finding:
        """Launch once; every element of every expected array must be equal."""
        case = self.make()
        placed = {name: machine.upload(x) for name, x in case.arrays.items()}
        self._launch(machine, case, placed)
        compared = sum(wanted.size for wanted in case.expected.values())
        for name, wanted in case.expected.items():
            if difference := first_difference(name, machine.download(placed[name]), wanted):
                return Finding(difference, f"{compared} values, exactly")
        return Finding("", f"{compared} values, exactly")

    def _launch(self, machine: Machine, case: Case, placed: Mapping[str, Any]) -> None:
        family = arrays.cupy_family()
        address = {NULL: 0, **{name: family.view(x).ptr for name, x in placed.items()}}
        values = [address[x] if isinstance(x, str) else x for x in values_of(case.params)]
        box_map, layout = case.box_map, layout_of(type(case.params))
        args = launching.ArgumentBlock((layout.size, *([MAP_BYTES] if box_map else [])))
        layout.pack_into(args.views[0], *values)
        if box_map:
            args.views[1][:] = driver.current().encode_tiled(box_map.spec(address[box_map.array]))
        request, stream = self.kernel.request(self.variant, machine.arch), family.current_stream(machine.device)
        with driver.device_guard(machine.device):
            bind(request, machine.device, case.grid, args, stream, dependent=False)(stream)


def first_difference(name: str, got: Array, wanted: Array) -> str:
    """First difference of two arrays, and the number of differing elements; "" if none. NaN equals NaN."""
    if got.shape != wanted.shape:
        return f"{name}: shape {got.shape}, expected {wanted.shape}"
    differ = (got != wanted) & ~((got != got) & (wanted != wanted))
    if not differ.any():
        return ""
    where = tuple(map(int, np.argwhere(differ)[0]))
    axes = AXES.get(name, ("",) * len(where))
    index = ", ".join(f"{axis} {i}".strip() for axis, i in zip(axes, where, strict=True))
    return (
        f"{name}[{index}]: got {got[where]}, expected {wanted[where]} "
        f"({int(differ.sum())} of {differ.size} values differ)"
    )


def stage(name: str) -> str:
    """The first part of a probe's name."""
    return name.partition("/")[0]


def random(name: str) -> np.random.Generator:
    """Random numbers: the same for the same probe, everywhere."""
    return np.random.default_rng(zlib.crc32(name.encode()))


def small_integers(rng: np.random.Generator, *shape: int, most: int = 4) -> Array:
    """So small that no product or sum of them is rounded, in any order."""
    return rng.integers(-most, most, shape, endpoint=True).astype(np.float32)
