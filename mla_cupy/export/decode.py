"""Dense decode: what an export of it fixes, and the procedures of its plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from mla_cupy.arrays.view import View
from mla_cupy.cache_formats import FORMATS
from mla_cupy.dtypes import HALF
from mla_cupy.errors import ArgumentError, explain
from mla_cupy.export.plain import CODES, D_HEAD, FREE_LSE, check_d_head, choice, row_sizes
from mla_cupy.export.record import (
    Found,
    Memory,
    Recorder,
    addresses_of,
    check_present,
    check_workspace,
    memory_of,
    record_call,
)
from mla_cupy.export.subject import (
    DEVICE,
    PLAN_ARGUMENTS,
    WORKSPACE,
    WORKSPACE_BYTES,
    Argument,
    Array,
    Subject,
    size_argument,
)
from mla_cupy.kernels.attention.records import MMA_DENSE as FORMATS_READ
from mla_cupy.kernels.decode import DECODE
from mla_cupy.kernels.decode.configs import DecodeConfig
from mla_cupy.kernels.pipeline import Layout
from mla_cupy.ops.call import examine
from mla_cupy.ops.checks import MATH_OF_DENSE_DECODE
from mla_cupy.ops.decode import OPERATION
from mla_cupy.ops.decode_plan import DecodePlan, examine_plan
from mla_cupy.shapes import D_QK, D_ROPE, D_V

_MAX_B, _MAX_PAGES, _CP_WORLD, _CP_RANK, _SCHEDULED_B = PLAN_ARGUMENTS
_LENGTHS = Array("seqlens", ("b",), "int32", 1, False)
_B = size_argument("b")
_PACKED = "cu_seqlens_q"
_FORMS = {"q_rope", "attn_sink"}
"""Inputs that a plan has to know of."""
_ANY_SPLIT_TOKENS = 4096
"""Tokens of a split, without effect on plans that are not batch-invariant."""


def subject(
    *,
    h_q: int,
    page_size: int,
    s_q: int | None = None,
    d_qk: int | None = None,
    dtype: str | None = None,
    kv_format: str | None = None,
    out_dtype: str | None = None,
    d_head: int | None = None,
    window: int | None = None,
    math: str | None = None,
) -> Subject:
    """Dense decode with these sizes and dtypes fixed; None is the default."""
    s_q, dtype, math = s_q or 1, dtype or HALF[0], math or "exact"
    record = choice("--kv-format", kv_format, (None, *FORMATS_READ))
    d_qk = d_qk or (FORMATS[record].d_qk if record else D_QK)
    choice("--math", math, MATH_OF_DENSE_DECODE)
    choice("--dtype", dtype, HALF if math == "exact" else (*HALF, CODES))
    half = dtype if dtype in HALF else HALF[0]
    choice("--out-dtype", out_dtype, (None, half, "float32", CODES))
    sizes = {"s_q": s_q, "h_q": h_q, "d_qk": d_qk, "page_size": page_size, "d_v": D_V}
    sizes |= row_sizes(check_d_head(d_head) if d_head else D_V, out_dtype == CODES)
    coded: dict[str, Literal["real"]] = {"q_scale": "real"} if dtype == CODES else {}
    dtypes = {
        "q": dtype,
        "kv_cache": "uint8" if record else dtype,
        "block_table": "int32",
        "seqlens": "int32",
        "out": out_dtype or half,
        "lse": "float32",
        **({"out_scales": "float32"} if out_dtype == CODES else {}),
    }
    return Subject(
        OPERATION,
        {
            **sizes,
            "width": FORMATS[record].width if record else d_qk,
        },
        dtypes,
        fixed={"window": window, "math": math, "out_dtype": CODES if out_dtype == CODES else None},
        free={
            "scale": "real",
            "causal": "integer",
            "cp_world": "integer",
            "cp_rank": "integer",
            "kv_scale": "real",
            **coded,
            **FREE_LSE,
        },
        notes={"record": record or ""},
    )


def fitted(subject: Subject) -> Subject:
    """The subject with the sizes, dtypes and options that its optional inputs want."""
    sizes, dtypes, fixed = dict(subject.sizes), dict(subject.dtypes), dict(subject.fixed)
    if "q_rope" in dtypes:
        sizes |= {"d_qk": sizes["d_qk"] - D_ROPE, "d_rope": D_ROPE}
    if _PACKED in dtypes:
        fixed["max_seqlen_q"] = sizes["s_q"]
    if projecting := dtypes.keys() & {"w_uv", "gate"}:
        sizes |= row_sizes(D_HEAD if sizes["d_head"] == D_V else sizes["d_head"], "out_scales" in dtypes)
        dtypes |= dict.fromkeys(projecting, dtypes["q"] if dtypes["q"] in HALF else HALF[0])
    elif sizes["d_head"] != D_V:
        raise ArgumentError(explain("--d-head", sizes["d_head"], "none without --with w_uv"))
    if "kv_scales" in dtypes:
        sizes["num_scales"] = 1
    instead = {name.removesuffix("s") for name in ("q_scales", "kv_scales") if name in dtypes}
    fixed |= dict.fromkeys(instead, 1.0)
    free = {name: kind for name, kind in subject.free.items() if name not in instead}
    defaults = {name: value for name, value in subject.defaults.items() if name not in instead}
    return replace(subject, sizes=sizes, dtypes=dtypes, fixed=fixed, free=free, defaults=defaults)


def record(given: Subject, arch: str) -> Recorder:
    """Record calls, plans, their updates, and calls with a plan.

    Packed queries are exported for calls without a plan: the update of a plan has no starts.
    """
    recorder = record_call(given, arch)
    if _PACKED in given.dtypes:
        return recorder
    planned = _Planned(given, recorder)
    own = [*(argument for argument in PLAN_ARGUMENTS if argument.kind != "plan"), WORKSPACE, WORKSPACE_BYTES]
    recorder.record("plan_make", own, planned.make)
    lengths = [_B, *_arguments(_LENGTHS)]
    memory = Memory(_LENGTHS.name, False, lambda: given.view(_LENGTHS), lambda: given.check_items(_LENGTHS))
    workspace = memory_of(given)[-1]
    recorder.record("plan_update", [*own, *lengths], planned.update, [memory, workspace], [planned.make])
    checks = [planned.make, lambda: examine(OPERATION, given.views(), given.options())]
    recorder.record("call_planned", [*given.arguments(), *own, _SCHEDULED_B], planned.call, memory_of(given), checks)
    return recorder


def _arguments(array: Array) -> list[Argument]:
    return [array.address, *array.strides]


class _Planned:
    """Procedures of plans: what the package does, over recorded numbers."""

    def __init__(self, given: Subject, recorder: Recorder) -> None:
        self._subject, self._recorder = given, recorder

    def make(self) -> Found:
        """A plan: its checks, and its workspace."""
        _, _, layout = self._plan()
        return self._recorder.found(layout, [], {})

    def update(self) -> Found:
        """The schedule of a step."""
        plan, config, layout = self._plan()
        lengths = self._subject.view(_LENGTHS)
        check_present(_LENGTHS.name, lengths)
        b = plan.check_lengths(lengths)
        steps = plan.steps(config, lengths.strides[0], b) if b != 0 else []
        return self._recorder.found(layout, steps, {_LENGTHS.name: _LENGTHS.address.number})

    def call(self) -> Found:
        """A call with a plan."""
        plan, _, layout = self._plan()
        plan.mark_scheduled(None if _SCHEDULED_B.number < 0 else _SCHEDULED_B.number)
        views: Mapping[str, View | None] = self._subject.views()
        request = examine(OPERATION, views, self._subject.options())
        config = plan.configuration(request)
        steps = DECODE.steps(config, replace(request, planned=True)) if config else []
        return self._recorder.found(layout, steps, addresses_of(self._subject))

    def _plan(self) -> tuple[DecodePlan, DecodeConfig, Layout]:
        given, sizes = self._subject, self._subject.sizes
        problem, limits, _ = examine_plan(
            max_b=_MAX_B.number,
            s_q=sizes["s_q"],
            h_q=sizes["h_q"],
            d_qk=sizes["d_qk"] + sizes.get("d_rope", 0),
            kv_format=given.notes["record"] or None,
            max_pages=_MAX_PAGES.number,
            page_size=sizes["page_size"],
            dtype=given.dtypes["q"],
            shard=(_CP_WORLD.number, _CP_RANK.number),
            forms={**dict.fromkeys(given.dtypes.keys() & _FORMS, True), "window": given.fixed["window"] or 0},
            tree_mask="tree_mask" in given.dtypes,
            d_head=sizes["d_head"] if "w_uv" in given.dtypes else 0,
            fp8_out="out_scales" in given.dtypes,
            math=given.fixed["math"],
            batch_invariant=False,
            split_tokens=_ANY_SPLIT_TOKENS,
            kernel=None,
        )
        config = DECODE.configure(problem, self._recorder.device)
        layout = DECODE.workspace(config)
        check_workspace(layout)
        address: Any = WORKSPACE.number
        return DecodePlan(problem, limits, DEVICE, config, (None, address)), config, layout
