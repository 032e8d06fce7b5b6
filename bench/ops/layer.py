"""A decode layer between its projections and the output projection.

Where an indexer selects, tokens with nearly the same logits may be on either side of the cut, and lists of V4 are drawn
from caches that every call changes: there the check is of finiteness only. Elsewhere it compares some heads of some
sequences with the float64 oracle.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

import mla_cupy
from mla_cupy import reference
from mla_cupy.dtypes import numpy_dtype, round_to

from ..core.cost import D_V
from ..core.device import Device
from ..core.implementation import OWN, Choices, Known, Own, Prepared
from ..core.operation import BenchOperation, Ratio
from ..core.recorders import Call
from ..core.samples import OutSample, judge_out
from ..core.tolerance import distance, spaced
from .layer_cases import (
    CASES,
    D_ROPE,
    MAIN,
    MODELS,
    PAGE_SIZE,
    IndexInputs,
    LayerCase,
    LayerInputs,
    LayerOutputs,
    case_of,
    make_inputs,
)

Array = npt.NDArray[Any]

# ---- Steps -----------------------------------------------------------------------------------------------------------

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
    case: LayerCase,
    dtype: str,
    inputs: LayerInputs,
    buffers: Buffers,
    device: Device,
    *,
    after_prepare: bool = False,
    **projection: Any,
) -> Call:
    """Decode over the cache, or over what was selected; with `projection` to heads, else to latents."""
    model, q = case.model, buffers.queries[:, None]
    out = buffers.out if projection or not model.absorbs else buffers.latents
    if not model.record:
        d_head: dict[str, Any] = {"d_head": model.d_head} if projection else {}
        sizes: dict[str, Any] = {"max_b": case.b, "s_q": 1, "h_q": case.h_q, "d_qk": model.d_qk, "dtype": dtype}
        sizes["after_prepare"] = after_prepare
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
        figures={name: [_alone(one[name]) for one in steps] for name in steps[0]},
    )


def _alone(call: Any) -> Call:
    """A step for its own figure, where the call before it is the same step."""
    options = getattr(call, "keywords", {})
    return partial(call, independent=False) if "independent" in options else call


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


# ---- What is timed ---------------------------------------------------------------------------------------------------


class FewLaunches(Own):
    """W_UK, RoPE of queries and keys, and the append; maybe the indexer; attention, merge, W_UV and gate."""

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
        token = (inputs.latent, inputs.rope if model.has_rope else None, inputs.cache, inputs.slots)
        steps: dict[str, Any] = {}
        if not model.absorbs:
            buffers.queries[...] = inputs.q  # once: a layer would turn them in place
            source, target = columns_of_rope(case, inputs, buffers)
            steps["prepare"] = partial(mla_cupy.mla_prepare, source, *token, **turns, out=target)
            return {**steps, "attention": attention(case, dtype, inputs, buffers, device)}
        w_uk, w_uv = inputs.kv_b_proj[:, : model.d_nope], inputs.kv_b_proj[:, model.d_nope :]
        options: dict[str, Any] = {**(turns if model.has_rope else {}), "w_uk": w_uk, "out": buffers.queries}
        steps["prepare and absorb"] = partial(mla_cupy.mla_prepare, inputs.q, *token, **options)
        if inputs.index is not None:
            index = inputs.index
            arrays = (index.q, index.weights, index.k, *turns.values(), index.cache, inputs.slots)
            options = {"norm_weight": index.norm_weight, "norm_bias": index.norm_bias, "independent": True}
            options |= {"codes": buffers.codes, "folded": buffers.folded}
            steps["index q and k"] = partial(mla_cupy.indexer_prepare, *arrays, **options)
            steps["select"] = selection(case, inputs, index, buffers, device)
        projection = {"w_uv": w_uv, **({"gate": inputs.gate} if model.has_gate else {})}
        return {
            **steps,
            "attention and W_UV": attention(case, dtype, inputs, buffers, device, after_prepare=True, **projection),
        }


# ---- Check -----------------------------------------------------------------------------------------------------------


def expect(case: LayerCase, dtype: str, inputs: LayerInputs, device: Device) -> list[OutSample]:
    """The oracle's values for a few sequences and heads; none where something was selected."""
    if case.model.record:
        return []
    found = []
    for sequence in spaced(case.b, 2).tolist():
        pages = _with_the_new_token(case, inputs, sequence, device)
        for head in spaced(case.h_q, 2).tolist():
            exact, rounded = (_expected(case, inputs, device, sequence, head, pages, x) for x in (None, dtype))
            found.append(OutSample((sequence, 0, head), exact, distance(rounded, exact)))
    return found


def _tables(inputs: LayerInputs, sequence: int, device: Device) -> dict[str, Any]:
    tables = {"cos": device.to_host(inputs.cos), "sin": device.to_host(inputs.sin)}
    return {**tables, "positions": device.to_host(inputs.positions[sequence : sequence + 1])}


def _with_the_new_token(case: LayerCase, inputs: LayerInputs, sequence: int, device: Device) -> Array:
    """The sequence's pages on the host, after the append."""
    pages: Array = device.take(inputs.cache, inputs.host_table[sequence]).copy()
    one = slice(sequence, sequence + 1)
    latent, rope = device.to_host(inputs.latent[one]), device.to_host(inputs.rope[one])
    slot = np.array([case.s_kv - 1], np.int32)
    if not case.model.has_rope:
        reference.cache_append(latent, None, pages, slot)
    else:
        reference.cache_append(latent, rope, pages, slot, **_tables(inputs, sequence, device))
    return pages


def _expected(
    case: LayerCase,
    inputs: LayerInputs,
    device: Device,
    sequence: int,
    head: int,
    pages: Array,
    rounding: str | None,
) -> Array:
    model, one, heads = case.model, slice(sequence, sequence + 1), slice(head, head + 1)
    q, weights = device.to_host(inputs.q[one, heads]), device.to_host(inputs.kv_b_proj[heads])
    (absorbed,) = reference.absorb(q[..., : model.d_nope], weights[:, : model.d_nope])
    kind = numpy_dtype(str(q.dtype))
    parts = [absorbed]
    if model.has_rope:
        turned = reference.mla_prepare(q[..., -D_ROPE:], **_tables(inputs, sequence, device))[0]
        parts.append(np.asarray(turned).astype(kind).astype(np.float64))
    queries = np.concatenate(parts, axis=-1)
    if rounding is not None:
        queries = round_to(queries, rounding).astype(kind)
    gate = device.to_host(inputs.gate[one, :, heads]) if model.has_gate else None
    table = np.arange(len(pages), dtype=np.int32)[None]
    out: Array = reference.mla_decode(
        *(queries[:, None], pages, table, np.array([case.s_kv], np.int32)),
        scale=case.scale,
        w_uv=weights[:, model.d_nope :],
        gate=gate,
        rounding=rounding,
    )[0]
    found: Array = out[0, 0, 0]
    return found


# ---- The operation ---------------------------------------------------------------------------------------------------

SEPARATE = "separate"
TIME, LAUNCHES = 0.75, 2 / 3
"""Aims: of the time of a dense layer of 64 sequences with 16 heads, and of the launches of V3.2."""


def implementations(choices: Choices) -> Known:
    """Ours with few launches, and of separate calls, with our attention or FlashMLA's."""
    from ..peers.layer_calls import SeparateCalls
    from ..peers.layer_flashmla import FlashMlaLayer

    return {
        OWN: FewLaunches,
        SEPARATE: SeparateCalls,
        "flashmla": choices.from_dir(FlashMlaLayer, "flashmla"),
    }


def ratios(rows: Sequence[Mapping[str, Any]]) -> list[Ratio]:
    """Ratios of the time and of the launches to separate calls."""
    found = {row["implementation"]: row for row in rows if row["status"] == "ok"}
    if not {OWN, SEPARATE} <= found.keys():
        return []
    own, separate = found[OWN], found[SEPARATE]
    case = own["case"]
    times = [row["timing"]["us_median"] for row in (own, separate)]
    made = [Ratio(f"{case}: time of separate calls", times[0] / times[1], TIME if case == MAIN.name else None)]
    said = [re.match(r"(\d+) launches", row["includes"]) for row in (own, separate)]
    counts = [int(match[1]) for match in said if match]
    if len(counts) == 2:
        text = f"{case}: {counts[0]} launches in place of {counts[1]}"
        made.append(Ratio(text, counts[0] / counts[1], LAUNCHES if case.startswith("v32-") else None))
    return made


LAYER = BenchOperation(
    name="layer",
    title="one decode layer between its projections and the output projection",
    examples="""examples:
  run layer                                 all models, with few launches and as separate calls
  run layer --case v3-hq32-b8-skv2048       any other sizes, named in the same form
""",
    peers="separate (RoPE, LayerNorm and gate by kernels of their own, cache_append, both products by cuBLAS); "
    "flashmla (the same with its attention; --peers-dir); or none. Default: separate, and flashmla with --peers-dir",
    suites={"targets": CASES, "quick": (MAIN, LayerCase("v32", 128, 64, 16384))},
    case_form="<v3, v32, glm5, k3 or v4flash>-hq<N>-b<N>-skv<N>",
    pattern=rf"({'|'.join(MODELS)})-hq(\d+)-b(\d+)-skv(\d+)",
    case_of=case_of,
    inputs=make_inputs,
    expect=expect,
    judge=judge_out,
    implementations=implementations,
    default_peers=(SEPARATE,),
    peers_from_dir=("flashmla",),
    ratios=ratios,
)
