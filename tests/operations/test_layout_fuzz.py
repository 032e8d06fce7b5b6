"""Random layouts of every array of every operation, in the simulator, against the oracle.

Axes in any order in memory, gaps, steps, offsets, backwards: whatever a kernel fetches is poison but for the array, and
nothing may be written beside a result. The ordinary run takes a few seeds; `-m slow` takes many. What is no layout of
whole elements is an error, also among good ones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

import mla_cupy
from mla_cupy import ShapeError, reference
from mla_cupy.ops import OPERATIONS
from mla_cupy.ops.operation import Input, Operation, Output
from mla_cupy.reference import indexer_topk, merge_states
from tests.indexer.prepare import prepare_cases
from tests.support.cases import DecodeCase, make
from tests.support.dense_cases import DenseCase
from tests.support.dense_cases import make as make_dense
from tests.support.dense_gradients import check_gradients as check_dense_gradients
from tests.support.dense_gradients import make_gradients
from tests.support.gradients import check_gradients
from tests.support.indexer_cases import LogitsCase, PagedCase, logits_inputs, paged_inputs
from tests.support.loss_cases import FIELDS, LossCase, check_loss, loss_inputs, shares
from tests.support.operations import each, function_of, good_call, off_by_a_byte, output_names, stepped_by_bytes
from tests.support.recorder import Recorder
from tests.support.sim_driver import simulated
from tests.support.sparse_cases import SparseCase
from tests.support.sparse_cases import make as make_sparse
from tests.support.sparse_loss_cases import SparseLossCase, check_sparse_loss, sparse_loss_inputs
from tests.support.tolerance import check, check_lse
from tests.support.workspace import aligned_bytes

Array = np.ndarray[Any, Any]
QUICK, SLOW = range(2), range(2, 40)
seeds = pytest.mark.parametrize(
    "seed", [*QUICK, *(pytest.param(seed, marks=pytest.mark.slow) for seed in SLOW)], ids=lambda seed: f"seed{seed}"
)


class LaidOut(NamedTuple):
    """An array, and the memory that it lies in with poison around it."""

    view: Array
    memory: Array
    before: Array

    def assert_nothing_beside(self) -> None:
        mine = self.view.copy()
        self.view[...] = 0
        beside = self.before.copy()
        at_home = np.lib.stride_tricks.as_strided(
            beside.reshape(-1)[self.offset :], self.view.shape, self.view.strides, writeable=True
        )
        at_home[...] = 0
        assert self.memory.tobytes() == beside.tobytes()
        self.view[...] = mine

    @property
    def offset(self) -> int:
        return (self.view.ctypes.data - self.memory.ctypes.data) // self.view.itemsize


def layout_of(array: Input) -> str:
    """Layout as of an output."""
    return "wide" if array.wide else "rows" if array.contiguous else "any"


def lay_out(rng: np.random.Generator, x: Array, array: Input | Output, backwards: float = 0.3) -> LaidOut:
    """Equal values elsewhere, in another allowed layout; some of the axes run backwards."""
    layout = array.layout if isinstance(array, Output) else layout_of(array)
    if array.even and x.ndim > 1:  # the first two axes as one
        one = lay_out(rng, x.reshape(-1, *x.shape[2:]), replace(array, even=False), backwards)
        return one._replace(view=one.view.reshape(x.shape))
    if array.name == "cache" and x.dtype == np.uint8:  # of records: whole pages lie apart
        return lay_out_pages(rng, x)
    free = list(range(x.ndim if layout == "any" else x.ndim - 1))
    order = [*rng.permutation(free), *range(len(free), x.ndim)]
    unit = 16 // x.itemsize if layout == "wide" else 1
    sizes, cut, flipped = [], [], []
    for place, axis in enumerate(order):
        inner = place == x.ndim - 1
        step = int(rng.integers(1, 3)) if axis in free else 1
        begin, end = (int(n) * (unit if inner else 1) for n in rng.integers(0, 3, 2))
        taken = (x.shape[axis] - 1) * step + 1 if x.shape[axis] else 0
        padding = -(begin + taken + end) % unit if inner else 0
        sizes.append(begin + taken + end + padding)
        cut.append(slice(begin, begin + taken, step))
        flipped.append(axis in free and layout != "wide" and bool(rng.random() < backwards))
    poison = np.float32(np.nan) if x.dtype.kind not in "iu" else np.iinfo(x.dtype).max
    memory = np.empty(sizes, x.dtype)
    memory[...] = poison
    view = memory[tuple(cut)]
    for place, flip in enumerate(flipped):
        view = np.flip(view, place) if flip else view
    view = view.transpose(np.argsort(order))
    view[...] = x
    assert view.shape == x.shape
    return LaidOut(view, memory, memory.copy())


def lay_out_pages(rng: np.random.Generator, x: Array) -> LaidOut:
    """Multiples of 16 bytes apart."""
    page = x[0].size
    begin, gap = (16 * int(n) for n in rng.integers(0, 3, 2))
    memory = aligned_bytes(begin + len(x) * (page + -page % 16 + gap))
    memory[...] = 0xFF
    view = memory[begin:].reshape(len(x), -1)[:, :page].reshape(x.shape)
    view[...] = x
    return LaidOut(view, memory, memory.copy())


def arranged(seed: int, operation: Operation, call: dict[str, Any]) -> tuple[dict[str, LaidOut], dict[str, Any]]:
    """Every array of a call, laid out at random; the outputs full of sevens."""
    rng = np.random.default_rng([seed, 13])
    laid = {
        array.name: lay_out(rng, call[array.name], array)
        for array in (*operation.inputs, *operation.outputs)
        if call.get(array.name) is not None
    }
    return laid, {name: it.view for name, it in laid.items()}


def run(seed: int, operation: Operation, call: dict[str, Any], **options: Any) -> tuple[Any, ...]:
    """The results in the simulator. Nothing else has changed."""
    laid, given = arranged(seed, operation, call)
    inputs = {array.name: given[array.name].tobytes() for array in operation.inputs if array.name in given}
    with simulated(2, (9, 0) if seed % 2 else (8, 0)):
        results = function_of(operation)(**given, **options)
    for name in output_names(operation):
        if name in laid:
            laid[name].assert_nothing_beside()
    assert {name: given[name].tobytes() for name in inputs} == inputs
    return tuple(results)


@seeds
def test_decode(seed: int) -> None:
    case = DecodeCase(b=2, s_q=1 + seed % 2, h_q=4, page_size=(16, 24)[seed % 2], seqlens=(35, 17), seed=seed)
    inputs = make(case)
    names = [array.name for array in OPERATIONS["mla_decode"].inputs if not array.optional]
    call = dict(zip(names, inputs.arguments, strict=True))
    outputs = {
        "out": np.full((2, case.s_q, 4, 512), 7, inputs.q.dtype),
        "lse": np.full((2, 4, case.s_q), 7, np.float32),
    }
    got = run(seed, OPERATIONS["mla_decode"], {**call, **outputs}, scale=inputs.q.shape[-1] ** -0.5)
    check(got, inputs.exact, inputs.rounded, case.dtype)


@seeds
def test_prefill(seed: int) -> None:
    """Prefill with a state, and operands whole or in pieces."""
    case = DenseCase(
        ((3, 5), (2, 2)),
        h_q=4,
        h_kv=2,
        q_pair=seed % 2 == 1,
        k_rope=("per_head", "within")[seed % 3 == 2],
        state="float32",
        seed=seed,
    )
    inputs = make_dense(case)
    call = {"q": inputs.q, "k": inputs.k, "v": inputs.v, **inputs.options}
    call["out"], call["lse"] = np.full((5, 4, 128), 7, inputs.q.dtype), np.full((5, 4), 7, np.float32)
    got = run(seed, OPERATIONS["mla_prefill"], call, causal=call.pop("causal"))
    check(got, inputs.exact, inputs.rounded, case.dtype)


@seeds
def test_prefill_backward(seed: int) -> None:
    """The backward with the same operands; the results of a merge."""
    case = DenseCase(
        ((3, 5), (2, 2)),
        h_q=4,
        h_kv=2,
        q_pair=seed % 2 == 1,
        k_rope=("per_head", "within", "shared")[seed % 3],
        state="float32",
        seed=seed,
    )
    inputs = make_gradients(case, dlse=True, out_dtype=("", "float32")[seed % 2])
    names = ("q", "k", "v", "out", "dout", "lse")
    call = {**dict(zip(names, inputs.arguments, strict=True)), **inputs.options}
    for name in ("q", "k", "v", "q_rope", "k_rope"):
        if name in call:
            call[f"d{name}"] = np.full(call[name].shape, 7, inputs.dout.dtype)
    operation = OPERATIONS["mla_prefill_backward"]
    got = run(seed, operation, call, causal=call.pop("causal"), deterministic=seed % 4 < 2)
    check_dense_gradients(got, inputs)


@seeds
def test_prefill_mask(seed: int) -> None:
    """Indices out of range, repeated ones, and indices of another sequence's keys."""
    rng = np.random.default_rng([seed, 17])
    call = {
        "indices": rng.integers(-2, 14, (5, 1, 9), np.int32),
        "cu_seqlens_q": np.array([0, 2, 5], np.int32),
        "cu_seqlens_kv": np.array([0, 7, 12], np.int32),
    }
    options = {"max_keys": 5 + 125 * (seed % 2), "relative": seed % 4 < 2}
    starts = {name: call[name] for name in ("cu_seqlens_q", "cu_seqlens_kv")}
    (exact,) = reference.prefill_mask(call["indices"].reshape(5, 9), **starts, **options)
    call["mask"] = np.full(exact.shape, 7, np.uint8)
    (got,) = run(seed, OPERATIONS["prefill_mask"], call, **options)
    np.testing.assert_array_equal(got, exact)


@seeds
def test_prefill_segments(seed: int) -> None:
    """Padding before, between and after segments; the keys lack one."""
    rng = np.random.default_rng([seed, 19])
    names, lengths = np.array([4, 0, 2, 9, -1]), rng.integers(1, 5, (2, 5))
    ids_q, ids_kv = (
        np.repeat(names[kept], counts[kept]) for kept, counts in zip(([0, 1, 2, 3, 4], [2, 1, 3]), lengths, strict=True)
    )
    call = {"segment_ids_q": ids_q.astype(np.int32), "segment_ids_kv": ids_kv.astype(np.int32)}
    exact = reference.prefill_segments(ids_q, 4, segment_ids_kv=ids_kv)
    outputs = {name: np.full(13, 7, np.int32) for name in ("cu_seqlens_q", "cu_seqlens_kv")}
    for got, expected in zip(
        run(seed, OPERATIONS["prefill_segments"], {**call, **outputs}, max_segments=4), exact, strict=True
    ):
        np.testing.assert_array_equal(got, expected)


SPARSE = SparseCase(
    s_q=3, s_kv=60, h_q=3, topk=20, sequences=((2, 40), (1, 20)), causal=True, lengths=True, sink=True
)  # fmt: skip


def sparse_case(seed: int) -> SparseCase:
    return SparseCase(**{**SPARSE.__dict__, "seed": seed, "d_qk": (576, 512)[seed % 3 == 1]})


@seeds
def test_sparse_forward(seed: int) -> None:
    inputs = make_sparse(sparse_case(seed))
    operation = OPERATIONS["sparse_mla_forward"]
    call = {"q": inputs.q, "kv": inputs.kv, "indices": inputs.indices, **inputs.optional}
    outputs = {
        "out": np.full((3, 3, 512), 7, inputs.q.dtype),
        **{name: np.full((3, 3), 7, np.float32) for name in ("lse", "max_logits")},
    }
    got = run(seed, operation, {**call, **outputs}, causal=True, scale=inputs.q.shape[-1] ** -0.5)
    check(got[:2], inputs.exact[:2], inputs.rounded[:2], inputs.case.dtype)
    check_lse(got[2], inputs.exact[2], inputs.rounded[2])


@seeds
def test_sparse_backward(seed: int) -> None:
    inputs = make_sparse(sparse_case(seed))
    operation = OPERATIONS["sparse_mla_backward"]
    names = ("q", "kv", "out", "dout", "lse", "indices")
    call = {**dict(zip(names, inputs.backward_arguments, strict=True)), **inputs.optional}
    outputs = {
        "dq": np.full(inputs.q.shape, 7, inputs.q.dtype),
        "dkv": np.full(inputs.kv.shape, 7, inputs.q.dtype),
        "d_sink": np.full(3, 7, np.float32),
    }
    got = run(seed, operation, {**call, **outputs}, causal=True, scale=inputs.q.shape[-1] ** -0.5)
    check_gradients(got, inputs)


@seeds
def test_merge(seed: int) -> None:
    rng = np.random.default_rng(seed)
    outs = rng.standard_normal((3, 2, 2, 3, 40), np.float32).astype((np.float32, np.float16)[seed % 2])
    lses = 4 * rng.standard_normal((3, 2, 3, 2), np.float32)
    call = {
        "outs": outs,
        "lses": lses,
        "out": np.full((2, 2, 3, 40), 7, np.float32),
        "lse": np.full((2, 3, 2), 7, np.float32),
    }
    got = run(seed, OPERATIONS["merge_states"], call)
    for x, exact in zip(got, merge_states(outs, lses), strict=True):
        np.testing.assert_allclose(x, exact, rtol=3e-6, atol=3e-6)


def assert_same_logits(got: Array, exact: Array) -> None:
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(exact))
    np.testing.assert_allclose(got, exact, rtol=3e-6, atol=3e-4)


@seeds
def test_indexer_logits(seed: int) -> None:
    inputs = logits_inputs(LogitsCase(s_q=3, s_kv=40, h=3, d=32, dtype=("bfloat16", "uint8")[seed % 2], seed=seed))
    call = {**inputs, "logits": np.full((3, 40), 7, np.float32)}
    (got,) = run(seed, OPERATIONS["indexer_logits"], call)
    assert_same_logits(got, reference.indexer_logits(**inputs))


@seeds
def test_indexer_logits_paged(seed: int) -> None:
    inputs = paged_inputs(PagedCase(b=2, s_q=2, h=3, d=32, page_size=8, seqlens=(13, 20), seed=seed))
    keys = 8 * inputs["block_table"].shape[1]
    (got,) = run(seed, OPERATIONS["indexer_logits_paged"], {**inputs, "logits": np.full((2, 2, keys), 7, np.float32)})
    assert_same_logits(got, reference.indexer_logits_paged(**inputs))


@seeds
def test_indexer_topk(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.integers(-4, 5, (4, 50)).astype(np.float32)
    inputs = {
        "logits": logits,
        "ks": np.array([0, 3, 20, 9], np.int32),
        "ke": np.array([50, 40, 20, 70], np.int32),
        "block_table": rng.integers(0, 99, (2, 7)).astype(np.int32),
    }
    outputs = {
        "indices": np.full((4, 10), 7, np.int32),
        "counts": np.full(4, 7, np.int32),
        "values": np.full((4, 10), 7, np.float32),
    }
    options = {"k": 10, "page_size": 8, "order": ("index", "value")[seed % 2]}
    got = run(seed, OPERATIONS["indexer_topk"], {**inputs, **outputs}, **options)
    for x, exact in zip(got, indexer_topk(**inputs, **options), strict=True):
        np.testing.assert_array_equal(x, exact)


@seeds
def test_indexer_warmup_loss(seed: int) -> None:
    per_head = seed % 2 == 1
    sizes: dict[str, Any] = {"h_i": 3, "target": "per_head", "codes": "uint8"} if per_head else {"lse": True, "d_v": 9}
    sizes |= {"d": 75, "h_kv": 3, "pairs": "qk" if per_head else "qK"}
    case = LossCase(s_q=4, s_kv=7, sequences=((3, 5), (1, 1)), seed=seed, **sizes)
    inputs = loss_inputs(case)
    exact = reference.indexer_warmup_loss(**inputs, **case.options)
    dtypes = dict.fromkeys(FIELDS, np.dtype(np.float32)) | dict.fromkeys(("out", "d_index_k"), inputs["q"].dtype)
    outputs = {name: np.full(x.shape, 7, dtypes[name]) for name, x in exact._asdict().items() if x is not None}
    options = {**case.options, "scale": case.d**-0.5}
    check_loss(run(seed, OPERATIONS["indexer_warmup_loss"], {**inputs, **outputs}, **options), exact)


@seeds
def test_indexer_sparse_loss(seed: int) -> None:
    case = SparseLossCase(s_q=4, s_kv=7, topk=5, d=11, lse=seed % 2 == 0, causal=True, lengths=True, seed=seed)
    inputs = sparse_loss_inputs(case)
    exact = reference.indexer_sparse_loss(**inputs, causal=True)
    dtypes = dict.fromkeys(exact._fields, np.dtype(np.float32)) | {"d_index_k": inputs["q"].dtype}
    outputs = {name: np.full(x.shape, 7, dtypes[name]) for name, x in exact._asdict().items() if x is not None}
    options = {"scale": case.d**-0.5, "causal": True, "deterministic": seed % 2 == 1}
    got = run(seed, OPERATIONS["indexer_sparse_loss"], {**inputs, **outputs}, **options)
    check_sparse_loss(got, exact)


@seeds
def test_indexer_head_sums(seed: int) -> None:
    if seed % 2 == 0:
        inputs = loss_inputs(LossCase(s_q=4, s_kv=7, d=11, lse=True, sequences=((3, 5), (1, 1)), seed=seed))
    else:
        inputs = sparse_loss_inputs(SparseLossCase(s_q=4, s_kv=7, topk=5, d=11, lengths=True, seed=seed))
    given = shares(inputs, 2)[1]
    exact = reference.indexer_head_sums(**given)
    outputs = {"head_sums": np.full(exact.shape, 7, np.float32)}
    (got,) = run(seed, OPERATIONS["indexer_head_sums"], {**given, **outputs}, scale=11**-0.5)
    np.testing.assert_allclose(got, exact, rtol=0, atol=1e-5)


def prepare(seed: int, name: str) -> None:
    operation = OPERATIONS[f"indexer_{name}"]
    inputs = prepare_cases.arrays(name, d=(32, 64)[seed % 2], seed=seed)
    wanted = prepare_cases.expected(name, inputs)
    outputs = {output.name: np.full(x.shape, 7, x.dtype) for output, x in zip(operation.outputs, wanted, strict=True)}
    for x, exact in zip(run(seed, operation, {**inputs, **outputs}), wanted, strict=True):
        np.testing.assert_array_equal(x, exact)


@seeds
def test_indexer_prepare_q(seed: int) -> None:
    prepare(seed, "prepare_q")


@seeds
def test_indexer_prepare_k(seed: int) -> None:
    prepare(seed, "prepare_k")


def in_whole_items(call: dict[str, Any]) -> list[str]:
    """The arrays that can lie between items: not byte arrays."""
    return [name for name, x in call.items() if x.itemsize > 1]


@pytest.mark.parametrize("operation", each(), ids=lambda operation: operation.name)
def test_odd_layouts_among_good_ones(operation: Operation, recorder: Recorder) -> None:
    """Any one of them is found, with whatever layouts the others have; nothing is launched or allocated."""
    for seed in range(10):
        call = good_call(operation)
        for name in in_whole_items(call):
            path = operation.paths.get(name, name)
            for spoil, word in ((off_by_a_byte, f"{path}'s address"), (stepped_by_bytes, f"{path}.strides")):
                _, given = arranged(seed, operation, call)
                with pytest.raises(ShapeError, match="multiple") as caught:
                    function_of(operation)(**{**given, name: spoil(call[name])})
                assert str(caught.value).startswith(word)
    assert (recorder.launches, recorder.allocations) == ([], [])


@pytest.mark.parametrize("operation", each(), ids=lambda operation: operation.name)
def test_layouts_are_told_apart(operation: Operation, recorder: Recorder) -> None:
    """Repeated calls with ever other layouts: each launch has the strides and addresses of its own arrays."""
    call = good_call(operation)
    kinds = [arranged(seed, operation, call)[1] for seed in range(30)]
    memory = aligned_bytes(max(mla_cupy.workspace_bytes(function_of(operation), **kind) for kind in kinds))

    def launched(given: dict[str, Any]) -> list[tuple[str, bytes]]:
        recorder.launches.clear()
        function_of(operation)(**given, workspace=memory)
        return [(launch.entry, launch.params.tobytes()) for launch in recorder.launches]

    alone = []
    for kind in kinds:
        mla_cupy.ops.call.forget()
        alone.append(launched(kind))
    for turn in range(3):
        for index in np.random.default_rng(turn).permutation(len(kinds)):
            assert launched(kinds[index]) == alone[index]


@pytest.mark.parametrize("operation", each(), ids=lambda operation: operation.name)
def test_odd_layouts_in_the_simulator(operation: Operation) -> None:
    """Its arrays have the host arrays' offsets from multiples of 16 bytes."""
    with simulated(2) as target:
        for name in in_whole_items(good_call(operation)):
            for spoil in (off_by_a_byte, stepped_by_bytes):
                call = good_call(operation)
                with pytest.raises(ShapeError, match=name):
                    function_of(operation)(**{**call, name: spoil(call[name])})
    assert target.launched == []
