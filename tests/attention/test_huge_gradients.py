"""Gradients where scores are huge: such rows have none, and do not disturb the others.

A log-sum-exp in float32 does not tell the weights of such a row.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import mla_cupy
from mla_cupy import dtypes, reference
from mla_cupy.kernels.dense import DENSE_BACKWARD
from tests.attention.test_huge_scores import HugeCase, integers, queries, tokens
from tests.support.kernels import BACKWARD_KERNELS, cc_of, in_both_sizes
from tests.support.sim_driver import simulated

Array = npt.NDArray[Any]
DENSE = [kernel.name for kernel in DENSE_BACKWARD.kernels]
BF16 = dtypes.numpy_dtype("bfloat16")


def small(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).integers(-2, 3, shape).astype(BF16)


def check(got: tuple[Any, ...], exact: tuple[Any, ...], lse: Array) -> None:
    """Each array is within 2 % of its largest number; the first one is dq."""
    assert len(got) == len(exact)
    for number, (x, y) in enumerate(zip(got, exact, strict=True)):
        assert (x is None) == (y is None)
        if x is None:
            continue
        found, wanted = (np.asarray(of, np.float64) for of in (x, y))
        np.testing.assert_allclose(found, wanted, rtol=0.02, atol=0.02 * np.abs(wanted).max(), err_msg=str(number))
    huge = np.abs(lse) > 1e8
    assert 0 < huge.sum() < huge.size
    dq = np.asarray(got[0], np.float64)
    assert not dq[huge].any()
    assert dq[~huge].any()


def run_dense(kernel: str, deterministic: bool, place: AbstractContextManager[Any]) -> None:
    case = HugeCase("", "", heads=8, lengths=(0, 67))
    k = np.zeros((67, 8, 192), BF16)
    k[..., 128] = integers(case)[:, None]
    q, v, dout = queries(case, (3,), 192), small(1, 67, 8, 128), small(2, 3, 8, 128)
    options = {"scale": case.options["scale"], "causal": False}
    out, lse = reference.mla_prefill(q, k, v, **options)
    exact = reference.mla_prefill_backward(q, k, v, out, dout, lse, **options)
    with place:
        arguments = (q, k, v, out.astype(np.float32), dout, lse.astype(np.float32))
        got = mla_cupy.mla_prefill_backward(*arguments, **options, deterministic=deterministic, kernel=kernel)
    check(got, exact, lse)


def run_sparse(kernel: str, deterministic: bool, place: AbstractContextManager[Any]) -> None:
    heads = 128 if "pair" in kernel else 16
    case = HugeCase("", "", heads=heads, lengths=(0, 67))
    kv, dout = tokens(case)[:, None].astype(BF16), small(2, 1, heads, 512)
    indices = np.full((1, 1, 128), -1, np.int32)
    indices[0, 0, :67] = np.random.default_rng(5).permutation(67)
    q, options = queries(case, (1,), 576), {"scale": case.options["scale"]}
    out, lse, _ = reference.sparse_mla_forward(q, kv, indices, **options)
    exact = reference.sparse_mla_backward(q, kv, out, dout, lse, indices, **options)
    with place:
        arguments = (q, kv, out.astype(np.float32), dout, lse.astype(np.float32), indices)
        got = mla_cupy.sparse_mla_backward(*arguments, **options, deterministic=deterministic, kernel=kernel)
    check(got, exact, lse)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kernel", DENSE)
def test_dense_backward(kernel: str, deterministic: bool) -> None:
    run_dense(kernel, deterministic, simulated(1, cc_of(kernel), mode="random"))


@pytest.mark.one_in(8)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kernel", in_both_sizes(BACKWARD_KERNELS))
def test_sparse_backward(kernel: str, deterministic: bool) -> None:
    run_sparse(kernel, deterministic, simulated(2, cc_of(kernel), mode="random"))


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kernel", DENSE)
def test_dense_backward_on_a_gpu(hopper: object, kernel: str, deterministic: bool) -> None:
    run_dense(kernel, deterministic, nullcontext())


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kernel", in_both_sizes(kernel for kernel in BACKWARD_KERNELS if "sm100" not in kernel))
def test_sparse_backward_on_a_gpu(hopper: object, kernel: str, deterministic: bool) -> None:
    run_sparse(kernel, deterministic, nullcontext())
