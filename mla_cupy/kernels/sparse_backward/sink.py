"""Host side of `sparse_backward/sink.cu`."""

from __future__ import annotations

from mla_cupy.kernels.params import SinkParams
from mla_cupy.kernels.pipeline import Call, Launch, LaunchArgs
from mla_cupy.kernels.sparse_backward import delta
from mla_cupy.kernels.sparse_backward.problem import SparseBackwardProblem
from mla_cupy.kernels.spec import PLAIN, KernelSpec

HEADS_PER_BLOCK = 32


KERNEL: KernelSpec[object] = KernelSpec(
    "sparse_backward_sink",
    "adds the partial sums up to the gradient of the attention sinks",
    "sparse_backward/sink.cu",
    SinkParams,
    core=PLAIN,
    facts={"heads_per_block": HEADS_PER_BLOCK},
)


def launch(problem: SparseBackwardProblem, call: Call) -> Launch:
    """Write d_sink, (h_q,), contiguous."""
    params = SinkParams(sink_sums="sink_sums", d_sink="d_sink", spans=delta.spans(problem.s_q), h_q=problem.h_q)
    return Launch(KERNEL, PLAIN[0], (-(-problem.h_q // HEADS_PER_BLOCK), 1, 1), LaunchArgs(params), dependent=False)
