"""The table of combinations is what calls and plans do: every conflict is refused, in the table's words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mla_cupy
from mla_cupy.cache_formats import FORMATS
from mla_cupy.errors import ArgumentError
from mla_cupy.ops.combinations import PARTS, TABLE, Conflict, check
from tests.support.flat import flat, mla_decode, plan_decode

Call = dict[str, Any]
B, S_Q, H_Q, TOPK, PAGES, PAGE = 2, 2, 4, 3, 3, 64
HALF, CODES = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
#: Batch-invariance is a part of plans alone.
CASES = [(name, x) for name, conflicts in TABLE.items() for x in conflicts if x.part != "batch_invariant"]


def cache(record: str) -> Any:
    if record == "rows":
        return np.zeros((PAGES, PAGE, 576), HALF)
    return np.zeros((PAGES, PAGE, FORMATS[record].width), np.uint8)


def held(record: str) -> Callable[[Call], Call]:
    d_qk = 576 if record == "rows" else FORMATS[record].d_qk
    return lambda call: call | {"kv_cache": cache(record), "q": call["q"][..., :d_qk]}


def added(**arguments: Any) -> Callable[[Call], Call]:
    return lambda call: call | arguments


def packed(call: Call) -> Call:
    q = call["q"].reshape(B * S_Q, H_Q, -1)
    return call | {"q": q, "cu_seqlens_q": np.array([0, S_Q, B * S_Q], np.int32)}


def coded(call: Call) -> Call:
    return call | {name: call[name].astype(CODES) for name in ("q", "k", "v") if name in call}


def narrow(call: Call) -> Call:
    return call | {"q": np.zeros((B, S_Q, H_Q, 320), HALF), "kv_cache": np.zeros((PAGES, PAGE, 320), HALF)}


def turned(call: Call) -> Call:
    tables = {"out_cos": np.ones((9, 32), np.float32), "out_sin": np.zeros((9, 32), np.float32)}
    if "block_table" in call and call["q"].shape[-1] == 576:
        call = call | {"q": call["q"][..., :512], "kv_cache": cache("rows")[..., :512]}
    return call | tables | {"out_positions": np.zeros((B, S_Q), np.int32)}


def split(call: Call) -> Call:
    return call | {"q": call["q"][..., :512], "q_rope": call["q"][..., 512:]}


ROWS = np.ones((B, S_Q, H_Q), np.float32)
HEADS = np.ones((1, H_Q), np.float32)
ADD: dict[str, Callable[[Call], Call]] = {
    "not_causal": added(causal=False),
    "tree_mask": added(tree_mask=np.ones((B, S_Q), np.uint64)),
    "window": added(window=4),
    "cu_seqlens_q": packed,
    "equal_lengths": added(),
    "max_seqlen_q": added(max_seqlen_q=2),
    "cp_world": added(cp_world=2),
    "fp8_out": added(out_dtype="float8_e4m3fn"),
    "q_rope": split,
    "fp8x2": added(math="fp8x2"),
    "w_uv": added(w_uv=np.zeros((H_Q, 128, 512), HALF)),
    "narrow": narrow,
    "fp8_math": added(math="fp8"),
    "exact_math": added(math="exact"),
    "codes": coded,
    "half": added(),
    "kv_scale": added(kv_scale=2.0),
    "kv_scales": added(kv_scales=np.ones(1, np.float32)),
    "q_scale": added(q_scale=2.0),
    "q_scales": added(q_scales=ROWS),
    "row_scales": added(q_scales=ROWS),
    "k_scales": added(k_scales=HEADS),
    "v_scales": added(v_scales=HEADS),
    "mask": added(mask=np.zeros((S_Q, 16), np.uint8)),
    "state_out": added(state_out=np.zeros((S_Q, H_Q, 128), np.float32), state_lse=np.zeros((S_Q, H_Q), np.float32)),
    "out_cos": turned,
    **{name: held(name) for name in ("rows", "v32", "v32-nope", "v4", "v41", "fp8")},
}
OF_PLANS = {
    "tree_mask": {"tree_mask": True},
    "window": {"window": 4},
    "cu_seqlens_q": {"cu_seqlens_q": True},
    "cp_world": {"cp_world": 2},
    "fp8_out": {"fp8_out": True},
    "w_uv": {"d_head": 128},
    "q_rope": {"q_rope": True},
    "out_cos": {"out_cos": True, "d_qk": 512},
    "fp8x2": {"math": "fp8x2"},
    "batch_invariant": {"batch_invariant": True},
    "narrow": {"d_qk": 320},
    "fp8_math": {"math": "fp8"},
    "exact_math": {"math": "exact"},
    "codes": {"dtype": "float8_e4m3fn"},
    "rows": {},
    **{name: {"record": name, "d_qk": FORMATS[name].d_qk} for name in ("v32", "v32-nope", "v4", "v41")},
}
"""Arguments of `plan_decode` for a part; the other options belong to single calls."""


def plain(name: str) -> Call:
    """A call that is right, without any part."""
    q = np.zeros((B, S_Q, H_Q, 576), HALF)
    table, seqlens = np.zeros((B, 2), np.int32), np.full(B, 70, np.int32)
    indices = np.zeros((B, S_Q, TOPK), np.int32)
    if name == "mla_prefill":
        return {"q": q[0, ..., :192], "k": q[0, ..., :192], "v": q[0, ..., :128]}
    if name == "sparse_mla_decode":
        return {"q": q, "kv_cache": cache("v32"), "indices": indices, "scale": 0.1}
    if name == "sparse_mla_forward":
        return {"q": q[0], "kv": cache("rows")[0], "indices": indices[0], "scale": 0.1}
    return {"q": q, "kv_cache": cache("rows"), "block_table": table, "seqlens": seqlens}


def call_with(name: str, *parts: str) -> Call:
    """A call with these parts, and with what they need; the parts that change arrays come first."""
    call = plain(name)
    order = sorted(parts, key=lambda part: part not in ("rows", *FORMATS, "narrow"))
    if (
        name == "mla_decode"
        and {*parts} & {"codes", "fp8x2", "fp8_math"}
        and not {*parts} & {"rows", "v32", "v32-nope", "v4", "v41"}
    ):
        call |= {"kv_cache": cache("fp8"), "math": "fp8"}
    for part in order:
        if name == "sparse_mla_forward" and part in FORMATS:
            call |= {"kv": cache(part), "q": call["q"][..., : FORMATS[part].d_qk]}
        elif not (name == "sparse_mla_forward" and part == "rows"):
            scales = name == "mla_prefill" and part == "q_scales"
            call = call | {part: HEADS} if scales else ADD[part](call)
    return call


def expected(conflict: Conflict) -> str:
    return f"expected {PARTS[conflict.part].without} {PARTS[conflict.other].beside.partition('{')[0]}"


@pytest.mark.parametrize(("name", "conflict"), CASES, ids=lambda x: x if isinstance(x, str) else f"{x[0]}-{x[1]}")
def test_a_conflict_is_refused(name: str, conflict: Conflict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    with pytest.raises(ArgumentError) as caught:
        flat(getattr(mla_cupy, name))(**call_with(name, conflict.part, conflict.other))
    said = str(caught.value)
    assert said.startswith(f"{PARTS[conflict.part].argument}: got ")
    assert expected(conflict) in said
    assert said.endswith(conflict.remedy)


PLANNED = [x for x in TABLE["mla_decode"] if x.part in OF_PLANS and x.other in OF_PLANS]


@pytest.mark.parametrize("conflict", PLANNED, ids=lambda x: f"{x[0]}-{x[1]}")
def test_a_plan_refuses_it_too(conflict: Conflict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    sizes = {"max_b": 2, "s_q": 2, "h_q": 4, "max_pages": 2, "page_size": 64, "dtype": "bfloat16"}
    plan_decode(**sizes)
    with pytest.raises(ArgumentError) as caught:
        plan_decode(**{**sizes, **OF_PLANS[conflict.part], **OF_PLANS[conflict.other]})
    assert expected(conflict) in str(caught.value)


def test_every_part_alone_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is refused for itself: the tests above fail for the pair."""
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    alone = (
        "not_causal",
        "tree_mask",
        "window",
        "cu_seqlens_q",
        "cp_world",
        "fp8_out",
        "w_uv",
        "narrow",
        "v32",
        "v32-nope",
        "v4",
        "fp8",
    )
    for part in alone:
        mla_decode(**call_with("mla_decode", part))


def test_a_number_is_looked_at_if_the_other_part_is_there() -> None:
    """A recorded call compares a number only where the comparison matters."""

    def asked() -> object:
        raise AssertionError("the number was compared in vain")

    check(TABLE["mla_decode"], {"cp_world": asked, "kv_scale": asked})
    with pytest.raises(ArgumentError, match=r"^shard\.world: got 4, expected 1 with a window$"):
        check(TABLE["mla_decode"], {"cp_world": lambda: 4, "window": 3})
