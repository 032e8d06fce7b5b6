"""The Blackwell kernels of the sparse backward in the simulator, through the public call, against the oracle.

What all main kernels must do, test_sparse_backward_sim.py has. No GPU has run these kernels, so here is what could go
wrong in their choreography: tiles of keys by number and remainder, heads by number, and the asynchrony of loads,
products and reads of tensor memory, early, late and in random order.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy.errors import ArgumentError
from mla_cupy.kernels.sparse_backward.problem import SparseBackwardProblem
from tests.support.flat import flat
from tests.support.gradients import check_gradients
from tests.support.kernels import BACKWARD_KERNELS, BLACKWELL
from tests.support.sim_driver import fake_gpu, simulated
from tests.support.sparse_cases import SparseCase, SparseInputs, make

MODES = (("early", 0), ("late", 0), *(("random", seed) for seed in range(1, 21)))

ONE = SparseCase(s_q=1, s_kv=300, h_q=64, topk=32, invalid=0.0)
CASES = [
    # Tiles of 32 keys: 1, 2, 3, 4, 5, 6.
    ONE,
    replace(ONE, topk=64, h_q=1, sink=True),
    replace(ONE, topk=96, h_q=16, d_qk=512),
    replace(ONE, topk=128, h_q=100, dtype="float16"),
    replace(ONE, topk=160, h_q=128, sink=True),
    replace(ONE, topk=192, h_q=64, d_qk=512, dtype="float16"),
    # The last tile has 1 key, 31, 1, 31.
    replace(ONE, topk=1, h_q=16),
    replace(ONE, topk=31, h_q=128, d_qk=512, sink=True),
    replace(ONE, topk=33, h_q=64, dtype="float16"),
    replace(ONE, topk=127, h_q=1),
    # Two queries a launch, each with a list of its own length; some have no key at all.
    SparseCase(s_q=2, s_kv=300, h_q=64, topk=130, lengths=True, sink=True),
    SparseCase(s_q=6, s_kv=200, h_q=16, topk=70, lengths=True, causal=True, d_qk=512),
    SparseCase(s_q=2, s_kv=60, h_q=100, topk=40, invalid=1.0, sink=True),
    # Fewer rows than slots: every row is selected several times by a query.
    SparseCase(s_q=2, s_kv=1, h_q=16, topk=40, invalid=0.0),
    SparseCase(s_q=2, s_kv=5, h_q=128, topk=70, invalid=0.3, dtype="float16", sink=True),
    SparseCase(s_q=5, s_kv=90, h_q=1, topk=70, sequences=((2, 30), (0, 5), (3, 50)), causal=True),
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_matches_oracle:
        # The kernel that calls get by default takes every case; those that run on request take turns.
        default, *others = BLACKWELL
        chosen_kernels = [(default, others[i % len(others)]) for i in range(len(CASES))]
        pairs = [(case, kernel) for case, kernels in zip(CASES, chosen_kernels, strict=True) for kernel in kernels]
        # Modes and determinism take turns; the first three modes come most often.
        turns = [MODES[i % 3] if i % 2 else MODES[2 + i // 2 % 20] for i in range(len(pairs))]
        chosen = [(*pair, mode, i % 5 == 2) for i, (pair, mode) in enumerate(zip(pairs, turns, strict=True))]
        # With one head, rows of tiny weight have gradients below the precision of exact additions.
        chosen = [(case, *rest, exact and case.h_q > 1) for case, *rest, exact in chosen]
        ids = [
            f"{case.id}-{kernel}-{mode}{seed}{'-deterministic' if deterministic else ''}"
            for case, kernel, (mode, seed), deterministic in chosen
        ]
        metafunc.parametrize(("case", "kernel", "mode", "deterministic"), chosen, ids=ids)


def run(
    inputs: SparseInputs, kernel: str | None, mode: tuple[str, int] = ("early", 0), **options: Any
) -> tuple[Any, Any, Any]:
    with simulated(2, (10, 0), *mode) as target:
        got = flat(mla_cupy.sparse_mla_backward)(*inputs.backward_arguments, **inputs.options, kernel=kernel, **options)
    assert BACKWARD_KERNELS[kernel or BLACKWELL[0]].entry in target.launched
    return got


@pytest.mark.one_in(16)
def test_matches_oracle(case: SparseCase, kernel: str, mode: tuple[str, int], deterministic: bool) -> None:
    inputs = make(case)
    check_gradients(run(inputs, kernel, mode, deterministic=deterministic), inputs, deterministic=deterministic)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("kernel", BLACKWELL)
@pytest.mark.parametrize("sink", [-np.inf, 0.7, np.inf], ids=str)
def test_sinks(kernel: str, sink: float) -> None:
    """-inf is no sink; +inf takes all of the weight, so nothing is left of dq and dkv."""
    inputs = make(SparseCase(s_q=2, s_kv=90, h_q=64, topk=40, sink=True))
    assert inputs.attn_sink is not None
    inputs.attn_sink[:] = sink
    got = run(make_consistent(inputs), kernel)
    check_gradients(got, inputs)
    if sink == np.inf:
        assert not any(np.asarray(x, np.float32).any() for x in got)


def make_consistent(inputs: SparseInputs) -> SparseInputs:
    """`out` belongs to the current sinks."""
    out, lse, _ = mla_cupy.reference.sparse_mla_forward(*inputs.arguments, **inputs.options)
    inputs.out[...] = out.astype(inputs.out.dtype)
    inputs.lse[...] = lse.astype(inputs.lse.dtype)
    return inputs


@pytest.mark.one_in(4)
@pytest.mark.parametrize("cc", [(10, 0), (10, 3)], ids=str)
def test_default_kernel(cc: tuple[int, int]) -> None:
    """Tiles of 32 keys, for every call with 16-byte steps; the cubin is the GPU's."""
    inputs = make(SparseCase(s_q=2, s_kv=90, h_q=3, topk=40))
    with simulated(2, cc) as target:
        got = flat(mla_cupy.sparse_mla_backward)(*inputs.backward_arguments, **inputs.options)
    assert "mla_sparse_backward_sm100" in target.launched
    check_gradients(got, inputs)


def test_arrays_that_tensor_maps_cannot_describe() -> None:
    """Odd strides go to the generic kernel, which says so by name."""
    inputs = make(SparseCase(s_q=2, s_kv=40, h_q=2, topk=20, strides="odd"))
    with simulated(2, (10, 0)) as target:
        got = flat(mla_cupy.sparse_mla_backward)(*inputs.backward_arguments, **inputs.options)
    assert "mla_sparse_backward_generic" in target.launched
    check_gradients(got, inputs)


@pytest.mark.parametrize("kernel", BLACKWELL)
def test_nan_behind_the_last_head(kernel: str) -> None:
    """Boxes of 64 heads end at the array's heads: what lies behind them in memory is another query, or poison."""
    inputs = make(SparseCase(s_q=2, s_kv=60, h_q=5, topk=30))
    inputs.q[1], inputs.dout[1] = np.nan, np.nan
    expected = mla_cupy.reference.sparse_mla_backward(*inputs.backward_arguments, **inputs.options)
    got = run(inputs, kernel, ("random", 3))
    assert np.isfinite(got[0][0].astype(np.float32)).all()
    unit = np.abs(expected[0][0]).max()
    np.testing.assert_allclose(got[0][0].astype(np.float64), expected[0][0], rtol=0, atol=2e-2 * unit)


@pytest.mark.parametrize("kernel", BLACKWELL)
def test_dq_of_the_caller_keeps_its_gaps(kernel: str) -> None:
    """dq leaves in boxes: nothing between its rows, and nothing behind its last head, is written."""
    inputs = make(SparseCase(s_q=2, s_kv=60, h_q=3, topk=30))
    whole = np.full((2, 5, 640), 7, inputs.q.dtype)
    dq = whole[:, 1:4, 8:584]
    got = run(inputs, kernel, ("late", 0), dq=dq)
    assert got[0] is dq
    check_gradients(got, inputs)
    whole[:, 1:4, 8:584] = 7
    assert (whole == 7).all()


def test_hopper_refuses_by_name() -> None:
    inputs = make(SparseCase(s_q=1, s_kv=30, h_q=2, topk=20))
    for kernel in BLACKWELL:
        with pytest.raises(RuntimeError, match=r"compute capability 10\.0 or 10\.3"), simulated(2, (9, 0)):
            flat(mla_cupy.sparse_mla_backward)(*inputs.backward_arguments, **inputs.options, kernel=kernel)
    with pytest.raises(ArgumentError, match="sparse_backward_sm100"), simulated(2, (10, 0)):
        flat(mla_cupy.sparse_mla_backward)(*inputs.backward_arguments, **inputs.options, kernel="sparse_backward_sm10")


def test_takes_every_number_of_heads() -> None:
    gpu = fake_gpu(2, (10, 0))
    for kernel in BLACKWELL:
        for h_q in (1, 64, 65, 128):
            problem = SparseBackwardProblem(4, 10, h_q, 7, 576, "bfloat16")
            assert not BACKWARD_KERNELS[kernel].unsupported(problem, gpu)
