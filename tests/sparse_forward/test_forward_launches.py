"""Driver calls of the public sparse forward: kernels, records, memory; no CUDA is needed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy.kernels.sparse_forward import SPARSE_FORWARD
from tests.support.flat import flat
from tests.support.recorder import H200, Recorder
from tests.support.sparse_cases import SparseCase, SparseInputs, make
from tests.support.sparse_gpu import problem_of

SEQUENCES = ((3, 90), (0, 5), (2, 3), (1, 150))


def forward(inputs: SparseInputs, **options: Any) -> tuple[Any, Any, Any]:
    return flat(mla_cupy.sparse_mla_forward)(*inputs.arguments, **{**inputs.options, **options})


@pytest.mark.parametrize("strides", ["padded", "odd", "dense"])
@pytest.mark.parametrize("head_axis", [False, True])
def test_the_lists_are_made_from_the_caller_s_arrays(recorder: Recorder, strides: Any, head_axis: bool) -> None:
    case = SparseCase(
        s_q=9, topk=70, sequences=SEQUENCES, lengths=True, causal=True, strides=strides, head_axis=head_axis
    )
    inputs = make(case)
    forward(inputs)
    assert recorder.entries[:2] == ["attention_row_lists", "attention_schedule"]
    record = recorder.launches[0].params
    for name in ("indices", "topk_length", "cu_seqlens_q", "cu_seqlens_kv"):
        assert record[name] == getattr(inputs, name).ctypes.data
    strides_of = {"indices_stride_b": (inputs.indices, 0), "indices_stride_k": (inputs.indices, -1)}
    for name in ("topk_length", "cu_seqlens_q", "cu_seqlens_kv"):
        strides_of[f"{name}_stride"] = (getattr(inputs, name), 0)
    for name, (x, axis) in strides_of.items():
        assert record[f"{name}_elems"] == x.strides[axis] // 4
    sizes = {"s_q": 9, "s_kv": 300, "topk": 70, "b": 4, "causal": 1, "selected": 0, "rows_stride_elems": 128}
    assert {name: record[name] for name in sizes} == sizes
    assert recorder.launches[0].grid == (9, 1, 1)


def test_without_the_optional_arrays(recorder: Recorder) -> None:
    forward(make(SparseCase(s_q=5000, s_kv=9, h_q=1, topk=3, invalid=0.0)))
    record = recorder.launches[0].params
    names = ("topk_length", "cu_seqlens_q", "cu_seqlens_kv", "b", "causal")
    assert {name: record[name] for name in names} == dict.fromkeys(names, 0)
    assert recorder.launches[0].grid == (5000, 1, 1)
    assert recorder.launches[-1].params["attn_sink"] == 0


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
def test_the_attention_gets_the_arrays(recorder: Recorder, out_dtype: str) -> None:
    inputs = make(SparseCase(sink=True, topk=70))
    out, lse, max_logits = forward(inputs, out_dtype=out_dtype, lse_base="2", empty_lse=3.0, scale=0.5)
    record = recorder.launches[2].params
    addresses = {"q": inputs.q, "kv": inputs.kv, "out": out, "lse": lse, "max_logits": max_logits}
    for name, x in {**addresses, "attn_sink": inputs.attn_sink}.items():
        assert record[name] == x.ctypes.data
    assert record["out_is_fp32"] == (out_dtype == "float32")
    assert (record["factor"], record["empty"]) == (1, 3)
    assert record["scale_log2"] == np.float32(0.5 * np.log2(np.e))
    assert record["block_table"] == recorder.launches[0].params["rows"]
    assert record["seqlens"] == recorder.launches[0].params["counts"]


def test_memory(recorder: Recorder) -> None:
    """The results that are not given, and one workspace."""
    inputs = make(SparseCase(topk=70))
    forward(inputs)
    *results, workspace = recorder.allocations
    assert results == [(7, 16, 512), (7, 16), (7, 16)]
    config = SPARSE_FORWARD.configure(problem_of(inputs.case), H200)
    assert workspace == (SPARSE_FORWARD.workspace(config).nbytes,)
    first = recorder.launches[0].params
    assert first["counts"] - first["rows"] >= 4 * 7 * 128
    recorder.allocations.clear()
    given = {name: np.empty(shape, np.float32) for name, shape in (("lse", (7, 16)), ("max_logits", (7, 16)))}
    forward(inputs, out=np.empty((7, 16, 512), inputs.q.dtype), **given)
    assert recorder.allocations == [workspace]


def test_no_queries_no_launch(recorder: Recorder) -> None:
    results = forward(make(SparseCase(s_q=0)))
    assert [x.shape for x in results] == [(0, 16, 512), (0, 16), (0, 16)]
    assert recorder.launches == []


@pytest.mark.parametrize("case", [SparseCase(topk=0), SparseCase(s_kv=0)], ids=lambda case: case.id)
def test_no_rows_still_write_their_results(recorder: Recorder, case: SparseCase) -> None:
    forward(make(case))
    assert "attention_row_lists" in recorder.entries


def test_streams(recorder: Recorder) -> None:
    forward(make(SparseCase()), stream=1234)
    assert {launch.stream for launch in recorder.launches} == {1234}
