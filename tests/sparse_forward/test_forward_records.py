"""The sparse forward straight from FP8 records: the NumPy backend, and the kernels in the simulator and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import mla_cupy
from mla_cupy import ArgumentError, DTypeError, ShapeError, UnsupportedDeviceError, dtypes, reference
from mla_cupy.cache_formats import FORMATS
from mla_cupy.kernels.cache.table import GATHERED_PER_BLOCK
from mla_cupy.kernels.sparse_forward import SPARSE_FORWARD, convert
from mla_cupy.kernels.sparse_forward.problem import SparseForwardProblem
from mla_cupy.reference.sparse import selected_rows
from tests.support import sparse_cases
from tests.support.cases import as_read
from tests.support.flat import flat
from tests.support.gpu import upload
from tests.support.mutant_suite import mutant_suite
from tests.support.recorder import B200, H200, Recorder
from tests.support.sim_driver import simulated
from tests.support.sim_modes import MODES
from tests.support.sparse_cases import SparseCase
from tests.support.tolerance import check, check_lse

Array = npt.NDArray[Any]
Results = tuple[Array, Array, Array]

HOPPER, GENERIC = "sparse_forward_sm90_records", "sparse_forward_generic_records"
_NAN = 0x7F


@dataclass(frozen=True)
class RecordCase:
    """A sparse case whose kv is pages of a record; a `page_size` of 0 leaves their axis out."""

    of: SparseCase
    record: str = "v32"
    page_size: int = 5
    scales: str | None = None

    @property
    def id(self) -> str:
        return f"{self.of.id}-{self.record}-page{self.page_size}{self.scales or ''}"


@dataclass(frozen=True)
class RecordInputs:
    """The arrays of a call, and what the oracle says about them."""

    case: RecordCase
    q: Array
    kv: Array
    indices: Array
    options: dict[str, Any]

    @property
    def arguments(self) -> tuple[Array, Array, Array]:
        return self.q, self.kv, self.indices

    @cached_property
    def exact(self) -> Results:
        return reference.sparse_mla_forward(*self.arguments, **self.options)

    @cached_property
    def rounded(self) -> Results:
        rounding = "float16" if self.case.record in ("v32", "v32-nope") else self.case.of.dtype
        read = as_read(self.case.record, self.kv)
        out_dtype = self.case.of.dtype
        return reference.sparse_mla_forward(
            self.q, read, self.indices, **self.options, rounding=rounding, out_dtype=out_dtype
        )

    @cached_property
    def converted(self) -> Results:
        """The oracle over rows of q's dtype, rounded as the kernels over rows round."""
        cache, dtype = self.kv if self.kv.ndim == 3 else self.kv[:, None], self.case.of.dtype
        rows = reference.cache_gather(cache, np.arange(self.case.of.s_kv), kv_format=self.case.record)[0]
        rows = dtypes.round_to(rows, dtype)
        return reference.sparse_mla_forward(self.q, rows, self.indices, **self.options, rounding=dtype, out_dtype=dtype)


def make(case: RecordCase) -> RecordInputs:
    """A cache of NaN but for the rows that are selected, whose pages are further apart than they must."""
    inputs, record = sparse_cases.make(case.of), FORMATS[case.record]
    page_size = max(1, case.page_size)
    pages = -(-case.of.s_kv // page_size)
    assert pages * page_size == case.of.s_kv, "else there are more rows than the case says"
    stride = -(-record.page_bytes(page_size) // 16) * 16 + 16
    memory = np.full(pages * stride + 64, _NAN, np.uint8)
    shape, token = (pages, page_size, record.width), record.token_bytes
    cache = np.ndarray(shape, np.uint8, memory, -memory.ctypes.data % 64, (stride, token, 1))
    of = case.of
    chosen = selected_rows(
        inputs.indices, of.s_kv, inputs.topk_length, of.causal, inputs.cu_seqlens_q, inputs.cu_seqlens_kv
    )
    rows = np.unique(np.concatenate([np.zeros(0, np.int64), *chosen]))
    tokens = inputs.kv.reshape(of.s_kv, -1)[rows].astype(np.float32)
    latent, rope = (part.astype(dtypes.numpy_dtype("bfloat16")) for part in np.split(tokens, [record.d_latent], axis=1))
    rope_part = rope if record.d_rope else None
    reference.cache_append(latent, rope_part, cache, rows, kv_format=record.name, scales=case.scales)
    kv = cache if case.page_size else cache[:, 0]
    return RecordInputs(case, inputs.q, kv, inputs.indices, inputs.options)


CASES = (
    RecordCase(SparseCase(s_q=2, h_q=16, topk=64, invalid=0.0)),
    RecordCase(SparseCase(s_q=5, h_q=5, topk=200, lengths=True, sink=True), page_size=60, scales="plain"),
    RecordCase(SparseCase(s_q=2, h_q=40, topk=65, dtype="float16"), page_size=0),  # two blocks of heads
    RecordCase(SparseCase(s_q=6, h_q=3, topk=70, sequences=((2, 90), (0, 5), (3, 80)), causal=True), page_size=4),
    RecordCase(SparseCase(s_q=2, h_q=17, topk=300, d_qk=512, sink=True), "v4", page_size=50),
    RecordCase(SparseCase(s_q=3, h_q=4, topk=40, invalid=1.0, sink=True)),  # nothing to attend to
    RecordCase(SparseCase(s_q=1, h_q=9, topk=130, d_qk=512, dtype="float16", strides="odd"), "v4", page_size=1),
    RecordCase(SparseCase(s_q=3, h_q=17, topk=130, d_qk=512, sink=True), "v32-nope", page_size=50, scales="plain"),
    RecordCase(SparseCase(s_q=2, h_q=5, topk=70, d_qk=512, dtype="float16"), "v32-nope", page_size=0),
)
GENERIC_CASES = (
    RecordCase(SparseCase(s_q=4, h_q=1, topk=20, lengths=True, sink=True), page_size=60, scales="plain"),
    RecordCase(SparseCase(s_q=4, h_q=2, topk=9, sequences=((1, 90), (0, 5), (3, 80)), causal=True), page_size=4),
    RecordCase(SparseCase(s_q=1, h_q=9, topk=70, d_qk=512, dtype="float16"), "v4", page_size=50),
    RecordCase(SparseCase(s_q=2, h_q=9, topk=70, d_qk=512), "v32-nope", page_size=50, scales="plain"),
)


def same(x: Any) -> Any:
    return x


def run(inputs: RecordInputs, kernel: str | None, to: Callable[[Array], Any] = same, **options: Any) -> Any:
    arrays = {name: to(x) if isinstance(x, np.ndarray) else x for name, x in inputs.options.items()}
    return flat(mla_cupy.sparse_mla_forward)(*(to(x) for x in inputs.arguments), **arrays, kernel=kernel, **options)


def check_all(got: Results, inputs: RecordInputs, *, converted: bool = False) -> None:
    rounded = inputs.converted if converted else inputs.rounded
    check(got[:2], inputs.exact[:2], rounded[:2], inputs.case.of.dtype)
    check_lse(got[2], inputs.exact[2], rounded[2])


# ---- The oracle and the NumPy backend --------------------------------------------------------------------------


@pytest.mark.parametrize("case", [CASES[1], CASES[2], CASES[3], CASES[4], CASES[-1]], ids=lambda case: case.id)
def test_the_oracle_attends_to_dequantised_rows(case: RecordCase) -> None:
    inputs = make(case)
    cache = inputs.kv if inputs.kv.ndim == 3 else inputs.kv[:, None]
    rows = reference.cache_gather(cache, np.arange(case.of.s_kv), kv_format=case.record)[0]
    expected = reference.sparse_mla_forward(inputs.q, rows, inputs.indices, **inputs.options)
    for got, want in zip(inputs.exact, expected, strict=True):
        np.testing.assert_array_equal(got, want)
        assert not np.isnan(got).any()


def test_the_numpy_backend_rounds_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    inputs = make(CASES[1])
    out, lse, max_logits = run(inputs, None, check=False)
    np.testing.assert_array_equal(out.astype(np.float64), dtypes.round_to(inputs.exact[0], "bfloat16"))
    np.testing.assert_array_equal(lse, inputs.exact[1].astype(np.float32))
    np.testing.assert_array_equal(max_logits, inputs.exact[2].astype(np.float32))


# ---- Mistakes and choices --------------------------------------------------------------------------------------


def _pages(record: str) -> Array:
    return np.zeros((3, 8, FORMATS[record].token_bytes), np.uint8)


@pytest.mark.parametrize(
    ("kv", "d_qk", "match"),
    [
        (_pages("v32")[..., :640], 576, r"kv.shape\[-1\]: got 640, expected 656 or 584 or 528 for uint8"),
        (_pages("fp8"), 512, r"q.shape\[-1\]: got 512, expected 576 for fp8"),
        (_pages("v4"), 576, r"q.shape\[-1\]: got 576, expected 512 for v4"),
        (np.zeros((3, 8, 664), np.uint8)[..., :656], 576, "kv.strides: .*multiples of 16 bytes"),
        (np.zeros((9, 584), np.uint8), 512, "kv.strides: .*multiples of 16 bytes"),
        (np.zeros((3, 8, 576), np.float16), 576, r"kv.shape\[1\]: got 8, expected 1 head"),
        (np.zeros((3, 512), np.float16), 576, r"kv.shape\[-1\]: got 512, expected d_qk=576"),
    ],
    ids=[
        "no width",
        "d_qk of fp8",
        "d_qk of v4",
        "odd strides",
        "no pages of v4",
        "heads",
        "width",
    ],
)
def test_mistakes(kv: Array, d_qk: int, match: str, recorder: Recorder) -> None:
    q, indices = np.ones((1, 2, d_qk), np.float16), np.zeros((1, 3), np.int32)
    with pytest.raises(ShapeError, match=match):
        mla_cupy.sparse_mla_forward(q, kv, indices, scale=576**-0.5)
    assert recorder.launches == []


def test_slots_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    q, indices = np.ones((1, 2, 576), np.float16), np.array([[23, -1, 24]], np.int32)
    with pytest.raises(ArgumentError, match=r"indices\[0, 2\]: got 24, expected -1, or a row of 0 to 23"):
        flat(mla_cupy.sparse_mla_forward)(q, _pages("v32"), indices, check=True, scale=576**-0.5)


def test_the_backward_takes_rows_only() -> None:
    q, rows = np.ones((1, 2, 576), np.float16), np.zeros((24, 656), np.uint8)
    out, lse = np.ones((1, 2, 512), np.float16), np.ones((1, 2), np.float32)
    with pytest.raises(DTypeError, match=r"kv\.dtype: got uint8, expected float16"):
        mla_cupy.sparse_mla_backward(q, rows, out, out, lse, np.zeros((1, 3), np.int32), scale=576**-0.5)


def test_which_kernel(recorder: Recorder) -> None:
    inputs, rows = make(CASES[0]), sparse_cases.make(CASES[0].of)
    run(inputs, None)
    assert f"mla_{HOPPER}" in [launch.entry for launch in recorder.launches]
    for kernel in (HOPPER, GENERIC):
        with pytest.raises(UnsupportedDeviceError, match="reads a cache of FP8 records"):
            mla_cupy.sparse_mla_forward(*rows.arguments, kernel=kernel, scale=rows.scale)
    for kernel in ("sparse_forward_sm90", "sparse_forward_sm90_small", "attention_generic"):
        with pytest.raises(UnsupportedDeviceError, match="reads a cache of 16-bit rows"):
            run(inputs, kernel)


def test_few_queries_convert_nothing_in_memory(recorder: Recorder) -> None:
    """The workspace equals the one for rows: no place for any of kv."""
    inputs, rows = make(CASES[0]), sparse_cases.make(CASES[0].of)
    sizes = [
        mla_cupy.workspace_bytes(mla_cupy.sparse_mla_forward, *arguments, scale=1.0)
        for arguments in (inputs.arguments, rows.arguments)
    ]
    assert sizes[0] == sizes[1]


# ---- Converting all records first ------------------------------------------------------------------------------

CONVERTED = (
    RecordCase(SparseCase(s_q=6, s_kv=20, h_q=3, topk=70, lengths=True, sink=True), scales="plain"),
    RecordCase(
        SparseCase(s_q=3, s_kv=12, h_q=40, topk=65, sequences=((1, 5), (2, 4)), causal=True, dtype="float16"),
        page_size=0,
    ),
    RecordCase(SparseCase(s_q=6, s_kv=20, h_q=17, topk=70, d_qk=512), "v4", page_size=4),
)


def problem(h_q: int, gathers: int, **changes: Any) -> SparseForwardProblem:
    """A problem with this many gathered rows per token."""
    sizes = {"s_q": gathers, "s_kv": 1000, "h_q": h_q, "topk": 1000, "d_qk": 576, "dtype": "bfloat16", "record": "v32"}
    return SparseForwardProblem(**{**sizes, **changes})


@pytest.mark.parametrize(("h_q", "least"), [(1, 16), (16, 16), (32, 16), (33, 4), (128, 4)])
def test_many_gathers_per_token_convert_first(h_q: int, least: int) -> None:
    assert convert.is_faster(problem(h_q, least), H200)
    assert not convert.is_faster(problem(h_q, least, s_kv=1001), H200)
    assert not convert.is_faster(problem(h_q, least, record=""), H200)
    assert not convert.is_faster(problem(h_q, least, aligned=False), H200)  # no tensor cores over rows
    assert not convert.is_faster(problem(h_q, least), B200)


def test_a_kernel_from_records_on_request_converts_nothing() -> None:
    for kernel in (HOPPER, GENERIC):
        config = SPARSE_FORWARD.configure(problem(16, 100), H200, kernel)
        assert (config.kernel.name, config.converted, config.problem.record) == (kernel, "", "v32")
        assert convert.ROWS not in SPARSE_FORWARD.workspace(config).offsets


def test_the_workspace_of_converted_records() -> None:
    over_records = SPARSE_FORWARD.configure(problem(16, 100), H200)
    over_rows = SPARSE_FORWARD.configure(problem(16, 100, record=""), H200)
    assert (over_records.kernel, over_records.converted) == (over_rows.kernel, "v32")
    sizes = [SPARSE_FORWARD.workspace(config).nbytes for config in (over_records, over_rows)]
    assert sizes[0] - sizes[1] == -(-1000 * 576 * 2 // 256) * 256


@pytest.mark.parametrize("case", CONVERTED, ids=lambda case: case.id)
def test_launches_of_converted_records(recorder: Recorder, case: RecordCase) -> None:
    inputs = make(case)
    run(inputs, None)
    attention = "sparse_forward_sm90_small" if case.of.h_q <= 32 else "sparse_forward_sm90"
    assert recorder.entries[:4] == ["cache_gather", "attention_row_lists", "attention_schedule", attention]
    gather, reads = recorder.launches[0], recorder.launches[3].params
    tokens, d_qk = case.of.s_kv, case.of.d_qk
    assert gather.grid == (-(-tokens // GATHERED_PER_BLOCK), 1, 1)
    assert gather.addresses == {"cache": inputs.kv.ctypes.data, "rows": reads["kv"]}
    expected = {"n": tokens, "rows_stride_bytes": 2 * d_qk, "page_stride_bytes": inputs.kv.strides[0]}
    assert {name: gather.params[name] for name in expected} == expected
    strides = ("kv_stride_page_elems", "kv_stride_token_elems", "num_pages", "page_size")
    assert [reads[name] for name in strides] == [d_qk, 0, tokens, 1]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", CONVERTED, ids=lambda case: case.id)
def test_converted_records(case: RecordCase) -> None:
    inputs, number = make(case), CONVERTED.index(case)
    mode, seed = MODES[number % len(MODES)]
    with simulated((1, 3)[number % 2], mode=mode, seed=seed) as target:
        got = run(inputs, None)
    assert target.launched[0] == "mla_cache_gather"
    check_all(got, inputs, converted=True)


# ---- Kernels in the simulator ----------------------------------------------------------------------------------


@pytest.mark.one_in(8)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_hopper_kernel(case: RecordCase) -> None:
    inputs, number = make(case), CASES.index(case)
    mode, seed = MODES[number % len(MODES)]
    with simulated((1, 3)[number % 2], mode=mode, seed=seed) as target:
        got = run(inputs, HOPPER)
    assert f"mla_{HOPPER}" in target.launched
    check_all(got, inputs)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kernel", [HOPPER, GENERIC, None])
def test_shorter_tokens_without_rope(kernel: str | None) -> None:
    """Tokens of 528 bytes give the bits of those of 656, of kernels that read them and where all are converted."""
    inputs = make(RecordCase(SparseCase(s_q=6, s_kv=20, h_q=3, topk=70, d_qk=512), "v32-nope", scales="plain"))
    short = replace(inputs, kv=inputs.kv[..., :528].copy())
    with simulated(1) as target:
        whole, got = run(inputs, kernel), run(short, kernel, kv_format="v32-nope")
    assert (target.launched[0] == "mla_cache_gather") == (kernel is None)
    for mine, expected in zip(got, whole, strict=True):
        np.testing.assert_array_equal(mine, expected)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("sm_count", [1, 3, 5])
def test_hopper_kernel_in_all_modes(case: RecordCase, mode: tuple[str, int], sm_count: int) -> None:
    inputs = make(case)
    with simulated(sm_count, mode=mode[0], seed=mode[1]):
        check_all(run(inputs, HOPPER), inputs)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", GENERIC_CASES, ids=lambda case: case.id)
def test_generic_kernel_computes_in_float32(case: RecordCase) -> None:
    inputs = make(case)
    with simulated(1, mode="random", seed=3):
        got = run(inputs, GENERIC, out_dtype="float32")
    for mine, exact in zip(got, inputs.exact, strict=True):
        np.testing.assert_allclose(mine, exact, rtol=2e-5, atol=2e-5)


# ---- On a GPU --------------------------------------------------------------------------------------------------

ON_GPU = (
    *CASES,
    *(
        RecordCase(SparseCase(s_q=150, s_kv=6400, h_q=h_q, topk=700, sink=True, lengths=True), page_size=64)
        for h_q in (1, 8, 16, 32, 64, 128)
    ),
    RecordCase(SparseCase(s_q=90, s_kv=6400, h_q=128, topk=700, d_qk=512, dtype="float16"), "v4", page_size=64),
    RecordCase(SparseCase(s_q=300, s_kv=64000, h_q=16, topk=2048, causal=True), scales="plain"),  # sorted lists
)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_GPU, ids=lambda case: case.id)
def test_hopper_kernel_on_a_gpu(hopper: object, case: RecordCase) -> None:
    import cupy

    inputs = make(case)
    check_all(tuple(cupy.asnumpy(x) for x in run(inputs, HOPPER, upload)), inputs)


CONVERTED_ON_GPU = (
    *CONVERTED,
    RecordCase(SparseCase(s_q=500, s_kv=6400, h_q=16, topk=700, sink=True, lengths=True), page_size=64),
    RecordCase(SparseCase(s_q=90, s_kv=6400, h_q=128, topk=700, d_qk=512, dtype="float16"), "v4", page_size=64),
)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CONVERTED_ON_GPU, ids=lambda case: case.id)
def test_converted_records_on_a_gpu(hopper: object, case: RecordCase) -> None:
    import cupy

    inputs = make(case)
    of = case.of
    assert convert.is_faster(problem(of.h_q, of.s_q, s_kv=of.s_kv, topk=of.topk), H200)
    got = tuple(cupy.asnumpy(x) for x in run(inputs, None, upload))
    check_all(got, inputs, converted=True)


@pytest.mark.gpu
@pytest.mark.parametrize("case", GENERIC_CASES, ids=lambda case: case.id)
def test_generic_kernel_on_a_gpu(gpu: object, case: RecordCase) -> None:
    import cupy

    inputs = make(case)
    check_all(tuple(cupy.asnumpy(x) for x in run(inputs, GENERIC, upload)), inputs)


# ---- Planted bugs ----------------------------------------------------------------------------------------------


def run_hopper(inputs: RecordInputs, mode: tuple[str, int]) -> None:
    with simulated(1, mode=mode[0], seed=mode[1]):
        check_all(run(inputs, HOPPER), inputs)


FEW = make(RecordCase(SparseCase(s_q=2, h_q=5, topk=200, invalid=0.0), page_size=60, scales="plain"))
test_is_caught, test_as_it_is = mutant_suite(
    HOPPER,
    [partial(run_hopper, FEW, mode) for mode in (("late", 0), ("early", 0), ("random", 1))],
    {
        "bar.sync": (8, [0, 4]),
        "mbarrier.try_wait": (7, [0, 6]),
        "mbarrier.arrive": (11, [5]),
        "fence.proxy": (4, [0]),
        "wgmma.fence": (4, [0]),
        "wgmma.wait_group": (4, [0]),
    },
)
