"""Gradients and losses where scores are huge: what has one largest score has its gradients, all else finite ones.

The oracle has the log-sum-exp in float64. What float32 leaves of it does not tell how many scores are the largest.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import mla_cupy
from mla_cupy import dtypes, reference
from mla_cupy.kernels.dense import DENSE_BACKWARD
from tests.attention.test_huge_scores import HugeCase, integers, queries, tokens
from tests.support.flat import flat
from tests.support.kernels import BACKWARD_KERNELS, cc_of
from tests.support.sim_driver import simulated

Array = npt.NDArray[Any]
BF16 = dtypes.numpy_dtype("bfloat16")


def small(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).integers(-2, 3, shape).astype(BF16)


def check(got: tuple[Any, ...], exact: tuple[Any, ...], deterministic: bool = False) -> None:
    """Each array within 2 % of its largest number.

    The scores' column of dk is huge numbers times what is left of 0. Deterministic sums of a key's columns have one
    floor, so that it hides all others.
    """
    assert len(got) == len(exact)
    for number, (x, y) in enumerate(zip(got, exact, strict=True)):
        assert (x is None) == (y is None)
        if x is None:
            continue
        found, wanted = (np.asarray(of, np.float64) for of in (x, y))
        assert np.isfinite(found).all()
        if number == 1:
            found, wanted = (np.delete(of, of.shape[-1] - 64, axis=-1) for of in (found, wanted))
            if deterministic:
                continue
        np.testing.assert_allclose(found, wanted, rtol=0.02, atol=0.02 * np.abs(wanted).max(), err_msg=str(number))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kernel", [kernel.name for kernel in DENSE_BACKWARD.kernels])
def test_dense_backward(kernel: str, deterministic: bool) -> None:
    case = HugeCase("", "", heads=8, lengths=(0, 67))
    k = np.zeros((67, 8, 192), BF16)
    k[..., 128] = integers(case)[:, None]
    q, v, dout = queries(case, (3,), 192), small(1, 67, 8, 128), small(2, 3, 8, 128)
    options = {"scale": case.options["scale"], "causal": False}
    out, lse = reference.mla_prefill(q, k, v, **options)
    exact = reference.mla_prefill_backward(q, k, v, out, dout, lse, **options)
    with simulated(1, cc_of(kernel), mode="random"):
        arguments = (q, k, v, out.astype(np.float32), dout, lse.astype(np.float32))
        got = flat(mla_cupy.mla_prefill_backward)(*arguments, **options, deterministic=deterministic, kernel=kernel)
    check(got, exact)


@pytest.mark.settled
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kernel", BACKWARD_KERNELS)
def test_sparse_backward(kernel: str, deterministic: bool) -> None:
    heads = 128 if "pair" in kernel else 16
    case = HugeCase("", "", heads=heads, lengths=(0, 67))
    kv, dout = tokens(case)[:, None].astype(BF16), small(2, 1, heads, 512)
    indices = np.full((1, 1, 128), -1, np.int32)
    indices[0, 0, :67] = np.random.default_rng(5).permutation(67)
    q, options = queries(case, (1,), 576), {"scale": case.options["scale"]}
    out, lse, _ = reference.sparse_mla_forward(q, kv, indices, **options)
    exact = reference.sparse_mla_backward(q, kv, out, dout, lse, indices, **options)
    with simulated(2, cc_of(kernel), mode="random"):
        arguments = (q, kv, out.astype(np.float32), dout, lse.astype(np.float32), indices)
        got = flat(mla_cupy.sparse_mla_backward)(*arguments, **options, deterministic=deterministic, kernel=kernel)
    check(got, exact, deterministic)
