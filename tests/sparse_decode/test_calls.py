"""`sparse_mla_decode` on the NumPy backend, its mistakes, and what it launches."""

from __future__ import annotations

import numpy as np
import pytest

import mla_cupy
from mla_cupy import ArgumentError, ShapeError, dtypes, reference
from mla_cupy.cache_formats import V32
from mla_cupy.ops import POOL_OPERATIONS
from tests.cache.inputs import empty_cache
from tests.sparse_decode.runs import (
    CASES,
    GENERIC,
    MORE_CASES,
    NOPE_CASES,
    ON_HOPPER,
    SINCE_AMPERE,
    V41_CASES,
    V41_WIDE,
    SparseDecodeCase,
    fitting,
    make,
)
from tests.support.flat import flat
from tests.support.kernels import in_both_sizes
from tests.support.mistakes import Bad, Call, option, raises, swap
from tests.support.operations import mistakes
from tests.support.recorder import Recorder


@pytest.mark.parametrize("case", [*CASES, *V41_CASES], ids=str)
def test_the_numpy_backend_rounds_the_oracle(case: SparseDecodeCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    call = make(case)
    out, lse = flat(mla_cupy.sparse_mla_decode)(**call)
    exact_out, exact_lse = reference.sparse_mla_decode(**call)
    np.testing.assert_array_equal(out, dtypes.round_to(exact_out, case.dtype).astype(out.dtype))
    np.testing.assert_array_equal(lse, exact_lse.astype(np.float32))


def test_the_oracle_is_attention_to_dequantised_rows() -> None:
    """The sparse forward over the rows that `cache_gather` reads, the second cache's after the first's."""
    call = make(SparseDecodeCase(record="v4", extra=20, sink=True))
    caches = [call["kv_cache"], call["extra_kv_cache"]]
    rows = [reference.cache_gather(c, np.arange(c.shape[0] * c.shape[1]))[0] for c in caches]
    lists = [
        np.where((i >= 0) & (i < len(r)), i, -1)
        for i, r in zip((call["indices"], call["extra_indices"]), rows, strict=True)
    ]
    lists[1] = np.where(lists[1] >= 0, lists[1] + len(rows[0]), -1)
    selected = np.concatenate(lists, axis=2)[:, 0]
    expected = reference.sparse_mla_forward(
        call["q"][:, 0], np.concatenate(rows), selected, scale=call["scale"], attn_sink=call["attn_sink"]
    )
    out, lse = reference.sparse_mla_decode(**call)
    np.testing.assert_allclose(out[:, 0], expected[0], rtol=1e-12)
    np.testing.assert_allclose(lse[:, 0], expected[1], rtol=1e-12)


def good() -> Call:
    call = make(SparseDecodeCase(extra=3, lengths=True, sink=True, s_q=2))
    shape = call["q"].shape[:3]
    return {**call, "out": np.full((*shape, 512), 7, call["q"].dtype), "lse": np.full(shape, 7, np.float32)}


RECORDED = [
    pytest.param(bad, id=bad.id.replace(" ", "_"))
    for bad in mistakes(POOL_OPERATIONS["sparse_mla_decode"])
    if not ("cache" in bad.id and bad.id.endswith(("odd strides", "between items")))  # bytes lie anywhere
    and bad.id.split()[0] in good()  # tests/projection has the others
]


@pytest.mark.parametrize("bad", RECORDED)
@pytest.mark.filterwarnings("ignore:.*encountered in cast:RuntimeWarning")
def test_refuses_arrays(bad: Bad, recorder: Recorder) -> None:
    call = good()
    bad.change(call)
    with pytest.raises(bad.error):
        flat(mla_cupy.sparse_mla_decode)(**call)
    assert recorder.launches == []


def rows_of_fp8() -> Call:
    cache = np.zeros((4, 5, 576), np.uint8)
    return {"kv_cache": cache, "extra_kv_cache": cache.copy()}


BAD = [
    Bad("narrow q", swap("q", lambda x: x[..., :448].copy()), ShapeError, ("q.shape[-1]", "448", "576 for v32")),
    Bad("fp8", lambda c: c.update(rows_of_fp8()), ArgumentError, ("math", "'exact'", '"fp8" for the format fp8')),
    Bad("fp8 twice", lambda c: c.update(rows_of_fp8(), math="fp8"), ArgumentError,
        ("extra_kv_cache", "None beside a kv_cache of fp8", "append its tokens")),
    Bad("math", option("math", "fp8"), ArgumentError, ("math", "'fp8'", '"exact" for the format v32', "cache_append")),
    Bad("kv_scale", option("kv_scale", 0.5), ArgumentError, ("kv_scale", "0.5", "1 for the format v32")),
    Bad("extra of v4", swap("extra_kv_cache", lambda x: np.zeros((4, 5, 584), np.uint8)), ShapeError,
        ("extra_kv_cache", "pages of v4", "v32 beside a kv_cache of v32")),
    Bad("extra in e2m1", swap("extra_kv_cache", lambda x: np.zeros((4, 5, 288), np.uint8)), ShapeError,
        ("extra_kv_cache", "pages of v41-fp4", "v32 beside a kv_cache of v32")),
    Bad("no tokens", swap("kv_cache", lambda x: x[:, :0]), ShapeError, ("kv_cache.shape[1]", "page_size=0", "1")),
    Bad("no extra tokens", swap("extra_kv_cache", lambda x: x[:, :0]), ShapeError, ("extra_page_size=0", "at least 1")),
    Bad("no extra cache", option("extra_kv_cache", None), ArgumentError, ("extra_kv_cache", "give both")),
    Bad("no extra indices", option("extra_indices", None), ArgumentError, ("extra_indices", "give both")),
    Bad("q in steps", swap("q", lambda x: np.repeat(x, 2, axis=0)[::2]), ShapeError, ("q.strides[0]", "2 times")),
    Bad("out in steps", swap("out", lambda x: np.repeat(x, 2, axis=0)[::2]), ShapeError, ("out.strides[0]", "2 times")),
    Bad("scale", option("scale", 0), ArgumentError, ("scale", "0", "above 0")),
    Bad("kernel", option("kernel", "attention_generic"), ArgumentError, ("kernel", "sparse_decode_generic")),
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.id.replace(" ", "_"))
def test_refuses(bad: Bad, place: str) -> None:
    if place == "cupy" and "steps" in bad.id:
        pytest.skip("uploading keeps no steps")
    raises(bad, flat(mla_cupy.sparse_mla_decode), good(), place)


def test_launches(recorder: Recorder) -> None:
    """And a repeated call is launched as the first."""
    call = good()
    names = ["sparse_decode_schedule", "sparse_decode_sm90_small", "attention_combine"]
    for times in (1, 2):
        flat(mla_cupy.sparse_mla_decode)(**call)
        assert recorder.entries == names * times
    assert mla_cupy.workspace_bytes(flat(mla_cupy.sparse_mla_decode), **call) > 16 * 4 * 40


def test_no_query_is_no_launch(recorder: Recorder) -> None:
    q, indices = np.zeros((0, 1, 4, 576), np.float16), np.zeros((0, 1, 5), np.int32)
    out, lse = mla_cupy.sparse_mla_decode(q, empty_cache(V32, 2, 4), indices, scale=576**-0.5)
    assert (out.shape, lse.shape) == ((0, 1, 4, 512), (0, 1, 4))
    assert recorder.launches == []


# ---- On a GPU ---------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", in_both_sizes((*ON_HOPPER, *SINCE_AMPERE, GENERIC)))
@pytest.mark.parametrize(
    "case",
    [
        *CASES,
        *MORE_CASES,
        *NOPE_CASES,
        SparseDecodeCase(record="v32-nope", h_q=64, topk=2048, b=2, page_size=64),
        *(SparseDecodeCase(h_q=h, topk=2048, b=b, page_size=64) for h, b in ((128, 2), (64, 5), (16, 40), (8, 1))),
        SparseDecodeCase(record="v4", h_q=128, topk=128, extra=1024, sink=True, b=3, s_q=2, page_size=64),
    ],
    ids=str,
)
def test_on_a_gpu(case: SparseDecodeCase, kernel: str, gpu: object) -> None:
    _check_on_a_gpu(case, kernel)


V41_ON_A_GPU = (
    *V41_CASES,
    V41_WIDE,
    SparseDecodeCase(record="v41", h_q=128, topk=2048, b=2, page_size=64),
    SparseDecodeCase(record="v41", extra_record="v41-fp4", h_q=64, topk=128, extra=1024, sink=True, page_size=64),
)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "case"),
    [(name, case) for name in (*ON_HOPPER, GENERIC) for case in V41_ON_A_GPU],
    ids=str,
)
def test_v41_on_a_gpu(case: SparseDecodeCase, kernel: str, gpu: object) -> None:
    _check_on_a_gpu(case, kernel)


def _check_on_a_gpu(case: SparseDecodeCase, kernel: str) -> None:
    import cupy

    from tests.sparse_decode.runs import check
    from tests.support.gpu import upload

    if kernel in ON_HOPPER and cupy.cuda.Device().compute_capability != "90":
        pytest.skip("needs compute capability 9.0")
    case = fitting(case, kernel)
    for out_dtype in ("float32", case.dtype):
        check(case, upload, cupy.asnumpy, kernel, out_dtype)
