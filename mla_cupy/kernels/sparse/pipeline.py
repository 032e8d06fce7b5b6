"""The sparse forward as a sequence of kernels: lists of rows, schedule, attention over the parts, merge of the split
queries.

`configure` is pure: it says which kernels run. `lay_out` says how the workspace of a call is laid out. A
`SparseForwardSequence` is a configuration bound to a device; it takes raw pointers and enqueues. To the attention
kernels a query is a request of one token with pages of one token: see `attention/decode_params.cuh`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

from mla_cupy.launchers import (
    choice,
    decode_schedule,
    sparse_forward_generic,
    sparse_forward_sm90,
    sparse_forward_small_sm90,
    sparse_rows,
    split_combine,
)
from mla_cupy.launchers.decode_problem import HEAD_DIM_V, PARAMS
from mla_cupy.launchers.sparse_forward_problem import SparseForwardProblem
from mla_cupy.launchers.sparse_rows import SparseSelection
from mla_cupy.launchers.spec import DtypeVariant, Launch, Variant, argument_block
from mla_cupy.launchers.workspace import offsets
from mla_cupy.runtime import device as devices
from mla_cupy.runtime.device import DeviceInfo

#: The attention kernels, the fastest first.
KERNELS: dict[str, ModuleType] = {
    module.SPEC.name: module for module in (sparse_forward_small_sm90, sparse_forward_sm90, sparse_forward_generic)
}
ORDERED_FROM = 0.25
"""From this share of the L2 cache on, kv is walked in order, so that queries that run side by side share its lines."""


@dataclass(frozen=True)
class SparseForwardConfig:
    """Everything about a forward that does not depend on pointers, or on the numbers of queries, rows and slots.

    `ordered_from` is the size of kv, in bytes, from which on its rows are walked in order.
    """

    problem: SparseForwardProblem
    kernel: str
    row_blocks: int
    num_parts: int
    combine_blocks: int
    ordered_from: int


class Workspace(NamedTuple):
    """Offsets of the parts of the workspace, in bytes, and its size."""

    rows: int
    counts: int
    schedule: int
    partial_lse: int
    partial_max: int
    partial_out: int
    nbytes: int


class SparseForwardPointers(NamedTuple):
    """Addresses and strides (in elements, without contiguous last ones) of one call; 0 for what is not given.

    `attn_sink` and `max_logits` may be 0.
    """

    q: int
    kv: int
    attn_sink: int
    out: int
    lse: int
    max_logits: int
    q_strides: tuple[int, ...]  # query, head
    kv_stride: int
    sink_stride: int
    out_strides: tuple[int, ...]  # query, head
    lse_strides: tuple[int, ...]  # query, head
    max_strides: tuple[int, ...]  # query, head


class SparseForwardFlags(NamedTuple):
    """The numbers of one call; `scale_log2` is the scale times log2(e), `lse_factor` leads from base 2 to the caller's
    base.
    """

    out_is_fp32: bool
    scale_log2: float
    lse_factor: float
    empty_lse: float


def check_variant(variant: str | None) -> None:
    """Raise ArgumentError unless it names an attention kernel, or None."""
    choice.check_variant(KERNELS, variant)


def configure(problem: SparseForwardProblem, device: DeviceInfo, variant: str | None = None) -> SparseForwardConfig:
    """Choose the kernel and cut the problem.

    Parameters
    ----------
    problem : SparseForwardProblem
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
    kernel = choice.choose("the sparse forward", KERNELS, problem, device, variant)
    geometry = KERNELS[kernel].geometry(problem, device)
    return SparseForwardConfig(
        problem,
        kernel,
        geometry.row_blocks,
        geometry.num_parts,
        split_combine.blocks(device) if geometry.num_parts > 1 else 0,
        int(ORDERED_FROM * device.l2_bytes),
    )


def lay_out(config: SparseForwardConfig, s_q: int, topk: int) -> Workspace:
    """The workspace of a call: the lists, the schedule, then two slots for each part's pieces of split queries."""
    partial_rows = 2 * config.num_parts * config.problem.h_q if config.num_parts > 1 else 0
    sizes = (
        4 * s_q * sparse_rows.rows_stride(topk),
        4 * s_q,
        decode_schedule.POINT_BYTES * (config.num_parts + 1),
        4 * partial_rows,
        4 * partial_rows,
        4 * HEAD_DIM_V * partial_rows,
    )
    return Workspace(*offsets(sizes))


class SparseForwardSequence:
    """The kernels of one configuration on one device."""

    def __init__(self, config: SparseForwardConfig, device: DeviceInfo) -> None:
        self.config = config
        module = KERNELS[config.kernel]
        dtype = DtypeVariant(config.problem.dtype)
        self._rows = Launch(sparse_rows.SPEC.request(Variant(), device.arch), device.ordinal)
        self._cut = Launch(decode_schedule.SPEC.request(Variant(), device.arch), device.ordinal)
        self._attend = Launch(module.SPEC.request(module.variant(config.problem), device.arch), device.ordinal)
        self._combine = Launch(split_combine.SPEC.request(dtype, device.arch), device.ordinal)

    def bind(self, stream: int) -> None:
        """Build and load every kernel, so that later calls can be captured."""
        for launch in (self._rows, self._cut, self._attend, self._combine):
            launch.bind(stream)

    def workspace_bytes(self, s_q: int, topk: int) -> int:
        """Size of the workspace of a call, which must be aligned to 256 bytes."""
        return lay_out(self.config, s_q, topk).nbytes

    def execute(
        self,
        pointers: SparseForwardPointers,
        selection: SparseSelection,
        flags: SparseForwardFlags,
        workspace: int,
        stream: int,
    ) -> None:
        """Enqueue everything; not for s_q = 0. Nothing is allocated, nothing is read on the host."""
        config = self.config
        space = lay_out(config, selection.s_q, selection.topk)
        rows, counts, schedule = (workspace + offset for offset in space[:3])
        list_stride = sparse_rows.rows_stride(selection.topk)
        ordered = 2 * config.problem.d_qk * selection.s_kv >= config.ordered_from
        sparse_rows.launch(self._rows, selection, rows, counts, 0, ordered, stream)
        decode_schedule.launch(self._cut, counts, 1, selection.s_q, list_stride, schedule, config.num_parts, stream)

        q, out, lse, top = pointers.q_strides, pointers.out_strides, pointers.lse_strides, pointers.max_strides
        args = argument_block(PARAMS.size)
        PARAMS.pack_into(
            args.views[0],
            pointers.q,
            pointers.kv,
            rows,
            counts,
            schedule,
            pointers.out,
            pointers.lse,
            pointers.attn_sink,
            pointers.max_logits,
            workspace + space.partial_out,
            workspace + space.partial_lse,
            workspace + space.partial_max,
            *(q[0], 0, q[1]),
            *(pointers.kv_stride, 0, 0),
            *(list_stride, 1, 1),  # of the lists, and of their lengths
            *(out[0], 0, out[1]),
            *(lse[0], lse[1], 0),
            *(top[0], top[1], 0),
            pointers.sink_stride,
            *(selection.s_q, 1, config.problem.h_q, 1),
            *(selection.s_kv, 1, list_stride, config.num_parts),
            False,  # causal: the lists are
            *flags,
        )
        self._attend((config.row_blocks, config.num_parts, 1), args, stream)
        if config.combine_blocks:
            self._combine((config.combine_blocks, 1, 1), args, stream)


@functools.lru_cache(maxsize=256)
def sequence(problem: SparseForwardProblem, device: int, variant: str | None = None) -> SparseForwardSequence:
    """The kernels for a problem on a device, kept."""
    info = devices.describe(device)
    return SparseForwardSequence(configure(problem, info, variant), info)
