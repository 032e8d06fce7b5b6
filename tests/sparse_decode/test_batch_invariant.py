"""Batch-invariant sparse decode and sparse forward: a query has the same bits in every batch that it is part of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import mla_cupy
from mla_cupy import ArgumentError, reference
from tests.sparse_decode.runs import GENERIC, ON_HOPPER, SparseDecodeCase, as_read, fitting, format_of_keys
from tests.sparse_decode.runs import make as make_decode
from tests.support.flat import flat
from tests.support.kernels import FORWARD_KERNELS, cc_of
from tests.support.sim_driver import simulated
from tests.support.sparse_cases import SparseCase
from tests.support.sparse_cases import make as make_forward
from tests.support.tolerance import check

Array = npt.NDArray[Any]
Call = dict[str, Any]
Move = Callable[[Any], Any]
INVARIANT = {"batch_invariant": True, "split_tokens": 64}
PER_SEQUENCE = ("q", "indices", "topk_length", "extra_indices", "extra_topk_length", "out_positions", "gate")
WITHOUT_QUERIES = ("topk_length", "extra_topk_length")


def taken(call: Call, chosen: list[int], query: int | None = None) -> Call:
    """The call of some sequences in the given order; of one of their queries alone, if it is named."""
    some = {name: x[chosen] if name in PER_SEQUENCE else x for name, x in call.items()}
    if query is None:
        return some
    alone = {name for name in PER_SEQUENCE if name in some and name not in WITHOUT_QUERIES}
    return {name: x[:, query : query + 1] if name in alone else x for name, x in some.items()}


def run(operation: str, call: Call, kernel: str | None = None, *, to: Move, back: Move, **options: Any) -> list[Array]:
    """Results of a call on the host."""
    given = {name: to(x) if isinstance(x, np.ndarray) else x for name, x in call.items()}
    made = flat(getattr(mla_cupy, operation))(**given, kernel=kernel, **{**INVARIANT, **options})
    return [back(x) for x in made]


def assert_rows(got: list[Array], whole: list[Array], chosen: Any) -> None:
    for x, wanted in zip(got, whole, strict=True):
        assert x.tobytes() == np.ascontiguousarray(wanted[chosen]).tobytes()


def same(x: Any) -> Any:
    return x


# ---- Simulator --------------------------------------------------------------------------------------------------
DECODE_CASES = (
    SparseDecodeCase(b=2, s_q=2, topk=150, lengths=True, sink=True, h_q=5),
    SparseDecodeCase(record="v4", b=2, topk=20, extra=133, lengths=True, h_q=9, empty=True),
    SparseDecodeCase(record="v41", b=2, topk=70, extra=60, extra_record="v41-fp4", page_size=64),
    SparseDecodeCase(record="v4", b=2, s_q=2, topk=90, turned=True),
)


BATCHES = pytest.mark.parametrize(("sm_count", "mode"), [(1, "late"), (7, "random")])


@pytest.mark.one_in(32)
@pytest.mark.parametrize("kernel", [None, *ON_HOPPER, "sparse_decode_mma", GENERIC])
@pytest.mark.parametrize("case", DECODE_CASES, ids=str)
@BATCHES
def test_decode(case: SparseDecodeCase, kernel: str | None, sm_count: int, mode: str) -> None:
    """Several sequences in another order, and one alone; of several queries, one of them, too."""
    case = fitting(case, kernel or "")
    call = make_decode(case)
    with simulated(3):
        whole = run("sparse_mla_decode", call, kernel, to=same, back=np.asarray)
    exact = reference.sparse_mla_decode(**call)
    check(whole, exact, reference.sparse_mla_decode(**as_read(case, call), rounding=format_of_keys(case)), case.dtype)
    chosen = [case.b - 1, 0, case.b - 1] if mode == "late" else [0]
    with simulated(sm_count, mode=mode, seed=3):
        assert_rows(run("sparse_mla_decode", taken(call, chosen), kernel, to=same, back=np.asarray), whole, chosen)
    if case.s_q > 1 and mode == "random":
        with simulated(5):
            alone = run("sparse_mla_decode", taken(call, [1], 1), kernel, to=same, back=np.asarray)
        assert_rows(alone, whole, np.s_[1:2, 1:2])


def test_projected_results() -> None:
    """W_UV is applied in the merge whatever the batch, where a plain call of many queries has a launch of its own."""
    case = SparseDecodeCase(record="v4", b=3, topk=150, h_q=4, lengths=True)
    call = make_decode(case)
    w_uv = np.random.default_rng(1).standard_normal((case.h_q, 128, 512), np.float32)
    call["w_uv"] = (w_uv / 30).astype(call["q"].dtype)
    with simulated(3):
        whole = run("sparse_mla_decode", call, to=same, back=np.asarray)
    read = as_read(case, call)
    rounded = reference.sparse_mla_decode(**read, rounding=format_of_keys(case))
    check(whole, reference.sparse_mla_decode(**call), rounded, case.dtype)
    with simulated(5, mode="random", seed=2):
        assert_rows(run("sparse_mla_decode", taken(call, [2, 1]), to=same, back=np.asarray), whole, [2, 1])


FORWARD_CASES = (
    SparseCase(s_q=4, h_q=9, topk=150, lengths=True, sink=True),
    SparseCase(s_q=3, h_q=40, topk=90, d_qk=512, dtype="float16"),
)


JOINT = "sparse_forward_sm100_joint"
FORWARD_PAIRS = [(case, kernel) for case in FORWARD_CASES for kernel in (None, *FORWARD_KERNELS) if kernel != JOINT]
FORWARD_PAIRS = [pair for pair in FORWARD_PAIRS if not (pair[0].h_q > 32 and pair[1] == "sparse_forward_sm90_small")]
FORWARD_PAIRS += [(SparseCase(s_q=2, h_q=66, topk=90), JOINT)]


@pytest.mark.one_in(32)
@pytest.mark.parametrize(("case", "kernel"), FORWARD_PAIRS, ids=lambda x: getattr(x, "id", str(x)))
@BATCHES
def test_forward(case: SparseCase, kernel: str | None, sm_count: int, mode: str) -> None:
    inputs = make_forward(case)
    call = {"q": inputs.q, "kv": inputs.kv, "indices": inputs.indices, **inputs.options}
    cc = cc_of(kernel or "")
    with simulated(3, cc):
        whole = run("sparse_mla_forward", call, kernel, to=same, back=np.asarray)
    check(tuple(whole[:2]), inputs.exact[:2], inputs.rounded[:2], case.dtype)
    chosen = [case.s_q - 1, 0, 1, 0] if mode == "late" else [1]
    with simulated(sm_count, cc, mode, 3):
        got = run("sparse_mla_forward", taken(call, chosen), kernel, to=same, back=np.asarray)
    assert_rows(got, whole, chosen)


def test_results_without_the_option_do_depend_on_the_batch() -> None:
    """Or the tests above could not fail: one list is cut in the one batch, and not in the other."""
    call = make_decode(SparseDecodeCase(b=2, topk=256, h_q=4))
    with simulated(4):
        whole, alone = (
            run("sparse_mla_decode", x, to=same, back=np.asarray, batch_invariant=False)
            for x in (call, taken(call, [1]))
        )
    assert alone[0].tobytes() != whole[0][[1]].tobytes()


@pytest.mark.parametrize("operation", ["sparse_mla_decode", "sparse_mla_forward"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split_tokens": 100}, "split_tokens: got 100, expected a multiple of 64"),
        ({"split_tokens": 0, "batch_invariant": False}, "split_tokens"),
        ({"batch_invariant": "yes"}, "batch_invariant"),
    ],
)
def test_wrong_values(operation: str, options: dict[str, Any], message: str) -> None:
    inputs = make_forward(SparseCase(s_q=1))
    call = {"q": inputs.q, "kv": inputs.kv, "indices": inputs.indices, **inputs.options}
    if operation == "sparse_mla_decode":
        call = make_decode(SparseDecodeCase())
    with pytest.raises(ArgumentError, match=message):
        run(operation, call, to=same, back=np.asarray, **options)


def test_too_many_pieces() -> None:
    inputs = make_forward(SparseCase(s_q=1, topk=128))
    many = {"q": np.resize(inputs.q, (40000, 16, 576)), "indices": np.resize(inputs.indices, (40000, 128))}
    with pytest.raises(ArgumentError, match="at most 65535 pieces"):
        run("sparse_mla_forward", {"kv": inputs.kv, "scale": 1.0, **many}, to=same, back=np.asarray)


# ---- GPU --------------------------------------------------------------------------------------------------------
def random_decode(rng: np.random.Generator) -> tuple[SparseDecodeCase, Call]:
    record = str(rng.choice(["v32", "v4", "v41"]))
    second = record == "v41" and rng.random() < 0.5  # "v4" has odd pages in the second cache
    case = SparseDecodeCase(
        record=record,
        b=int(rng.integers(2, 40)),
        s_q=int(rng.integers(1, 3)),
        h_q=int(rng.choice([8, 16, 64, 128])),
        topk=int(rng.integers(1, 2049)),
        extra=int(rng.integers(1, 500)) if second else 0,
        lengths=bool(rng.random() < 0.5),
        page_size=64,
    )
    return case, make_decode(case)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(24))
def test_random_batches_of_decode(gpu: object, seed: int) -> None:
    """Permuted, split and padded by other sequences; in a graph the last time."""
    import cupy

    rng = np.random.default_rng(seed)
    case, call = random_decode(rng)
    split = int(rng.choice([64, 256, 512, 4096]))
    whole = run("sparse_mla_decode", call, to=cupy.asarray, back=cupy.asnumpy, split_tokens=split)
    for size in (case.b, int(rng.integers(1, case.b)), 3 * case.b, 1):
        chosen = rng.integers(0, case.b, size).tolist()
        some = taken(call, chosen)
        got = run("sparse_mla_decode", some, to=cupy.asarray, back=cupy.asnumpy, split_tokens=split)
        assert_rows(got, whole, chosen)
    if case.s_q > 1:
        some = taken(call, [0], 1)
        got = run("sparse_mla_decode", some, to=cupy.asarray, back=cupy.asnumpy, split_tokens=split)
        assert_rows(got, whole, np.s_[0:1, 1:2])


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [None, "sparse_forward_sm90", "attention_generic"])
@pytest.mark.parametrize("seed", range(8))
def test_random_batches_of_forward(gpu: object, seed: int, kernel: str | None) -> None:
    import cupy

    rng = np.random.default_rng(seed)
    case = SparseCase(
        s_q=int(rng.integers(2, 70)),
        s_kv=3000,
        h_q=int(rng.choice([8, 16, 64, 128])),
        topk=int(rng.integers(1, 2049)),
        d_qk=int(rng.choice([576, 512])),
        lengths=True,
        seed=seed,
    )
    inputs = make_forward(case)
    call = {"q": inputs.q, "kv": inputs.kv, "indices": inputs.indices, **inputs.options}
    split = int(rng.choice([64, 512, 4096]))
    whole = run("sparse_mla_forward", call, kernel, to=cupy.asarray, back=cupy.asnumpy, split_tokens=split)
    for size in (case.s_q, int(rng.integers(1, case.s_q)), 5 * case.s_q, 1):
        chosen = rng.integers(0, case.s_q, size).tolist()
        some = taken(call, chosen)
        got = run("sparse_mla_forward", some, kernel, to=cupy.asarray, back=cupy.asnumpy, split_tokens=split)
        assert_rows(got, whole, chosen)


@pytest.mark.gpu
def test_replays_of_a_graph(gpu: object) -> None:
    """The graph of a large batch gives each query the bits that it has alone."""
    import cupy

    call = make_decode(SparseDecodeCase(b=24, h_q=64, topk=1000, page_size=64))
    moved = {name: cupy.asarray(x) if isinstance(x, np.ndarray) else x for name, x in call.items()}
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        out, lse = mla_cupy.sparse_mla_decode(**moved, **INVARIANT)
        stream.begin_capture()
        mla_cupy.sparse_mla_decode(**moved, **INVARIANT, out=out, lse=lse)
        graph = stream.end_capture()
        for _ in range(3):
            graph.launch(stream)
        stream.synchronize()
    alone = run("sparse_mla_decode", taken(call, [5]), to=cupy.asarray, back=cupy.asnumpy)
    assert_rows(alone, [cupy.asnumpy(out), cupy.asnumpy(lse)], [5])
