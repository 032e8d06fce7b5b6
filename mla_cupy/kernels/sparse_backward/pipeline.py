"""The sparse backward: lists of rows, statistics, the main kernel, the gradients in their own dtypes.

A deterministic call adds so that the order does not matter, by binned sums: `tile/binned_sum.cuh`. The
kernels before the main one compute the extraction constants of the bins.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

from mla_cupy.errors import ArgumentError, explain
from mla_cupy.kernels import choice
from mla_cupy.kernels.attention import row_lists
from mla_cupy.kernels.exact_sums.launches import NUM_BINS, launch_bins, launch_bounds, launch_norms
from mla_cupy.kernels.numbers import LOG2_E, to_log2
from mla_cupy.kernels.param_layout import NULL
from mla_cupy.kernels.params import BackwardParams, PiecesParams
from mla_cupy.kernels.pipeline import Call, Launch, LaunchArgs, Layout, Pipeline, Step, ZeroFill
from mla_cupy.kernels.sparse_backward import generic, mma, passes, pieces, sm90, sm90_pair, sm100
from mla_cupy.kernels.sparse_backward.pieces import Pieces
from mla_cupy.kernels.sparse_backward.problem import (
    BackwardKernel,
    DkvOrder,
    SparseBackwardOptions,
    SparseBackwardProblem,
)
from mla_cupy.kernels.spec import Variant
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.runtime.launching import Dim3

_FLOAT = 4
_PROGRESS_BYTES = 8
_FIRST_ZEROED = "selected"
"""The part of the workspace from which on it starts as zeros."""


@dataclass(frozen=True)
class SparseBackwardConfig:
    """Everything about a backward that does not depend on pointers or strides.

    Attributes
    ----------
    ordered : bool
        Whether the lists of rows are sorted, so that queries that run together touch the same part of kv.
    dkv_order : DkvOrder
        Of the elements of a row of the sums.
    pieces : Pieces, optional
        The last queries, if they are cut into pieces; `grid` is of the others.
    """

    problem: SparseBackwardProblem
    kernel: BackwardKernel
    variant: Variant
    grid: Dim3
    ordered: bool
    dkv_order: DkvOrder
    pieces: Pieces | None = None

    @property
    def delta_in_main(self) -> bool:
        """True if the main kernel computes delta: nothing else needs it, and the kernel can."""
        problem = self.problem
        needed = problem.has_sink or problem.deterministic or problem.has_dlse
        return self.kernel.makes_delta and problem.aligned_out and not needed

    @property
    def num_bins(self) -> int:
        """Number of sums per element of dkv."""
        return NUM_BINS if self.problem.deterministic else 1


class SparseBackwardPipeline(Pipeline[SparseBackwardConfig]):
    """The kernels of the sparse backward."""

    kernels = (
        sm100.KERNEL,
        sm100.WEIGHT_STATIONARY,
        sm90_pair.KERNEL,
        sm90.KERNEL,
        mma.KERNEL,
        generic.KERNEL,
    )

    def configure(
        self, problem: SparseBackwardProblem, device: DeviceInfo, kernel: str | None = None
    ) -> SparseBackwardConfig:
        """See `Pipeline.configure`; a deterministic call of too many additions is an ArgumentError, too."""
        chosen = choice.choose("the sparse backward", self.kernels, problem, device, kernel)
        additions = chosen.additions(problem)
        total = problem.s_q * problem.topk * additions
        if problem.deterministic and total >= 2**32:
            got = f"True, with s_q * topk * {additions} = {total}"
            raise ArgumentError(explain("deterministic", got, "less than 2^32", "split the queries"))
        # Once the sums no longer fit in the L2, those in use should be close together.
        ordered = _FLOAT * problem.s_kv * problem.d_qk > device.l2_bytes
        cut = pieces.cut(chosen, problem, device)
        whole = replace(problem, s_q=cut.first_query) if cut else problem
        return SparseBackwardConfig(
            problem,
            chosen,
            chosen.variant(problem, device),
            chosen.grid(whole, device),
            ordered,
            chosen.dkv_order_on(device),
            cut,
        )

    def workspace(self, config: SparseBackwardConfig) -> Layout:
        """The lists, the statistics, and the sums of dkv, which with the counters before them start as zeros."""
        problem = config.problem
        per_head = _FLOAT * problem.s_q * problem.h_q
        per_row, one = (_FLOAT * problem.s_kv, _FLOAT) if problem.deterministic else (0, 0)
        return Layout(
            {
                **row_lists.list_sizes(problem.s_q, problem.topk),
                "lse2": per_head,
                "delta": per_head,
                "delta_bounds": per_head if problem.deterministic and problem.has_dlse else 0,
                "sink_sums": _FLOAT * passes.spans(problem.s_q) * problem.h_q if problem.has_sink else 0,
                "norms": per_row,
                "extractors": per_row + one,
                **self._pieces_layout(config),
                _FIRST_ZEROED: per_row,
                "largest": one,
                "progress": _PROGRESS_BYTES,
                "sums": _FLOAT * problem.s_kv * problem.d_qk * config.num_bins,
            }
        )

    def _pieces_layout(self, config: SparseBackwardConfig) -> dict[str, int]:
        if config.pieces is None:
            return {}
        rows = config.pieces.items * config.problem.h_q
        return {
            "dq_pieces": _FLOAT * rows * config.problem.d_qk,
            "delta_pieces": _FLOAT * rows if config.delta_in_main else 0,
        }

    def steps(self, config: SparseBackwardConfig, call: Call) -> list[Step]:
        """Without a query, dkv and d_sink become zeros all the same."""
        problem = config.problem
        steps: list[Step] = [ZeroFill(_FIRST_ZEROED)]
        if problem.s_q > 0:
            selected = "selected" if problem.deterministic else NULL
            lists = row_lists.launch(
                call, call.options.causal, call.options.relative, ordered=config.ordered, selected=selected
            )
            # Milliseconds of work: nothing to gain from a kernel that starts while its predecessor still adds.
            steps += [replace(lists, dependent=False)]
            if not config.delta_in_main:
                steps.append(passes.launch_delta(problem, call))
            if problem.has_dlse:
                steps.append(passes.launch_dlse(problem, call))
            if problem.deterministic:
                steps += self._bin(config, call)
            steps += self._main(config, call)
        if problem.s_kv > 0:
            steps.append(passes.launch_dkv(problem, call, config.num_bins, config.dkv_order))
        if problem.has_sink:
            steps.append(passes.launch_sink(problem, call))
        return steps

    def _bin(self, config: SparseBackwardConfig, call: Call) -> list[Step]:
        """Size and number of a deterministic main kernel's additions."""
        problem = config.problem
        of_rows = [launch_norms(call)] if problem.s_kv > 0 else []
        deltas = "delta_bounds" if problem.has_dlse else "delta"
        return [*of_rows, launch_bounds(call, deltas), launch_bins(problem.s_kv, config.kernel.additions(problem))]

    def _main(self, config: SparseBackwardConfig, call: Call) -> list[Step]:
        """The main kernel; where the last queries are cut into pieces, its build for these, and the sums of dq."""
        problem, kernel, cut = config.problem, config.kernel, config.pieces
        steps: list[Step] = []
        queries = cut.first_query if cut else problem.s_q
        if queries > 0:
            maps = kernel.maps(problem, call) if kernel.maps else ()
            args = LaunchArgs(self._main_params(config, call, queries), maps)
            steps.append(Launch(kernel, config.variant, config.grid, args, dependent=False))
        if cut:
            # They read nothing that the launch before them writes, and begin as its blocks end.
            args = LaunchArgs(self._main_params(config, call, problem.s_q, cut))
            steps.append(Launch(kernel, cut.build, (cut.items, 1, 1), args, dependent=queries > 0))
            steps.append(pieces.launch_dq(problem, call, cut))
        return steps

    def _main_params(
        self, config: SparseBackwardConfig, call: Call, s_q: int, cut: Pieces | None = None
    ) -> BackwardParams | PiecesParams:
        problem, options = config.problem, cast(SparseBackwardOptions, call.options)
        in_main = config.delta_in_main
        params = BackwardParams(
            q="q",
            kv="kv",
            dout="dout",
            rows="rows",
            counts="counts",
            lse2="lse" if in_main else "lse2",
            delta="delta_pieces" if cut and in_main else "delta",
            extractors="extractors" if problem.deterministic else NULL,
            dq="dq_pieces" if cut else "dq",
            dkv="sums",
            progress="progress" if config.ordered and not cut else NULL,
            out="out" if in_main else NULL,
            q_stride_s_h_elems=call.strides("q", 2),
            kv_stride_s_elems=call.stride("kv"),
            dout_stride_s_h_elems=call.strides("dout", 2),
            dq_stride_s_h_elems=call.strides("dq", 2),
            out_stride_s_h_elems=call.strides("out", 2),
            lse2_stride_s_h_elems=call.strides("lse", 2) if in_main else (problem.h_q, 1),
            rows_stride_elems=row_lists.rows_stride(problem.topk),
            s_q=s_q,
            s_kv=problem.s_kv,
            h_q=problem.h_q,
            lse2_factor=to_log2(options.lse_base) if in_main else 1.0,
            scale=options.scale,
            scale_log2=options.scale * LOG2_E,
        )
        if config.kernel.pieces_variant is None:
            return params
        first_query, count, piece_keys = (cut.first_query, cut.pieces, cut.piece_keys) if cut else (0, 1, 0)
        return PiecesParams(backward_params=params, first_query=first_query, pieces=count, piece_keys=piece_keys)


SPARSE_BACKWARD = SparseBackwardPipeline()
