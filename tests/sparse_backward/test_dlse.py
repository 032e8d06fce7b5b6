"""The gradient through lse: its formula, and what the kernels are told."""

from __future__ import annotations

import numpy as np
import pytest

import mla_cupy
from mla_cupy import reference
from mla_cupy.simulation import simulated
from tests.sparse_backward.test_launches import backward, records
from tests.support.flat import flat
from tests.support.gradients import check_gradients
from tests.support.recorder import Recorder
from tests.support.sparse_cases import Array, SparseCase, make

STEP = 1e-6


def loss(arrays: dict[str, Array], indices: Array, weights: tuple[Array, Array], lse_base: str) -> float:
    """A sum of out and lse, weighted; rows without a key have no lse."""
    out, lse, _ = reference.sparse_mla_forward(**arrays, indices=indices, d_v=16, lse_base=lse_base)
    return float((out * weights[0]).sum() + np.where(np.isinf(lse), 0, lse * weights[1]).sum())


@pytest.mark.parametrize("lse_base", ["e", "2"])
@pytest.mark.parametrize("sink", [None, (0.3, 2.0), (25.0, -np.inf)], ids=str)
def test_differences_of_the_forward(lse_base: str, sink: tuple[float, ...] | None) -> None:
    """Differences in float64, for every element of q, of kv and of the sinks."""
    rng = np.random.default_rng(0)
    indices = rng.integers(0, 9, (3, 6))
    indices[1], indices[2, 3:] = -1, -1  # a query without a row, and one with few
    arrays = {"q": rng.standard_normal((3, 2, 20)), "kv": rng.standard_normal((9, 20))}
    if sink is not None:
        arrays["attn_sink"] = np.array(sink)
    weights = rng.standard_normal((3, 2, 16)), rng.standard_normal((3, 2))
    out, lse, _ = reference.sparse_mla_forward(**arrays, indices=indices, d_v=16, lse_base=lse_base)
    given = {"out": out, "dout": weights[0], "lse": lse, "dlse": weights[1], "indices": indices}
    found = reference.sparse_mla_backward(**arrays, **given, d_v=16, lse_base=lse_base)
    for gradient, (name, x) in zip(found, arrays.items(), strict=False):
        assert gradient is not None
        for at in np.ndindex(x.shape):
            ends = []
            for by in (STEP, -STEP):
                moved = x.copy()
                moved[at] += by
                ends.append(loss({**arrays, name: moved}, indices, weights, lse_base))
            assert gradient[at] == pytest.approx((ends[0] - ends[1]) / (2 * STEP), abs=1e-7)


def test_what_nothing_flows_through() -> None:
    """A query without a key, an infinite lse, and an infinite sink; whatever the gradient there is."""
    inputs = make(SparseCase(s_q=3, s_kv=20, h_q=3, topk=5, invalid=0.0, sink=True, dlse=True))
    assert np.isposinf(inputs.attn_sink[2])
    inputs.indices[0] = -1
    inputs.lse[1, 0], inputs.lse[1, 1] = np.inf, -np.inf
    inputs.dlse[0], inputs.dlse[1] = np.nan, np.inf
    dq, dkv, d_sink = reference.sparse_mla_backward(*inputs.backward_arguments, **inputs.backward_options)
    assert not dq[:2].any()
    assert not dq[2, 2].any()
    assert np.isfinite(dkv).all()
    with simulated():
        got = flat(mla_cupy.sparse_mla_backward)(
            *inputs.backward_arguments, **inputs.backward_options, kernel="sparse_backward_generic"
        )
    assert not got[0][:2].any()
    assert not got[0][2, 2].any()
    assert np.isfinite(got[1].astype(np.float32)).all()
    np.testing.assert_allclose(got[2], d_sink, rtol=1e-4, atol=1e-5)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("deterministic", [False, True])
def test_base_two_and_a_sink_that_takes_nearly_all(deterministic: bool) -> None:
    """The bounds of a deterministic call bound the products, not their large factor."""
    case = SparseCase(s_q=3, s_kv=30, h_q=3, topk=20, invalid=0.0, sink=True, dlse=True)
    inputs = make(case)
    inputs.attn_sink[:] = 12, -np.inf, 25
    out, lse, _ = reference.sparse_mla_forward(*inputs.arguments, **inputs.options, lse_base="2")
    arguments = (inputs.q, inputs.kv, out.astype(np.float32), inputs.dout, lse.astype(np.float32), inputs.indices)
    exact = reference.sparse_mla_backward(*arguments, **inputs.backward_options, lse_base="2")
    options = {"lse_base": "2", "deterministic": deterministic, "kernel": "sparse_backward_generic"}
    with simulated():
        got = flat(mla_cupy.sparse_mla_backward)(*arguments, **inputs.backward_options, **options, dkv_dtype="float32")
    for x, y in zip(got, exact, strict=True):
        np.testing.assert_allclose(x.astype(np.float64), y, rtol=0, atol=1e-2 * np.abs(y).max())
    assert np.abs(exact[0][:, 2]).max() > 0.1  # all of it through lse: out is next to nothing


# ---- Launches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_statistics_change(recorder: Recorder, deterministic: bool) -> None:
    """Between the kernel that makes them and those that read them."""
    inputs = make(SparseCase(topk=70, sink=True, dlse=True))
    backward(inputs, deterministic=deterministic)
    before, after = ["attention_row_lists", "sparse_backward_delta"], ["sparse_backward_dkv", "sparse_backward_sink"]
    bins = ["exact_sums_norms", "exact_sums_bounds", "exact_sums_bins"] if deterministic else []
    assert recorder.entries == [*before, "sparse_backward_dlse", *bins, "sparse_backward_sm90", *after]
    (delta,), (dlse,), (main,) = (records(recorder, f"sparse_backward_{name}") for name in ("delta", "dlse", "sm90"))
    assert (dlse["dlse"], dlse["lse"]) == (inputs.dlse.ctypes.data, inputs.lse.ctypes.data)
    for name, x in (("dlse", inputs.dlse), ("lse", inputs.lse)):
        strides = dlse[f"{name}_stride_s_elems"], dlse[f"{name}_stride_h_elems"]
        assert strides == tuple(stride // 4 for stride in x.strides)
    assert (dlse["lse2"], dlse["delta"]) == (delta["lse2"], delta["delta"]) == (main["lse2"], main["delta"])
    assert (dlse["s_q"], dlse["h_q"], dlse["lse_to_log2"]) == (7, 16, np.float32(np.log2(np.e)))
    if deterministic:
        (bounds,) = records(recorder, "exact_sums_bounds")
        assert bounds["delta"] == dlse["delta_bounds"]
        assert dlse["delta_bounds"] not in (0, delta["delta"])
    else:
        assert dlse["delta_bounds"] == 0


def test_workspaces_without_it_are_as_before(recorder: Recorder) -> None:
    sizes = []
    for deterministic in (False, True):
        for dlse in (False, True):
            backward(make(SparseCase(topk=70, dlse=dlse)), deterministic=deterministic)
            sizes.append(recorder.allocations[-1][0])
    assert sizes[0] == sizes[1]
    assert sizes[3] - sizes[2] == 512  # 4 * s_q * h_q, in whole units of 256 bytes


def test_the_rule_sees_it() -> None:
    """Gradients without it are not taken for gradients with it."""
    inputs = make(SparseCase(s_q=2, s_kv=60, h_q=3, topk=30, dlse=True))
    with simulated():
        got = flat(mla_cupy.sparse_mla_backward)(*inputs.backward_arguments, **inputs.options)
    with pytest.raises(AssertionError, match="allowed"):
        check_gradients(got, inputs)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("dtype", "kernel"), [("float16", "sm90"), ("bfloat16", "sm90"), ("float16", "generic")])
def test_rows_beneath_a_sink(dtype: str, kernel: str) -> None:
    """As documented: with a sink far above the scores, float16 on tensor cores has no dq; other kernels keep it."""
    heads = 64 if kernel == "sm90" else 3
    inputs = make(SparseCase(s_q=1, s_kv=20, h_q=heads, topk=8, invalid=0.0, sink=True, dtype=dtype))
    _, lse, _ = reference.sparse_mla_forward(*inputs.arguments, **inputs.options)
    inputs.attn_sink[:] = lse[0] + 18  # no P is above e^-18, half of float16's smallest number
    dout = (inputs.dout.astype(np.float32).clip(-6, 6) * 1e4).astype(inputs.dout.dtype)
    out = reference.sparse_mla_forward(*inputs.arguments, **inputs.options)[0].astype(dout.dtype)
    arguments = (inputs.q, inputs.kv, out, dout, lse.astype(np.float32), inputs.indices)
    exact, *_ = reference.sparse_mla_backward(*arguments, **inputs.backward_options)
    assert np.abs(exact).max() > 1e-4
    with simulated():
        dq, *_ = flat(mla_cupy.sparse_mla_backward)(
            *arguments, **inputs.backward_options, kernel=f"sparse_backward_{kernel}"
        )
    if (dtype, kernel) == ("float16", "sm90"):
        assert not dq.astype(np.float32).any()
    else:
        np.testing.assert_allclose(dq.astype(np.float32), exact, rtol=0, atol=0.02 * np.abs(exact).max())
