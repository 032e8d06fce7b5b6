"""Forms of dense decode: a sink, queries in two arrays, lengths that vary, windows.

The oracle is compared with calls that have no form; the kernels with the oracle, in the simulator and on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from mla_cupy import dtypes, reference
from mla_cupy.cache_formats import FORMATS
from mla_cupy.kernels import KERNELS
from tests.decode.test_small_mutants import alike_where_finite
from tests.support.calls import on_host
from tests.support.cases import DecodeCase, DecodeInputs, as_read, make, poisoned, values
from tests.support.flat import mla_decode, plan_decode
from tests.support.gpu import upload
from tests.support.kernels import cc_of
from tests.support.mutant_suite import mutant_suite
from tests.support.mutants import Mutant
from tests.support.sim_driver import simulated
from tests.support.sim_modes import MODES
from tests.support.tolerance import check

Array = npt.NDArray[Any]

SMALL, SEESAW, GENERIC = "decode_sm90_small", "decode_sm90_seesaw", "attention_generic"
FEW_RECORDS, MANY_RECORDS = "decode_sm90_records", "decode_sm90_records_seesaw"
PLAIN_RECORDS = "decode_generic_records"
D_V = 512


@dataclass(frozen=True)
class FormCase:
    """A case of decode with forms.

    Attributes
    ----------
    queries : tuple of int
        Of each sequence, where they vary; empty where there are `base.s_q`.
    around : tuple of int
        Packed queries before the first sequence and after the last one, of no sequence.
    """

    base: DecodeCase
    pair: bool = False
    sink: bool = False
    turned: bool = False
    window: int = 0
    queries: tuple[int, ...] = ()
    around: tuple[int, int] = (0, 0)

    @property
    def forms(self) -> tuple[str, ...]:
        """The arguments of a call that it has."""
        has = {"attn_sink": self.sink, "q_rope": self.pair, "cu_seqlens_q": self.queries, "window": self.window}
        has["out_cos"] = self.turned
        return tuple(name for name, value in has.items() if value)

    @property
    def id(self) -> str:
        parts = [
            self.base.id,
            "pair" if self.pair else "",
            "sink" if self.sink else "",
            "turned" if self.turned else "",
            f"window{self.window}" if self.window else "",
            "q" + "_".join(map(str, self.queries)) if self.queries else "",
            f"around{self.around[0]}_{self.around[1]}" if any(self.around) else "",
        ]
        return "-".join(part for part in parts if part)


@dataclass(frozen=True)
class FormInputs:
    """The arrays of a case; what lies before all windows is poison, and its entries of the block table are garbage."""

    case: FormCase
    base: DecodeInputs
    arrays: dict[str, Array]
    options: dict[str, Any]

    @property
    def call(self) -> dict[str, Any]:
        return {**self.arrays, **self.options}

    @cached_property
    def exact(self) -> tuple[Array, Array]:
        return reference.mla_decode(**self.call)

    @cached_property
    def rounded(self) -> tuple[Array, Array]:
        record, dtype = self.case.base.record, self.case.base.dtype
        rounding = dtype if record in ("", "v4") else "float16"
        cache = as_read(record, self.arrays["kv_cache"])
        return reference.mla_decode(**{**self.call, "kv_cache": cache}, rounding=rounding)


def form_inputs(case: FormCase) -> FormInputs:
    base = make(case.base)
    rng = np.random.default_rng([case.base.seed, 3])
    arrays: dict[str, Array] = dict(zip(("q", "kv_cache", "block_table", "seqlens"), base.arguments, strict=True))
    options = dict(case.base.options)
    if case.queries:
        total = sum(case.queries) + sum(case.around)
        shape = (total, case.base.h_q, case.base.d_qk)
        packed = poisoned(shape, dtypes.numpy_dtype(case.base.dtype), case.base.strides)
        packed[...] = values(rng, shape, loud=(0.5, 1.0, 4.0))
        starts = np.zeros(2 * case.base.b + 2, np.int32)[::2]
        starts[:] = case.around[0] + np.cumsum([0, *case.queries])
        arrays |= {"q": packed, "cu_seqlens_q": starts}
    if case.pair:
        q = arrays["q"]
        rope = poisoned((*q.shape[:-1], 64), q.dtype, case.base.strides)
        rope[...] = q[..., D_V:]
        latent = poisoned((*q.shape[:-1], D_V), q.dtype, case.base.strides)
        latent[...] = q[..., :D_V]
        arrays |= {"q": latent, "q_rope": rope}
    if case.sink:
        sink = rng.normal(2.0, 3.0, 2 * case.base.h_q).astype(np.float32)[::2]
        sink[:2] = -np.inf, np.inf
        sink[2:3] = 40.0
        arrays["attn_sink"] = sink
    if case.turned:
        arrays |= turning(arrays["q"].shape[:-2], case.base.seed)
    if case.window:
        options["window"] = case.window
        _poison_before_windows(case, arrays)
    return FormInputs(case, base, arrays, options)


def turning(shape: tuple[int, ...], seed: int) -> dict[str, Array]:
    """Tables with gaps, with sums of squares that are not all 1, and positions, some outside the tables."""
    rng = np.random.default_rng([seed, 7])
    tables = rng.standard_normal((2, 9, 40)).astype(np.float32)
    tables[..., 32:] = np.nan
    places = np.full((*shape[:-1], 2 * shape[-1]), 2**31 - 1, np.int64 if seed % 2 else np.int32)
    positions = places[..., ::2]
    positions[...] = rng.integers(-2, 12, shape)
    return {"out_cos": tables[0, :, :32], "out_sin": tables[1, :, :32], "out_positions": positions}


def _poison_before_windows(case: FormCase, arrays: dict[str, Array]) -> None:
    """Pages before a sequence's windows are given away, and tokens before them in the first page are NaN."""
    cache, table, page_size = arrays["kv_cache"], arrays["block_table"], case.base.page_size
    for i, length in enumerate(case.base.lengths()):
        count = case.queries[i] if case.queries else case.base.s_q
        first = max(0, int(length) - count + 1 - case.window)
        table[i, : first // page_size] = (2147480000, -7, 0)[i % 3]
        if first < length:
            page = table[i, first // page_size]
            if 0 <= page < len(cache):
                _poison_tokens(case.base.record, cache[page], first % page_size)


def _poison_tokens(record: str, page: Array, count: int) -> None:
    """The first tokens of a page become NaN; of a record its codes, scales and RoPE columns are."""
    if not record:
        page[:count] = np.nan
        return
    layout, page_size = FORMATS[record], len(page)
    memory = np.lib.stride_tricks.as_strided(page, (layout.page_bytes(page_size),), (1,))
    for token in range(count):
        for field in layout.fields:
            at = layout.offset(field, page_size, token)
            memory[at : at + field.nbytes] = 0xFF


# ---- The oracle ------------------------------------------------------------------------------------------------


def test_a_pair_is_a_whole() -> None:
    inputs = form_inputs(FormCase(DecodeCase(b=3, s_q=2, h_q=3, seqlens=(70, 0, 33)), pair=True))
    for mine, whole in zip(inputs.exact, inputs.base.exact, strict=True):
        np.testing.assert_array_equal(mine, whole)


def test_packed_queries_are_calls_of_one_sequence_each() -> None:
    case = FormCase(DecodeCase(b=4, h_q=3, seqlens=(70, 2, 33, 9)), queries=(2, 3, 0, 1), around=(2, 1))
    inputs = form_inputs(case)
    q, cache, table, seqlens = (inputs.arrays[name] for name in ("q", "kv_cache", "block_table", "seqlens"))
    first = 2
    for i, count in enumerate(case.queries):
        if count:
            of_one = table[i : i + 1], seqlens[i : i + 1]
            out, lse = reference.mla_decode(q[None, first : first + count], cache, *of_one)
            np.testing.assert_array_equal(inputs.exact[0][first : first + count], out[0])
            np.testing.assert_array_equal(inputs.exact[1][:, first : first + count], lse[0])
        first += count
    for row in (0, 1, first):
        assert (inputs.exact[0][row] == 0).all()
        assert (inputs.exact[1][:, row] == -np.inf).all()


def test_hostile_starts_are_clamped() -> None:
    inputs = form_inputs(FormCase(DecodeCase(b=3, h_q=2, seqlens=(5, 6, 7)), queries=(1, 1, 1)))
    hostile, meant = np.array([-5, 2, 1, 99], np.int32), np.array([0, 2, 2, 3], np.int32)
    got, want = (reference.mla_decode(**{**inputs.call, "cu_seqlens_q": x}) for x in (hostile, meant))
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_window_hides_what_is_older() -> None:
    """A query sees what one of a sequence without the older tokens sees."""
    inputs = make(DecodeCase(b=1, s_q=3, h_q=2, seqlens=40, page_size=64, strides="dense"))
    q, cache, table, _ = inputs.arguments
    out, lse = reference.mla_decode(*inputs.arguments, window=7)
    for i, last in enumerate((37, 38, 39)):
        alone = cache[table[0, :1]][:, last - 6 : last + 1]
        want = reference.mla_decode(q[:, i : i + 1], alone, np.zeros((1, 1), np.int32), np.array([7]))
        np.testing.assert_allclose(out[:, i], want[0][:, 0], rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(lse[..., i], want[1][..., 0], rtol=1e-12)
    for wide in (40, 41, 2**31 - 1):
        np.testing.assert_array_equal(reference.mla_decode(*inputs.arguments, window=wide)[0], inputs.exact[0])


def test_a_sink_is_a_key_without_a_value() -> None:
    """Its weight is like a key's with the sink's score, in addition to the weights that are summed for `lse`."""
    inputs = make(DecodeCase(b=2, s_q=2, h_q=3, seqlens=(20, 0), strides="dense"))
    sinks = (0.5, -np.inf, np.inf)
    out, lse = reference.mla_decode(*inputs.arguments, attn_sink=np.array(sinks, np.float32))
    np.testing.assert_array_equal(lse, inputs.exact[1])
    for head, sink in enumerate(sinks):
        with np.errstate(over="ignore", under="ignore"):
            beside = np.exp(sink) / np.exp(lse[0, head])
        want = inputs.exact[0][0, :, head] / (1 + beside)[:, None]
        np.testing.assert_allclose(out[0, :, head], want, rtol=1e-12, atol=1e-300)
    assert (out[1] == 0).all()


def test_results_are_turned_back() -> None:
    """Turning back restores the columns that RoPE turned, and leaves the others."""
    rng = np.random.default_rng(3)
    angles = rng.random((9, 32)) * 7
    cos, sin, positions = np.cos(angles), np.sin(angles), np.array([[4, 2], [0, 8]])
    plain = rng.standard_normal((2, 2, 3, 512))
    turned = plain.copy()
    rows = np.repeat(positions.reshape(-1), 3)
    turned[..., 448:] = reference.cache.rotate(plain[..., 448:].reshape(12, 64), cos, sin, rows).reshape(2, 2, 3, 64)
    back = reference.dense_decode.turned_back(turned, cos, sin, positions)
    np.testing.assert_allclose(back, plain, atol=1e-6)
    np.testing.assert_array_equal(back[..., :448], plain[..., :448])


# ---- Kernels in the simulator ----------------------------------------------------------------------------------

SINGLE = DecodeCase(b=3, seqlens=(200, 0, 70), h_q=16)
MANY = DecodeCase(b=2, seqlens=(130, 3), s_q=3, h_q=24, page_size=16, missing_pages=1)
V4 = replace(SINGLE, record="v4", d_qk=512)
NOPE = replace(SINGLE, record="v32-nope", d_qk=512)
FP8 = replace(SINGLE, record="fp8", kv_scale=0.5)
RECORDS = (
    # Blocks of 16 and 32 rows: of one query, of several, and partly empty.
    (FormCase(replace(SINGLE, record="v32", dtype="float16"), pair=True), FEW_RECORDS),
    (FormCase(replace(FP8, b=4, seqlens=(70, 130, 9, 200), strides="odd"), queries=(1, 3, 0, 2), around=(1, 2)),
     FEW_RECORDS),
    (FormCase(replace(FP8, h_q=8, seqlens=(130, 2, 66)), queries=(5, 4, 1), pair=True, sink=True), FEW_RECORDS),
    (FormCase(replace(V4, seqlens=(200, 5, 129), s_q=3, h_q=7), window=66, turned=True), FEW_RECORDS),
    (FormCase(replace(V4, s_q=2, cp_world=3, cp_rank=1, dtype="float16"), turned=True), FEW_RECORDS),
    # Blocks of 64 rows of one query each, several in groups or side by side.
    (FormCase(replace(SINGLE, record="v32", h_q=64, s_q=2), pair=True), MANY_RECORDS),
    (FormCase(replace(FP8, h_q=48, seqlens=(300, 66, 1), page_size=48), queries=(2, 3, 1), around=(1, 1), window=150,
              pair=True, sink=True), MANY_RECORDS),
    (FormCase(replace(V4, h_q=72, b=2, s_q=2, seqlens=(260, 130), page_size=16, missing_pages=1, dtype="float16"),
              window=100, turned=True), MANY_RECORDS),
    (FormCase(replace(V4, h_q=40, seqlens=(300, 0, 65)), queries=(1, 2, 3), turned=True), MANY_RECORDS),
    # Plain ones, of calls with groups and without.
    (FormCase(replace(SINGLE, record="v32", h_q=3), queries=(4, 1, 5), around=(2, 0), pair=True, window=40),
     PLAIN_RECORDS),
    (FormCase(replace(V4, record="v41", h_q=3, s_q=2, cp_world=2), turned=True), PLAIN_RECORDS),
    # Tokens without RoPE columns, whose bytes are NaN.
    (FormCase(replace(NOPE, seqlens=(200, 5, 129), s_q=3, h_q=7), window=66, sink=True), FEW_RECORDS),
    (FormCase(replace(NOPE, h_q=40, seqlens=(300, 0, 65)), queries=(1, 2, 3)), MANY_RECORDS),
)  # fmt: skip
CASES = (
    (FormCase(SINGLE, pair=True), SMALL),
    (FormCase(replace(MANY), pair=True), SEESAW),
    (FormCase(replace(MANY, dtype="float16"), pair=True, sink=True), SEESAW),
    (FormCase(replace(SINGLE, s_q=2, cp_world=3, cp_rank=1), pair=True), SMALL),
    (FormCase(replace(SINGLE, h_q=5, strides="odd"), pair=True, sink=True), GENERIC),
    # Lengths that vary: none, many, more than a block has room for; queries of no sequence.
    (FormCase(replace(SINGLE, b=4, seqlens=(70, 130, 9, 200)), queries=(1, 3, 0, 2), around=(1, 2)), SMALL),
    (FormCase(replace(MANY, b=3, seqlens=(130, 2, 66)), queries=(5, 4, 1), around=(0, 3)), SEESAW),
    (FormCase(replace(SINGLE, h_q=80, seqlens=(66, 1, 64)), queries=(2, 1, 3), sink=True), SEESAW),
    (FormCase(replace(SINGLE, d_qk=512, dtype="float16"), queries=(7, 1, 2)), SMALL),
    (FormCase(replace(SINGLE, h_q=3), queries=(4, 1, 5), around=(2, 0), pair=True), GENERIC),
    # Windows: within a tile, over a tile's edge, of several tiles, and longer than the sequence.
    (FormCase(SINGLE, window=5), SMALL),
    (FormCase(replace(SINGLE, seqlens=(200, 5, 129), s_q=3, h_q=7), window=66, sink=True), SMALL),
    (FormCase(replace(MANY, seqlens=(260, 130), missing_pages=0), window=100), SEESAW),
    (FormCase(replace(SINGLE, h_q=64, seqlens=(257, 40, 65), page_size=128), window=64), SEESAW),
    (FormCase(replace(SINGLE, h_q=3, s_q=2), window=70), GENERIC),
    # Results turned back: whole and split ones, rows of several queries, several KV heads, groups of queries.
    (FormCase(replace(SINGLE, d_qk=512), turned=True), SMALL),
    (FormCase(replace(SINGLE, d_qk=512, s_q=3, h_q=7, seed=1, dtype="float16"), turned=True, sink=True), SMALL),
    (FormCase(replace(MANY, d_qk=512), turned=True), SEESAW),
    (FormCase(replace(SINGLE, d_qk=512, h_q=80, seqlens=(66, 1, 64)), queries=(2, 1, 3), turned=True), SEESAW),
    (FormCase(replace(SINGLE, d_qk=512, h_q=3, s_q=2, cp_world=2), turned=True), GENERIC),
    (FormCase(replace(SINGLE, d_qk=512, h_q=8), queries=(4, 1, 5), around=(2, 1), window=66, turned=True), SMALL),
    # All at once.
    (
        FormCase(
            replace(SINGLE, b=4, h_q=8, seqlens=(300, 130, 9, 200), page_size=16),
            queries=(1, 6, 2, 3),
            around=(1, 1),
            window=90,
            pair=True,
            sink=True,
        ),
        SMALL,
    ),
    (
        FormCase(replace(SINGLE, b=3, h_q=20, seqlens=(300, 70, 130)), queries=(4, 2, 6), window=33, pair=True),
        SEESAW,
    ),
    *RECORDS,
)
#: A sink alone is a matter of every kernel.
SINKS = (
    (SINGLE, SMALL),
    (MANY, SEESAW),
    (MANY, "decode_sm100"),
    (MANY, "decode_sm100_joint"),
    (replace(SINGLE, h_q=4, seqlens=(70, 3, 30)), GENERIC),
    (replace(SINGLE, record="v32"), FEW_RECORDS),
    (replace(SINGLE, record="v4", d_qk=512, h_q=64), MANY_RECORDS),
    (replace(SINGLE, record="v4", d_qk=512, h_q=4, seqlens=(70, 3, 30)), "decode_sm100_records"),
    (replace(SINGLE, record="v32", h_q=4, seqlens=(70, 3, 30)), PLAIN_RECORDS),
    (replace(SINGLE, record="fp8", math="fp8", kv_scale=0.5), "decode_sm90_fp8"),
    (replace(SINGLE, record="fp8", math="fp8", kv_scale=0.5, h_q=4, seqlens=(70, 3, 30)), "decode_sm100_fp8"),
)


def run(inputs: FormInputs, kernel: str | None, sm_count: int, mode: tuple[str, int], **options: Any) -> Any:
    with simulated(sm_count, cc_of(kernel or ""), *mode) as target:
        got = mla_decode(**inputs.call, kernel=kernel, **options)
    assert kernel is None or KERNELS[kernel].entry in target.launched
    return got


@pytest.mark.one_in(12)
@pytest.mark.parametrize(("case", "kernel"), CASES, ids=lambda value: getattr(value, "id", value))
def test_kernels(case: FormCase, kernel: str) -> None:
    inputs, number = form_inputs(case), CASES.index((case, kernel))
    got = run(inputs, kernel, (1, 3)[number % 2], MODES[number % len(MODES)])
    check(got, inputs.exact, inputs.rounded, case.base.dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "kernel"), CASES, ids=lambda value: getattr(value, "id", value))
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_kernels_in_all_modes(case: FormCase, kernel: str, mode: tuple[str, int]) -> None:
    inputs = form_inputs(case)
    for sm_count in (1, 3, 5):
        check(run(inputs, kernel, sm_count, mode), inputs.exact, inputs.rounded, case.base.dtype)


@pytest.mark.one_in(8)
@pytest.mark.parametrize(("base", "kernel"), SINKS, ids=lambda value: getattr(value, "id", value))
def test_sinks(base: DecodeCase, kernel: str) -> None:
    inputs = form_inputs(FormCase(base, sink=True))
    check(run(inputs, kernel, 3, ("random", 1)), inputs.exact, inputs.rounded, base.dtype)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kernel", [SMALL, SEESAW])
@pytest.mark.parametrize(("token", "seen"), [(61, (0,)), (62, (0, 1)), (63, (0, 1, 2)), (129, (2,))])
def test_what_a_row_does_not_see_does_not_reach_it(kernel: str, token: int, seen: tuple[int, ...]) -> None:
    """NaN and infinity at both ends of windows: only the rows that see them are not finite."""
    inputs = make(DecodeCase(b=1, s_q=3, h_q=4, seqlens=130))
    for column, value in ((3, np.nan), (300, np.inf)):
        inputs.kv_cache[inputs.block_table[0, token // 64], token % 64, 0, column] = value
    with simulated(1, mode="late"):
        out, _ = mla_decode(*inputs.arguments, window=67, kernel=kernel)
    finite = np.isfinite(out[0].astype(np.float32))
    for row in range(3):
        assert finite[row].all() == (row not in seen)
        assert finite[row][:, 300].any() == (row not in seen)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("kernel", [FEW_RECORDS, MANY_RECORDS])
@pytest.mark.parametrize(("token", "seen"), [(61, (0,)), (62, (0, 1)), (63, (0, 1, 2)), (129, (2,))])
def test_a_code_that_a_row_does_not_see_does_not_reach_it(kernel: str, token: int, seen: tuple[int, ...]) -> None:
    """NaN at both ends of windows, where it makes the whole rows of those that see it NaN, and no others."""
    inputs = make(DecodeCase(b=1, s_q=3, h_q=4 if kernel == FEW_RECORDS else 34, seqlens=130, record="fp8"))
    inputs.kv_cache[inputs.block_table[0, token // 64], token % 64, 0, 3] = 0x7F
    with simulated(1, mode="late"):
        out, lse = mla_decode(*inputs.arguments, window=67, kernel=kernel)
    for row in range(3):
        assert np.isnan(out[0, row].astype(np.float32)).all() == (row in seen)
        assert np.isfinite(out[0, row].astype(np.float32)).all() == (row not in seen)
        assert np.isnan(lse[0, :, row]).all() == (row in seen)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kernel", [SMALL, SEESAW])
def test_what_is_not_finite_is_turned_in_its_rows_only(kernel: str) -> None:
    """Values are whole keys here, so that the scores of whoever sees one are not finite, either."""
    inputs = form_inputs(FormCase(DecodeCase(b=1, s_q=3, h_q=4, seqlens=130, d_qk=512), turned=True))
    cache, table = inputs.arrays["kv_cache"], inputs.arrays["block_table"]
    cache[table[0, 2], 0, 0, 451], cache[table[0, 2], 1, 0, 500] = np.inf, np.nan
    with simulated(1, mode="late"):
        out, _ = mla_decode(**inputs.call, kernel=kernel)
    assert np.isfinite(out[0, 0].astype(np.float32)).all()
    assert not np.isfinite(out[0, 1:, :, 448:].astype(np.float32)).all(axis=-1).any()
    np.testing.assert_allclose(out[0, 0].astype(np.float32), inputs.exact[0][0, 0], atol=0.05)


def test_hostile_starts_in_a_kernel() -> None:
    """Nothing is read or written beyond the arrays, whatever the device finds there."""
    inputs = form_inputs(FormCase(replace(SINGLE, h_q=16), queries=(2, 1, 3)))
    for starts in ([-7, 5, 2, 2**31 - 1], [2**31 - 1] * 4, [-(2**31), 3, 3, 4]):
        call: dict[str, Any] = {**inputs.call, "cu_seqlens_q": np.array(starts, np.int32)}
        with simulated(2):
            got = mla_decode(**call)
        exact = reference.mla_decode(**call)
        check(got, exact, reference.mla_decode(**call, rounding="bfloat16"), "bfloat16")


# ---- On a GPU --------------------------------------------------------------------------------------------------


def long(**changes: Any) -> DecodeCase:
    return DecodeCase(**{"b": 9, "seqlens": "ragged-3000", "missing_pages": 0, **changes})


VARYING_STEPS = ((1, 3, 2), (2, 2, 2), (0, 6, 0))
VARYING = (1, 4, 2, 0, 1, 7, 1, 3, 2)
ON_GPU = (
    *CASES,
    *(
        (FormCase(long(h_q=h_q, page_size=page, dtype=dtype), **form), kernel)
        for h_q, page, dtype, kernel in (
            (16, 64, "bfloat16", SMALL),
            (128, 64, "bfloat16", SEESAW),
            (32, 16, "float16", SEESAW),
            (8, 128, "bfloat16", GENERIC),
        )
        for form in (
            {"pair": True},
            {"queries": VARYING, "around": (2, 3)},
            {"window": 700, "sink": True},
            {"queries": VARYING, "pair": True, "window": 130, "sink": True},
        )
    ),
    (FormCase(long(h_q=16, s_q=3, d_qk=512), window=1000), SEESAW),
    (FormCase(long(b=1, h_q=16, seqlens=40000), pair=True), SMALL),
    (FormCase(long(b=1, h_q=128, seqlens=40000), queries=(2,), window=9000), SEESAW),
    *(
        (
            FormCase(
                long(h_q=h_q, page_size=page, dtype=dtype, record=record, d_qk=FORMATS[record].d_qk), **form
            ),
            kernel,
        )
        for h_q, page, dtype, kernel in (
            (16, 64, "bfloat16", FEW_RECORDS),
            (128, 64, "bfloat16", MANY_RECORDS),
            (32, 16, "float16", FEW_RECORDS),
            (8, 128, "bfloat16", PLAIN_RECORDS),
        )
        for record in ("v32", "v32-nope", "v4", "fp8")
        for form in (
            {"queries": VARYING, "around": (2, 3), "window": 130, "sink": True},
            {{"v4": "turned", "v32-nope": "sink"}.get(record, "pair"): True, "queries": VARYING},
            {"window": 700},
        )
    ),
)  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "kernel"), ON_GPU, ids=lambda value: getattr(value, "id", value))
def test_kernels_on_a_gpu(hopper: object, case: FormCase, kernel: str) -> None:
    inputs = form_inputs(case)
    got = mla_decode(**_uploaded(inputs), **inputs.options, kernel=kernel)
    check(on_host(got), inputs.exact, inputs.rounded, case.base.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("base", "kernel"), [one for one in SINKS if "sm100" not in one[1]], ids=lambda value: getattr(value, "id", value)
)
def test_sinks_on_a_gpu(hopper: object, base: DecodeCase, kernel: str) -> None:
    inputs = form_inputs(FormCase(replace(base, b=5, seqlens="ragged-900"), sink=True))
    got = mla_decode(**_uploaded(inputs), **inputs.options, kernel=kernel)
    check(on_host(got), inputs.exact, inputs.rounded, base.dtype)


@pytest.mark.gpu
def test_a_plan_in_a_graph(hopper: object) -> None:
    """Lengths and numbers of queries are the replay's."""
    import cupy

    base = replace(SINGLE, seqlens=(70, 900, 9))
    given = [form_inputs(FormCase(base, queries=queries, pair=True)) for queries in VARYING_STEPS]
    first: dict[str, Any] = _uploaded(given[0])
    pages = first["block_table"].shape[1]
    plan = plan_decode(
        max_b=3, s_q=2, h_q=16, max_pages=pages, page_size=64, dtype="bfloat16", cu_seqlens_q=True, q_rope=True
    )
    out, lse = cupy.empty((6, 16, 512), first["q"].dtype), cupy.empty((16, 6), np.float32)
    stream = cupy.cuda.Stream(non_blocking=True)

    def step() -> None:
        plan.update(first["seqlens"], cu_seqlens_q=first["cu_seqlens_q"], total_q=6)
        mla_decode(**first, plan=plan, out=out, lse=lse)

    with stream:
        step()
        stream.synchronize()
        stream.begin_capture()
        step()
        graph = stream.end_capture()
        for inputs in given:
            for name in ("q", "q_rope", "cu_seqlens_q"):
                first[name][...] = upload(inputs.arrays[name])
            graph.launch()
            stream.synchronize()
            check(on_host((out, lse)), inputs.exact, inputs.rounded, "bfloat16")


def _uploaded(inputs: FormInputs) -> dict[str, Any]:
    return {name: upload(x) for name, x in inputs.arrays.items()}


# ---- Planted bugs ----------------------------------------------------------------------------------------------


def run_case(kernel: str, case: FormCase, mode: tuple[str, int], sm_count: int = 1) -> None:
    """The window begins at an infinity, which some rows see."""
    inputs = form_inputs(case)
    if case.window and case.queries and not case.base.record:
        table, cache, page_size = inputs.arrays["block_table"], inputs.arrays["kv_cache"], case.base.page_size
        first = int(case.base.lengths()[0]) - case.queries[0] + 1 - case.window
        cache[table[0, first // page_size], first % page_size, 0, 7] = np.inf
    got = run(inputs, kernel, sm_count, mode)
    alike = [alike_where_finite(mine, exact) for mine, exact in zip(got, inputs.exact, strict=True)]
    check((alike[0], alike[1]), inputs.exact, inputs.rounded, case.base.dtype)


GROUPS = "attention/query_groups.cuh"
LATE = ("late", 0)
#: The windows of the first sequence begin on both sides of a tile's edge.
OF_FEW = FormCase(
    replace(SINGLE, h_q=8, seqlens=(300, 131, 200), page_size=16),
    queries=(3, 6, 2),
    around=(1, 1),
    window=44,
    pair=True,
    sink=True,
)
OF_MANY = FormCase(replace(MANY, b=3, seqlens=(130, 2, 66)), queries=(5, 4, 1), around=(0, 3), pair=True)
OF_FEW_RECORDS = FormCase(replace(V4, seqlens=(200, 5, 129), s_q=3, h_q=7), window=66, turned=True)
OF_MANY_RECORDS = FormCase(
    replace(SINGLE, record="v32", h_q=48, seqlens=(200, 66, 1), page_size=48),
    queries=(2, 3, 1),
    around=(1, 1),
    window=100,
    pair=True,
    sink=True,
)
PLAIN = FormCase(replace(SINGLE, h_q=3, seqlens=(70, 0, 9)), queries=(4, 1, 5), around=(2, 0), pair=True)
TURNED = FormCase(replace(SINGLE, seqlens=(70, 0, 9), d_qk=512, h_q=3, s_q=2, cp_world=2), turned=True)
MERGED = FormCase(replace(SINGLE, b=2, h_q=8, seqlens=(9, 700)), queries=(3, 2))

test_few_rows_is_caught, test_few_rows_as_it_is = mutant_suite(
    SMALL,
    [partial(run_case, SMALL, OF_FEW, mode) for mode in (LATE, ("random", 1))],
    {
        "bar.sync": (6, [0, 3]),
        "mbarrier.try_wait": (6, [0, 3]),
        "mbarrier.arrive": (6, [0]),
        "fence.proxy": (2, [0]),
        "fence.mbarrier_init": (1, [0]),
        "cp.async.wait_all": (1, [0]),
        "wgmma.fence": (4, [0]),
        "wgmma.commit_group": (2, [0]),
        "wgmma.wait_group": (2, [0]),
    },
    [
        Mutant("a window is one too long", GROUPS, "(p, item, row) - window)", "(p, item, row) - window - 1)"),
    ],
)
test_many_rows_is_caught, test_many_rows_as_it_is = mutant_suite(
    SEESAW,
    [partial(run_case, SEESAW, OF_MANY, mode) for mode in (LATE, ("random", 1))],
    {
        "bar.sync": (19, [0, 14]),
        "bar.arrive": (5, [0]),
        "mbarrier.try_wait": (11, [0, 5]),
        "mbarrier.arrive": (12, [0]),
        "fence.proxy": (8, [0]),
        "fence.mbarrier_init": (1, [0]),
        "cp.async.wait_all": (1, [0]),
        "wgmma.fence": (9, [0]),
        "wgmma.commit_group": (7, [0]),
        "wgmma.wait_group": (7, [0]),
    },
)
test_few_records_is_caught, test_few_records_as_it_is = mutant_suite(
    FEW_RECORDS,
    [partial(run_case, FEW_RECORDS, OF_FEW_RECORDS, mode) for mode in (LATE, ("random", 1))],
    {
        "bar.sync": (5, [0, 2]),
        "mbarrier.try_wait": (7, [0, 3]),
        "mbarrier.arrive": (7, [0]),
        "fence.proxy": (4, [0]),
        "wgmma.fence": (4, [0]),
        "wgmma.commit_group": (4, [0]),
        "wgmma.wait_group": (4, [0]),
    },
    [
        Mutant(
            "nothing is turned",
            "attention/sm90/small_records_math.cuh",
            "if constexpr (kTurned) turn_back",
            "if (false) turn_back",
        ),
    ],
)
test_many_records_is_caught, test_many_records_as_it_is = mutant_suite(
    MANY_RECORDS,
    [partial(run_case, MANY_RECORDS, OF_MANY_RECORDS, mode) for mode in (LATE, ("random", 1))],
    {
        "bar.sync": (6, [0, 3]),
        "bar.arrive": (2, [0]),
        "mbarrier.try_wait": (17, [0, 8]),
        "mbarrier.arrive": (17, [0]),
        "fence.proxy": (10, [5]),
        "cp.async.wait_group": (1, [0]),
        "cp.async.wait_all": (2, [0]),
        "cp.async.commit_group": (1, [0]),
        "wgmma.fence": (12, [0]),
        "wgmma.commit_group": (11, [0]),
        "wgmma.wait_group": (13, [0]),
    },
    [
        Mutant(
            "what lies past the end is read",
            "attention/sm90/seesaw_records_forms.cuh",
            " || token >= item.tokens",
            "",
        ),
    ],
)
test_generic_is_caught, test_generic_as_it_is = mutant_suite(
    GENERIC,
    [partial(run_case, GENERIC, TURNED, LATE), partial(run_case, GENERIC, PLAIN, ("random", 1))],
    {
        "bar.sync": (5, [0, 2]),
    },
    [Mutant("turned on", "attention/output_rope.cuh", "column % 2 == 0 ?", "column % 2 != 0 ?")],
)
test_generic_records_is_caught, test_generic_records_as_it_is = mutant_suite(
    PLAIN_RECORDS,
    [partial(run_case, PLAIN_RECORDS, RECORDS[9][0], LATE)],
    {
        "bar.sync": (5, [0, 2]),
    },
)
test_merge_is_caught, test_merge_as_it_is = mutant_suite(
    "attention_combine",
    [partial(run_case, SMALL, MERGED, mode, 4) for mode in (LATE, ("random", 1))],
    {
        "bar.sync": (7, [0, 3]),
    },
    [
        Mutant(
            "merged results of the first query",
            "attention/merge_partials.cuh",
            "team.out_offsets[row] += first_query * p.out_stride_s_elems;",
            "",
        ),
    ],
)
