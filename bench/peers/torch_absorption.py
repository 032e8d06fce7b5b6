"""Both forms of attention to a paged cache, whole: our calls, and PyTorch's products with kv_b_proj."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mla_cupy

from ..core.cost import D_V
from ..core.device import Device
from ..core.implementation import Prepared
from ..core.recorders import Call
from ..ops.absorption import D_EXPANDED, D_HEAD, D_NOPE, AbsorptionCase, AbsorptionInputs, AbsorptionOutputs
from .torch_ops import import_torch, recorder_for

Steps = dict[str, Call]
"""The steps of a call in their order, by name."""


class _Form:
    """Base of both: all memory is there before, and each step is a figure of its own."""

    name = ""
    includes = ""

    def __init__(self) -> None:
        self._torch = import_torch(f"peer {self.name!r}")

    def unsupported(self, case: AbsorptionCase, dtype: str) -> str | None:
        return None

    def prepare(self, case: AbsorptionCase, dtype: str, sets: Sequence[AbsorptionInputs], device: Device) -> Prepared:
        recorder = recorder_for(self._torch, device)
        with recorder.current():
            results = [device.empty((case.s_q, case.h_q, D_HEAD), dtype) for _ in sets]
            steps = [
                self._steps(case, inputs, self._torch.from_dlpack(result))
                for inputs, result in zip(sets, results, strict=True)
            ]
        return Prepared(
            calls=[_in_turn(list(one.values())) for one in steps],
            outputs=lambda index: AbsorptionOutputs(results[index]),
            recorder=recorder,
            includes=self.includes,
            figures={name: [one[name] for one in steps] for name in steps[0]},
        )

    def _steps(self, case: AbsorptionCase, inputs: AbsorptionInputs, result: Any) -> Steps:
        raise NotImplementedError

    def _workspace(self, call: Callable[..., object], *operands: Any, **options: Any) -> Any:
        """None for tensors on the CPU, which take none."""
        nbytes = mla_cupy.workspace_bytes(call, *operands, **options)
        return self._torch.empty(nbytes, dtype=self._torch.uint8, device=operands[0].device) if nbytes else None


def _in_turn(steps: Sequence[Call]) -> Call:
    def call() -> None:
        for step in steps:
            step()

    return call


class AbsorbedForm(_Form):
    """Queries times the keys' half, attention to the cache as it lies, and results times the values' half."""

    name = "absorbed"
    includes = "both products, the schedule, attention and merge; RoPE columns of the queries are in place"

    def _steps(self, case: AbsorptionCase, inputs: AbsorptionInputs, result: Any) -> Steps:
        torch, tensor = self._torch, self._torch.from_dlpack
        queries, weights, q = tensor(inputs.queries), tensor(inputs.weights), tensor(inputs.q).clone()
        cache, table, lengths = tensor(inputs.kv_cache), tensor(inputs.block_table), tensor(inputs.seqlens)
        q[0, ..., D_V:] = queries[..., D_NOPE:]
        out = torch.empty_like(q[..., :D_V])
        lse = torch.empty((1, case.h_q, case.s_q), dtype=torch.float32, device=q.device)
        operands, options = (q, cache, table, lengths), {"scale": case.scale, "out": out, "lse": lse}
        workspace = self._workspace(mla_cupy.mla_decode, *operands, **options)
        nope = queries[..., :D_NOPE].transpose(0, 1)
        keys, values = weights[..., :D_NOPE].permute(1, 2, 0), weights[..., D_NOPE:].transpose(0, 1)
        absorbed, attended = q[0, ..., :D_V].transpose(0, 1), out[0].transpose(0, 1)
        return {
            "queries": lambda: torch.bmm(nope, keys, out=absorbed),
            "attention": lambda: mla_cupy.mla_decode(*operands, **options, workspace=workspace),
            "values": lambda: torch.bmm(attended, values, out=result.transpose(0, 1)),
        }


class UnabsorbedForm(_Form):
    """The tokens of the cache as rows, times kv_b_proj, and attention to keys and values per head."""

    name = "unabsorbed"
    includes = "slots, gather, kv_b_proj, the schedule and attention"

    def _steps(self, case: AbsorptionCase, inputs: AbsorptionInputs, result: Any) -> Steps:
        torch, tensor = self._torch, self._torch.from_dlpack
        q, weights = tensor(inputs.queries), tensor(inputs.weights).view(D_V, -1)
        cache, table, lengths = tensor(inputs.kv_cache), tensor(inputs.block_table), tensor(inputs.seqlens)
        starts, where = torch.zeros_like(lengths), {"dtype": torch.int32, "device": q.device}
        found = {"slots": torch.empty(case.s_kv, **where), "cu_seqlens": torch.empty(2, **where)}
        rows = torch.empty((case.s_kv, cache.shape[-1]), dtype=q.dtype, device=q.device)
        kv = torch.empty((case.s_kv, case.h_q, D_EXPANDED), dtype=q.dtype, device=q.device)
        flat, latents = kv.view(case.s_kv, -1), rows[:, :D_V]
        operands = q, kv[..., :D_NOPE], kv[..., D_NOPE:]
        lse = torch.empty((case.s_q, case.h_q), dtype=torch.float32, device=q.device)
        options = {"k_rope": rows[:, D_V:], "scale": case.scale, "out": result, "lse": lse}
        workspace = self._workspace(mla_cupy.mla_prefill, *operands, **options)
        sizes = {"page_size": case.page_size, "max_tokens": case.s_kv}

        def gather() -> None:
            mla_cupy.cache_slots(table, starts, lengths, **sizes, **found)
            mla_cupy.cache_gather(cache, found["slots"], out=rows)

        return {
            "gather": gather,
            "projection": lambda: torch.mm(latents, weights, out=flat),
            "attention": lambda: mla_cupy.mla_prefill(*operands, **options, workspace=workspace),
        }
