"""The mask of dense attention that indices make: one launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mla_cupy.kernels import choice
from mla_cupy.kernels.params import MaskParams
from mla_cupy.kernels.pipeline import Call, Launch, LaunchArgs, Layout, Pipeline, Step
from mla_cupy.kernels.spec import PLAIN, KernelSpec
from mla_cupy.runtime.device import DeviceInfo

WINDOW_BYTES = 8192
"""Bytes of a row of the mask that one block makes."""

KERNEL: KernelSpec[object] = KernelSpec(
    "dense_mask",
    "makes a mask of the keys that indices select, for dense attention",
    "dense/mask.cu",
    MaskParams,
    facts={"window_bytes": WINDOW_BYTES},
)


class MaskOptions(NamedTuple):
    """A call's arguments other than arrays: as passed, then as resolved by the checks."""

    max_keys: int
    relative: bool


@dataclass(frozen=True)
class MaskProblem:
    """`aligned` says that rows of indices start at, and step by, multiples of 16 bytes, without gaps."""

    s_q: int
    topk: int
    mask_bytes: int
    aligned: bool


class MaskPipeline(Pipeline[MaskProblem]):
    """The one kernel of `prefill_mask`."""

    kernels = (KERNEL,)

    def configure(self, problem: MaskProblem, device: DeviceInfo, kernel: str | None = None) -> MaskProblem:
        """See `Pipeline.configure`. There is nothing to choose."""
        choice.choose("making a mask", self.kernels, problem, device, kernel)
        return problem

    def workspace(self, config: MaskProblem) -> Layout:
        """See `Pipeline.workspace`: a call needs none."""
        return Layout({})

    def steps(self, config: MaskProblem, call: Call) -> list[Step]:
        """One launch, unless there is no query."""
        if config.s_q == 0:
            return []
        options: MaskOptions = call.options
        starts = call.views["cu_seqlens_q"]
        params = MaskParams(
            indices="indices",
            cu_seqlens_q=call.name("cu_seqlens_q"),
            cu_seqlens_kv=call.name("cu_seqlens_kv"),
            mask="mask",
            indices_stride_s_k_elems=call.strides("indices", 2),
            cu_seqlens_q_stride_elems=call.stride("cu_seqlens_q"),
            cu_seqlens_kv_stride_elems=call.stride("cu_seqlens_kv"),
            mask_stride_bytes=call.stride("mask"),
            topk=config.topk,
            b=0 if starts is None else starts.shape[0] - 1,
            mask_bytes=config.mask_bytes,
            relative=options.relative,
            aligned=config.aligned,
        )
        windows = -(-config.mask_bytes // WINDOW_BYTES)
        return [Launch(KERNEL, PLAIN[0], (config.s_q, windows, 1), LaunchArgs(params))]


MASK = MaskPipeline()
