"""Dense decode as a sequence of kernels: schedule, attention over the parts, merge of the split requests.

`configure` is pure: it says which kernels run and how the workspace is laid out. A `DecodeSequence` is that, bound to
a device; it takes raw pointers and enqueues.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

from mla_cupy.launchers import (
    choice,
    decode_schedule,
    dense_decode_generic,
    dense_decode_sm90_delayed,
    dense_decode_sm90_seesaw,
    split_combine,
)
from mla_cupy.launchers.decode_problem import HEAD_DIM_V, PARAMS, DecodeProblem
from mla_cupy.launchers.spec import MAP_BYTES, DtypeVariant, Launch, Variant
from mla_cupy.launchers.workspace import offsets
from mla_cupy.runtime import device as devices
from mla_cupy.runtime import driver
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.runtime.tensormap import TensorMapSpec

#: The attention kernels, the fastest first.
KERNELS: dict[str, ModuleType] = {
    module.SPEC.name: module for module in (dense_decode_sm90_seesaw, dense_decode_sm90_delayed, dense_decode_generic)
}
_MAPS_KEPT = 1024
_ADDRESSES = struct.Struct("<7Q")  # the record up to `lse`
_NO_SINK_NOR_MAX = (0, 0)  # only sparse attention knows them
_NO_STRIDES = (0, 0, 0, 0)


class Workspace(NamedTuple):
    """Offsets of the parts of the workspace, in bytes, and its size."""

    schedule: int
    partial_lse: int
    partial_out: int
    nbytes: int


@dataclass(frozen=True)
class DecodeConfig:
    """Everything about a decode that does not depend on pointers or on the batch size."""

    problem: DecodeProblem
    kernel: str
    row_blocks: int
    num_parts: int
    combine_blocks: int
    workspace: Workspace


def configure(problem: DecodeProblem, device: DeviceInfo, variant: str | None = None) -> DecodeConfig:
    """Choose the kernel and cut the problem.

    Parameters
    ----------
    problem : DecodeProblem
    device : DeviceInfo
    variant : str, optional
        The kernel to take; default: the fastest that fits.

    Raises
    ------
    ArgumentError
        If there is no such kernel.
    UnsupportedDeviceError
        If it does not fit, or none does: the message has each one's reason.
    """
    kernel = choice.choose("decode", KERNELS, problem, device, variant)
    geometry = KERNELS[kernel].geometry(problem, device)
    return DecodeConfig(
        problem,
        kernel,
        geometry.row_blocks,
        geometry.num_parts,
        split_combine.blocks(device) if geometry.num_parts > 1 else 0,
        _lay_out(problem, geometry.num_parts),
    )


def check_variant(variant: str | None) -> None:
    """Raise ArgumentError unless it names an attention kernel, or None."""
    choice.check_variant(KERNELS, variant)


def _lay_out(problem: DecodeProblem, num_parts: int) -> Workspace:
    """The schedule, then two slots for each part's pieces of split requests."""
    rows = 2 * num_parts * problem.s_q * problem.h_q if num_parts > 1 else 0
    return Workspace(*offsets((decode_schedule.POINT_BYTES * (num_parts + 1), 4 * rows, 4 * HEAD_DIM_V * rows)))


class DecodePointers(NamedTuple):
    """Addresses and strides (in elements, without contiguous last ones) of one call, in the order of the record."""

    q: int
    kv: int
    block_table: int
    seqlens: int
    out: int
    lse: int
    q_strides: tuple[int, ...]
    kv_strides: tuple[int, ...]  # page, token, head
    table_strides: tuple[int, ...]
    seqlens_strides: tuple[int, ...]
    out_strides: tuple[int, ...]
    lse_strides: tuple[int, ...]


class DecodeSizes(NamedTuple):
    """The sizes that may change from call to call."""

    b: int
    num_pages: int
    page_size: int
    max_pages: int


class DecodeSequence:
    """The kernels of one configuration on one device: `attend` and `combine` are launches, `schedule` a call."""

    def __init__(self, config: DecodeConfig, device: DeviceInfo) -> None:
        self.config = config
        module = KERNELS[config.kernel]
        dtype = DtypeVariant(config.problem.dtype)
        self._cut = Launch(decode_schedule.SPEC.request(Variant(), device.arch), device.ordinal)
        self.attend = Launch(module.SPEC.request(dtype, device.arch), device.ordinal)
        self.combine = Launch(split_combine.SPEC.request(dtype, device.arch), device.ordinal)
        self._kv_map_spec: Callable[..., TensorMapSpec] | None = getattr(
            module, "kv_map", None
        )  # of kernels that fetch by TMA
        self._maps: dict[tuple[driver.Driver, int, int, int, tuple[int, ...]], bytes] = {}

    def bind(self, stream: int) -> None:
        """Build and load every kernel, so that later calls can be captured."""
        for launch in (self._cut, self.attend, self.combine):
            launch.bind(stream)

    def schedule(self, seqlens: int, stride: int, sizes: DecodeSizes, workspace: int, stream: int) -> None:
        """Enqueue the cutting of the batch into parts."""
        decode_schedule.launch(
            self._cut,
            seqlens,
            stride,
            sizes.b,
            sizes.max_pages * sizes.page_size,
            workspace + self.config.workspace.schedule,
            self.config.num_parts,
            stream,
        )

    def prepare(
        self, pointers: DecodePointers, sizes: DecodeSizes, flags: tuple[float, ...], workspace: int, stream: int
    ) -> PreparedAttention:
        """The attention and the merge, ready to be enqueued. `flags` is the record from `causal` on."""
        return PreparedAttention(self, pointers, sizes, flags, workspace, stream)

    def kv_map(self, base: int, sizes: DecodeSizes, strides: tuple[int, ...]) -> bytes | None:
        """The cache's tensor map, kept: a model calls with the same few caches, one a layer. None if not needed."""
        if self._kv_map_spec is None:
            return None
        target = driver.current()
        key = (target, base, sizes.page_size, sizes.num_pages, strides)
        encoded = self._maps.get(key)
        if encoded is None:
            problem = self.config.problem
            spec = self._kv_map_spec(problem.dtype, base, sizes.page_size, problem.h_kv, sizes.num_pages, *strides)
            if len(self._maps) >= _MAPS_KEPT:
                self._maps.clear()
            encoded = self._maps[key] = target.encode_tiled(spec)
        return encoded


class PreparedAttention:
    """The launches of one call with everything packed; calls that differ in addresses only can share it.

    It owns its argument block: one thread at a time may use it.
    """

    __slots__ = ("_args", "_driver", "_kernels", "_kv", "_kv_strides", "_launches", "_record", "_schedule", "_sizes")

    def __init__(
        self,
        kernels: DecodeSequence,
        pointers: DecodePointers,
        sizes: DecodeSizes,
        flags: tuple[float, ...],
        workspace: int,
        stream: int,
    ) -> None:
        config, problem = kernels.config, kernels.config.problem
        self._kernels = kernels
        self._sizes = sizes
        self._kv_strides = pointers.kv_strides
        self._schedule = workspace + config.workspace.schedule
        self._args = driver.ArgumentBlock((PARAMS.size, MAP_BYTES))
        self._record = self._args.views[0]
        self._kv = 0  # whose map is in the block
        self._driver = driver.current()
        self._launches = [kernels.attend.prepare((config.row_blocks, config.num_parts, 1), self._args, stream)]
        if config.combine_blocks:
            self._launches.append(kernels.combine.prepare((config.combine_blocks, 1, 1), self._args, stream))
        PARAMS.pack_into(
            self._args.views[0],
            *pointers[:4],
            self._schedule,
            pointers.out,
            pointers.lse,
            *_NO_SINK_NOR_MAX,
            workspace + config.workspace.partial_out,
            workspace + config.workspace.partial_lse,
            0,
            *pointers.q_strides,
            *pointers.kv_strides,
            *pointers.table_strides,
            *pointers.seqlens_strides,
            *pointers.out_strides,
            *pointers.lse_strides,
            *_NO_STRIDES,
            sizes.b,
            problem.s_q,
            problem.h_q,
            problem.h_kv,
            sizes.num_pages,
            sizes.page_size,
            sizes.max_pages,
            config.num_parts,
            *flags,
        )

    def enqueue(self, addresses: Sequence[int], stream: int) -> None:
        """Enqueue with these addresses (of the six arrays) in place of those that it was made with."""
        q, kv, block_table, seqlens, out, lse = addresses
        _ADDRESSES.pack_into(self._record, 0, q, kv, block_table, seqlens, self._schedule, out, lse)
        if kv != self._kv:
            encoded = self._kernels.kv_map(kv, self._sizes, self._kv_strides)
            if encoded is not None:
                self._args.views[1][:] = encoded
            self._kv = kv
        for launch in self._launches:
            launch(stream)

    def is_current(self) -> bool:
        """Whether it was prepared for the driver of now."""
        return self._driver is driver.current()


@functools.lru_cache(maxsize=256)
def sequence(problem: DecodeProblem, device: int, variant: str | None = None) -> DecodeSequence:
    """The kernels for a problem on a device, kept."""
    info = devices.describe(device)
    return DecodeSequence(configure(problem, info, variant), info)
