"""Forms of dense decode: what is refused, which kernels are chosen, plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mla_cupy import ArgumentError, PlanError, ShapeError, UnsupportedDeviceError
from mla_cupy.kernels import KERNELS
from mla_cupy.kernels.decode import DECODE
from mla_cupy.kernels.decode.problem import DecodeProblem, Forms
from mla_cupy.simulation import fake_gpu
from tests.decode.test_forms import (
    CASES,
    FEW_RECORDS,
    GENERIC,
    MANY_RECORDS,
    SEESAW,
    SINGLE,
    SINKS,
    SMALL,
    FormCase,
    form_inputs,
)
from tests.support.calls import plan_of
from tests.support.cases import DecodeCase, make
from tests.support.flat import mla_decode, plan_decode
from tests.support.kernels import by_name, cc_of
from tests.support.recorder import Recorder
from tests.support.sim_driver import simulated
from tests.support.tolerance import check

# ---- Mistakes and choices --------------------------------------------------------------------------------------


def _call(**changes: Any) -> dict[str, Any]:
    arrays = {
        "q": np.ones((2, 1, 4, 576), np.float16),
        "kv_cache": np.ones((3, 8, 576), np.float16),
        "block_table": np.zeros((2, 2), np.int32),
        "seqlens": np.ones(2, np.int32),
    }
    return {**arrays, **changes}


PACKED = {"q": np.ones((5, 4, 576), np.float16), "cu_seqlens_q": np.array([0, 2, 5], np.int32)}
LONG = np.zeros((2, 9000), np.int32)
RECORDS = {"kv_cache": np.zeros((3, 8, 656), np.uint8)}
MANY_HEADS = np.ones((2, 1, 64, 520), np.float16)
LATENT, ROPE = np.ones((2, 1, 4, 512), np.float16), np.ones((2, 1, 4, 64), np.float16)

TURNED = {
    "q": LATENT,
    "kv_cache": np.ones((3, 8, 512), np.float16),
    "out_cos": np.ones((5, 32), np.float32),
    "out_sin": np.ones((5, 32), np.float32),
    "out_positions": np.ones((2, 1), np.int32),
}


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({**PACKED, "q": _call()["q"]}, ShapeError, r"q.shape: got \(2, 1, 4, 576\), expected \(total_q, h_q,"),
        ({"q": PACKED["q"]}, ShapeError, r"q.shape: got \(5, 4, 576\), expected \(b, s_q, h_q,"),
        (
            {**PACKED, "cu_seqlens_q": np.zeros(2, np.int32)},
            ShapeError,
            r"cu_seqlens_q.shape\[0\]: got 2, expected b\+1=3",
        ),
        ({**PACKED, "out": np.ones((2, 1, 4, 512), np.float16)}, ShapeError, r"out.shape: .* expected \(5, 4, 512\)"),
        ({**PACKED, "lse": np.ones((5, 4), np.float32)}, ShapeError, r"lse.shape: .* expected \(4, 5\)"),
        ({**PACKED, "max_seqlen_q": 0}, ArgumentError, "max_seqlen_q: got 0, expected an integer from 1"),
        ({"max_seqlen_q": 1}, ArgumentError, "packed.max_seqlen_q: got 1, expected None without packed.cu_seqlens_q"),
        ({**PACKED, "cp_world": 2}, ArgumentError, "shard.world: got 2, expected 1 with packed"),
        ({"window": 4, "cp_world": 2}, ArgumentError, "shard.world: got 2, expected 1 with a window"),
        ({"window": 4, "causal": False}, ArgumentError, "causal: got False, expected True with a window"),
        (
            {"window": 4, "tree_mask": np.ones((2, 1), np.uint64)},
            ArgumentError,
            "window: got 4, expected None with a tree_mask",
        ),
        ({"window": 0}, ArgumentError, "window: got 0, expected an integer from 1"),
        ({"q_rope": ROPE}, ShapeError, r"q.shape\[-1\]: got 576, expected 512 with q_rope"),
        ({"q": LATENT, "q_rope": ROPE[..., :32]}, ShapeError, r"q_rope.shape\[-1\]: got 32, expected 64"),
        ({"q": LATENT, "q_rope": ROPE[:, :, :3]}, ShapeError, r"q_rope.shape\[2\]: got 3, expected h_q=4"),
        ({"q": LATENT}, ShapeError, r"kv_cache.shape\[-1\]: got 576, expected d_qk=512"),
        ({**TURNED, "out_positions": None}, ArgumentError, "out_rope.positions"),
        ({**TURNED, "q": _call()["q"]}, ShapeError, r"q.shape\[-1\]: got 576, expected 512 with out_rope"),
        (
            {**TURNED, "out_sin": np.ones((5, 16), np.float32)},
            ShapeError,
            r"out_rope.sin.shape\[-1\]: got 16, expected pairs=32",
        ),
        ({**TURNED, "out_positions": np.ones((2, 2), np.int32)}, ShapeError, r"out_rope.positions.shape\[-1\]: got 2"),
        ({**TURNED, "kernel": "attention_mma"}, UnsupportedDeviceError, "attention_mma takes no out_rope"),
        ({"attn_sink": np.ones(3, np.float32)}, ShapeError, r"attn_sink.shape\[0\]: got 3, expected h_q=4"),
        ({"window": 4, "kernel": "attention_mma"}, UnsupportedDeviceError, "attention_mma takes no window"),
        (
            {"q": LATENT, "q_rope": ROPE, "kernel": "decode_sm90_small_cluster8"},
            UnsupportedDeviceError,
            "takes no q_rope",
        ),
        (
            {"attn_sink": np.ones(4, np.float32), "kernel": "decode_sm90_small_cluster8"},
            UnsupportedDeviceError,
            "takes no attn_sink",
        ),
        (
            {"q": LATENT, "q_rope": ROPE, "tree_mask": np.ones((2, 1), np.uint64), "kernel": SMALL},
            UnsupportedDeviceError,
            "takes no tree_mask with optional inputs other than attn_sink",
        ),
        (
            {**PACKED, **RECORDS, "window": 4, "kernel": "decode_mma_records"},
            UnsupportedDeviceError,
            "decode_mma_records takes no packed and no window",
        ),
        (
            {**PACKED, **RECORDS, "kernel": MANY_RECORDS},
            UnsupportedDeviceError,
            "takes lengths that vary, and windows, with more than 32 heads only",
        ),
        (
            {"q": MANY_HEADS[..., 1:513], "q_rope": MANY_HEADS[..., :64], **RECORDS, "kernel": MANY_RECORDS},
            UnsupportedDeviceError,
            "needs q to start at, and step by, multiples of 16 bytes",
        ),
        (
            {"window": 4, "kv_cache": np.ones((3, 8, 577), np.float16)[..., :576], "kernel": SMALL},
            UnsupportedDeviceError,
            "multiples of 16 bytes",
        ),
    ],
)
def test_mistakes(changes: dict[str, Any], error: type[Exception], match: str, recorder: Recorder) -> None:
    with pytest.raises(error, match=match):
        mla_decode(**_call(**changes))
    assert recorder.launches == []


NARROW = {"q": np.ones((2, 1, 4, 320), np.float16), "kv_cache": np.ones((3, 8, 320), np.float16)}
CODES = {"kv_cache": np.zeros((3, 8, 576), np.uint8), "math": "fp8"}
WIDE = {"q": np.ones((2, 1, 64, 576), np.float16), **CODES, "math": "fp8x2"}
#: Calls that no GPU has a kernel for, what the error says, and a plan for such calls.
UNSERVED = (
    ({**NARROW, "window": 3}, "window: got .*, expected None for keys of 320", {"d_qk": 320, "window": 3}),
    (
        {**NARROW, **PACKED, "q": np.ones((5, 4, 320), np.float16)},
        "packed: got .*, expected None for keys of 320",
        {"d_qk": 320, "cu_seqlens_q": True},
    ),
    ({**CODES, "window": 4}, "window: got 4, expected None with fp8.math='fp8'", {"math": "fp8", "window": 4}),
    (
        {**CODES, "q": LATENT, "q_rope": ROPE},
        "q_rope: got (an array|True), expected None",
        {"math": "fp8", "q_rope": True},
    ),
    ({**CODES, **PACKED}, "packed: got (an array|True), expected None", {"math": "fp8", "cu_seqlens_q": True}),
    ({**WIDE, "window": 4}, "window: got 4, expected None with fp8.math='fp8x2'", {"math": "fp8x2", "window": 4}),
    (
        {**WIDE, "tree_mask": np.ones((2, 1), np.uint64)},
        "tree_mask: got (an array|True), expected None with fp8.math='fp8x2'",
        {"math": "fp8x2", "h_q": 64, "tree_mask": True},
    ),
    ({**CODES, "math": "fp8x2"}, "q: got 4 query rows .*, expected at least 17 with", {"math": "fp8x2"}),
)


@pytest.mark.parametrize(
    ("changes", "match", "planned"), UNSERVED, ids=lambda value: value if type(value) is str else ""
)
def test_the_oracle_refuses_what_no_gpu_serves(
    changes: dict[str, Any], match: str, planned: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    with pytest.raises(ArgumentError, match=match):
        mla_decode(**_call(**changes))
    shape = {"max_b": 2, "s_q": 1, "h_q": 4, "max_pages": 2, "page_size": 8, "dtype": "float16"}
    record = {"record": "fp8"} if "math" in planned else {}
    with pytest.raises(ArgumentError, match=match):
        plan_decode(**{**shape, **record, **planned})


def test_values_are_checked_on_request(recorder: Recorder) -> None:
    with pytest.raises(ArgumentError, match=r"cu_seqlens_q\[2\]: got 1, expected ascending starts of 0 to 5"):
        mla_decode(**_call(**{**PACKED, "cu_seqlens_q": np.array([0, 2, 1], np.int32)}), check=True)


@pytest.mark.parametrize(
    ("changes", "kernel"),
    [
        ({"q": LATENT, "q_rope": ROPE}, SMALL),
        ({"attn_sink": np.ones(4, np.float32)}, SMALL),
        ({**PACKED, "max_seqlen_q": 2}, SMALL),
        ({"window": 9, "q": np.ones((2, 1, 64, 576), np.float16), "block_table": LONG}, SEESAW),
        ({"window": 9, "kv_cache": np.ones((3, 8, 577), np.float16)[..., :576]}, GENERIC),
        ({**PACKED, **RECORDS}, FEW_RECORDS),
        ({"window": 9, **RECORDS, "q": np.ones((2, 1, 64, 576), np.float16), "block_table": LONG}, MANY_RECORDS),
        ({"q": MANY_HEADS[..., 1:513], "q_rope": MANY_HEADS[..., :64], **RECORDS, "block_table": LONG}, FEW_RECORDS),
        ({"attn_sink": np.ones(4, np.float32), **RECORDS}, FEW_RECORDS),
    ],
)
def test_which_kernel(changes: dict[str, Any], kernel: str, recorder: Recorder) -> None:
    mla_decode(**_call(**changes))
    assert KERNELS[kernel].entry in [launch.entry for launch in recorder.launches]


WHOLE = Forms(attn_sink=True, q_rope=True, packed=True, out_rope=True, window=5)


@pytest.mark.parametrize("name", list(by_name(DECODE)))
@pytest.mark.parametrize("form", Forms._fields)
def test_the_table_of_forms_is_true(name: str, form: str) -> None:
    """A kernel takes the forms that it lists, and says which it does not take."""
    kernel, device = by_name(DECODE)[name], fake_gpu(1, cc_of(name))
    record = "" if "records" not in name and kernel.math == "exact" else "fp8"
    wanted = Forms(**{form: getattr(WHOLE, form)})
    h_q, d_qk = 128 if "joint" in name or "seesaw" in name else 16, 320 if "narrow" in name else 576
    problem = DecodeProblem(1, h_q, "bfloat16", d_qk=d_qk, record=record, math=kernel.math, forms=wanted)
    reason = kernel.objection(problem, device)
    assert (reason is None) == (form in kernel.forms)
    assert reason is None or str(reason) == f"takes no {form}"
    words = {"cu_seqlens_q": "packed", "out_cos": "out_rope"}
    run_by = {(case_kernel, words.get(shown, shown)) for case, case_kernel in CASES for shown in case.forms}
    run_by |= {(sunk, "attn_sink") for _, sunk in SINKS}
    if form in kernel.forms and "mma" not in name and "narrow" not in name:  # those have cases of their own
        assert (name, form) in run_by


# ---- Plans -----------------------------------------------------------------------------------------------------


def test_a_plan_serves_steps_of_other_lengths() -> None:
    cases = [
        FormCase(replace(SINGLE, seqlens=(70, 130, 9), seed=seed), queries=queries, pair=True, window=66)
        for seed, queries in ((1, (1, 3, 2)), (2, (1, 1, 1)), (3, (0, 6, 0)))
    ]
    with simulated(3):
        plan = plan_decode(
            max_b=3,
            s_q=2,
            h_q=16,
            max_pages=5,
            page_size=64,
            dtype="bfloat16",
            device=0,
            cu_seqlens_q=True,
            q_rope=True,
            window=66,
        )
        for case in cases:
            inputs = form_inputs(case)
            width = inputs.arrays["block_table"].shape[1]
            table = np.full((3, 5), -7, np.int32)
            table[:, :width] = inputs.arrays["block_table"]
            arrays: dict[str, Any] = {**inputs.arrays, "block_table": table}
            total = len(arrays["q"])
            plan.update(arrays["seqlens"], cu_seqlens_q=arrays["cu_seqlens_q"], total_q=total)
            got = mla_decode(**arrays, **inputs.options, plan=plan)
            check(got, inputs.exact, inputs.rounded, "bfloat16")
    assert plan.kernel == SMALL


@pytest.mark.one_in(4)
@pytest.mark.parametrize("cuts", [{}, {"batch_invariant": True, "split_tokens": 64}], ids=["even", "pieces"])
def test_a_plan_for_two_arrays_and_a_sink(cuts: dict[str, Any]) -> None:
    inputs = form_inputs(FormCase(replace(SINGLE, s_q=2, h_q=8, seqlens=(300, 0, 70)), pair=True, sink=True))
    with simulated(3):
        plan = plan_of(inputs.base, device=0, q_rope=True, attn_sink=True, **cuts)
        plan.update(inputs.arrays["seqlens"])
        got = mla_decode(**inputs.call, plan=plan)
    assert plan.kernel == SMALL
    check(got, inputs.exact, inputs.rounded, "bfloat16")


def test_mistakes_of_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    inputs = form_inputs(FormCase(DecodeCase(b=2, seqlens=9), queries=(1, 2), sink=True))
    arrays = inputs.arrays
    for options, match in (
        ({"attn_sink": True}, "packed=False"),
        ({"cu_seqlens_q": True, "s_q": 2}, "attn_sink=False"),
        ({"cu_seqlens_q": True, "attn_sink": True, "window": 5, "s_q": 2}, "window=5"),
    ):
        plan = plan_of(inputs.base, **options)
        packed = {"cu_seqlens_q": arrays["cu_seqlens_q"], "total_q": 3} if options.get("cu_seqlens_q") else {}
        plan.update(arrays["seqlens"], **packed)
        with pytest.raises(PlanError, match=match):
            mla_decode(**inputs.call, plan=plan)
    plan = plan_of(inputs.base, cu_seqlens_q=True, attn_sink=True, s_q=2)
    with pytest.raises(PlanError, match="cu_seqlens_q: got None, expected one for this plan"):
        plan.update(arrays["seqlens"])
    with pytest.raises(ArgumentError, match="total_q: got 5, expected an integer from 0 to 4"):
        plan.update(arrays["seqlens"], cu_seqlens_q=arrays["cu_seqlens_q"], total_q=5)
    with pytest.raises(ShapeError, match=r"cu_seqlens_q.shape: got \(2,\), expected \(3,\)"):
        plan.update(arrays["seqlens"], cu_seqlens_q=arrays["cu_seqlens_q"][:2], total_q=3)
    plan.update(arrays["seqlens"], cu_seqlens_q=arrays["cu_seqlens_q"], total_q=2)
    with pytest.raises(PlanError, match="an update for total_q=2, expected one for total_q=3"):
        mla_decode(**inputs.call, plan=plan)
    plan.update(arrays["seqlens"], cu_seqlens_q=arrays["cu_seqlens_q"], total_q=3)
    got = mla_decode(**inputs.call, plan=plan)
    np.testing.assert_array_equal(got[1], inputs.exact[1].astype(np.float32))
    with pytest.raises(PlanError, match="total_q: got one, expected None"):
        plan_of(inputs.base).update(arrays["seqlens"], total_q=3)
    with pytest.raises(ArgumentError, match="batch_invariant: got True, expected False for keys of 320"):
        plan_of(make(DecodeCase(d_qk=320)), batch_invariant=True)
    with pytest.raises(ArgumentError, match="packed: got 'yes'"):
        plan_of(inputs.base, cu_seqlens_q="yes")
