"""A layer with few launches: `mla_prepare` with W_UK, and decode with W_UV."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import mla_cupy

from ...core.device import Device
from ...core.implementation import OWN, Prepared
from .cases import LayerCase
from .inputs import LayerInputs
from .steps import Buffers, Steps, attention, columns_of_rope, prepared_layer, selection, tables


class FewLaunches:
    """W_UK, RoPE of queries and keys, and the append; maybe the indexer; attention, merge, W_UV and gate."""

    name = OWN

    def unsupported(self, case: LayerCase, dtype: str) -> str | None:
        if case.model.index_heads and dtype != "bfloat16":
            return "index queries are bfloat16"
        return None

    def prepare(self, case: LayerCase, dtype: str, sets: Sequence[LayerInputs], device: Device) -> Prepared:
        def make(inputs: LayerInputs, buffers: Buffers) -> Steps:
            return self._steps(case, dtype, inputs, buffers, device)

        return prepared_layer(make, case, dtype, sets, device)

    def _steps(self, case: LayerCase, dtype: str, inputs: LayerInputs, buffers: Buffers, device: Device) -> Steps:
        model = case.model
        turns = tables(inputs)
        token = (inputs.latent, inputs.rope, inputs.cache, inputs.slots)
        steps: dict[str, Any] = {}
        if not model.absorbs:
            buffers.queries[...] = inputs.q  # once: a layer would turn them in place
            source, target = columns_of_rope(case, inputs, buffers)
            steps["prepare"] = partial(mla_cupy.mla_prepare, source, *token, **turns, out=target)
            return {**steps, "attention": attention(case, dtype, inputs, buffers, device)}
        w_uk, w_uv = inputs.kv_b_proj[:, : model.d_nope], inputs.kv_b_proj[:, model.d_nope :]
        if model.has_rope:
            options: dict[str, Any] = {**turns, "w_uk": w_uk, "out": buffers.queries}
            steps["prepare and absorb"] = partial(mla_cupy.mla_prepare, inputs.q, *token, **options)
        else:
            steps["append"] = partial(mla_cupy.cache_append, inputs.latent, None, inputs.cache, inputs.slots)
            steps["absorb"] = partial(mla_cupy.absorb, inputs.q, w_uk, out=buffers.queries)
        if inputs.index is not None:
            index = inputs.index
            arrays = (index.q, index.weights, index.k, *turns.values(), index.cache, inputs.slots)
            options = {"norm_weight": index.norm_weight, "norm_bias": index.norm_bias}
            options |= {"codes": buffers.codes, "folded": buffers.folded}
            steps["index q and k"] = partial(mla_cupy.indexer_prepare, *arrays, **options)
            steps["select"] = selection(case, inputs, index, buffers, device)
        projection = {"w_uv": w_uv, **({"gate": inputs.gate} if model.has_gate else {})}
        return {**steps, "attention and W_UV": attention(case, dtype, inputs, buffers, device, **projection)}
