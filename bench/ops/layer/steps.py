"""A layer's steps: what both ways to make it share, and how many kernels they launch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import mla_cupy

from ...core.cost import D_V
from ...core.device import Device
from ...core.implementation import Prepared
from ...core.recorders import Call
from .cases import D_ROPE, PAGE_SIZE, LayerCase
from .inputs import IndexInputs, LayerInputs, LayerOutputs

Steps = Mapping[str, Call]
"""Calls in their order, by name."""


class Buffers:
    """Memory that a layer's steps write, made before: nothing is allocated in a call."""

    def __init__(self, case: LayerCase, dtype: str, device: Device) -> None:
        model = case.model
        self.queries = device.empty((case.b, case.h_q, model.d_qk), dtype)
        self.latents = device.empty((case.b, 1, case.h_q, D_V), dtype)
        width = model.d_head if model.absorbs else D_V
        self.out = device.empty((case.b, 1, case.h_q, width), dtype)
        self.lse = device.empty((case.b, case.h_q, 1), "float32")
        self.sparse_lse = device.empty((case.b, 1, case.h_q), "float32")
        if model.index_heads:
            self.codes = device.empty((case.b, model.index_heads, 128), "uint8")
            self.folded = device.empty((case.b, model.index_heads), "float32")
            self.indices = device.empty((case.b, 1, model.topk), "int32")
            self.counts = device.empty((case.b, 1), "int32")

    def workspace(self, device: Device, function: Callable[..., Any], *arrays: Any, **options: Any) -> Any:
        """Memory for a call; None where it needs none."""
        nbytes = mla_cupy.workspace_bytes(function, *arrays, **options)
        return device.empty((nbytes,), "uint8") if nbytes else None


def tables(inputs: LayerInputs) -> dict[str, Any]:
    """RoPE's tables, and the positions of the new tokens."""
    return {"cos": inputs.cos, "sin": inputs.sin, "positions": inputs.positions}


def selection(case: LayerCase, inputs: LayerInputs, index: IndexInputs, buffers: Buffers, device: Device) -> Call:
    """Logits of the quantised index queries, and the tokens that they select."""
    lengths = inputs.seqlens[:, None]
    arrays = (buffers.codes[:, None], index.cache, buffers.folded[:, None], lengths, inputs.block_table)
    options = {"topk": case.model.topk, "indices": buffers.indices, "counts": buffers.counts}
    workspace = buffers.workspace(device, mla_cupy.indexer_select_paged, *arrays, **options)
    return partial(mla_cupy.indexer_select_paged, *arrays, **options, workspace=workspace)


def attention(
    case: LayerCase, dtype: str, inputs: LayerInputs, buffers: Buffers, device: Device, **projection: Any
) -> Call:
    """Decode over the cache, or over what was selected; with `projection` to heads, else to latents."""
    model, q = case.model, buffers.queries[:, None]
    out = buffers.out if projection or not model.absorbs else buffers.latents
    if not model.record:
        d_head: dict[str, Any] = {"d_head": model.d_head} if projection else {}
        sizes: dict[str, Any] = {"max_b": case.b, "s_q": 1, "h_q": case.h_q, "d_qk": model.d_qk, "dtype": dtype}
        plan = mla_cupy.plan_decode(**sizes, **d_head, max_pages=case.pages, page_size=PAGE_SIZE)
        plan.update(inputs.seqlens)  # one for all layers of a step: not part of a layer
        arrays = (q, inputs.cache, inputs.block_table, inputs.seqlens)
        given: dict[str, Any] = {"scale": case.scale, "plan": plan, "out": out, "lse": buffers.lse}
        if projection:
            given["project"] = mla_cupy.Project(**projection)
        return partial(mla_cupy.mla_decode, *arrays, **given)
    lists = inputs.lists if model.extra else buffers.indices
    options = {"scale": case.scale, "out": out, "lse": buffers.sparse_lse}
    if projection:
        options["project"] = mla_cupy.Project(**projection)
    if model.extra:
        options |= {"extra_kv_cache": inputs.extra_cache, "extra_indices": inputs.extra_lists}
        options |= {"attn_sink": inputs.sink}
    workspace = buffers.workspace(device, mla_cupy.sparse_mla_decode, q, inputs.cache, lists, **options)
    return partial(mla_cupy.sparse_mla_decode, q, inputs.cache, lists, **options, workspace=workspace)


def columns_of_rope(case: LayerCase, inputs: LayerInputs, buffers: Buffers) -> tuple[Any, Any]:
    """RoPE's columns of the projected queries, and of those that decode takes."""
    return inputs.q[..., -D_ROPE:], buffers.queries[..., -D_ROPE:]


def prepared_layer(
    make: Callable[[LayerInputs, Buffers], Steps],
    case: LayerCase,
    dtype: str,
    sets: Sequence[LayerInputs],
    device: Device,
) -> Prepared:
    """All steps of a layer as one call, each step as a figure, and how many kernels it takes."""
    buffers = [Buffers(case, dtype, device) for _ in sets]
    with device.current():
        steps = [make(inputs, own) for inputs, own in zip(sets, buffers, strict=True)]
    calls = [partial(_in_turn, list(one.values())) for one in steps]
    with device.current():
        count = launches(calls[0], device)
        each = {name: launches(call, device) for name, call in steps[0].items()}
    said = ", ".join(f"{name} {number}" if number else name for name, number in each.items())
    return Prepared(
        calls=calls,
        outputs=lambda index: LayerOutputs(buffers[index].out),
        recorder=device.recorder(),
        includes=f"{count} launches: {said}" if count else said,
        figures={name: [one[name] for one in steps] for name in steps[0]},
    )


def _in_turn(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def launches(call: Call, device: Device) -> int:
    """The nodes of a CUDA graph of the call: kernels and fills; 0 on the host."""
    if not hasattr(device.stream, "begin_capture"):
        return 0
    call()  # loads what it needs
    device.synchronize()
    device.stream.begin_capture()
    try:
        call()
    finally:
        graph = device.stream.end_capture()
    count = ctypes.c_size_t()
    status = ctypes.CDLL("libcuda.so.1").cuGraphGetNodes(ctypes.c_void_p(graph.graph), None, ctypes.byref(count))
    return 0 if status else count.value
