"""The logits on a GPU: every kernel against the oracle, hostile input, and bits that do not depend on the place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import dtypes, reference
from mla_cupy.kernels.indexer.logits import LOGITS, LOGITS_PAGED
from mla_cupy.kernels.indexer.logits.problem import CODES, LogitsProblem
from mla_cupy.reference.indexer_records import page_parts
from mla_cupy.runtime import device
from tests.support.gpu import upload
from tests.support.indexer_cases import (
    IN_FLOAT16,
    ON_TENSOR_CORES,
    LogitsCase,
    PagedCase,
    as_codes,
    check_logits,
    logits_inputs,
    paged_inputs,
)
from tests.support.kernels import by_name

pytestmark = pytest.mark.gpu

CASES = [
    LogitsCase(s_q=1, s_kv=1, h=1, dtype="uint8", ranges="none"),
    LogitsCase(s_q=333, s_kv=4099, h=64, dtype="uint8"),
    LogitsCase(s_q=512, s_kv=2048, h=64, dtype="uint8", ranges="causal"),
    LogitsCase(s_q=40, s_kv=20000, h=32, dtype="uint8"),
    LogitsCase(s_q=100, s_kv=3000, h=128, dtype="uint8"),
    LogitsCase(s_q=65, s_kv=1000, h=12, d=64, dtype="uint8"),
    LogitsCase(s_q=65, s_kv=1000, h=3, d=32, dtype="uint8"),
    LogitsCase(s_q=200, s_kv=3000, h=64, dtype="bfloat16", scales=False),
    LogitsCase(s_q=200, s_kv=1000, h=100, d=64, dtype="bfloat16"),
    LogitsCase(s_q=20, s_kv=700, h=100, d=128, dtype="bfloat16"),  # more than the fast kernel takes
    LogitsCase(s_q=9, s_kv=300, h=40, d=32, dtype="bfloat16"),
]
HALF_CASES = [
    LogitsCase(s_q=1, s_kv=1, h=1, dtype="uint8", ranges="none", float16=True),
    LogitsCase(s_q=333, s_kv=4099, h=64, dtype="uint8", float16=True),
    LogitsCase(s_q=512, s_kv=2048, h=64, dtype="uint8", ranges="causal", float16=True),
    LogitsCase(s_q=100, s_kv=3000, h=128, dtype="uint8", float16=True),
    LogitsCase(s_q=65, s_kv=1000, h=12, d=64, dtype="uint8", float16=True),
    LogitsCase(s_q=65, s_kv=1000, h=3, d=32, dtype="uint8", float16=True),
]
PAGED_CASES = [
    PagedCase(b=1, s_q=1, h=64, seqlens=(1,)),
    PagedCase(b=5, s_q=1, h=64, seqlens=(4000, 0, 65, 64, 1999)),
    PagedCase(b=3, s_q=2, h=32, seqlens=(1000, 2, 129), missing_page=True),
    PagedCase(b=4, s_q=4, h=64, seqlens=(700, 64, 3000, 5), per_token=True),
    PagedCase(b=2, s_q=8, h=128, seqlens=(500, 1300)),
    PagedCase(b=1, s_q=1, h=24, seqlens=(30000,)),
    PagedCase(b=2, s_q=3, h=7, d=64, page_size=32, seqlens=(300, 77)),
    PagedCase(b=1, s_q=11, h=7, page_size=64, seqlens=(300,)),
]


def kernels(pipeline: Any, problem: LogitsProblem) -> list[str]:
    """Kernels that support the problem on this GPU."""
    return [name for name, kernel in by_name(pipeline).items() if not kernel.unsupported(problem, device.describe(0))]


def on_gpu(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: upload(x) for name, x in inputs.items()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_logits(case: LogitsCase, gpu: object) -> None:
    inputs = logits_inputs(case)
    exact, given = reference.indexer_logits(**inputs), on_gpu(inputs)
    dtype = CODES[0] if case.dtype in CODES else case.dtype
    for kernel in kernels(LOGITS, LogitsProblem(case.s_q, case.s_kv, case.h, case.d, dtype)):
        for out_dtype in ("float32", "bfloat16"):
            got = mla_cupy.indexer_logits(**given, kernel=kernel, out_dtype=out_dtype).get()
            check_logits(got, inputs, exact, ON_TENSOR_CORES)


@pytest.mark.parametrize("case", HALF_CASES, ids=lambda case: case.id)
def test_float16(case: LogitsCase, gpu: object) -> None:
    inputs = logits_inputs(case)
    got = mla_cupy.indexer_logits(**on_gpu(inputs), accumulate="float16").get()
    check_logits(got, inputs, reference.indexer_logits(**inputs), IN_FLOAT16)


@pytest.mark.parametrize("d", [32, 64, 128])
def test_the_largest_codes_are_finite_in_float16(d: int, hopper: object) -> None:
    q, k = as_codes(np.full((40, 128, d), 128 / d)), as_codes(np.full((300, d), 448.0))
    weights = np.full((40, 128), -3e20, np.float32)
    got = mla_cupy.indexer_logits(upload(q), upload(k), upload(weights), accumulate="float16").get()
    np.testing.assert_allclose(got, 57344.0 * 128 * weights[0, 0].astype(np.float64), rtol=1e-2)
    too_large = upload(k[None, :40]), upload(k), upload(weights[:1, :40])
    assert np.isneginf(mla_cupy.indexer_logits(*too_large, accumulate="float16").get()).all()


def test_bits_do_not_depend_on_the_place_in_float16(hopper: object) -> None:
    inputs = logits_inputs(LogitsCase(s_q=40, s_kv=700, h=24, dtype="uint8", ranges="none", float16=True))
    here = mla_cupy.indexer_logits(**on_gpu(inputs), accumulate="float16").get()
    for tokens, before in ((3, 1), (5, 77), (8, 128)):
        rows = {name: np.concatenate([inputs[name][:tokens], inputs[name]]) for name in ("q", "weights")}
        keys = {name: np.concatenate([inputs[name][:before], inputs[name]]) for name in ("k", "k_scale")}
        there = mla_cupy.indexer_logits(**on_gpu({**rows, **keys}), accumulate="float16").get()
        np.testing.assert_array_equal(there[tokens:, before:].view(np.uint32), here.view(np.uint32))


def test_prepared_queries_in_float16(gpu: object) -> None:
    """Logits of equal queries are as near to each other as their codes are."""
    rng = np.random.default_rng(2)
    q = rng.standard_normal((50, 64, 128), np.float32).astype(dtypes.numpy_dtype("bfloat16"))
    k = rng.standard_normal((900, 128), np.float32).astype(dtypes.numpy_dtype("bfloat16"))
    tables = upload(np.ones((1, 32), np.float32)), upload(np.zeros((1, 32), np.float32))
    codes, scales = mla_cupy.indexer_prepare_k(upload(k), *tables, upload(np.zeros(900, np.int32)))
    logits = []
    for accumulate in ("float32", "float16"):
        place = upload(np.zeros(50, np.int32))
        weights = upload(np.ones((50, 64), np.float32))
        queries, folded = mla_cupy.indexer_prepare_q(upload(q), weights, *tables, place, accumulate=accumulate)
        got = mla_cupy.indexer_logits(queries, codes, folded, k_scale=scales, accumulate=accumulate)
        logits.append(got.get().astype(np.float64))
    assert np.abs(logits[0] - logits[1]).max() < 0.02 * np.abs(logits[0]).max()


@pytest.mark.parametrize("case", PAGED_CASES, ids=lambda case: case.id)
def test_paged(case: PagedCase, gpu: object) -> None:
    inputs = paged_inputs(case)
    exact, given = reference.indexer_logits_paged(**inputs), on_gpu(inputs)
    problem = LogitsProblem(case.b * case.s_q, 1, case.h, case.d, CODES[0], case.s_q, case.page_size, 1)
    for kernel in kernels(LOGITS_PAGED, problem):
        got = mla_cupy.indexer_logits_paged(**given, kernel=kernel).get()
        check_logits(got, inputs, exact, ON_TENSOR_CORES)


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("s_kv", [1000, 1003])
def test_nothing_is_written_outside(clean: bool, dtype: str, s_kv: int, gpu: object) -> None:
    import cupy

    inputs = logits_inputs(LogitsCase(s_q=77, s_kv=s_kv, h=16, dtype="uint8"))
    exact = reference.indexer_logits(**inputs)
    memory = cupy.full((77, s_kv + 5), 7, dtypes.numpy_dtype(dtype))
    mla_cupy.indexer_logits(**on_gpu(inputs), clean=clean, logits=memory[:, :s_kv])
    got = memory.get().astype(np.float32)
    assert (got[:, s_kv:] == 7).all()
    assert (got[:, :s_kv][~np.isfinite(exact)] == (-np.inf if clean else 7)).all()


@pytest.mark.parametrize("h", [1, 24, 64, 100])
def test_bits_do_not_depend_on_the_place(h: int, hopper: object) -> None:
    """Equal queries and keys, shifted by any number of tokens and keys, and in pages."""
    case = PagedCase(b=1, s_q=8, h=h, seqlens=(1000,), per_token=True)
    inputs = paged_inputs(case)
    codes, scales = page_parts(inputs["cache"][:, :, 0])
    pages = inputs["block_table"][0, :16]
    keys, factors = codes[pages].reshape(1024, 128).view(np.uint8), scales[pages].reshape(1024).copy()
    paged = mla_cupy.indexer_logits_paged(**on_gpu(inputs)).get()[0, :, :1024]
    ends = inputs["seqlens"][0]
    for tokens, before in ((0, 0), (3, 1), (5, 77), (8, 128)):
        prefill = mla_cupy.indexer_logits(
            upload(np.concatenate([inputs["q"][0][:tokens], inputs["q"][0]])),
            upload(np.concatenate([keys[:before], keys])),
            upload(np.concatenate([inputs["weights"][0][:tokens], inputs["weights"][0]])),
            ks=upload(np.full(tokens + 8, before, np.int32)),
            ke=upload(np.concatenate([ends[:tokens], ends + before]).astype(np.int32)),
            k_scale=upload(np.concatenate([factors[:before], factors])),
        ).get()
        np.testing.assert_array_equal(prefill[tokens:, before:].view(np.uint32), paged.view(np.uint32))


@pytest.mark.parametrize(("s_q", "h"), [(1, 64), (2, 64), (1, 32), (3, 24)])
def test_bits_do_not_depend_on_the_share(s_q: int, h: int, hopper: device.DeviceInfo) -> None:
    """Shares of 128 pages and more, whose first ones are asked for before an earlier kernel is done; each call at once
    after another. Pages are in many places of the table, and some of them are none."""
    inputs = paged_inputs(PagedCase(b=16, s_q=s_q, h=h, seqlens=(4096,) * 16, missing_page=True))
    times = -(-128 * hopper.sm_count // (16 * 64)) + 1
    inputs["block_table"] = np.tile(inputs["block_table"][:, :64], (1, times))
    inputs["seqlens"] = (4096 * times - 5 * np.arange(16)).astype(np.int32)
    given, cache = on_gpu(inputs), upload(inputs["cache"])
    of_sequence = [{name: x[n : n + 1] for name, x in given.items()} | {"cache": cache} for n in range(16)]
    short = [mla_cupy.indexer_logits_paged(**one).get() for one in of_sequence]
    together = [mla_cupy.indexer_logits_paged(**given) for _ in range(5)]
    for got in together:
        np.testing.assert_array_equal(got.get().view(np.uint32), np.concatenate(short).view(np.uint32))


@pytest.mark.parametrize("kernel", [None, "indexer_logits_generic"])
@pytest.mark.parametrize(("s_q", "h", "page_size"), [(1, 64, 64), (3, 17, 12), (8, 100, 64)])
def test_keys_in_e2m1(s_q: int, h: int, page_size: int, kernel: str | None, gpu: object) -> None:
    case = PagedCase(b=3, s_q=s_q, h=h, page_size=page_size, seqlens=(700, 0, 129), missing_page=True, e2m1=True)
    inputs = paged_inputs(case)
    got = mla_cupy.indexer_logits_paged(**on_gpu(inputs), kernel=kernel).get()
    check_logits(got, inputs, reference.indexer_logits_paged(**inputs))


def test_hostile_values(gpu: object) -> None:
    """Ranges, lengths and tables of any numbers: nothing hangs, and nothing outside is read."""
    rng = np.random.default_rng(0)
    wild = np.array([-(2**31), 2**31 - 1, -1, 0, 7, 700], np.int32)
    inputs = logits_inputs(LogitsCase(s_q=100, s_kv=700, h=8, dtype="uint8", ranges="none"))
    paged = paged_inputs(PagedCase(b=6, s_q=2, h=8, seqlens=(100,) * 6))
    for _ in range(20):
        inputs["ks"], inputs["ke"] = rng.choice(wild, 100), rng.choice(wild, 100)
        got = mla_cupy.indexer_logits(**on_gpu(inputs)).get()
        check_logits(got, inputs, reference.indexer_logits(**inputs), ON_TENSOR_CORES)
        paged["seqlens"] = rng.choice(wild, (6, 2))
        paged["block_table"] = rng.choice(np.concatenate([wild, np.arange(8, dtype=np.int32)]), (6, 4))
        got = mla_cupy.indexer_logits_paged(**on_gpu(paged)).get()
        exact = reference.indexer_logits_paged(**paged)
        np.testing.assert_array_equal(np.isneginf(got), np.isneginf(exact))


def test_the_same_bits_again(gpu: object) -> None:
    inputs = on_gpu(logits_inputs(LogitsCase(s_q=300, s_kv=5000, h=64, dtype="uint8")))
    first = mla_cupy.indexer_logits(**inputs).get().view(np.uint32)
    for _ in range(50):
        np.testing.assert_array_equal(mla_cupy.indexer_logits(**inputs).get().view(np.uint32), first)
