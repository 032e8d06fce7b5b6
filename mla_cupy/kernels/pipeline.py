"""Pipelines of operations: launches that share one workspace, configured once, prepared once, enqueued many times.

A pipeline is pure up to `prepare`: `configure` chooses the kernel, `workspace` lays out the memory, `steps` lists the
launches with their grids and parameters. Arrays appear in the steps by name. `Prepared` binds the names to addresses,
which is all that differs between calls of equal shapes, strides and dtypes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import itemgetter
from struct import Struct
from typing import Any, ClassVar, Generic, Literal, TypeVar, overload

from mla_cupy.arrays.view import View
from mla_cupy.kernels.param_layout import NULL, Params, layout_of, values_of
from mla_cupy.kernels.spec import KernelSpec, Variant
from mla_cupy.runtime import driver, launching, loader
from mla_cupy.runtime.build import BuildRequest
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.runtime.launching import ArgumentBlock, Dim3
from mla_cupy.runtime.tensormap import MAP_BYTES, TensorMapSpec

WORKSPACE_ALIGNMENT = 256
"""Alignment of the workspace and of each of its parts, in bytes."""
_MAPS_KEPT = 4096

ConfigT = TypeVar("ConfigT")


class Layout:
    """The offsets of the parts of a workspace.

    Attributes
    ----------
    sizes : dict
        Part -> size in bytes.
    offsets : dict
        Part -> offset in bytes, a multiple of WORKSPACE_ALIGNMENT.
    nbytes : int
        Size of the whole.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        padded = [-(-size // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT for size in sizes.values()]
        ends = list(accumulate(padded, initial=0))
        self.sizes = dict(sizes)
        self.offsets = dict(zip(sizes, ends, strict=False))
        self.nbytes = ends[-1]


@dataclass(frozen=True, eq=False)
class LaunchArgs:
    """The arguments of one or more launches.

    Attributes
    ----------
    params : Params
    maps : tuple of (str, TensorMapSpec)
        Further arguments: tensor maps over arrays, by name. The `base` of each is that array's address.
    """

    params: Params
    maps: tuple[tuple[str, TensorMapSpec], ...] = ()


@dataclass(frozen=True, eq=False)
class Launch:
    """One launch. With `dependent` it may start before its predecessor has ended, on GPUs that support that."""

    kernel: KernelSpec[Any]
    variant: Variant
    grid: Dim3
    args: LaunchArgs
    dependent: bool = True

    def __post_init__(self) -> None:
        assert type(self.args.params) is self.kernel.params_of(self.variant)


@dataclass(frozen=True)
class ZeroFill:
    """Fills the workspace with zeros, from one of its parts to the end."""

    first: str


Step = Launch | ZeroFill


@dataclass(frozen=True)
class Call:
    """Arrays, options and stream of a call, in addition to its configuration.

    Attributes
    ----------
    views : mapping
        The arrays by name, outputs included; None for absent arrays. Addresses are meaningless.
    options : named tuple
        The operation's own.
    planned : bool
        Whether a plan has scheduled the work already.
    moved : mapping
        Parts of the workspace that stand in for arrays, by the arrays' names.
    """

    views: Mapping[str, View | None]
    options: Any
    planned: bool = False
    moved: Mapping[str, str] = field(default_factory=dict)

    def view(self, name: str) -> View:
        """The view of an array that is not None."""
        found = self.views[name]
        assert found is not None
        return found

    def name(self, name: str) -> str:
        """Place of an array: `name`, or a part of the workspace; NULL for an absent array."""
        return NULL if self.views.get(name) is None else self.moved.get(name, name)

    @overload
    def strides(self, name: str, axes: Literal[2]) -> tuple[int, int]: ...
    @overload
    def strides(self, name: str, axes: Literal[3]) -> tuple[int, int, int]: ...
    @overload
    def strides(self, name: str, axes: Literal[4]) -> tuple[int, int, int, int]: ...
    def strides(self, name: str, axes: int) -> Any:
        """The strides of an array's first axes; zeros for missing axes, and for an absent array."""
        return tuple(self.stride(name, axis) for axis in range(axes))

    def stride(self, name: str, axis: int = 0) -> int:
        """The stride of one axis; 0 for a missing axis, and for an absent array."""
        view = self.views.get(name)
        return 0 if view is None or axis >= len(view.strides) else view.strides[axis]


class Pipeline(ABC, Generic[ConfigT]):
    """The kernels of an operation. `configure`, `workspace` and `steps` are pure: no device is touched.

    Attributes
    ----------
    kernels : tuple of KernelSpec
        Those that `kernel=` chooses from, the fastest first.
    """

    kernels: ClassVar[tuple[KernelSpec[Any], ...]]

    @abstractmethod
    def configure(self, problem: Any, device: DeviceInfo, kernel: str | None = None) -> ConfigT:
        """Choose the kernel, and how it divides the problem.

        Raises
        ------
        ArgumentError
            If there is no such kernel.
        UnsupportedDeviceError
            If the kernel does not fit, or none does: the message has the reason for each.
        """

    @abstractmethod
    def workspace(self, config: ConfigT) -> Layout:
        """The layout of the memory that a call needs."""

    @abstractmethod
    def steps(self, config: ConfigT, call: Call) -> list[Step]:
        """Launches of a call, in order."""

    def prepare(self, config: ConfigT, call: Call, names: Sequence[str], device: DeviceInfo, stream: int) -> Prepared:
        """Build and load every kernel, and pack everything but addresses; not while `stream` is being captured."""
        return Prepared(self.steps(config, call), names, self.workspace(config), device, stream)


class Prepared:
    """The launches of a call, ready to be enqueued with any addresses.

    It owns its parameter blocks: one thread at a time may use it. `driver` is the driver that it was prepared for.
    """

    __slots__ = ("_addresses", "_base", "_blocks", "_launches", "_offsets", "_parts", "driver")

    def __init__(
        self, steps: Sequence[Step], names: Sequence[str], layout: Layout, device: DeviceInfo, stream: int
    ) -> None:
        self.driver = driver.current()
        self._offsets = tuple(layout.offsets.values())
        self._base = -1
        self._parts: tuple[int, ...] = ()
        self._addresses: list[int] = []  # that the blocks hold
        index = {name: at for at, name in enumerate((NULL, *names, *layout.offsets))}
        args = {id(step.args): step.args for step in steps if isinstance(step, Launch)}
        blocks = {key: _Block(one, index) for key, one in args.items()}
        self._blocks = [block.write for block in blocks.values()]
        self._launches = [
            self._fill(run[0], layout, device.ordinal)
            if isinstance(run[0], ZeroFill)
            else self.driver.in_order([_bound(step, device, stream, blocks[id(step.args)].args) for step in run])
            for run in _runs(steps)
        ]

    def enqueue(self, addresses: list[int], workspace: int, stream: int) -> None:
        """Enqueue everything.

        Parameters
        ----------
        addresses : list of int
            0, then the arrays' addresses in the order of the names; 0 for an absent array.
        workspace : int
            Address of the workspace.
        stream : int
        """
        if workspace != self._base:
            self._base, self._parts = workspace, tuple([workspace + offset for offset in self._offsets])
            self._addresses = []
        if addresses != self._addresses:  # comparing takes a tenth of writing
            self._addresses = []
            places = [*addresses, *self._parts]
            for write in self._blocks:
                write(places)
            self._addresses = addresses.copy()
        for launch in self._launches:
            launch(stream)

    def _fill(self, step: ZeroFill, layout: Layout, device: int) -> launching.PreparedLaunch:
        target, offset = self.driver, layout.offsets[step.first]
        nbytes = layout.nbytes - offset

        def enqueue(stream: int) -> None:
            with target.device_guard(device):
                target.memset(self._base + offset, 0, nbytes, stream)

        return enqueue


class _Block:
    """The parameter block of launches with the same arguments."""

    def __init__(self, args: LaunchArgs, index: Mapping[str, int]) -> None:
        layout, values = layout_of(type(args.params)), values_of(args.params)
        count = layout.num_addresses
        self.args = ArgumentBlock((layout.size, *[MAP_BYTES] * len(args.maps)))
        self._view = self.args.views[0]
        layout.pack_into(self._view, *[0] * count, *values[count:])
        self._pick = itemgetter(*(index[name] for name in values[:count]))
        self._pack = Struct(f"<{count}Q").pack_into
        self._maps = [
            _Map(index[name], replace(spec, array=name), view)
            for (name, spec), view in zip(args.maps, self.args.views[1:], strict=True)
        ]

    def write(self, places: list[int]) -> None:
        """Write the addresses into the block."""
        self._pack(self._view, 0, *self._pick(places))
        for tensor_map in self._maps:
            if places[tensor_map.index] != tensor_map.base:
                tensor_map.encode(places[tensor_map.index])


class _Map:
    """A tensor map in a parameter block, and its array's address."""

    __slots__ = ("_kept", "_spec", "_view", "base", "index")

    def __init__(self, index: int, spec: TensorMapSpec, view: memoryview) -> None:
        self.index, self.base = index, -1
        self._spec, self._view = spec, view
        self._kept: dict[int, bytes] = {}  # a model calls with the same few caches, one per layer

    def encode(self, base: int) -> None:
        encoded = self._kept.get(base)
        if encoded is None:
            if len(self._kept) >= _MAPS_KEPT:
                self._kept.clear()
            encoded = self._kept[base] = driver.current().encode_tiled(replace(self._spec, base=base))
        self._view[:] = encoded
        self.base = base


def _runs(steps: Sequence[Step]) -> list[list[Any]]:
    """Neighbouring launches together, and each fill alone."""
    found: list[list[Any]] = []
    for step in steps:
        if isinstance(step, Launch) and found and isinstance(found[-1][0], Launch):
            found[-1].append(step)
        else:
            found.append([step])
    return found


def _bound(launch: Launch, device: DeviceInfo, stream: int, args: ArgumentBlock) -> launching.PreparedLaunch:
    request = launch.kernel.request(launch.variant, device.arch)
    return bind(request, device.ordinal, launch.grid, args, stream, dependent=launch.dependent)


def bind(
    request: BuildRequest, device: int, grid: Dim3, args: ArgumentBlock, stream: int, *, dependent: bool
) -> launching.PreparedLaunch:
    """A launch of a kernel, which is built and loaded first; `stream` is only asked whether it is being captured.

    Threads, blocks per cluster and shared memory are the kernel's own facts. Every kernel waits for its predecessor
    before it reads what that may write, so all of them can be programmatic dependents.
    """
    wanted = driver.current().wanted(request)
    kernel = loader.loaded(wanted, device, stream)
    build = loader.obtain(wanted)
    block, cluster = (int(build.facts["threads"]), 1, 1), (int(build.facts.get("cluster", 1)), 1, 1)
    pdl = dependent and has_programmatic_launch(request.arch)
    return driver.current().prepare(kernel, grid, block, cluster, build.dynamic_smem, args, pdl)


def load(builds: Iterable[tuple[KernelSpec[Any], Variant]], device: DeviceInfo, stream: int) -> None:
    """Build and load kernels, so that later calls can be captured; not while `stream` is being captured."""
    for kernel, variant in builds:
        wanted = driver.current().wanted(kernel.request(variant, device.arch))
        loader.loaded(wanted, device.ordinal, stream)


def has_programmatic_launch(arch: str) -> bool:
    """True if kernels for `arch` can be programmatic dependents: from compute capability 9.0 on."""
    return int(arch.removeprefix("sm_").rstrip("af")) >= 90
