"""Decode of sequences that share a prefix: the groups, and results equal to plain decode."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import mla_cupy
from mla_cupy import ArgumentError, DTypeError, PlanError, PrefixGroup, ShapeError, reference
from tests.support.calls import on_host
from tests.support.cases import DecodeCase, make
from tests.support.flat import cascade_decode, mla_decode, plan_cascade
from tests.support.gpu import upload
from tests.support.sim_driver import simulated
from tests.support.tolerance import check

Array = npt.NDArray[Any]


# ---- Groups ----------------------------------------------------------------------------------------------------


def table_of(*rows: str) -> Array:
    """A page per letter."""
    return np.array([[ord(letter) for letter in row] for row in rows])


def found(rows: tuple[str, ...], lengths: tuple[int, ...], **options: Any) -> list[tuple[int, ...]]:
    given = {"page_size": 4, "h_q": 16, "always": True, **options}
    return [tuple(group) for group in mla_cupy.shared_prefixes(table_of(*rows), np.array(lengths), **given)]


@pytest.mark.parametrize(
    ("rows", "lengths", "groups"),
    [
        (("abcd", "abef", "abgh"), (16, 14, 9), [(0, 3, 2)]),
        (("abcd", "xbcd"), (16, 16), []),
        (("abcd", "abcd"), (16, 7), [(0, 2, 1)]),  # only whole pages
        (("abcd", "abcd"), (16, 3), []),
        (("abcd", "abcd", "qrst", "qrsu", "zzzz"), (16,) * 5, [(0, 2, 4), (2, 2, 3)]),
        (("abcd", "abcd", "auvw", "auvx"), (16,) * 4, [(0, 2, 4), (2, 2, 3)]),  # more than the page that all share
        (("axyz", "abcd", "abcd", "awww"), (16,) * 4, [(1, 2, 4)]),  # four pages once, not one page three times
        (("axyz", "abcd", "abew", "awww", "acde", "avvv"), (16,) * 6, [(0, 6, 1)]),
        (("a", "b"), (4, 4), []),
        (("abcd",), (16,), []),
        ((), (), []),
    ],
    ids=str,
)
def test_groups(rows: tuple[str, ...], lengths: tuple[int, ...], groups: list[tuple[int, ...]]) -> None:
    if not rows:
        assert mla_cupy.shared_prefixes(np.zeros((0, 3), int), np.zeros(0, int), page_size=4, h_q=16) == ()
    else:
        assert found(rows, lengths) == groups


def test_every_query_sees_the_prefix() -> None:
    """The first of three sees all but the last two tokens."""
    rows = ("abcd", "abcd")
    assert found(rows, (9, 9), s_q=1) == found(rows, (10, 10), s_q=3) == [(0, 2, 2)]
    assert found(rows, (9, 9), s_q=3) == [(0, 2, 1)]


def test_groups_against_every_pair() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        table = rng.integers(0, 2, (6, 5)).cumsum(axis=1) * 10 + np.arange(5)
        lengths, s_q = rng.integers(0, 21, 6), int(rng.integers(1, 4))
        end = 0
        for first, count, pages in mla_cupy.shared_prefixes(table, lengths, page_size=4, h_q=1, s_q=s_q, always=True):
            assert first >= end
            assert count >= 2
            assert pages >= 1
            end = first + count
            assert (table[first:end, :pages] == table[first, :pages]).all()
            assert (lengths[first:end] - s_q + 1 >= 4 * pages).all()


def test_the_model_decides() -> None:
    """Many sequences over a long prefix gain with few heads, and nothing with many; short prefixes never do."""
    table = np.tile(np.arange(256), (64, 1))
    lengths = np.full(64, 256 * 64)
    for heads, worth in ((8, True), (16, True), (64, False), (128, False)):
        groups = mla_cupy.shared_prefixes(table, lengths, page_size=64, h_q=heads)
        assert bool(groups) == worth, heads
    assert mla_cupy.shared_prefixes(table[:, :4], np.full(64, 256), page_size=64, h_q=16) == ()
    assert mla_cupy.shared_prefixes(table[:2], lengths[:2], page_size=64, h_q=16) == ()


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"seqlens": np.zeros(3, int)}, ShapeError, r"\(2, 3\) and \(3,\)"),
        ({"block_table": np.zeros(2, int)}, ShapeError, r"\(b, max_pages\)"),
        ({"page_size": 0}, ArgumentError, "page_size: got 0"),
        ({"device": "cuda"}, ArgumentError, "device: got 'cuda'"),
        ({"device": -1}, ArgumentError, "device: got -1"),
        ({"seqlens": np.array(["3", "4"])}, DTypeError, "seqlens.dtype: got <U1, expected integers"),
        ({"seqlens": "34"}, DTypeError, "seqlens: got a str"),
        ({"seqlens": np.ma.zeros(2, int)}, DTypeError, "seqlens: got a MaskedArray"),
        ({"block_table": np.zeros((2, 3))}, DTypeError, "block_table.dtype: got float64"),
        ({"block_table": [[1, 2], [3]]}, DTypeError, "block_table.dtype: got object"),
        ({"s_q": 1.5}, ArgumentError, "s_q: got 1.5"),
        ({"always": "yes"}, ArgumentError, "always: got 'yes'"),
    ],
    ids=str,
)
def test_mistakes_of_groups(changes: dict[str, Any], error: type[Exception], match: str) -> None:
    call = {"block_table": np.zeros((2, 3), int), "seqlens": np.zeros(2, int), "page_size": 4, "h_q": 2}
    with pytest.raises(error, match=match):
        mla_cupy.shared_prefixes(**{**call, **changes})


# ---- Decode ----------------------------------------------------------------------------------------------------

CASE = DecodeCase(b=6, seqlens=(90, 40, 75, 64, 150, 149), s_q=2, h_q=4, page_size=16)
GROUPS = (PrefixGroup(1, 3, 2), PrefixGroup(4, 2, 9))  # the first sequence is alone; 9 pages leave 6 and 5 tokens


def shared(case: DecodeCase = CASE) -> tuple[Array, ...]:
    """The case's arguments, whose tables share prefixes."""
    inputs = make(case)
    table = inputs.block_table.copy()
    for first, count, pages in GROUPS:
        longest = first + int(inputs.seqlens[first : first + count].argmax())
        table[first : first + count, :pages] = table[longest, :pages]
    return inputs.q, inputs.kv_cache, table, inputs.seqlens


@pytest.mark.parametrize("options", [{}, {"causal": False, "lse_base": "2"}, {"out_dtype": "float32"}], ids=str)
@pytest.mark.parametrize("record", ["", "v32"])
def test_equals_plain_decode(options: dict[str, Any], record: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    arguments = shared(DecodeCase(**{**vars(CASE), "record": record}))
    expected = mla_decode(*arguments, **options)
    out, lse = cascade_decode(*arguments, GROUPS, **options)
    assert (out.dtype, lse.dtype) == (expected[0].dtype, expected[1].dtype)
    limit = 2.0**-7 if out.dtype != np.float32 else 1e-5
    np.testing.assert_allclose(out.astype(np.float32), expected[0].astype(np.float32), rtol=limit, atol=limit)
    np.testing.assert_allclose(lse, expected[1], rtol=1e-5, atol=1e-5)


def test_results_are_written_where_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    arguments = shared()
    b, s_q, h_q, _ = arguments[0].shape
    out = np.zeros((b, s_q + 1, h_q, 512), np.float32)[:, :s_q]
    lse = np.zeros((b, s_q, h_q), np.float32).swapaxes(1, 2)
    results = cascade_decode(*arguments, GROUPS, out=out, lse=lse)
    assert results[0] is out
    assert results[1] is lse
    expected = reference.mla_decode(*arguments)
    np.testing.assert_allclose(out, expected[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(lse, expected[1], rtol=1e-5, atol=1e-5)


def test_without_groups_it_is_plain_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    arguments = shared()
    for mine, plain in zip(cascade_decode(*arguments, ()), mla_decode(*arguments), strict=True):
        np.testing.assert_array_equal(mine, plain)
    empty = [x[:0] if number != 1 else x for number, x in enumerate(arguments)]
    assert cascade_decode(*empty, ())[0].shape == (0, 2, 4, 512)


def test_a_row_that_sees_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    q, cache, table, seqlens = shared()
    seqlens = np.array([0, *seqlens[1:]], np.int32)
    missing = table.copy()
    missing[4:] = -1
    out, lse = cascade_decode(q, cache, missing, seqlens, GROUPS, empty_lse=3.0)
    for sequence in (0, 4, 5):
        assert (out[sequence].astype(np.float32) == 0).all()
        assert (lse[sequence] == 3).all()
    assert np.isfinite(lse[1:4]).all()


@pytest.mark.parametrize(
    ("groups", "match"),
    [
        ([(0, 7, 1)], r"groups\[0\]: got sequences \[0, 7\)"),
        ([(0, 2, 1), (1, 2, 1)], r"groups\[1\]: got sequences \[1, 3\), expected sequences within \[2, 6\)"),
        ([(0, 0, 1)], r"groups\[0\]"),
        ([(0, 2, 0)], r"groups\[0\].pages: got 0"),
        ([(0, 2, 99)], r"groups\[0\].pages: got 99"),
    ],
    ids=str,
)
def test_mistakes(groups: list[tuple[int, int, int]], match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    with pytest.raises(ArgumentError, match=match):
        cascade_decode(*shared(), [PrefixGroup(*group) for group in groups])


def plan_of(
    case: DecodeCase, arguments: tuple[Array, ...], groups: tuple[PrefixGroup, ...], device: int | None = None
) -> mla_cupy.CascadePlan:
    q, cache, table, _ = arguments
    sizes = {
        "b": len(q),
        "s_q": q.shape[1],
        "h_q": q.shape[2],
        "max_pages": table.shape[1],
        "page_size": cache.shape[1],
    }
    return plan_cascade(groups, **sizes, dtype=case.dtype, record=case.record or None, device=device)


@pytest.mark.parametrize("record", ["", "v32"])
def test_with_a_plan(record: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One plan serves lengths that change from step to step."""
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    case = DecodeCase(**{**vars(CASE), "record": record})
    arguments = shared(case)
    plan = plan_of(case, arguments, GROUPS)
    for shorter in (0, 1):
        q, cache, table, seqlens = arguments
        lengths = seqlens - np.array([shorter, 0, 0, 0, shorter, 0], np.int32)
        plan.update(lengths)
        got = cascade_decode(q, cache, table, lengths, GROUPS, plan=plan)
        for mine, plain in zip(got, cascade_decode(q, cache, table, lengths, GROUPS), strict=True):
            np.testing.assert_array_equal(mine, plain)


def test_a_plan_whose_prefix_is_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    q, cache, table, _ = shared()
    arguments = q[4:], cache, table[4:, :9], np.array([145, 146], np.int32)
    groups = (PrefixGroup(0, 2, 9),)
    plan = plan_of(CASE, arguments, groups)
    plan.update(arguments[3])
    for mine, plain in zip(
        cascade_decode(*arguments, groups, plan=plan),
        cascade_decode(*arguments, groups),
        strict=True,
    ):
        np.testing.assert_array_equal(mine, plain)


def test_mistakes_of_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    arguments = shared()
    plan = plan_of(CASE, arguments, GROUPS)
    with pytest.raises(PlanError, match="no update yet"):
        cascade_decode(*arguments, GROUPS, plan=plan)
    with pytest.raises(ShapeError, match=r"seqlens.shape: got \(5,\)"):
        plan.update(arguments[3][:5])
    plan.update(arguments[3])
    with pytest.raises(PlanError, match="make a plan for these groups"):
        cascade_decode(*arguments, GROUPS[:1], plan=plan)
    with pytest.raises(ArgumentError, match="b: got 0"):
        mla_cupy.plan_cascade((), b=0, h_q=4, max_pages=4, page_size=16, dtype="float16")


def test_mistakes_of_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    with pytest.raises(ShapeError, match=r"lse.shape: got \(6, 4, 3\)"):
        cascade_decode(*shared(), GROUPS, lse=np.zeros((6, 4, 3), np.float32))
    with pytest.raises(ShapeError, match=r"q\.shape"):
        cascade_decode(shared()[0][0], *shared()[1:], GROUPS)


def test_in_the_simulator() -> None:
    """The kernels that the public calls choose."""
    case = DecodeCase(b=3, seqlens=(90, 70, 65), h_q=5, page_size=16)
    inputs = make(case)
    table = inputs.block_table.copy()
    table[1:3, :4] = table[1, :4]
    arguments = inputs.q, inputs.kv_cache, table, inputs.seqlens
    groups = (PrefixGroup(1, 2, 4),)
    with simulated(2):
        got = cascade_decode(*arguments, groups)
        plan = plan_of(case, arguments, groups, device=0)
        plan.update(inputs.seqlens)
        planned = cascade_decode(*arguments, groups, plan=plan)
    for mine, plain in zip(planned, got, strict=True):
        np.testing.assert_array_equal(mine, plain)
    exact = reference.mla_decode(*arguments)
    check(got, exact, reference.mla_decode(*arguments, rounding=case.dtype), case.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(("h_q", "s_q", "record"), [(16, 1, ""), (8, 2, ""), (64, 1, ""), (16, 1, "v32")])
def test_on_a_gpu(hopper: object, h_q: int, s_q: int, record: str) -> None:
    """A system prompt and a conversation within it."""
    case = DecodeCase(b=9, seqlens=(3000, 2999, *(2500 + 7 * i for i in range(7))), h_q=h_q, s_q=s_q, record=record)
    inputs = make(case)
    table = inputs.block_table.copy()
    table[:, :20] = table[0, :20]
    table[:2, :46] = table[0, :46]
    groups = mla_cupy.shared_prefixes(table, inputs.seqlens, page_size=64, h_q=h_q, s_q=s_q, always=True)
    assert groups
    arguments = inputs.q, inputs.kv_cache, table, inputs.seqlens
    on_gpu = [upload(x) for x in arguments]
    got = on_host(cascade_decode(*on_gpu, groups))
    plan = plan_of(case, arguments, groups)
    for _ in range(2):
        plan.update(on_gpu[3])
        planned = on_host(cascade_decode(*on_gpu, groups, plan=plan))
        for mine, plain in zip(planned, got, strict=True):
            np.testing.assert_array_equal(mine, plain)
    rounding = "float16" if record else case.dtype
    exact, rounded = (reference.mla_decode(*arguments, rounding=kind) for kind in (None, rounding))
    check(got, exact, rounded, case.dtype)


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.uint64])
def test_sizes_of_numpy(kind: Any) -> None:
    """Products of them would overflow, and lengths minus them be no integers."""
    table, lengths = table_of("abx", "aby"), np.array([40, 41])
    wanted = mla_cupy.shared_prefixes(table, lengths, page_size=16, h_q=100, s_q=4, always=True)
    assert wanted == (PrefixGroup(0, 2, 2),)
    sizes = {"page_size": kind(16), "h_q": kind(100), "s_q": kind(4)}
    assert mla_cupy.shared_prefixes(table, lengths, **sizes, always=True) == wanted
    shape: dict[str, Any] = {"b": kind(2), "h_q": kind(100), "max_pages": kind(3), "page_size": kind(100)}
    plan = plan_cascade(wanted, **shape, dtype="bfloat16")
    plan.update(np.array([240, 241], np.int32))


def test_queries_in_e4m3_with_a_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale applies to all stages: groups, sequences alone, and plain `mla_decode`."""
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    rng, e4m3 = np.random.default_rng(7), ml_dtypes.float8_e4m3fn
    q = rng.standard_normal((3, 1, 4, 576)).astype(e4m3)
    cache = rng.standard_normal((5, 64, 576)).astype(e4m3)
    table, seqlens = np.array([[2, 0], [2, 1], [3, 4]], np.int32), np.array([100, 70, 90], np.int32)
    groups = (mla_cupy.PrefixGroup(0, 2, 1),)
    options = {"math": "fp8", "q_scale": 0.25, "out_dtype": "float32"}
    got = cascade_decode(q, cache, table, seqlens, groups, **options)
    expected = mla_decode(q, cache, table, seqlens, **options)
    for mine, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-2, atol=1e-2)
    plain = cascade_decode(q, cache, table, seqlens, groups, math="fp8", out_dtype="float32")
    assert np.abs(plain[1] - got[1]).max() > 0.5
