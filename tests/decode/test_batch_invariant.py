"""Batch-invariant plans: a sequence's bits do not depend on what else is in the batch, nor on where it stands."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from mla_cupy import ArgumentError
from tests.support.cases import DecodeCase, DecodeInputs, make
from tests.support.flat import mla_decode, plan_decode
from tests.support.gpu import upload
from tests.support.kernels import SCHEDULED_KERNELS, cc_of, on_hopper
from tests.support.mutant_suite import mutant_suite
from tests.support.sim_driver import simulated
from tests.support.tolerance import check

Array = npt.NDArray[Any]

HOPPER = on_hopper(SCHEDULED_KERNELS)
KERNELS = (*HOPPER, "decode_sm100")
#: With pieces of 128 tokens: two, none, one, three with a short last one, and one of a single token.
CASE = DecodeCase(b=5, seqlens=(256, 0, 128, 300, 1), s_q=2, h_q=3, page_size=16)
SPLIT_TOKENS = 128
#: A case like CASE with FP8 rows, and with their only kernel.
FP8_CASE = replace(CASE, b=3, seqlens=(130, 0, 129), s_q=1, record="fp8", kv_scale=0.03)
MAX_B = 6


def _sizes(case: DecodeCase, max_pages: int) -> dict[str, Any]:
    return {
        "s_q": case.s_q,
        "h_q": case.h_q,
        "max_pages": max_pages,
        "page_size": case.page_size,
        "dtype": case.dtype,
        "record": case.record or None,
    }


def _run(inputs: DecodeInputs, chosen: list[int], kernel: str | None, sm_count: int, mode: str) -> tuple[Array, Array]:
    """The results of some of the sequences, in the given order, as a batch of their own."""
    sizes = _sizes(inputs.case, inputs.block_table.shape[1])
    with simulated(sm_count, cc_of(kernel or ""), mode, len(chosen)) as target:
        plan = plan_decode(
            max_b=MAX_B, **sizes, batch_invariant=True, split_tokens=SPLIT_TOKENS, device=0, kernel=kernel
        )
        plan.update(inputs.seqlens[chosen])
        got = mla_decode(
            inputs.q[chosen],
            inputs.kv_cache,
            inputs.block_table[chosen],
            inputs.seqlens[chosen],
            plan=plan,
            kv_scale=inputs.case.kv_scale,
        )
        assert "mla_decode_combine_pieces" in target.launched
    return got


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kernel", KERNELS)
def test_bits_do_not_depend_on_the_batch(kernel: str) -> None:
    inputs = make(CASE)
    out, lse = _run(inputs, [0, 1, 2, 3, 4], kernel, 3, "early")
    check((out, lse), inputs.exact, inputs.rounded, CASE.dtype)
    rng = np.random.default_rng(7)
    for sm_count, mode in ((1, "late"), (5, "random")):
        chosen = [*rng.integers(0, CASE.b, 2).tolist(), 3]
        got = _run(inputs, chosen, kernel, sm_count, mode)
        assert got[0].tobytes() == out[chosen].tobytes()
        assert got[1].tobytes() == lse[chosen].tobytes()


def test_fp8_rows() -> None:
    inputs = make(FP8_CASE)
    out, lse = _run(inputs, [0, 1, 2], None, 2, "early")
    check((out, lse), inputs.exact, inputs.rounded, FP8_CASE.dtype)
    got = _run(inputs, [2], None, 3, "late")
    assert (got[0].tobytes(), got[1].tobytes()) == (out[2:].tobytes(), lse[2:].tobytes())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kernel", [*KERNELS, "attention_generic"])
def test_random_batches(kernel: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = tuple(int(n) for n in rng.integers(0, 500, 6))
    inputs = make(DecodeCase(b=6, seqlens=lengths, s_q=int(rng.integers(1, 4)), h_q=5, page_size=16, seed=seed))
    out, lse = _run(inputs, list(range(6)), kernel, 4, "random")
    check((out, lse), inputs.exact, inputs.rounded, inputs.case.dtype)
    chosen = rng.integers(0, 6, rng.integers(1, MAX_B + 1)).tolist()
    got = _run(inputs, chosen, kernel, int(rng.integers(1, 9)), "late")
    assert (got[0].tobytes(), got[1].tobytes()) == (out[chosen].tobytes(), lse[chosen].tobytes())


def test_the_kernel_does_not_depend_on_the_batch() -> None:
    inputs = make(CASE)
    with simulated(2):
        for max_b in (1, 300):
            sizes = _sizes(CASE, inputs.block_table.shape[1])
            plan = plan_decode(max_b=max_b, **sizes, batch_invariant=True, device=0)
            assert plan.kernel == "decode_sm90_small"


def test_the_numpy_backend_is_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    inputs = make(CASE)
    plan = plan_decode(max_b=MAX_B, **_sizes(CASE, inputs.block_table.shape[1]), batch_invariant=True)
    plan.update(inputs.seqlens)
    out, lse = mla_decode(*inputs.arguments, plan=plan)
    chosen = [3, 0, 3]
    arguments = (inputs.q[chosen], inputs.kv_cache, inputs.block_table[chosen], inputs.seqlens[chosen])
    plan.update(inputs.seqlens[chosen])
    got = mla_decode(*arguments, plan=plan)
    assert (got[0].tobytes(), got[1].tobytes()) == (out[chosen].tobytes(), lse[chosen].tobytes())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"batch_invariant": 2}, "batch_invariant"),
        ({"batch_invariant": True, "split_tokens": 100}, "split_tokens: got 100, expected a multiple of 64"),
        ({"batch_invariant": True, "split_tokens": 0}, "split_tokens"),
        ({"batch_invariant": True, "split_tokens": 64, "max_pages": 257}, "at least 1/256 of max_pages"),
        ({"batch_invariant": True, "split_tokens": 64, "max_pages": 256, "max_b": 257}, "at most 65535 pieces"),
    ],
    ids=str,
)
def test_bad_plans(options: dict[str, Any], match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    sizes = {"max_b": 2, "s_q": 1, "h_q": 16, "max_pages": 8, "page_size": 64, "dtype": "bfloat16"}
    with pytest.raises(ArgumentError, match=match):
        plan_decode(**{**sizes, **options})


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [*HOPPER, "attention_generic"])
@pytest.mark.parametrize("seed", range(5))
def test_random_batches_on_a_gpu(hopper: object, kernel: str, seed: int) -> None:
    import cupy

    rng = np.random.default_rng(seed)
    lengths = tuple(int(n) for n in rng.integers(0, 9000, 40))
    inputs = make(DecodeCase(b=40, seqlens=lengths, s_q=1 + seed % 2, h_q=16, seed=seed))
    sizes = {**_sizes(inputs.case, inputs.block_table.shape[1]), "batch_invariant": True, "split_tokens": 2048}
    plan = plan_decode(max_b=64, **sizes, kernel=kernel)
    cache, found = upload(inputs.kv_cache), {}
    for chosen in (np.arange(40), *(rng.integers(0, 40, n) for n in (1, 7, 40, 64))):
        q, table, seqlens = (upload(x[chosen]) for x in (inputs.q, inputs.block_table, inputs.seqlens))
        plan.update(seqlens)
        out, lse = (cupy.asnumpy(x) for x in mla_decode(q, cache, table, seqlens, plan=plan))
        for i, request in enumerate(chosen.tolist()):
            bits = out[i].tobytes(), lse[i].tobytes()
            assert found.setdefault(request, bits) == bits


def run_pieces(mode: str) -> None:
    """Sequences of two pieces, none, and three."""
    case = replace(CASE, b=3, seqlens=(256, 0, 300))
    inputs = make(case)
    check(_run(inputs, [0, 1, 2], "decode_sm90_small", 3, mode), inputs.exact, inputs.rounded, case.dtype)


test_merge_is_caught, test_merge_as_it_is = mutant_suite(
    "decode_combine_pieces",
    [partial(run_pieces, mode) for mode in ("late", "random")],
    {
        "bar.sync": (3, [1]),
    },
)
test_schedule_is_caught, test_schedule_as_it_is = mutant_suite(
    "decode_schedule_pieces",
    [partial(run_pieces, mode) for mode in ("late", "random")],
    {
        "bar.sync": (1, [0]),
    },
)
