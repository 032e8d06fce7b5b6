"""The kernels of the backward of dense attention in the simulator, through the public call, against the oracle.

What no query sees is NaN, and what belongs to a query that sees no key; sequences end anywhere in a tile.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mla_cupy
from tests.dense.backward_runs import GENERIC, KERNELS, run
from tests.support.dense_cases import DenseCase
from tests.support.dense_gradients import NAMES, GradientInputs, make_gradients, moved
from tests.support.flat import flat
from tests.support.sim_driver import simulated

Array = np.ndarray[Any, Any]
SMALL = (
    (
        DenseCase(((3, 5), (0, 2), (2, 0), (4, 2)), h_q=4, h_kv=2, around=(1, 1), q_pair=True),
        {"dlse": True},
    ),
    (
        DenseCase(((2, 34),), d_qk=256, d_v=256, dtype="float16", causal=False, state="float16", k_rope="per_head"),
        {"out_dtype": "float32"},
    ),
    (DenseCase(((34, 3),), d_qk=128, d_v=128, h_q=2, h_kv=1, k_rope="within", starts=False), {}),
)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("case", "options", "cc"),
    [(*SMALL[0], (7, 5)), (*SMALL[1], (9, 0)), (*SMALL[2], (10, 0))],
    ids=["sequences", "wide", "narrow"],
)
def test_generic_kernels(case: DenseCase, options: dict[str, Any], cc: tuple[int, int]) -> None:
    run(make_gradients(case, **options), GENERIC, 1, ("random", 3), cc)


def test_two_tiles() -> None:
    """Two tiles of keys, then of queries."""
    run(make_gradients(DenseCase(((2, 131), (130, 2)), d_qk=128, d_v=128)), GENERIC)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_what_one_query_sees_stays_with_it(kernel: str, deterministic: bool) -> None:
    """NaN in keys that only later queries see, in queries that only earlier keys are seen by, and across sequences."""
    inputs = make_gradients(DenseCase(((6, 6), (3, 3))))
    inputs.forward.v[4, 0, 9], inputs.forward.k[5, 0, 3] = np.nan, np.nan
    inputs.dout[1, 0, 5] = np.nan
    for array in (*inputs.arguments, inputs.options["k_rope"]):
        array[6:] = np.nan
    got = run(inputs, kernel, deterministic=deterministic)
    dq, dk, dv, dk_rope = (x.astype(np.float32) for x in got if x is not None)
    assert np.isfinite(dq[[0, 2, 3]]).all()
    assert np.isfinite(dk[2:4]).all()
    assert np.isfinite(dv[2:4]).all()
    assert np.isfinite(dk_rope[2:4]).all()
    assert all(np.isnan(x[6:]).all() for x in (dq, dk, dv, dk_rope))


@pytest.mark.one_in(8)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_results_stay_within_their_rows(kernel: str, deterministic: bool) -> None:
    """As views of larger arrays, dk and dv of one, results leave all memory between and around them unchanged."""
    inputs = make_gradients(DenseCase(((3, 4), (66, 5)), h_q=4, h_kv=2, q_pair=True))
    s_q, s_kv = inputs.case.totals
    kind = inputs.dout.dtype
    queries, rope = np.full((s_q + 2, 5, 136), 7, kind), np.full((s_q + 2, 6, 72), 7, kind)
    keys, key_rope = np.full((s_kv + 2, 3, 264), 7, kind), np.full((s_kv + 2, 80), 7, kind)
    results = {
        "dq": queries[1:-1, :4, :128],
        "dq_rope": rope[1:-1, :4, :64],
        "dk": keys[1:-1, :2, :128],
        "dv": keys[1:-1, :2, 128:256],
        "dk_rope": key_rope[1:-1, :64],
    }
    got = run(inputs, kernel, deterministic=deterministic, **results)
    for name, x in zip(NAMES, got, strict=True):
        assert x is results[name]
        x[...] = 7
    assert all((x == 7).all() for x in (queries, rope, keys, key_rope))


@pytest.mark.parametrize("kernel", KERNELS)
def test_hostile_starts(kernel: str) -> None:
    """They are clamped, and never go down."""
    inputs = make_gradients(DenseCase(((9, 11),), starts=False))
    inputs.options["cu_seqlens_q"] = np.array([-(2**31), 4, 2, 2**31 - 1, 5], np.int32)
    inputs.options["cu_seqlens_kv"] = np.array([3, -1, 7, 6, 2**31 - 1], np.int32)
    run(with_finite(inputs), kernel)


def with_finite(inputs: GradientInputs) -> GradientInputs:
    """The case with log-sum-exps that are right for its starts: P is then at most 1."""
    out, lse = mla_cupy.reference.mla_prefill(*inputs.forward.arguments, **inputs.options)
    inputs.out[:], inputs.lse[:] = out.astype(inputs.out.dtype), lse
    return inputs


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(3, 0), (0, 3), (0, 0)])
def test_none_of_a_kind(kernel: str, deterministic: bool, queries: int, keys: int) -> None:
    """The others' gradients are zeros."""
    inputs = make_gradients(DenseCase(((queries, keys),), h_q=2, starts=False))
    with simulated(1) as target:
        got = flat(mla_cupy.mla_prefill_backward)(
            *inputs.arguments, **inputs.options, kernel=kernel, deterministic=deterministic
        )
    assert bool(target.launched) == bool(queries or keys)
    for array, x in zip((inputs.forward.q, inputs.forward.k, inputs.forward.v), got[:3], strict=True):
        assert x.shape == array.shape
        assert not x.any()
    assert not got[4].any()


def test_odd_strides_fall_to_the_generic_kernel() -> None:
    inputs = make_gradients(DenseCase(((2, 3),)))
    odd = np.zeros((*inputs.forward.k.shape[:2], inputs.forward.k.shape[2] + 1), inputs.dout.dtype)[..., 1:]
    odd[:] = inputs.forward.k
    run(moved(inputs, k=odd), GENERIC)
    with simulated(1) as target:
        flat(mla_cupy.mla_prefill_backward)(inputs.forward.q, odd, *inputs.arguments[2:], **inputs.options)
    assert f"mla_{GENERIC}" in target.launched
