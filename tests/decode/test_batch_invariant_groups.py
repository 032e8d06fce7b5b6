"""Batch-invariant plans for packed queries and windows: a sequence's bits do not depend on the batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.decode.test_forms import FEW_RECORDS, GENERIC, MANY_RECORDS, SEESAW, SMALL, FormCase, FormInputs, form_inputs
from tests.support.calls import plan_of
from tests.support.cases import DecodeCase
from tests.support.flat import mla_decode
from tests.support.sim_driver import simulated
from tests.support.tolerance import check

Array = npt.NDArray[Any]

#: With pieces of 128 tokens: several, none, one and a single token.
BASE = DecodeCase(b=4, seqlens=(300, 0, 128, 1), h_q=4, page_size=16)
PACKED = FormCase(BASE, queries=(3, 1, 5, 1), sink=True)
WINDOWS = FormCase(replace(BASE, s_q=2, seqlens=(700, 5, 128, 333)), window=200, pair=True)
BOTH = FormCase(replace(BASE, seqlens=(700, 9, 128, 333)), window=200, queries=(2, 1, 4, 3), around=(1, 2))
MOST = 5
"""Queries of a packed sequence."""


def taken(inputs: FormInputs, chosen: list[int]) -> tuple[dict[str, Array], Any]:
    """The arrays of some sequences in the given order, and where their queries are in the whole call's results."""
    arrays = dict(inputs.arrays)
    for name in ("block_table", "seqlens"):
        arrays[name] = arrays[name][chosen]
    if not inputs.case.queries:
        return {name: x[chosen] if name in ("q", "q_rope") else x for name, x in arrays.items()}, chosen
    starts = inputs.arrays["cu_seqlens_q"]
    parts = [np.arange(starts[i], starts[i + 1]) for i in chosen]
    at = np.concatenate(parts)
    for name in {"q", "q_rope"} & arrays.keys():
        arrays[name] = arrays[name][at]
    arrays["cu_seqlens_q"] = np.cumsum([0, *map(len, parts)]).astype(np.int32)
    return arrays, at


def run(inputs: FormInputs, arrays: dict[str, Array], kernel: str | None) -> tuple[Array, Array]:
    case = inputs.case
    forms: dict[str, Any] = {"cu_seqlens_q": bool(case.queries), "window": case.window or None, "attn_sink": case.sink}
    sizes = {"max_b": 9, "s_q": MOST if case.queries else case.base.s_q}
    plan = plan_of(
        inputs.base, device=0, **forms, **sizes, q_rope=case.pair, batch_invariant=True, split_tokens=128, kernel=kernel
    )
    if case.queries:
        plan.update(arrays["seqlens"], cu_seqlens_q=arrays["cu_seqlens_q"], total_q=len(arrays["q"]))
    else:
        plan.update(arrays["seqlens"])
    out, lse = mla_decode(**arrays, **inputs.options, plan=plan)
    return np.asarray(out), np.asarray(lse)


def of_queries(results: tuple[Array, Array], inputs: FormInputs, at: Any) -> tuple[bytes, bytes]:
    """`lse` of packed queries is (h_q, total_q)."""
    out, lse = results
    return out[at].tobytes(), np.ascontiguousarray(lse[:, at] if inputs.case.queries else lse[at]).tobytes()


@pytest.mark.one_in(12)
@pytest.mark.parametrize("kernel", [None, SMALL, SEESAW, GENERIC])
@pytest.mark.parametrize("case", [PACKED, WINDOWS, BOTH], ids=lambda case: case.id)
def test_bits_do_not_depend_on_the_batch(case: FormCase, kernel: str | None) -> None:
    inputs = form_inputs(case)
    with simulated(3) as target:
        whole = run(inputs, inputs.arrays, kernel)
    assert "mla_decode_combine_pieces" in target.launched
    check(whole, inputs.exact, inputs.rounded, case.base.dtype)
    for sm_count, mode, chosen in ((1, "late", [3, 0, 0, 2]), (7, "random", [0])):
        arrays, at = taken(inputs, chosen)
        with simulated(sm_count, mode=mode, seed=3):
            got = run(inputs, arrays, kernel)
        everything = slice(None)
        assert of_queries(got, inputs, everything) == of_queries(whole, inputs, at)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("kernel", [FEW_RECORDS, MANY_RECORDS])
def test_fp8_tokens(kernel: str) -> None:
    h_q = 40 if kernel == MANY_RECORDS else 4
    base = replace(BOTH.base, record="v32", h_q=h_q, page_size=64)
    inputs = form_inputs(replace(BOTH, base=base, queries=(1, 1, 2, 1)))
    with simulated(3):
        whole = run(inputs, inputs.arrays, kernel)
    arrays, at = taken(inputs, [2, 0])
    with simulated(2, mode="random", seed=1):
        got = run(inputs, arrays, kernel)
    assert of_queries(got, inputs, slice(None)) == of_queries(whole, inputs, at)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(12))
def test_random_batches_on_a_gpu(hopper: object, seed: int) -> None:
    rng = np.random.default_rng(seed)
    b, window = int(rng.integers(3, 9)), int(rng.choice([0, 100, 2000]))
    record = str(rng.choice(["", "v32"]))
    lengths = tuple(int(n) for n in rng.integers(1, 6000, b))
    base = DecodeCase(b=b, seqlens=lengths, h_q=int(rng.choice([8, 16, 64])), page_size=64, record=record, seed=seed)
    queries = tuple(int(n) for n in np.minimum(rng.integers(1, MOST + 1, b), lengths))
    inputs = form_inputs(FormCase(base, queries=queries, window=window))
    whole = run(inputs, inputs.arrays, None)
    for size in (1, b - 1, 8):
        arrays, at = taken(inputs, rng.integers(0, b, size).tolist())
        got = run(inputs, arrays, None)
        assert of_queries(got, inputs, slice(None)) == of_queries(whole, inputs, at)
