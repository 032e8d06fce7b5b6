"""The indexer's losses of cudnn-frontend, over all keys or selected ones, in its three steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.device import Device
from ..core.implementation import Prepared
from ..core.recorders import Call
from ..ops.indexer_loss import LossCase, LossInputs, LossOutputs
from . import cudnn
from .torch_ops import peak_bytes, recorder_for

MIN_INDEX_HEADS, HEAD_TILE, LIST_TILE = 64, 64, 128  # of its kernels for Hopper


class CudnnLoss:
    """Scores of the attention, scores of the indexer, gradients: each step allocates what it returns.

    It has gradients only; the first two steps store a float32 per pair, s_q * s_kv or s_q * topk of them. Its loss is a
    mean, so that the number of tokens is its coefficient here; its weights have the factors of ours in them.
    """

    name = "cudnn"

    def __init__(self) -> None:
        self._torch, self._dsa = cudnn.load()

    def unsupported(self, case: LossCase, dtype: str) -> str | None:
        if case.per_head:
            return "sums its target over heads"
        if case.mha or case.fp8:
            return "takes keys that all heads share, and an indexer in bfloat16"
        if case.topk % LIST_TILE:
            return f"takes lists of multiples of {LIST_TILE} keys"
        if case.h_i < MIN_INDEX_HEADS:
            return f"takes {MIN_INDEX_HEADS} index heads at least"
        if any(heads > HEAD_TILE and heads % HEAD_TILE for heads in (case.h, case.h_i)) or case.h < 2:
            return f"takes 2 to {HEAD_TILE} heads, or a multiple of {HEAD_TILE}"
        return None

    def prepare(self, case: LossCase, dtype: str, sets: Sequence[LossInputs], device: Device) -> Prepared:
        import cupy

        recorder = recorder_for(self._torch, device)
        latest: list[Any] = [None] * len(sets)
        with recorder.current():
            calls = [self._call(case, inputs, latest, index) for index, inputs in enumerate(sets)]
        unit = (case.h_i * case.d_i) ** -0.5

        def outputs(index: int) -> LossOutputs:
            found = dict(latest[index].items())
            found["d_weights"] = unit * found["d_weights"].float()  # CuPy's arithmetic of bfloat16 is experimental
            shapes = {
                "d_index_q": (case.tokens, case.h_i, case.d_i),
                "d_index_k": (case.tokens, case.d_i),
                "d_weights": (case.tokens, case.h_i),
            }
            arrays = {name: cupy.from_dlpack(found[name]).reshape(shape) for name, shape in shapes.items()}
            return LossOutputs(None, arrays["d_index_q"], arrays["d_index_k"], arrays["d_weights"])

        return Prepared(
            calls=calls,
            outputs=outputs,
            recorder=recorder,
            includes="gradients without the loss: scores of the attention, scores of the indexer, gradients; "
            "the log-sum-exps are given",
            workspace_bytes=lambda: peak_bytes(self._torch, calls[0], lambda: list(latest[0].values())),
        )

    def _tensors(self, case: LossCase, inputs: LossInputs) -> dict[str, Any]:
        """Tensors with an axis of sequences, and keys with one of heads."""
        tensors = {name: self._torch.from_dlpack(x) for name, x in inputs.arguments.items()}
        shaped = {
            name: tensors[name].reshape(case.b, case.s, *tensors[name].shape[1:])
            for name in tensors
            if "cu" not in name
        }
        unit = (case.h_i * case.d_i) ** -0.5
        return {**shaped, "weights": (unit * shaped["weights"]).to(shaped["q"].dtype)}

    def _call(self, case: LossCase, inputs: LossInputs, latest: list[Any], index: int) -> Call:
        x, one = self._tensors(case, inputs), self._torch.ones(1, device="cuda")
        return (self._sparse_call if case.topk else self._dense_call)(case, x, one, latest, index)

    def _dense_call(self, case: LossCase, x: dict[str, Any], one: Any, latest: list[Any], index: int) -> Call:
        keys, index_keys = (x[name].unsqueeze(2) for name in ("k", "index_k"))

        def call() -> None:
            target = self._dsa.dense_attn_score_recompute_wrapper(
                x["q"], keys, x["lse"], case.d**-0.5, qhead_per_kv_head=case.h
            )
            scores = self._dsa.dense_indexer_score_recompute_wrapper(
                x["index_q"], index_keys, x["weights"], qhead_per_kv_head=case.h_i
            )
            sums = target["out"], target["denom"], scores["out"], scores["denom"]
            latest[index] = self._dsa.dense_indexer_backward_wrapper(
                x["index_q"], x["weights"], x["index_k"], *sums, one, loss_coeff=float(case.tokens)
            )

        return call

    def _sparse_call(self, case: LossCase, x: dict[str, Any], one: Any, latest: list[Any], index: int) -> Call:
        def call() -> None:
            target = self._dsa.sparse_attn_score_recompute_wrapper(
                x["q"], x["k"], x["lse"], x["indices"], case.d**-0.5, qhead_per_kv_head=case.h
            )
            softmax = self._dsa.sparse_indexer_score_recompute_wrapper(
                x["index_q"], x["index_k"], x["weights"], x["indices"], qhead_per_kv_head=case.h_i
            )
            both = target["target"], softmax["predict"]
            latest[index] = self._dsa.indexer_backward_wrapper(
                x["index_q"], x["weights"], x["index_k"], *both, x["indices"], one, loss_coeff=float(case.tokens)
            )

        return call
