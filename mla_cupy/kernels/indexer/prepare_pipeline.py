"""Preparation of index queries and keys: one launch."""

from __future__ import annotations

from mla_cupy.kernels import choice
from mla_cupy.kernels.indexer import prepare
from mla_cupy.kernels.indexer.prepare import PrepareOptions, PrepareProblem, PrepareVariant
from mla_cupy.kernels.pipeline import Call, Launch, Layout, Pipeline, Record, Step
from mla_cupy.runtime.device import DeviceInfo


class PreparePipeline(Pipeline[PrepareProblem]):
    """The one kernel of both operations.

    Parameters
    ----------
    x, scales : str
        Names of the vectors and of what carries their scales.
    weights : str
        Name of the weights; "" for keys, which have none and only one vector per token.
    """

    kernels = (prepare.KERNEL,)

    def __init__(self, x: str, weights: str, scales: str) -> None:
        self._x, self._weights, self._scales = x, weights, scales

    def configure(self, problem: PrepareProblem, device: DeviceInfo, kernel: str | None = None) -> PrepareProblem:
        """See `Pipeline.configure`. There is nothing to choose."""
        choice.choose("the indexer's preparation", self.kernels, problem, device, kernel)
        return problem

    def workspace(self, config: PrepareProblem) -> Layout:
        """None is needed."""
        return Layout({})

    def steps(self, config: PrepareProblem, call: Call) -> list[Step]:
        """One launch, unless there is no vector."""
        options: PrepareOptions = call.options
        x, cos = call.view(self._x), call.view("cos")
        heads = x.shape[1] if self._weights else 1
        vectors = x.shape[0] * heads
        if vectors == 0:
            return []
        axes = 2 if self._weights else 1
        values = (
            *self._strides(call, self._x, axes),
            *(call.strides(self._weights, 2) if self._weights else (0, 0)),
            *(call.strides(name, 1)[0] for name in ("cos", "sin", "positions")),
            *self._strides(call, "codes", axes),
            *self._strides(call, self._scales, axes),
            *(x.shape[0], heads, cos.shape[1], cos.shape[0]),
            *(options.interleaved, options.hadamard, options.scales == "power_of_2", options.reference_rounding),
            config.aligned,
            *(heads**-0.5, config.head_dim**-0.5),
        )
        names = (self._x, self._weights, "cos", "sin", "positions", "codes", self._scales)
        record = Record(prepare.KERNEL, names, values)
        blocks = -(-vectors // prepare.BLOCK_VECTORS)
        return [Launch(prepare.KERNEL, PrepareVariant(config.head_dim), (blocks, 1, 1), record)]

    @staticmethod
    def _strides(call: Call, name: str, axes: int) -> tuple[int, int]:
        """Between tokens, and between the heads of one."""
        strides = call.strides(name, axes)
        return strides[0], strides[1] if axes == 2 else 0


PREPARE_Q = PreparePipeline("q", "weights", "folded")
PREPARE_K = PreparePipeline("k", "", "k_scale")
