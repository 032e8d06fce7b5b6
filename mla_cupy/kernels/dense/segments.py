"""The starts of packed sequences that the ids of their tokens tell: one launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mla_cupy.kernels import choice
from mla_cupy.kernels.params import SegmentsParams
from mla_cupy.kernels.pipeline import Call, Launch, LaunchArgs, Layout, Pipeline, Step
from mla_cupy.kernels.spec import PLAIN, KernelSpec
from mla_cupy.runtime.device import DeviceInfo

PARTS = 3
"""Sequences of each segment: padding before its queries, keys before its keys, and itself."""
RUN_BYTES = 12

KERNEL: KernelSpec[object] = KernelSpec(
    "dense_segments",
    "finds the starts of packed sequences by the ids of their tokens",
    "dense/segments.cu",
    SegmentsParams,
    facts={"parts": PARTS, "run_bytes": RUN_BYTES},
)


class SegmentsOptions(NamedTuple):
    """A call's arguments other than arrays: as passed, then as resolved by the checks."""

    max_segments: int


@dataclass(frozen=True)
class SegmentsProblem:
    """Numbers of tokens; `keys_have_ids` unless keys share the queries' ids."""

    s_q: int
    s_kv: int
    max_segments: int
    keys_have_ids: bool


class SegmentsPipeline(Pipeline[SegmentsProblem]):
    """The one kernel of `prefill_segments`."""

    kernels = (KERNEL,)

    def configure(self, problem: SegmentsProblem, device: DeviceInfo, kernel: str | None = None) -> SegmentsProblem:
        """See `Pipeline.configure`. There is nothing to choose."""
        choice.choose("finding segments", self.kernels, problem, device, kernel)
        return problem

    def workspace(self, config: SegmentsProblem) -> Layout:
        """The runs of queries, of keys, and those that go with the queries'."""
        sides = 3 if config.keys_have_ids else 1
        return Layout({"runs": sides * RUN_BYTES * config.max_segments})

    def steps(self, config: SegmentsProblem, call: Call) -> list[Step]:
        """One launch of one block."""
        params = SegmentsParams(
            segment_ids_q="segment_ids_q",
            segment_ids_kv=call.name("segment_ids_kv"),
            cu_seqlens_q="cu_seqlens_q",
            cu_seqlens_kv="cu_seqlens_kv",
            runs="runs",
            segment_ids_q_stride_elems=call.stride("segment_ids_q"),
            segment_ids_kv_stride_elems=call.stride("segment_ids_kv"),
            cu_seqlens_q_stride_elems=call.stride("cu_seqlens_q"),
            cu_seqlens_kv_stride_elems=call.stride("cu_seqlens_kv"),
            s_q=config.s_q,
            s_kv=config.s_kv,
            max_segments=config.max_segments,
            keys_have_ids=config.keys_have_ids,
        )
        return [Launch(KERNEL, PLAIN[0], (1, 1, 1), LaunchArgs(params))]


SEGMENTS = SegmentsPipeline()
