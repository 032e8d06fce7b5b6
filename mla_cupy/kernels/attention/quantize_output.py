"""Host side of `attention/quantize_output.cu`: results as e4m3 codes with a scale per 128 columns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mla_cupy.arrays.view import View
from mla_cupy.kernels.params import QuantizeOutputParams
from mla_cupy.kernels.pipeline import Call, Launch, LaunchArgs, Step
from mla_cupy.kernels.spec import PLAIN, KernelSpec

COLUMNS = 128
"""Columns of a scale."""
_BLOCK_SCALES = 16
_HALF_BYTES = 2

KERNEL: KernelSpec[object] = KernelSpec(
    "attention_quantize_output",
    "turns results of decode into e4m3 codes with a scale per 128 columns",
    "attention/quantize_output.cu",
    QuantizeOutputParams,
    facts={"block_scales": _BLOCK_SCALES, "columns": COLUMNS},
)

RESULTS = "results_16"
"""The part of the workspace with results in 16 bits."""


def workspace(rows: int, columns: int) -> dict[str, int]:
    """The part of the workspace for `rows` rows of all heads."""
    return {RESULTS: _HALF_BYTES * rows * columns}


def steps(call: Call, half: str, steps_of: Callable[[Call], list[Step]]) -> list[Step]:
    """The steps of a call by `steps_of`; where it has scales, `out` is the workspace to them, and a launch follows.

    `half` is the dtype of results in 16 bits.
    """
    if not call.name("out_scales"):
        return steps_of(call)
    out = call.view("out")
    moved = {"out": RESULTS}
    made = steps_of(replace(call, views={**call.views, "out": _contiguous(out, half)}, moved=moved))
    return [*made, launch(call, half)] if made else []


def _contiguous(out: View, dtype: str) -> View:
    """A result of the same shape without gaps."""
    *outer, heads, columns = out.shape
    strides = [heads * columns, columns, 1]
    if len(outer) == 2:
        strides.insert(0, outer[1] * heads * columns)
    return View(0, out.shape, tuple(strides), dtype, out.device)


def launch(call: Call, half: str) -> Launch:
    """Quantise the results in the workspace."""
    shape: tuple[int, ...] = call.view("out").shape
    b, s_q, h_q, columns = shape if len(shape) == 4 else (1, *shape)
    scales = b * s_q * h_q * (columns // COLUMNS)
    params = QuantizeOutputParams(
        results=RESULTS,
        codes="out",
        scales="out_scales",
        codes_stride_b_s_h_elems=_outer_strides(call, "out"),
        scales_stride_b_s_h_column_elems=(*_outer_strides(call, "out_scales"), call.view("out_scales").strides[-1]),
        num_scales=scales,
        s_q=s_q,
        h_q=h_q,
        row_scales=columns // COLUMNS,
        results_are_bf16=half == "bfloat16",
        power_of_2=call.options.scales == "power_of_2",
    )
    return Launch(KERNEL, PLAIN[0], (-(-scales // _BLOCK_SCALES), 1, 1), LaunchArgs(params))


def _outer_strides(call: Call, name: str) -> tuple[int, int, int]:
    """Strides of sequences, tokens and heads; packed results have no axis of sequences."""
    *outer, s_q, h_q, _ = call.view(name).strides
    return (outer[0] if outer else 0), s_q, h_q
