"""Projections on a GPU against the oracle, in sizes that the simulator has no time for; and in a CUDA graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import dtypes, reference
from tests.projection.inputs import kv_b_proj, states
from tests.support.calls import on_host
from tests.support.cases import DecodeCase, make
from tests.support.flat import mla_decode, plan_decode
from tests.support.gpu import upload
from tests.support.tolerance import check

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("n", "b", "s_q", "h", "d_head", "outs_dtype"),
    [
        (1, 16, 1, 128, 128, "half"),
        (5, 16, 1, 128, 128, "float32"),
        (66, 1, 1, 128, 128, "float32"),
        (256, 1, 1, 16, 128, "float32"),
        (3, 9, 7, 64, 256, "half"),
        (2, 70, 1, 16, 192, "float32"),
        (9, 3, 2, 12, 64, "half"),
        (32, 16, 1, 16, 128, "float32"),
        (33, 17, 1, 16, 128, "float32"),
    ],
)
def test_merge_project(gpu: object, n: int, b: int, s_q: int, h: int, d_head: int, outs_dtype: str, dtype: str) -> None:
    given = states(n, b, s_q, h, d_head, dtype, dtype if outs_dtype == "half" else outs_dtype)
    arrays = {name: upload(x) for name, x in given.arrays.items()}
    out, lse = on_host(mla_cupy.merge_project(**arrays, out_dtype="float32"))
    exact, exact_lse = reference.merge_project(*given, rounding=dtype)
    flip = 8 * dtypes.TABLE[dtype].unit_roundoff * float(np.abs(given.w_uv.astype(np.float32)).max())
    np.testing.assert_allclose(out, exact, rtol=1e-4, atol=flip)
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-5, atol=1e-5)
    assert not out[0, 0, 0].any()
    again, _ = on_host(mla_cupy.merge_project(**arrays, out_dtype="float32"))
    assert again.tobytes() == out.tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("b", "s_q", "h", "d_head"),
    [(1, 1, 128, 128), (64, 1, 16, 128), (70, 3, 128, 128), (33, 1, 96, 64), (9, 5, 5, 256)],
)
def test_results_without_an_lse(gpu: object, b: int, s_q: int, h: int, d_head: int, dtype: str) -> None:
    """One state in 16 bits: copied, not merged. A token's bits do not depend on the others."""
    given = states(1, b, s_q, h, d_head, dtype, dtype)
    outs = np.nan_to_num(given.outs)
    arrays = [upload(x) for x in (outs, given.w_uv)]
    gate = upload(given.gate)
    out, _ = mla_cupy.merge_project(*arrays, gate=gate, out_dtype="float32")
    last, _ = mla_cupy.merge_project(arrays[0][:, -1:], arrays[1], gate=gate[-1:], out_dtype="float32")
    got, alone = on_host((out, last))
    np.testing.assert_allclose(got, reference.merge_project(outs, given.w_uv, gate=given.gate)[0], rtol=1e-4, atol=1e-4)
    assert got[-1:].tobytes() == alone.tobytes()


@pytest.mark.parametrize(("b", "h"), [(1, 128), (4, 128), (16, 128), (64, 16), (1, 16), (5, 96)])
@pytest.mark.parametrize("plan", [None, {}, {"batch_invariant": True, "split_tokens": 512}], ids=str)
def test_decode(gpu: object, b: int, h: int, plan: dict[str, Any] | None) -> None:
    """A graph, replayed over the first call's leftovers."""
    import cupy

    case = DecodeCase(b=b, h_q=h, seqlens="ragged-3000")
    inputs, rng = make(case), np.random.default_rng(0)
    _, w_uv = kv_b_proj(rng, h, 128, 128, case.dtype)
    gate = rng.standard_normal((b, 1, h, 128)).astype(w_uv.dtype)
    weights = {"w_uv": w_uv, "gate": gate}
    exact, rounded = (reference.mla_decode(*inputs.arguments, **weights, rounding=x) for x in (None, case.dtype))
    arrays = [upload(x) for x in inputs.arguments]
    options: dict[str, Any] = {name: upload(x) for name, x in weights.items()}
    options |= {"scale": 576**-0.5, "out": cupy.zeros(gate.shape, gate.dtype)}
    options["lse"] = cupy.zeros((b, h, 1), cupy.float32)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        if plan is None:
            nbytes = mla_cupy.workspace_bytes(mla_decode, *arrays, **options)
            options["workspace"] = cupy.empty(nbytes, cupy.uint8)
        else:
            sizes = {"max_b": b, "s_q": 1, "h_q": h, "max_pages": inputs.block_table.shape[1]}
            sizes |= {"page_size": case.page_size, "dtype": case.dtype, "d_head": 128}
            options["plan"] = plan_decode(**sizes, **plan)
            options["plan"].update(arrays[3])
        got = on_host(mla_decode(*arrays, **options))
        check(got, exact, rounded, case.dtype)
        options["out"].fill(0)
        stream.begin_capture()
        mla_decode(*arrays, **options)
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
    replayed = on_host((options["out"], options["lse"]))
    assert replayed[0].tobytes() == got[0].tobytes()
    assert replayed[1].tobytes() == got[1].tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("b", "s_q", "h", "d_head"), [(64, 1, 128, 128), (67, 1, 64, 256), (23, 3, 96, 192), (140, 1, 48, 64)]
)
def test_decode_of_many_rows(gpu: object, b: int, s_q: int, h: int, d_head: int, dtype: str) -> None:
    """W_UV after the combine; a result with gaps."""
    case = DecodeCase(b=b, s_q=s_q, h_q=h, seqlens="ragged-300", dtype=dtype)
    inputs, rng = make(case), np.random.default_rng(0)
    _, w_uv = kv_b_proj(rng, h, 128, d_head, dtype)
    gate = rng.standard_normal((b, s_q, h, d_head)).astype(w_uv.dtype)
    weights = {"w_uv": w_uv, "gate": gate}
    exact, rounded = (reference.mla_decode(*inputs.arguments, **weights, rounding=x) for x in (None, dtype))
    out = upload(np.zeros((b, s_q, h, d_head + 8), w_uv.dtype))[..., :d_head]
    arrays, options = [upload(x) for x in inputs.arguments], {name: upload(x) for name, x in weights.items()}
    got = on_host(mla_decode(*arrays, **options, out=out))
    check(got, exact, rounded, dtype)
    again = on_host(mla_decode(*arrays, **options, out=out))
    assert again[0].tobytes() == got[0].tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("t", "h", "d_nope"),
    [(1, 128, 128), (16, 128, 128), (300, 16, 192), (33, 96, 64), (7, 5, 256), (131, 128, 128), (64, 16, 128)],
)
def test_absorb(gpu: object, t: int, h: int, d_nope: int, dtype: str) -> None:
    rng = np.random.default_rng(t)
    whole = rng.standard_normal((t, h, d_nope + 64)).astype(dtypes.numpy_dtype(dtype))
    w_uk, _ = kv_b_proj(rng, h, d_nope, 128, dtype)
    queries = upload(whole)
    q = mla_cupy.absorb(queries[..., :d_nope], upload(w_uk), q_rope=queries[..., d_nope:])
    (exact,) = reference.absorb(whole[..., :d_nope], w_uk, whole[..., d_nope:])
    got = on_host((q, q))[0].astype(float)
    np.testing.assert_allclose(got, exact, rtol=1.01 * dtypes.TABLE[dtype].unit_roundoff, atol=1e-4)
