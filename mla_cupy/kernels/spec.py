"""What a kernel is to the host: its source, its variants, the record of its parameters, and how it is launched."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np

from mla_cupy.runtime import driver, kernels
from mla_cupy.runtime.build import BuildRequest

MAP_BYTES = 128
_STRUCT_CODES = {"u8": "Q", "i8": "q", "i4": "i", "f4": "f"}


@dataclass(frozen=True)
class Variant:
    """Base of the variants: each field is one `-D` macro of the kernel, `MLA_` and the field's name in capitals."""

    def defines(self) -> tuple[tuple[str, str], ...]:
        return tuple((f"MLA_{field.name.upper()}", str(getattr(self, field.name))) for field in fields(self))

    def __str__(self) -> str:
        """The canonical name: in the cubin's file name, the test ids and the bench labels."""
        return "-".join(str(getattr(self, field.name)) for field in fields(self)) or "plain"


@dataclass(frozen=True)
class DtypeVariant(Variant):
    """A kernel that is compiled once for each 16-bit type."""

    dtype: str


DTYPE_VARIANTS = (DtypeVariant("bfloat16"), DtypeVariant("float16"))


class Params:
    """The record of a kernel's parameter struct: 8-byte members first, as in the `.cu`.

    `dtype` is the NumPy record (names, offsets, size) that tests compare with the facts of the cubin; `pack_into`
    writes all members in order.
    """

    def __init__(self, **members: str) -> None:
        self.dtype = np.dtype([(name, "<" + kind) for name, kind in members.items()], align=True)
        codes = "".join(_STRUCT_CODES[kind] for kind in members.values())
        padding = self.dtype.itemsize - struct.calcsize("<" + codes)
        self._struct = struct.Struct(f"<{codes}{padding}x")
        self.size = self.dtype.itemsize

    def pack_into(self, buffer: memoryview, *values: float) -> None:
        self._struct.pack_into(buffer, 0, *values)

    def layout(self) -> list[int]:
        """The offset of the first member of each further kind, then the size: the fact `params_layout`."""
        members = [(str(kind), at) for kind, at, *_ in (self.dtype.fields or {}).values()]
        firsts = [at for (kind, at), (before, _) in zip(members[1:], members, strict=False) if kind != before]
        return [*firsts, self.size]


@dataclass(frozen=True)
class KernelSpec:
    """One kernel: one `.cu`, one entry point.

    `core` are the variants that are compiled on import; `supports_arch` takes a target such as "sm_90a".
    """

    name: str
    source: str
    variants: tuple[Variant, ...]
    core: tuple[Variant, ...]
    supports_arch: Callable[[str], bool]
    params: Params

    @property
    def entry(self) -> str:
        return f"mla_{self.name}"

    def request(self, variant: Variant, arch: str) -> BuildRequest:
        """What to compile for `variant` on `arch`."""
        return BuildRequest(self.entry, self.source, arch, variant.defines(), str(variant))


def any_arch(arch: str) -> bool:
    """For kernels without instructions of one architecture."""
    return True


def only_sm90a(arch: str) -> bool:
    """For kernels with WGMMA."""
    return arch == "sm_90a"


def only_sm100a(arch: str) -> bool:
    """For kernels with tcgen05."""
    return arch in ("sm_100a", "sm_103a")


def has_programmatic_launch(arch: str) -> bool:
    """Whether kernels for `arch` can be programmatic dependents: from compute capability 9.0 on."""
    return int(arch.removeprefix("sm_").rstrip("af")) >= 90


class Launch:
    """A kernel bound to a device at its first use, with everything about its launch that does not change.

    Threads, blocks of a cluster and shared memory are the kernel's own facts. With `dependent` it is a programmatic
    dependent of its predecessor, where the GPU knows that: it may start before the other one has ended.
    """

    __slots__ = ("_block", "_cluster", "_dependent", "_device", "_driver", "_kernel", "_request", "_smem")

    def __init__(self, request: BuildRequest, device: int, dependent: bool = True) -> None:
        self._request = request
        self._device = device
        self._dependent = dependent and has_programmatic_launch(request.arch)
        self._driver: driver.Driver | None = None

    def __call__(self, grid: driver.Dim3, args: driver.ArgumentBlock, stream: int) -> None:
        """Enqueue it once."""
        self.prepare(grid, args, stream)(stream)

    def prepare(self, grid: driver.Dim3, args: driver.ArgumentBlock, stream: int) -> driver.PreparedLaunch:
        """Make it ready to be enqueued; `stream` is only asked whether it is being captured.

        Every kernel waits for its predecessor before it reads, so all can be programmatic dependents.
        """
        self.bind(stream)
        sizes = (grid, self._block, self._cluster)
        return driver.current().prepare(self._kernel, *sizes, self._smem, args, self._dependent)

    def bind(self, stream: int) -> None:
        """Build and load the kernel, unless that is done; not while `stream` is being captured."""
        target = driver.current()
        if target is self._driver:
            return
        self._kernel = kernels.loaded(self._request, self._device, stream)
        build = kernels.obtain(self._request)
        self._block = (int(build.facts["threads"]), 1, 1)
        self._cluster = (int(build.facts.get("cluster", 1)), 1, 1)
        self._smem = build.dynamic_smem
        self._driver = target


class _Blocks(threading.local):
    def __init__(self) -> None:
        self.by_sizes: dict[tuple[int, ...], driver.ArgumentBlock] = {}


_blocks = _Blocks()


def argument_block(*sizes: int) -> driver.ArgumentBlock:
    """This thread's block for parameters of these sizes. A launch copies them, so it is free again at once."""
    block = _blocks.by_sizes.get(sizes)
    if block is None:
        block = _blocks.by_sizes[sizes] = driver.ArgumentBlock(sizes)
    return block
