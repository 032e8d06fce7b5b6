"""The kernels of the sparse stage's loss in the simulator, through the public call, against the oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mla_cupy
from mla_cupy import ArgumentError, UnsupportedDeviceError, reference
from mla_cupy.kernels.indexer.loss import SPARSE_LOSS
from mla_cupy.kernels.indexer.loss.problem import LossProblem
from mla_cupy.simulation import fake_gpu
from tests.support.flat import flat
from tests.support.loss_cases import TENSOR_CORE_ERROR, run_loss
from tests.support.sim_driver import simulated
from tests.support.sparse_loss_cases import SparseLossCase, check_sparse_loss, sparse_loss_inputs

CASES = [
    SparseLossCase(),
    SparseLossCase(s_q=4, topk=5, lse=True, lengths=True, row_weights=False),
    SparseLossCase(
        s_q=6, s_kv=14, h=5, h_i=3, d=7, d_i=64, causal=True, sequences=((2, 3), (0, 2), (3, 8)), weights="bfloat16"
    ),
    SparseLossCase(s_q=1, s_kv=1, topk=1, h=1, h_i=1, d=1),
    SparseLossCase(s_q=4, topk=3, lse=True, codes="float8_e4m3fn"),
]
FIRST = CASES[0]
GENERIC, HOPPER = "indexer_loss_generic_scores", "indexer_loss_sm90_list_scores"
#: (mode of completion, seed)
MODES = (("late", 0), ("random", 1), ("early", 0), ("random", 2), ("late", 1))
HOPPER_CASES = [
    SparseLossCase(s_q=3, s_kv=150, topk=140, h=3, h_i=2, d=128, d_i=64, lse=True),
    SparseLossCase(s_q=4, s_kv=14, topk=9, h=5, h_i=3, d=136, d_i=128, lse=True, sequences=((1, 3), (0, 2), (3, 8))),
    SparseLossCase(s_q=3, s_kv=40, topk=70, h=2, h_i=66, d=8, lengths=True, causal=True, weights="bfloat16"),
    SparseLossCase(s_q=2, s_kv=40, topk=135, h=66, h_i=1, d=136),
    SparseLossCase(s_q=3, s_kv=14, topk=9, h=2, h_i=3, d=64, d_i=64, lse=True, codes="uint8"),
]
LARGE_HOPPER_CASES = [
    SparseLossCase(s_q=3, s_kv=900, topk=700, h=128, h_i=64, d=576, d_i=128, lse=True),
    SparseLossCase(s_q=3, s_kv=900, topk=650, h=17, h_i=128, d=64, lengths=True),
    SparseLossCase(s_q=3, s_kv=900, topk=700, h=128, h_i=1, d=576),
    SparseLossCase(s_q=3, s_kv=400, topk=300, h=4, h_i=70, d=64, d_i=128, codes="float8_e4m3fn"),
]


def run(case: SparseLossCase, inputs: dict[str, Any], cc: tuple[int, int] = (9, 0), **options: Any) -> tuple[Any, ...]:
    with simulated(2, cc):
        return run_loss(mla_cupy.indexer_sparse_loss, **inputs, **{"causal": case.causal, "kernel": GENERIC, **options})


def run_hopper(case: SparseLossCase, mode: tuple[str, int], **options: Any) -> tuple[Any, ...]:
    inputs = sparse_loss_inputs(case)
    with simulated(2, (9, 0), *mode) as target:
        got = run_loss(mla_cupy.indexer_sparse_loss, **inputs, causal=case.causal, kernel=HOPPER, **options)
    launched = set(target.launched)
    assert {f"mla_{HOPPER}", "mla_indexer_loss_sm90_list_gradients"} <= launched
    assert ("mla_indexer_loss_sm90_list_lse" in launched) == (not case.lse)
    assert "mla_indexer_loss_generic_attention" not in launched
    check_sparse_loss(got, reference.indexer_sparse_loss(**inputs, causal=case.causal), TENSOR_CORE_ERROR)
    return got


@pytest.mark.one_in(8)
@pytest.mark.parametrize("case", HOPPER_CASES, ids=lambda case: case.id)
def test_hopper(case: SparseLossCase) -> None:
    at = HOPPER_CASES.index(case)
    run_hopper(case, MODES[at], deterministic=at in (0, 4), buffer_bytes=1 if at in (1, 4) else 1 << 20)


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("case", [*HOPPER_CASES, *LARGE_HOPPER_CASES], ids=lambda case: case.id)
def test_hopper_in_every_mode(case: SparseLossCase, mode: tuple[str, int], deterministic: bool) -> None:
    run_hopper(case, mode, deterministic=deterministic)


def test_what_hopper_does_not_take() -> None:
    """Odd addresses and widths, no token, more heads: the plain kernels do."""
    sizes = {"s_q": 4, "s_kv": 4, "heads": 2, "index_heads": 2, "head_dim": 128, "index_dim": 64, "topk": 3}
    assert SPARSE_LOSS.configure(LossProblem(**sizes), fake_gpu(1)).kernel.name == HOPPER
    for changes, word in (
        ({"aligned": False}, "16 bytes"),
        ({"s_q": 0}, "one"),
        ({"head_dim": 100}, "multiples of 8"),
        ({"heads": 129}, "up to 128"),
        ({"index_heads": 129}, "up to 128"),
    ):
        problem = LossProblem(**{**sizes, **changes})  # type: ignore[arg-type]
        assert SPARSE_LOSS.configure(problem, fake_gpu(1)).kernel.name == GENERIC
        with pytest.raises(UnsupportedDeviceError, match=word):
            SPARSE_LOSS.configure(problem, fake_gpu(1), HOPPER)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_equals_the_oracle(case: SparseLossCase, deterministic: bool) -> None:
    """Chunks of one token or all, with poison in the keys that nobody selects."""
    inputs = sparse_loss_inputs(case)
    limit = 1 if case.lse else 1 << 20
    got = run(case, inputs, (8, 0) if case.causal else (9, 0), deterministic=deterministic, buffer_bytes=limit)
    check_sparse_loss(got, reference.indexer_sparse_loss(**inputs, causal=case.causal))


def bits_of_both_orders(deterministic: bool) -> set[bytes]:
    """The gradient by keys that many tokens select, of numbers of all sizes, with the tokens in both orders."""
    case = SparseLossCase(s_q=12, s_kv=3, topk=3, h=1, h_i=1, d=4, row_weights=False)
    inputs, rng = sparse_loss_inputs(case), np.random.default_rng(0)
    inputs["indices"] = rng.integers(0, 3, (12, 3)).astype(np.int32)
    for name in ("k", "index_k"):
        inputs[name] = rng.standard_normal(inputs[name].shape).astype(ml_dtypes.bfloat16)
    inputs["weights"] *= (10.0 ** (np.arange(12) % 4))[:, None].astype(np.float32)
    turned = {name: x if name in ("k", "index_k") else x[::-1].copy() for name, x in inputs.items()}
    bits = set()
    for given in (inputs, turned):
        got = run(case, given, deterministic=deterministic, d_index_k=np.zeros((3, 32), np.float32))
        check_sparse_loss(got, reference.indexer_sparse_loss(**given, causal=case.causal))
        bits.add(got[4].tobytes())
    return bits


def test_deterministic_sums_do_not_depend_on_the_order() -> None:
    assert len(bits_of_both_orders(deterministic=True)) == 1
    assert len(bits_of_both_orders(deterministic=False)) == 2, "others do: the test can fail"


def test_only_the_loss() -> None:
    inputs = sparse_loss_inputs(FIRST)
    alone, whole = run(FIRST, inputs, gradients=False), run(FIRST, inputs)
    assert alone[3:] == (None,) * 3
    for x, y in zip(alone[:3], whole[:3], strict=True):
        assert x.tobytes() == y.tobytes()
    shapes = {"d_index_q": inputs["index_q"].shape, "d_index_k": inputs["index_k"].shape}
    wide = {name: np.full(shape, 7, np.float32) for name, shape in shapes.items()}
    got = run(FIRST, inputs, **wide, deterministic=True)
    assert got[4] is wide["d_index_k"]
    check_sparse_loss(got, reference.indexer_sparse_loss(**inputs, causal=FIRST.causal))
    np.testing.assert_array_equal(got[3].astype(ml_dtypes.bfloat16), whole[3])


@pytest.mark.parametrize(("s_q", "s_kv", "topk"), [(0, 3, 2), (3, 0, 2), (3, 4, 0)])
def test_no_token_no_key_or_no_list(s_q: int, s_kv: int, topk: int) -> None:
    """There is no divergence, and the gradients are zeros."""
    case = SparseLossCase(s_q=s_q, s_kv=s_kv, topk=topk)
    inputs = sparse_loss_inputs(case)
    for deterministic in (False, True):
        names = ("d_index_q", "d_index_k", "d_weights")
        targets = {name: np.full(inputs[name[2:]].shape, 7, np.float32) for name in names}
        got = run(case, inputs, deterministic=deterministic, **targets)
        assert (got[0] == 0).all()
        assert all((x == 0).all() for x in targets.values())


def test_all_keys_selected_is_the_warmup_loss() -> None:
    case = SparseLossCase(s_q=3, s_kv=4, topk=4)
    inputs = sparse_loss_inputs(case)
    rng = np.random.default_rng(0)
    for name in ("k", "index_k"):
        inputs[name] = rng.standard_normal(inputs[name].shape).astype(ml_dtypes.bfloat16)
    inputs["indices"] = np.tile(np.arange(4, dtype=np.int32), (3, 1))
    got = run(case, inputs)
    del inputs["indices"]
    with simulated(2):
        wanted = run_loss(mla_cupy.indexer_warmup_loss, **inputs, causal=False, kernel="indexer_loss_generic_scores")
    for x, y in zip(got[:4], wanted[:4], strict=True):
        np.testing.assert_array_equal(x, y)


def test_the_workspace_is_linear() -> None:
    """The workspace grows linearly in the tokens, for lists of one length."""
    sizes = []
    for s in (256, 512, 1024):
        inputs = sparse_loss_inputs(SparseLossCase(s_q=s, s_kv=s, d=4, lse=True))
        with simulated(1):
            sizes.append(
                mla_cupy.workspace_bytes(flat(mla_cupy.indexer_sparse_loss), **inputs, scale=1.0, buffer_bytes=1)
            )
    assert sizes[2] - sizes[1] == 2 * (sizes[1] - sizes[0])


@pytest.mark.parametrize(("deterministic", "mebibytes"), [(False, 1634), (True, 1955)])
def test_the_workspace_of_131072_keys(deterministic: bool, mebibytes: int) -> None:
    """The workspace matches the kernels' page: chunks of 1,024 lists of 2,048 keys."""
    problem = LossProblem(131_072, 131_072, 128, 64, 576, 128, topk=2048, deterministic=deterministic)
    config = SPARSE_LOSS.configure(problem, fake_gpu(1))
    assert config.kernel.name == HOPPER
    assert round(SPARSE_LOSS.workspace(config).nbytes / 2**20) == mebibytes


def test_too_many_additions_are_refused() -> None:
    sizes = LossProblem(1 << 12, 1 << 20, 1, 1, 64, 64, topk=1 << 20, deterministic=True)
    with pytest.raises(ArgumentError, match="deterministic: got True, with s_q"):
        SPARSE_LOSS.configure(sizes, fake_gpu(1))
    assert SPARSE_LOSS.configure(replace(sizes, deterministic=False), fake_gpu(1)).num_bins == 1
