"""Indices of packed sequences: counted from the first row of each sequence, or of all rows with `relative=False`."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mla_cupy
from mla_cupy import ArgumentError
from mla_cupy.simulation import simulated
from tests.bindings.cases import Array, BoundCall, as_tuple, backward, forward, head_sums, sparse_loss
from tests.interop.test_torch import array, tensor
from tests.support.calls import assert_same
from tests.support.flat import flat
from tests.support.loss_cases import run_loss
from tests.support.recorder import Recorder
from tests.support.sparse_loss_cases import SparseLossCase

SEQUENCES = {"sequences": ((2, 15), (3, 20)), "causal": True, "lengths": True}
LISTS = SparseLossCase(s_q=6, s_kv=30, sequences=((2, 10), (1, 0), (2, 15)), lengths=True)
CALLS = [
    forward(SEQUENCES, lse_base="2"),
    forward({**SEQUENCES, "causal": False, "head_axis": True}),
    backward(SEQUENCES),
    sparse_loss(LISTS, deterministic=True),
    head_sums(LISTS),
]
each = pytest.mark.parametrize("call", CALLS, ids=[call.id for call in CALLS])
INT_MAX = 2**31 - 1


def of_all_rows(call: BoundCall) -> BoundCall:
    """Selection by row numbers; entries past a sequence's end name the next one's rows."""
    indices, starts_q, starts_kv = (call.arrays[x] for x in ("indices", "cu_seqlens_q", "cu_seqlens_kv"))
    sequence = np.clip(np.searchsorted(starts_q, np.arange(len(indices)), side="right") - 1, 0, len(starts_kv) - 2)
    start = starts_kv[sequence].astype(np.int64).reshape(-1, *[1] * (indices.ndim - 1))
    moved = np.where(indices < 0, indices, np.minimum(indices + start, INT_MAX)).astype(np.int32)
    assert (moved != indices).any()
    return BoundCall(call.id, call.operation, {**call.arrays, "indices": moved}, {**call.options, "relative": False})


def compare(got: tuple[Any, ...], wanted: tuple[Any, ...]) -> None:
    assert len(got) == len(wanted)
    for x, expected in zip(got, wanted, strict=True):
        if expected is not None:
            assert_same(np.asarray(x), np.asarray(expected))


@pytest.mark.usefixtures("_numpy_backend")
@each
def test_numpy(call: BoundCall) -> None:
    compare(of_all_rows(call).eager(), call.eager())


@pytest.mark.one_in(8)
@each
def test_simulated(call: BoundCall) -> None:
    """The kernel that makes the lists is the only one that knows; what follows has the same lists, and bits."""
    with simulated():
        wanted, got = call.eager(), of_all_rows(call).eager()
    if call.operation == "sparse_mla_backward":  # `dkv` is summed in any order
        np.testing.assert_allclose(got[1].astype(float), wanted[1].astype(float), atol=0.05)
        got, wanted = got[::2], wanted[::2]
    compare(got, wanted)


@pytest.mark.usefixtures("_numpy_backend")
@each
def test_torch(torch: Any, of_torch: Any, call: BoundCall) -> None:
    moved = of_all_rows(call)
    given = {name: tensor(torch, x) for name, x in moved.arrays.items()}
    options = {name: getattr(torch, x) if name.endswith("dtype") else x for name, x in moved.options.items()}
    got = as_tuple(flat(getattr(of_torch, call.operation))(**given, **options))
    compare(tuple(None if x is None else array(torch, x) for x in got), call.eager())


@pytest.mark.usefixtures("_numpy_backend")
@each
def test_jax(jax: Any, of_jax: Any, call: BoundCall) -> None:
    moved = of_all_rows(call)
    function = jax.jit(lambda arrays: flat(getattr(of_jax, call.operation))(**arrays, **moved.options))
    compare(as_tuple(function({name: jax.numpy.asarray(x) for name, x in moved.arrays.items()})), call.eager())


GRADIENTS = forward(SEQUENCES), sparse_loss(LISTS)


def gradients_of_torch(torch: Any, of_torch: Any, call: BoundCall) -> list[Array]:
    given = {name: tensor(torch, x) for name, x in call.arrays.items()}
    wanted = ("q", "kv") if call.operation == "sparse_mla_forward" else ("index_q", "index_k", "weights")
    leaves = [given[name].requires_grad_() for name in wanted]
    if call.operation == "sparse_mla_forward":
        value = flat(of_torch.sparse_mla_forward)(**given, **call.options)[0].float().sum()
    else:
        value = run_loss(of_torch.indexer_sparse_objective, **given, **call.options)[0]
    return [array(torch, x) for x in torch.autograd.grad(value, leaves)]


@pytest.mark.usefixtures("_numpy_backend")
@pytest.mark.parametrize("call", GRADIENTS, ids=[call.id for call in GRADIENTS])
def test_gradients_of_torch(torch: Any, of_torch: Any, call: BoundCall) -> None:
    wanted = gradients_of_torch(torch, of_torch, call)
    assert all(np.abs(x.astype(np.float64)).max() > 0 for x in wanted)
    compare(tuple(gradients_of_torch(torch, of_torch, of_all_rows(call))), tuple(wanted))


def gradients_of_jax(jax: Any, of_jax: Any, call: BoundCall) -> list[Array]:
    wanted = ("q", "kv") if call.operation == "sparse_mla_forward" else ("index_q", "index_k", "weights")
    given = {name: jax.numpy.asarray(x) for name, x in call.arrays.items()}

    def value(leaves: dict[str, Any]) -> Any:
        if call.operation == "sparse_mla_forward":
            return flat(of_jax.sparse_mla_forward)(**{**given, **leaves}, **call.options)[0].astype("float32").sum()
        return run_loss(of_jax.indexer_sparse_objective, **{**given, **leaves}, **call.options)[0]

    found = jax.jit(jax.grad(value))({name: given[name] for name in wanted})
    return [np.asarray(found[name]) for name in wanted]


@pytest.mark.usefixtures("_numpy_backend")
@pytest.mark.parametrize("call", GRADIENTS, ids=[call.id for call in GRADIENTS])
def test_gradients_of_jax(jax: Any, of_jax: Any, call: BoundCall) -> None:
    compare(tuple(gradients_of_jax(jax, of_jax, of_all_rows(call))), tuple(gradients_of_jax(jax, of_jax, call)))


@pytest.mark.usefixtures("_numpy_backend")
@pytest.mark.parametrize("relative", [False, True])
def test_what_the_indexer_selects(relative: bool) -> None:
    """Selections of two sequences are attended to as they come, with the same value of `relative`."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(ml_dtypes.bfloat16)

    starts_q, starts_kv = np.array([0, 2, 5], np.int32), np.array([0, 9, 20], np.int32)
    owner = np.searchsorted(starts_q, np.arange(5), side="right") - 1
    weights = rng.random((5, 2), np.float32)
    ks, ke = starts_kv[owner], starts_kv[owner + 1]
    indices, _ = mla_cupy.indexer_select(normal(5, 2, 32), normal(20, 32), weights, ks, ke, topk=6, relative=relative)
    q, kv = normal(5, 4, 576), normal(20, 576)
    out, _, _ = flat(mla_cupy.sparse_mla_forward)(
        q, kv, indices, scale=576**-0.5, packed=mla_cupy.Packed(starts_q, starts_kv), relative=relative, check=True
    )
    rows = indices + (ks[:, None] if relative else 0)
    wanted, _, _ = mla_cupy.sparse_mla_forward(q, kv, rows, scale=576**-0.5)
    assert_same(out, wanted)


@pytest.mark.usefixtures("_numpy_backend")
def test_check_names_the_keyword() -> None:
    starts_q, starts_kv = np.array([0, 1, 2], np.int32), np.array([0, 5, 9], np.int32)
    q, kv = np.ones((2, 2, 576), np.float16), np.ones((9, 576), np.float16)
    call: dict[str, Any] = {"scale": 1.0, "packed": mla_cupy.Packed(starts_q, starts_kv)}
    indices = np.array([[0, 4, -1], [5, 8, -1]], np.int32)
    with mla_cupy.checking():
        mla_cupy.sparse_mla_forward(q, kv, indices, relative=False, **call)
    said = r"indices\[1, 0\]: got 5, .* row of 0 to 3; pass relative=False for row"
    with mla_cupy.checking(), pytest.raises(ArgumentError, match=said):
        mla_cupy.sparse_mla_forward(q, kv, indices, **call)
    indices[1, 1] = 4
    said = r"indices\[1, 1\]: got 4, expected -1, or a row of 5 to 8$"
    with mla_cupy.checking(), pytest.raises(ArgumentError, match=said):
        mla_cupy.sparse_mla_forward(q, kv, indices, relative=False, **call)
    with pytest.raises(ArgumentError, match=r"relative: got 2, expected True or False"):
        mla_cupy.sparse_mla_forward(q, kv, indices, relative=2, scale=576**-0.5)


def test_the_kernel_is_told(recorder: Recorder) -> None:
    for call in CALLS:
        for relative in (True, False):
            recorder.launches.clear()
            changed = {name: call.arrays[name].copy() for name in call.changed if name in call.arrays}
            options = {**call.options, "relative": relative}
            flat(getattr(mla_cupy, call.operation))(**{**call.arrays, **changed}, **options)
            (lists,) = (x for x in recorder.launches if x.entry == "mla_attention_row_lists")
            assert lists.params["relative"] == relative
