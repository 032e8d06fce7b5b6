"""The preparation before decode on a GPU: every byte, many rows, graphs, time beside a copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import reference
from mla_cupy.ops import backend
from tests.cache.prepare_runs import CASES, PrepareCase, check_prepare, make
from tests.cache.test_rates_gpu import copy_microseconds, microseconds
from tests.support.gpu import fetch, upload

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_oracle(case: PrepareCase, gpu: object) -> None:
    check_prepare(case, upload, fetch)


@pytest.mark.parametrize("quantise", [False, True])
@pytest.mark.parametrize("record", ["bf16", "fp8", "v32"])
def test_many_rows(quantise: bool, record: str, gpu: object) -> None:
    kept = {"kv_scale": 0.2} if record == "fp8" else {}
    check_prepare(PrepareCase(n=301, h=16, quantise=quantise, record=record, hostile=False, **kept), upload, fetch)


def test_a_captured_call_follows_its_arrays(gpu: object) -> None:
    import cupy

    case = PrepareCase(record="v32", hostile=False, quantise=True)
    first, second = make(case), make(case, seed=1)
    given = {name: upload(x) for name, x in first.arrays.items()}
    results = mla_cupy.mla_prepare(**given, **first.options)  # which allocates, and loads the kernel
    out, q_scales = results[:2]
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        mla_cupy.mla_prepare(**given, **first.options, out=out, q_scales=q_scales)
        graph = stream.end_capture()
    for name, x in second.arrays.items():
        given[name][...] = upload(np.ascontiguousarray(x))
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    exact = reference.mla_prepare(**second.arrays, **second.options)
    codes, scales = backend.rounded(exact[:2], ("uint8", "float32"))
    np.testing.assert_array_equal(fetch(out), codes)
    np.testing.assert_array_equal(fetch(q_scales), scales)


def arrays_of(n: int, h: int) -> dict[str, Any]:
    """Queries, and tokens for the rows of a 16-bit cache."""
    import cupy

    kind = upload(np.zeros(1, "bfloat16")).dtype
    rng = np.random.default_rng(0)
    angles = rng.random((4096, 32), np.float32)
    return {
        "q": cupy.zeros((n, h, 576), kind),
        "latent": cupy.zeros((n, 512), kind),
        "rope": cupy.zeros((n, 64), kind),
        "cache": cupy.zeros((2 * n // 64, 64, 576), kind),
        "slots": cupy.asarray(rng.permutation(2 * n)[:n].astype(np.int32)),
        "cos": cupy.asarray(np.cos(angles)),
        "sin": cupy.asarray(np.sin(angles)),
        "positions": cupy.asarray(rng.integers(0, 4096, n).astype(np.int32)),
    }


@pytest.mark.perf
def test_a_step_of_decoding_in_place(gpu: object) -> None:
    given = arrays_of(128, 128)
    took = microseconds(lambda stream: mla_cupy.mla_prepare(**given, out=given["q"], stream=stream))
    print(f"128 tokens of 128 heads, in place: {took:.2f} us")
    assert took <= 4


@pytest.mark.perf
@pytest.mark.parametrize("n", [128, 8192])
def test_codes_beside_a_copy_of_their_bytes(n: int, gpu: object) -> None:
    import cupy

    given = arrays_of(n, 128)
    codes, scales = cupy.empty((n, 128, 576), cupy.uint8), cupy.empty((n, 128), cupy.float32)
    results = {"out": codes, "q_scales": scales}
    took = microseconds(lambda stream: mla_cupy.mla_prepare(**given, **results, quantise=True, stream=stream))
    copied = copy_microseconds(given["q"].nbytes + codes.nbytes + scales.nbytes + 4 * given["latent"].nbytes)
    print(f"{n} tokens of 128 heads to codes: {took:.1f} us; a copy of as many bytes {copied:.1f} us")
    assert took <= 1.6 * copied
