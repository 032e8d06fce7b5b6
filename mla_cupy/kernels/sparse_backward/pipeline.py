"""The sparse backward as a sequence of kernels: lists of rows, statistics, the main kernel, the gradients' own dtypes.

A `SparseBackwardSequence` is a configuration bound to a device; it takes raw pointers and enqueues.

A deterministic call rounds what it adds, so that every sum is exact and has no order: `attention/exact_addition.cuh`.
The kernels before the main one find out how far it must round.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import NamedTuple

from mla_cupy.launchers import (
    sparse_bounds,
    sparse_delta,
    sparse_dkv,
    sparse_norms,
    sparse_rounders,
    sparse_rows,
    sparse_sink,
)
from mla_cupy.launchers.sparse_backward_config import KERNELS, SparseBackwardConfig, Workspace, configure, levels
from mla_cupy.launchers.sparse_problem import PARAMS, SparseBackwardProblem
from mla_cupy.launchers.sparse_rows import SparseSelection
from mla_cupy.launchers.spec import MAP_BYTES, DtypeVariant, KernelSpec, Launch, Variant, argument_block
from mla_cupy.runtime import device as devices
from mla_cupy.runtime import driver
from mla_cupy.runtime.device import DeviceInfo


class Strided(NamedTuple):
    """An array: its address, and its strides in elements without the contiguous last one."""

    ptr: int
    strides: tuple[int, ...]


class BackwardPointers(NamedTuple):
    """The arrays of one call. Strides are of the query and the head, or of the row."""

    q: Strided
    kv: Strided
    out: Strided
    dout: Strided
    lse: Strided
    attn_sink: Strided  # address 0 without one
    dq: Strided
    dkv: Strided
    d_sink: int  # contiguous


class BackwardFlags(NamedTuple):
    """The rest of a call."""

    scale: float
    scale_log2: float
    lse_to_log2: float
    out_is_fp32: bool
    dkv_is_fp32: bool


class SparseBackwardSequence:
    """The kernels of one configuration on one device."""

    def __init__(self, config: SparseBackwardConfig, device: DeviceInfo) -> None:
        self.config = config
        problem = config.problem
        dtype = DtypeVariant(problem.dtype)

        def kernel(module: ModuleType, variant: Variant) -> Launch:
            spec: KernelSpec = module.SPEC
            # Milliseconds of work: nothing to gain from a kernel that starts while its predecessor still adds.
            return Launch(spec.request(variant, device.arch), device.ordinal, dependent=False)

        self._device = device.ordinal
        self._rows = kernel(sparse_rows, Variant())
        self._delta = kernel(sparse_delta, dtype)
        main = KERNELS[config.kernel]
        self._main = kernel(main, main.variant(problem))
        self._dkv = kernel(sparse_dkv, dtype)
        self._launches = [self._rows, self._delta, self._main, self._dkv]
        if problem.has_sink:
            self._sink = kernel(sparse_sink, Variant())
            self._launches.append(self._sink)
        if problem.deterministic:
            self._norms, self._bounds = kernel(sparse_norms, dtype), kernel(sparse_bounds, dtype)
            self._rounders = kernel(sparse_rounders, Variant())
            self._launches += [self._norms, self._bounds, self._rounders]

    @property
    def workspace_bytes(self) -> int:
        """Of the memory that a call needs, aligned to 256 bytes."""
        return self.config.workspace.nbytes

    def bind(self, stream: int) -> None:
        """Build and load every kernel, so that later calls can be captured."""
        for launch in self._launches:
            launch.bind(stream)

    def execute(
        self,
        pointers: BackwardPointers,
        selection: SparseSelection,
        flags: BackwardFlags,
        workspace: int,
        stream: int,
    ) -> None:
        """Enqueue everything."""
        space = Workspace(*(workspace + offset for offset in self.config.workspace))
        problem = self.config.problem
        with driver.device_guard(self._device):
            driver.current().memset(space.zeroed, 0, space.nbytes - space.zeroed, stream)
        if problem.s_q > 0:
            self._prepare_queries(pointers, selection, flags, space, stream)
            if problem.deterministic:
                self._prepare_rounding(pointers, flags, space, stream)
            self._run_main(pointers, flags, space, stream)
        self._finish(pointers, flags, space, stream)

    def _prepare_queries(
        self,
        pointers: BackwardPointers,
        selection: SparseSelection,
        flags: BackwardFlags,
        space: Workspace,
        stream: int,
    ) -> None:
        """The lists of rows, and the statistics of each query and head."""
        problem = self.config.problem
        selected = space.selected if problem.deterministic else 0
        sparse_rows.launch(self._rows, selection, space.rows, space.counts, selected, self.config.ordered, stream)
        delta = sparse_delta.DeltaPointers(
            pointers.out.ptr,
            pointers.dout.ptr,
            pointers.lse.ptr,
            pointers.attn_sink.ptr,
            space.counts,
            space.delta,
            space.lse2,
            space.sink_sums if problem.has_sink else 0,
            pointers.out.strides,
            pointers.dout.strides,
            pointers.lse.strides,
            pointers.attn_sink.strides[0],
        )
        delta_flags = (flags.out_is_fp32, flags.lse_to_log2)
        sparse_delta.launch(self._delta, delta, problem.s_q, problem.h_q, delta_flags, stream)

    def _prepare_rounding(
        self, pointers: BackwardPointers, flags: BackwardFlags, space: Workspace, stream: int
    ) -> None:
        """What a deterministic main kernel must know of its additions: how large they can be, and how many."""
        problem = self.config.problem
        if problem.s_kv > 0:
            norms = (pointers.kv.ptr, space.selected, space.norms, pointers.kv.strides[0])
            sparse_norms.launch(self._norms, *norms, problem.s_kv, stream)
        bounds = sparse_bounds.BoundsPointers(
            pointers.q.ptr,
            pointers.dout.ptr,
            space.lse2,
            space.delta,
            space.rows,
            space.counts,
            space.norms,
            space.largest,
            pointers.q.strides,
            pointers.dout.strides,
            sparse_rows.rows_stride(problem.topk),
        )
        queries = (problem.s_q, problem.h_q, problem.d_qk)
        sparse_bounds.launch(self._bounds, bounds, queries, flags.scale, stream)
        counted = (space.selected, space.largest, space.rounders, problem.s_kv, self.config.additions)
        sparse_rounders.launch(self._rounders, *counted, stream)

    def _run_main(self, pointers: BackwardPointers, flags: BackwardFlags, space: Workspace, stream: int) -> None:
        problem = self.config.problem
        tensor_maps = getattr(KERNELS[self.config.kernel], "tensor_maps", None)
        specs = () if tensor_maps is None else tensor_maps(problem, pointers)
        args = argument_block(PARAMS.size, *(MAP_BYTES for _ in specs))
        for view, spec in zip(args.views[1:], specs, strict=True):
            view[:] = driver.current().encode_tiled(spec)
        PARAMS.pack_into(
            args.views[0],
            pointers.q.ptr,
            pointers.kv.ptr,
            pointers.dout.ptr,
            space.rows,
            space.counts,
            space.lse2,
            space.delta,
            space.rounders if problem.deterministic else 0,
            pointers.dq.ptr,
            space.sums,
            space.progress if self.config.ordered else 0,
            *pointers.q.strides,
            *pointers.kv.strides,
            *pointers.dout.strides,
            *pointers.dq.strides,
            sparse_rows.rows_stride(problem.topk),
            problem.s_q,
            problem.s_kv,
            problem.h_q,
            0,
            flags.scale,
            flags.scale_log2,
        )
        self._main(self.config.grid, args, stream)

    def _finish(self, pointers: BackwardPointers, flags: BackwardFlags, space: Workspace, stream: int) -> None:
        """dkv in its own dtype, and the gradient of the sink."""
        problem = self.config.problem
        if problem.s_kv > 0:
            sizes = (problem.s_kv, problem.d_qk, levels(problem))
            order = (KERNELS[self.config.kernel].DKV_ORDER, flags.dkv_is_fp32)
            dkv = pointers.dkv
            sparse_dkv.launch(self._dkv, space.sums, dkv.ptr, dkv.strides[0], sizes, order, stream)
        if problem.has_sink:
            spans = sparse_delta.spans(problem.s_q)
            sparse_sink.launch(self._sink, space.sink_sums, pointers.d_sink, spans, problem.h_q, stream)


@functools.lru_cache(maxsize=256)
def sequence(problem: SparseBackwardProblem, device: int, variant: str | None = None) -> SparseBackwardSequence:
    """The kernels for a problem on a device, kept."""
    info = devices.describe(device)
    return SparseBackwardSequence(configure(problem, info, variant), info)
