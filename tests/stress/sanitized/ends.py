"""The ends of a layer, before attention and after it, and the forms of decode that have kernels of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

import mla_cupy
from mla_cupy import dtypes, reference
from tests.cache import absorbed_runs, prepare_runs
from tests.decode.test_forms import CASES as FORMS
from tests.decode.test_forms import SINKS, FormCase, form_inputs
from tests.indexer.prepare.prepare_cases import both, expected
from tests.projection.inputs import kv_b_proj, states
from tests.stress.sanitized import Call
from tests.support.calls import assert_same
from tests.support.cases import DecodeCase, make
from tests.support.flat import mla_decode
from tests.support.gpu import fetch, upload
from tests.support.tolerance import check

To, Back = Callable[[Any], Any], Callable[[Any], Any]
#: n, b, s_q, h, d_head; tokens fewer and more than a block's, a head wider than a block's columns.
MERGES = ((1, 1, 1, 3, 64), (3, 2, 1, 2, 128), (9, 3, 2, 1, 256), (2, 9, 5, 2, 192))
#: t, h, d_nope.
ABSORBED = ((1, 2, 128), (40, 1, 64), (5, 3, 256))
PROJECTED = (
    DecodeCase(b=2, h_q=4, seqlens=(130, 0)),
    DecodeCase(b=1, s_q=3, h_q=7, seqlens=400, dtype="float16"),  # split
    DecodeCase(b=3, h_q=64, seqlens=(70, 3, 66)),
    DecodeCase(b=41, h_q=128, seqlens="ragged-100"),  # W_UV after the combine
)


def calls(to: To = upload, back: Back = fetch) -> Iterator[Call]:
    """Each operation, with gaps and strides that are none; `to` and `back` take arrays to where they are computed."""
    for case in prepare_runs.CASES:
        yield Call(f"prepare {case}", partial(prepare_runs.check_prepare, case, to, back))
    for absorbed in absorbed_runs.CASES:
        yield Call(f"prepare and absorb {absorbed}", partial(absorbed_runs.check_absorbed, absorbed, to, back))
    for d in (32, 64, 128):
        yield Call(f"index {d}", partial(index, d, to, back))
    for sizes in ABSORBED:
        yield Call(f"absorb {sizes}", partial(absorb, *sizes, to, back))
    for merged in MERGES:
        yield Call(f"merge and project {merged}", partial(merge_project, *merged, to, back))
    for projected in PROJECTED:
        yield Call(f"decode and project {projected.id}", partial(decode_and_project, projected, to, back))
    for case_and_kernel in FORMS:
        yield Call(f"forms {case_and_kernel[0].id}", partial(forms, *case_and_kernel, to, back))
    for base, kernel in SINKS:
        yield Call(f"sink {base.id}", partial(forms, FormCase(base, sink=True), kernel, to, back))


def index(d: int, to: To, back: Back) -> None:
    """Queries and keys, byte by byte."""
    inputs = both(d)
    got = mla_cupy.indexer_prepare(**{name: to(x) for name, x in inputs.items()}, return_k=True)
    for x, wanted in zip(got, expected("prepare", inputs), strict=True):
        assert_same(back(x), wanted)


def absorb(t: int, h: int, d_nope: int, to: To, back: Back) -> None:
    """Beside a RoPE part; the weights are columns of a larger matrix, the queries of longer ones."""
    rng = np.random.default_rng(t)
    w_uk, _ = kv_b_proj(rng, h, d_nope, 64, "bfloat16")
    q = rng.standard_normal((t, h, d_nope + 64), np.float32).astype(w_uk.dtype)
    parts = q[..., :d_nope], q[..., d_nope:]
    got = mla_cupy.absorb(to(parts[0]), to(w_uk), q_rope=to(parts[1]))
    (wanted,) = reference.absorb(parts[0], w_uk, parts[1])
    np.testing.assert_allclose(back(got).astype(np.float64), wanted, rtol=2**-8, atol=2e-2)


def merge_project(n: int, b: int, s_q: int, h: int, d_head: int, to: To, back: Back) -> None:
    """Merge and project with a gate; empty states have NaN."""
    given = states(n, b, s_q, h, d_head)
    got = mla_cupy.merge_project(**{name: to(x) for name, x in given.arrays.items()}, out_dtype="float32")
    exact, exact_lse = reference.merge_project(*given, rounding="bfloat16")
    flip = 8 * dtypes.TABLE["bfloat16"].unit_roundoff * float(np.abs(given.w_uv.astype(np.float32)).max())
    np.testing.assert_allclose(back(got[0]), exact, rtol=1e-4, atol=flip)
    np.testing.assert_allclose(back(got[1]), exact_lse, rtol=1e-5, atol=1e-5)


def decode_and_project(case: DecodeCase, to: To, back: Back) -> None:
    """Decode and project with a gate."""
    inputs, rng = make(case), np.random.default_rng(0)
    _, w_uv = kv_b_proj(rng, case.h_q, 128, 128, case.dtype)
    gate = rng.standard_normal((case.b, case.s_q, case.h_q, 128)).astype(w_uv.dtype)
    weights = {"w_uv": w_uv, "gate": gate}
    exact, rounded = (reference.mla_decode(*inputs.arguments, **weights, rounding=x) for x in (None, case.dtype))
    got = mla_decode(*map(to, inputs.arguments), **{name: to(x) for name, x in weights.items()})
    check((back(got[0]), back(got[1])), exact, rounded, case.dtype)


def forms(case: FormCase, kernel: str, to: To, back: Back) -> None:
    """Optional inputs, with the case's kernel."""
    inputs = form_inputs(case)
    given: dict[str, Any] = {name: to(x) for name, x in inputs.arrays.items()}
    got = mla_decode(**given, **inputs.options, kernel=kernel)
    check((back(got[0]), back(got[1])), inputs.exact, inputs.rounded, case.base.dtype)
