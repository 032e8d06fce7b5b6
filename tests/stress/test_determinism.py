"""Equal calls give equal bits; the order of a batch changes nothing but roundings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy.runtime.device import DeviceInfo
from tests.support.calls import ALL_KERNELS, need, on_host, plan_of
from tests.support.cases import DecodeCase, make
from tests.support.flat import mla_decode
from tests.support.gpu import upload, uploaded
from tests.support.kernels import fitting, in_both_sizes
from tests.support.tolerance import check

pytestmark = pytest.mark.gpu

REPEATS = 1000


@pytest.fixture(params=in_both_sizes(ALL_KERNELS))
def kernel(request: pytest.FixtureRequest, gpu: DeviceInfo) -> str:
    need(request.param, gpu)
    return str(request.param)


@pytest.mark.parametrize(
    "case",
    [
        DecodeCase(b=4, h_q=128, seqlens=(700, 64, 1500, 1)),
        DecodeCase(b=1, h_q=16, seqlens=4000, dtype="float16"),
        DecodeCase(b=30, h_q=16, s_q=2, seqlens="ragged-200", page_size=16),
    ],
    ids=lambda case: case.id,
)
def test_a_thousand_repeats_give_the_same_bits(kernel: str, case: DecodeCase) -> None:
    import cupy

    inputs = make(fitting(case, kernel))
    arguments = uploaded(inputs)
    plan = plan_of(inputs, kernel=kernel)
    plan.update(arguments[3])
    out, lse = mla_decode(*arguments, plan=plan)
    first = on_host((out, lse))
    check(first, inputs.exact, inputs.rounded, case.dtype)
    first_out, first_lse = cupy.asarray(first[0].view(np.uint16)), cupy.asarray(first[1].view(np.uint32))
    different = cupy.zeros(2, cupy.int64)
    for repeat in range(REPEATS):
        out.fill(np.nan)
        lse.fill(np.nan)
        if repeat % 10 == 0:
            plan.update(arguments[3])
        mla_decode(*arguments, plan=plan, out=out, lse=lse)
        different[0] += (out.view(cupy.uint16) != first_out).sum()
        different[1] += (lse.view(cupy.uint32) != first_lse).sum()
    assert different.get().tolist() == [0, 0]


def test_merging_repeats_give_the_same_bits(gpu: DeviceInfo) -> None:
    import cupy

    rng = np.random.default_rng(0)
    outs = upload(rng.standard_normal((7, 4, 2, 16, 512), np.float32))
    lses = upload(rng.standard_normal((7, 4, 16, 2), np.float32))
    first = on_host(mla_cupy.merge_states(outs, lses))
    different = cupy.zeros((), cupy.int64)
    for _ in range(200):
        out, lse = mla_cupy.merge_states(outs, lses)
        different += (out != cupy.asarray(first[0])).sum() + (lse != cupy.asarray(first[1])).sum()
    assert int(different) == 0


@pytest.mark.parametrize("h_q", [16, 128])
@pytest.mark.parametrize("seed", range(3))
def test_order_of_the_batch(kernel: str, h_q: int, seed: int) -> None:
    inputs = make(fitting(DecodeCase(b=17, h_q=h_q, seqlens="ragged-900", seed=seed), kernel))
    order = np.random.default_rng(seed).permutation(17)
    q, kv_cache, table, seqlens = inputs.arguments
    permuted: Any = (upload(q[order]), upload(kv_cache), upload(table[order]), upload(seqlens[order]))
    out, lse = on_host(mla_decode(*permuted, kernel=kernel))
    back = np.argsort(order)
    check((out[back], lse[back]), inputs.exact, inputs.rounded, inputs.case.dtype)
