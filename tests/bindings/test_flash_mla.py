"""`mla_cupy.compat.flash_mla` against the oracle, in FlashMLA's conventions, with arrays of several libraries."""

from __future__ import annotations

import doctest
import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mla_cupy import ArgumentError, DTypeError, MlaError, PlanError, ShapeError, reference
from mla_cupy.compat import flash_mla
from mla_cupy.compat.flash_mla import (
    FlashMLASchedMeta,
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
    get_mla_metadata,
)
from tests.bindings.test_doctests import REPOSITORY
from tests.sparse_decode.runs import SparseDecodeCase
from tests.sparse_decode.runs import make as records_call
from tests.support import cases
from tests.support.recorder import Recorder
from tests.support.tolerance import check, check_lse

pytestmark = pytest.mark.usefixtures("_numpy_backend")

PAGES, PAGE, B, S_Q, HEADS, TOPK = 5, 16, 3, 2, 4, 9
SCALE = 192**-0.5


def decode_inputs(**changes: Any) -> cases.DecodeInputs:
    sizes = {"b": B, "s_q": S_Q, "h_q": HEADS, "page_size": PAGE, "seqlens": "ragged-70", "strides": "dense"}
    return cases.make(cases.DecodeCase(**{**sizes, **changes}))


@pytest.mark.parametrize("causal", [False, True])
def test_dense_decode(library: Any, causal: bool) -> None:
    """Two layers of one step; the middle sequence is empty."""
    make, back = library
    inputs = decode_inputs(causal=causal)
    arguments = [make(x) for x in inputs.arguments]
    schedule, nothing = get_mla_metadata(arguments[3], S_Q * HEADS, 1)
    assert nothing is None
    for _ in range(2):
        out, lse = flash_mla_with_kvcache(*arguments, 512, schedule, causal=causal)
        out, lse = back(out), back(lse)
        unseen = np.isneginf(inputs.exact[1])
        assert unseen.any()
        assert (lse[unseen] == np.inf).all()
        check((out, np.where(unseen, -np.inf, lse)), inputs.exact, inputs.rounded, "bfloat16")
    assert schedule.have_initialized


def test_the_schedule_follows_other_lengths(library: Any) -> None:
    make, back = library
    inputs = decode_inputs()
    q, cache, table, seqlens = (make(x) for x in inputs.arguments)
    schedule = FlashMLASchedMeta()
    with pytest.raises(PlanError, match="got no schedule"):
        schedule.update(seqlens)
    flash_mla_with_kvcache(q, cache, table, seqlens, 512, schedule, causal=True)
    shorter = np.minimum(inputs.seqlens, 20).astype(np.int32)
    schedule.update(make(shorter))
    out, _ = flash_mla_with_kvcache(q, cache, table, make(shorter), 512, schedule, causal=True)
    exact = reference.mla_decode(*inputs.arguments[:3], shorter)
    rounded = reference.mla_decode(*inputs.arguments[:3], shorter, rounding="bfloat16")
    check((back(out), exact[1]), exact, rounded, "bfloat16")


def test_a_step_is_scheduled_once(recorder: Recorder) -> None:
    """One schedule serves all layers, in memory of the arrays' library; `update` schedules again."""
    inputs = decode_inputs(page_size=64, d_qk=512, seqlens="ragged-1100")
    schedule = FlashMLASchedMeta()
    for _ in range(3):
        flash_mla_with_kvcache(*inputs.arguments, 512, schedule, causal=True)
    assert recorder.entries.count("attention_schedule") == 1
    assert recorder.entries.count("attention_combine") == 3
    assert sum(len(shape) == 1 for shape in recorder.allocations) == 1, "one workspace, and results"
    schedule.update(inputs.seqlens)
    assert recorder.entries[-1] == "attention_schedule"


def test_no_sequence_and_rows_off_the_grid() -> None:
    """Calls that no plan serves."""
    inputs = decode_inputs(strides="odd")
    out, lse = flash_mla_with_kvcache(*inputs.arguments, 512, FlashMLASchedMeta(), causal=True)
    check((out, np.where(np.isposinf(lse), -np.inf, lse)), inputs.exact, inputs.rounded, "bfloat16")
    none = (x[:0] if at != 1 else x for at, x in enumerate(inputs.arguments))
    out, lse = flash_mla_with_kvcache(*none, 512, FlashMLASchedMeta())
    assert (out.shape, lse.shape) == ((0, S_Q, HEADS, 512), (0, HEADS, S_Q))


def sparse_decode_inputs(topk: int = TOPK) -> dict[str, Any]:
    """Tokens of the whole cache, -1 and one past the end among them; one query selects nothing."""
    rng = np.random.default_rng(5)
    q = rng.standard_normal((B, S_Q, HEADS, 576)).astype(ml_dtypes.bfloat16)
    cache = rng.standard_normal((PAGES, PAGE, 1, 576)).astype(ml_dtypes.bfloat16)
    indices = rng.integers(-1, PAGES * PAGE + 1, (B, S_Q, topk)).astype(np.int32)
    indices[1, 0] = -1
    return {"q": q, "k_cache": cache, "indices": indices}


@pytest.mark.parametrize("with_options", [False, True], ids=["plain", "lengths and a sink"])
def test_sparse_decode(library: Any, with_options: bool) -> None:
    make, back = library
    given = sparse_decode_inputs()
    more: dict[str, Any] = {}
    if with_options:
        more = {"topk_length": np.array([TOPK, 4, 0], np.int32), "attn_sink": np.linspace(-1, 2, HEADS, dtype="f4")}
    out, lse = flash_mla_with_kvcache(
        *(make(given["q"]), make(given["k_cache"]), None, None, 512, FlashMLASchedMeta()),
        softmax_scale=SCALE,
        indices=make(given["indices"]),
        **{name: make(x) for name, x in more.items()},
    )
    flat = {"q": given["q"].reshape(-1, HEADS, 576), "indices": given["indices"].reshape(-1, TOPK)}
    if with_options:
        more["topk_length"] = np.repeat(more["topk_length"], S_Q)
    exact, rounded = (
        reference.sparse_mla_forward(
            *(flat["q"], given["k_cache"].reshape(-1, 576), flat["indices"]), scale=SCALE, rounding=rounding, **more
        )
        for rounding in (None, "bfloat16")
    )
    assert out.shape == (B, S_Q, HEADS, 512)
    assert lse.shape == (B, HEADS, S_Q)
    found = back(lse).swapaxes(1, 2).reshape(-1, HEADS)
    unseen = np.isneginf(exact[1])
    assert (found[unseen] == np.inf).all()
    results = back(out).reshape(-1, HEADS, 512), np.where(unseen, -np.inf, found)
    check(results, exact[:2], rounded[:2], "bfloat16")


FP8_CASES = (
    SparseDecodeCase(h_q=5, s_q=2, b=3, extra=7, lengths=True, sink=True, empty=True),
    SparseDecodeCase(record="v4", h_q=2, topk=20, extra=33, lengths=True, sink=True),
    SparseDecodeCase(record="v41", h_q=2, topk=9, extra=20, lengths=True, sink=True, extra_record="v41-fp4"),
    SparseDecodeCase(record="v32-nope", h_q=5, extra=7, lengths=True, sink=True),
)


@pytest.mark.parametrize("case", FP8_CASES, ids=str)
def test_sparse_decode_from_fp8(library: Any, case: SparseDecodeCase, request: pytest.FixtureRequest) -> None:
    """Queries that do not step evenly, poisoned caches whose pages have gaps, and two lists."""
    make, back = library
    if request.node.callspec.params["library"] == "jax" and case.record == "v4":
        pytest.skip("JAX arrays have no gaps between pages, which v4 needs")
    given = records_call(case)
    room = np.full((case.b, case.s_q + 1, case.h_q, given["q"].shape[-1]), np.nan, given["q"].dtype)
    room[:, : case.s_q] = given["q"]
    given.pop("scale")
    call = {name: make(x) for name, x in {**given, "q": room[:, : case.s_q]}.items()}
    out, lse = flash_mla_with_kvcache(
        *(call["q"], one_head(call["kv_cache"]), None, None, 512, FlashMLASchedMeta()),
        softmax_scale=SCALE,
        is_fp8_kvcache=True,
        indices=call["indices"],
        attn_sink=call["attn_sink"],
        topk_length=call["topk_length"],
        extra_k_cache=one_head(call.get("extra_kv_cache")),
        extra_indices_in_kvcache=call.get("extra_indices"),
        extra_topk_length=call.get("extra_topk_length"),
    )
    exact = reference.sparse_mla_decode(**given, scale=SCALE, empty_lse=np.inf)
    assert out.shape == exact[0].shape
    np.testing.assert_allclose(back(out).astype("f8"), exact[0], rtol=2**-8, atol=1e-6)
    np.testing.assert_allclose(back(lse), exact[1].swapaxes(1, 2), rtol=1e-6)
    assert np.isposinf(back(lse)).any() == case.empty


@pytest.mark.parametrize(
    ("name", "record"), [("V32", "v32"), ("V32_NO_ROPE", "v32-nope"), ("V4", "v4"), ("V41", "v41")]
)
def test_formats_by_their_names(name: str, record: str) -> None:
    given = records_call(SparseDecodeCase(record=record, h_q=4))
    arguments = (given["q"], one_head(given["kv_cache"]), None, None, 512)
    options = {"is_fp8_kvcache": True, "indices": given["indices"], "softmax_scale": SCALE}
    expected = flash_mla_with_kvcache(*arguments, FlashMLASchedMeta(), **options)
    got = flash_mla_with_kvcache(*arguments, FlashMLASchedMeta(), **options, kv_format=name)
    for mine, wanted in zip(got, expected, strict=True):
        np.testing.assert_array_equal(mine, wanted)
    other = "V4" if record != "v4" else "V41"
    with pytest.raises(ShapeError, match=r"k_cache.shape\[-1\]: got"):
        flash_mla_with_kvcache(*arguments, FlashMLASchedMeta(), **options, kv_format=other)


def test_tokens_of_528_bytes() -> None:
    """Only their name says that they are no V41: sparse and dense decode."""
    given = records_call(SparseDecodeCase(record="v32-nope", h_q=4, page_size=64))
    cache = one_head(given["kv_cache"])
    options = {"is_fp8_kvcache": True, "softmax_scale": SCALE}
    table, lengths = np.array([[3, 1], [0, 2]], np.int32), np.array([70, 0], np.int32)
    cache[...] = 0x38  # 1 in e4m3; whatever is no code is finite, too
    for rest in (((None, None, 512), {"indices": given["indices"]}), ((table, lengths, 512), {})):
        results = [
            flash_mla_with_kvcache(given["q"], k, *rest[0], FlashMLASchedMeta(), **options, **rest[1], kv_format=name)
            for k, name in ((cache, None), (cache[..., :528], "V32_NO_ROPE"), (cache[..., :528].copy(), "V32_NO_ROPE"))
        ]
        for got in results[1:]:
            for mine, wanted in zip(got, results[0], strict=True):
                np.testing.assert_array_equal(mine, wanted)


def one_head(cache: Any) -> Any:
    """The cache with FlashMLA's axis of one head."""
    return None if cache is None else cache[:, :, None, :]


def fp8_decode_call() -> dict[str, Any]:
    """Dense decode from records; two query tokens of two sequences."""
    given = records_call(SparseDecodeCase(h_q=64, s_q=2, page_size=64))
    table = np.array([[3, 1], [0, 2]], np.int32)
    lengths, cache = np.array([70, 0], np.int32), np.zeros((5, 64, 1, 656), np.uint8)
    rows = np.ones((5 * 64, 512), np.float16), np.ones((5 * 64, 64), np.float16)
    reference.cache_append(*rows, cache[:, :, 0], np.arange(5 * 64))
    return {"q": given["q"], "k_cache": cache, "block_table": table, "cache_seqlens": lengths, "head_dim_v": 512}


def test_dense_decode_from_fp8() -> None:
    call = fp8_decode_call()
    schedule = FlashMLASchedMeta()
    for _ in range(2):
        out, lse = flash_mla_with_kvcache(
            **call, tile_scheduler_metadata=schedule, causal=True, is_fp8_kvcache=True, softmax_scale=SCALE
        )
        assert (out[0] == 1).all()
        assert np.isposinf(lse[1]).all()
    with pytest.raises(ArgumentError, match="is_fp8_kvcache: got True, expected False, without indices; or strict"):
        flash_mla_with_kvcache(**call, tile_scheduler_metadata=FlashMLASchedMeta(), is_fp8_kvcache=True, strict=True)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"extra_k_cache": np.zeros((2, 3, 1, 656), "u1")}, ArgumentError, "extra_indices_in_kvcache: got None"),
        ({"extra_topk_length": np.zeros(2, "i4")}, ArgumentError, "extra_k_cache: got None"),
        ({"k_cache": np.zeros((9, 5, 1, 600), "u1")}, ShapeError, r"k_cache.shape\[-1\]: got 600"),
        ({"extra_k_cache": np.zeros((2, 656), "u1"), "extra_indices_in_kvcache": np.zeros((2, 2, 1), "i4")}, ShapeError,
         "extra_k_cache.shape"),
        ({"causal": True}, ArgumentError, "causal: got True"),
        ({"strict": True}, ShapeError, "64 or 128 heads"),
        ({"kv_format": "v32"}, ArgumentError, "kv_format: got 'v32', expected None, or one of V32, V32_NO_ROPE, V4"),
        ({"is_fp8_kvcache": False, "kv_format": "V32"}, ArgumentError, "kv_format: got 'V32', expected None, as"),
    ],
    ids=lambda x: str(x)[:30],
)  # fmt: skip
def test_mistakes_of_decode_from_fp8(change: dict[str, Any], error: type[Exception], message: str) -> None:
    given = records_call(SparseDecodeCase(h_q=5, s_q=2))
    call: dict[str, Any] = {"q": given["q"], "k_cache": one_head(given["kv_cache"]), "indices": given["indices"]}
    call.update(block_table=None, cache_seqlens=None, head_dim_v=512, is_fp8_kvcache=True)
    call["tile_scheduler_metadata"] = schedule = FlashMLASchedMeta()
    with pytest.raises(error, match=message):
        flash_mla_with_kvcache(**{**call, **change})
    assert not schedule.have_initialized
    flash_mla_with_kvcache(**call)


def test_sparse_decode_of_no_tokens() -> None:
    given = sparse_decode_inputs(topk=0)
    lengths = np.zeros(B, np.int32)
    q, cache, indices = given.values()
    out, lse = flash_mla_with_kvcache(
        q, cache, None, None, 512, FlashMLASchedMeta(), indices=indices, topk_length=lengths
    )
    assert (out == 0).all()
    assert (lse == np.inf).all()


def test_sparse_forward(library: Any) -> None:
    """The order of the results, and the marks of a query without rows."""
    make, back = library
    given = sparse_decode_inputs()
    q, kv = given["q"].reshape(-1, HEADS, 576), given["k_cache"].reshape(-1, 1, 576)
    indices = given["indices"].reshape(-1, 1, TOPK)
    more = {"attn_sink": np.linspace(-1, 2, HEADS, dtype="f4"), "topk_length": np.full(B * S_Q, 5, np.int32)}
    wanted = reference.sparse_mla_forward(q, kv, indices, scale=SCALE, **more)
    rounded = reference.sparse_mla_forward(q, kv, indices, scale=SCALE, rounding="bfloat16", **more)
    arguments = [make(x) for x in (q, kv, indices)]
    out, max_logits, lse = flash_mla_sparse_fwd(
        *arguments, SCALE, 512, make(more["attn_sink"]), make(more["topk_length"]), indexer_topk=0
    )
    unseen = np.isneginf(wanted[1])
    assert unseen.any()
    assert (back(lse)[unseen] == np.inf).all()
    assert (back(max_logits)[unseen] == -np.inf).all()
    results = back(out), np.where(unseen, -np.inf, back(lse)), back(max_logits)
    check(results, wanted, rounded, "bfloat16")


def test_lse_of_the_first_indices(library: Any) -> None:
    """The log-sum-exp covers the first indices within `topk_length`, without the sink; other results do not change."""
    make, back = library
    given = sparse_decode_inputs()
    q, kv = given["q"].reshape(-1, HEADS, 576), given["k_cache"].reshape(-1, 1, 576)
    indices, first = given["indices"].reshape(-1, 1, TOPK), 7
    lengths = np.resize(np.array([3, TOPK, 0], np.int32), len(q))
    indices[1, 0, :first] = -1
    arguments = [*(make(x) for x in (q, kv, indices)), SCALE, 512, make(np.ones(HEADS, "f4")), make(lengths)]
    *results, lse = flash_mla_sparse_fwd(*arguments, indexer_topk=first)
    short = {"topk_length": np.minimum(lengths, first), "scale": SCALE}
    _, exact, _ = reference.sparse_mla_forward(q, kv, indices, **short, empty_lse=np.inf)
    _, rounded, _ = reference.sparse_mla_forward(q, kv, indices, **short, empty_lse=np.inf, rounding="bfloat16")
    assert (back(lse)[1:3] == np.inf).all()
    check_lse(back(lse), exact, rounded)
    for got, wanted in zip(results, flash_mla_sparse_fwd(*arguments), strict=True):
        np.testing.assert_array_equal(back(got), back(wanted))


# ---- refused -----------------------------------------------------------------------------------------------------

DENSE_MISTAKES = [
    ({"is_fp8_kvcache": True}, DTypeError, "k_cache.dtype: got bfloat16, expected uint8 or float8_e4m3fn"),
    ({"tile_scheduler_metadata": np.zeros(3)}, PlanError, "tile_scheduler_metadata: got ndarray"),
    ({"num_splits": np.zeros(4)}, ArgumentError, "num_splits: got a ndarray, expected None"),
    ({"head_dim_v": 128}, ArgumentError, "head_dim_v: got 128, expected 512"),
    ({"extra_k_cache": np.zeros(3)}, ArgumentError, "extra_k_cache: got an array, expected None; pass it with indices"),
    ({"extra_topk_length": np.zeros(3)}, ArgumentError, "extra_topk_length"),
    ({"attn_sink": np.zeros(HEADS, "f4")}, ArgumentError, "attn_sink: got an array, without indices"),
    ({"topk_length": np.zeros(B, "i4")}, ArgumentError, "topk_length: got an array, without indices"),
    ({"block_table": None}, ArgumentError, "block_table: got None"),
    ({"cache_seqlens": None}, ArgumentError, "cache_seqlens: got None"),
    ({"block_table": np.zeros((B, 1, 1), "i4")}, ShapeError, "block_table.shape"),
    ({"q": np.zeros((B, HEADS, 576), ml_dtypes.bfloat16)}, ShapeError, r"q.shape: got \(3, 4, 576\)"),
    ({"k_cache": None}, DTypeError, "k_cache: got None, expected an array"),
    ({"q": [1.0]}, DTypeError, "q: got a list, expected an array"),
    ({"softmax_scale": 0.0}, ArgumentError, "scale: got 0.0"),
]


@pytest.mark.parametrize(("change", "error", "message"), DENSE_MISTAKES, ids=lambda x: str(x)[:40])
def test_mistakes_of_decode(change: dict[str, Any], error: type[Exception], message: str) -> None:
    """A refused call leaves the schedule as it was."""
    names = ("q", "k_cache", "block_table", "cache_seqlens")
    given: dict[str, Any] = dict(zip(names, decode_inputs().arguments, strict=True))
    given.update(head_dim_v=512, tile_scheduler_metadata=FlashMLASchedMeta())
    schedule = given["tile_scheduler_metadata"]
    with pytest.raises(error, match=message):
        flash_mla_with_kvcache(**{**given, **change})
    assert not schedule.have_initialized
    flash_mla_with_kvcache(**given)


def test_a_schedule_for_another_form() -> None:
    q, cache, table, seqlens = decode_inputs().arguments
    schedule = FlashMLASchedMeta()
    flash_mla_with_kvcache(q, cache, table, seqlens, 512, schedule)
    for other in ({"q": q[:, :1]}, {"causal": True}, {"block_table": table[:, :3]}):
        given = {"q": q, "block_table": table, **other}
        with pytest.raises(PlanError, match="pass a new get_mla_metadata"):
            flash_mla_with_kvcache(
                k_cache=cache, cache_seqlens=seqlens, head_dim_v=512, tile_scheduler_metadata=schedule, **given
            )


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"causal": True}, ArgumentError, "causal: got True"),
        ({"indices": np.zeros((B, S_Q + 1, TOPK), "i4")}, ShapeError, "indices.shape"),
        ({"indices": np.zeros((B * S_Q, TOPK), "i4")}, ShapeError, "indices.shape"),
        (
            {"k_cache": np.zeros((PAGES, PAGE, 2, 576), ml_dtypes.bfloat16)},
            ShapeError,
            r"k_cache.shape: got .*, 2, 576",
        ),
        (
            {"k_cache": np.zeros((PAGES, PAGE + 1, 1, 576), ml_dtypes.bfloat16)[:, :PAGE]},
            ShapeError,
            "to pages without gaps",
        ),
        ({"strict": True}, ArgumentError, "is_fp8_kvcache: got False, expected True, with indices"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_mistakes_of_sparse_decode(change: dict[str, Any], error: type[Exception], message: str) -> None:
    given = sparse_decode_inputs()
    schedule = FlashMLASchedMeta()
    call = {"block_table": None, "cache_seqlens": None, "head_dim_v": 512, "tile_scheduler_metadata": schedule}
    with pytest.raises(error, match=message):
        flash_mla_with_kvcache(**{**given, **call, **change})
    assert not schedule.have_initialized


def test_strict_decode() -> None:
    inputs = decode_inputs()
    with pytest.raises(ShapeError, match="got 16, expected 64; or strict=False"):
        flash_mla_with_kvcache(*inputs.arguments, 512, FlashMLASchedMeta(), strict=True)
    inputs = decode_inputs(page_size=64)
    flash_mla_with_kvcache(*inputs.arguments, 512, FlashMLASchedMeta(), strict=True)
    none = (x[:0] if at != 1 else x for at, x in enumerate(inputs.arguments))
    with pytest.raises(ShapeError, match=r"q.shape\[0\]: got 0"):
        flash_mla_with_kvcache(*none, 512, FlashMLASchedMeta(), strict=True)


def test_strict_sparse_forward() -> None:
    def call(
        h_q: int = 64,
        topk: int = 128,
        dtype: Any = ml_dtypes.bfloat16,
        axis: bool = True,
        d_qk: int = 576,
        **options: Any,
    ) -> Any:
        kv, indices = np.zeros((10, 1, d_qk), dtype), np.full((1, 1, topk), -1, np.int32)
        q = np.zeros((1, h_q, d_qk), dtype)
        return flash_mla_sparse_fwd(q, kv if axis else kv[:, 0], indices, SCALE, strict=True, **options)

    call()
    assert len(call(topk=2048, indexer_topk=2048)) == len(call(128, 1152, d_qk=512, indexer_topk=1024)) == 4
    for change, error, message in (
        ({"h_q": 16}, ShapeError, "64 or 128 heads"),
        ({"topk": 64}, ShapeError, "a multiple of 128"),
        ({"dtype": np.float16}, DTypeError, "q.dtype: got float16"),
        ({"axis": False}, ShapeError, "kv.shape: got"),
        (
            {"indexer_topk": 64},
            ArgumentError,
            "indexer_topk: got 64, expected one of .0, 512, 1024, 2048., with 64 heads",
        ),
        ({"h_q": 128, "topk": 512, "indexer_topk": 512}, ArgumentError, "one of .0,., with 128 heads and d_qk 576"),
    ):
        with pytest.raises(error, match=message):
            call(**change)


@pytest.mark.parametrize("indexer_topk", [-1, TOPK + 1, 1.0, True])
def test_no_such_indexer_topk(indexer_topk: Any) -> None:
    given = sparse_decode_inputs()
    arguments = (given["q"].reshape(-1, HEADS, 576), given["k_cache"].reshape(-1, 1, 576))
    with pytest.raises(ArgumentError, match=f"indexer_topk: got .*, expected an integer from 0 to {TOPK}"):
        flash_mla_sparse_fwd(*arguments, given["indices"].reshape(-1, 1, TOPK), SCALE, indexer_topk=indexer_topk)


def test_docstrings() -> None:
    result = doctest.testmod(flash_mla, raise_on_error=False)
    assert result.attempted > 0
    assert result.failed == 0


def test_it_needs_no_framework() -> None:
    code = "import sys, mla_cupy.compat.flash_mla; print({'jax', 'torch', 'cupy'} & set(sys.modules))"
    environment = {"PYTHONPATH": str(REPOSITORY), "MLA_CUPY_JIT": "lazy", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"softmax_scale": "x"}, "softmax_scale: got 'x'"),
        ({"k_cache": np.zeros((PAGES, PAGE, 1, 576), "V2")}, "k_cache.dtype: got"),
        ({"k_cache": np.zeros((PAGES, PAGE, 1, 576), np.uint8)}, "k_cache.dtype: got uint8, .* is_fp8_kvcache=True"),
        ({"cache_seqlens": np.zeros(B, np.int8)}, "cache_seqlens.dtype: got int8"),
        ({"q": np.zeros((B, S_Q, HEADS, 0), ml_dtypes.bfloat16)}, r"q.shape\[-1\]: got 0"),
        ({"causal": np.array([1, 2])}, "causal: got array"),
        ({"head_dim_v": np.array([512, 512])}, "head_dim_v: got array"),
    ],
)
def test_errors_are_about_flash_mlas_arguments(changes: dict[str, Any], match: str) -> None:
    inputs = decode_inputs()
    names = ("q", "k_cache", "block_table", "cache_seqlens")
    call: dict[str, Any] = {**dict(zip(names, inputs.arguments, strict=True)), "head_dim_v": 512, **changes}
    with pytest.raises(MlaError, match=f"^{match}"):
        flash_mla_with_kvcache(**call, tile_scheduler_metadata=FlashMLASchedMeta())


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"k_cache": np.zeros((PAGES, PAGE, 1, 512), ml_dtypes.bfloat16)}, r"k_cache.shape\[3\]: got 512"),
        ({"topk_length": np.zeros((B, 2), np.int32)}, r"topk_length.shape: got \(3, 2\)"),
        ({"indices": np.zeros((B, S_Q, 2, 2), np.int32)}, r"indices.shape: got \(3, 2, 2, 2\)"),
    ],
)
def test_sizes_of_a_selection(changes: dict[str, Any], match: str) -> None:
    call = {**sparse_decode_inputs(), "block_table": None, "cache_seqlens": None, "head_dim_v": 512, **changes}
    with pytest.raises(ShapeError, match=f"^{match}"):
        flash_mla_with_kvcache(**call, tile_scheduler_metadata=FlashMLASchedMeta())


def test_a_schedule_of_another_form_says_what_differs() -> None:
    inputs = decode_inputs()
    schedule = FlashMLASchedMeta()
    flash_mla_with_kvcache(*inputs.arguments, 512, schedule)
    message = "tile_scheduler_metadata: got one for causal=False, expected one for causal=True; pass a new"
    with pytest.raises(PlanError, match=message):
        flash_mla_with_kvcache(*inputs.arguments, 512, schedule, causal=True)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_more_kv_heads(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashMLA's own tests have three; each serves its share of the query heads, with one schedule."""
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    make = np.asarray if library == "numpy" else pytest.importorskip("torch").from_numpy
    rng = np.random.default_rng(0)
    q, cache = (rng.standard_normal(shape).astype(np.float16) for shape in ((2, 2, 6, 576), (4, 8, 3, 576)))
    table, seqlens = np.array([[2, 0], [1, 3]], np.int32), np.array([13, 5], np.int32)
    schedule, _ = get_mla_metadata()
    for _ in range(2):
        out, lse = flash_mla_with_kvcache(*map(make, (q, cache, table, seqlens)), 512, schedule, causal=True)
    for head in range(3):
        mine = slice(2 * head, 2 * head + 2)
        exact, exact_lse = reference.mla_decode(q[:, :, mine], cache[:, :, head], table, seqlens)
        np.testing.assert_allclose(np.asarray(out)[:, :, mine], exact, atol=2e-3)
        np.testing.assert_allclose(np.asarray(lse)[:, mine], exact_lse, rtol=1e-6)
    with pytest.raises(ShapeError, match=r"q.shape\[2\]: got 5, expected a multiple of h_kv=3"):
        flash_mla_with_kvcache(*map(make, (q[:, :, :5], cache, table, seqlens)), 512, schedule)
