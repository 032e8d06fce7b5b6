"""Public functions that take the members of groups by their names inside the package, as tests list their arguments.

Where a test gives decode no `scale`, it has the oracle's default; `check=True` makes the call in `mla_cupy.checking`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import mla_cupy
from mla_cupy.ops import COMPOSITE_OPERATIONS, OPERATIONS, POOL_OPERATIONS, Fp8, Shard

_R = TypeVar("_R")
_KNOWN = {**OPERATIONS, **POOL_OPERATIONS, **COMPOSITE_OPERATIONS}
_WITH_DEFAULT_SCALE = ("mla_decode", "cascade_decode")


def flat(function: Callable[..., _R]) -> Callable[..., _R]:
    """A public function, or a binding's, with the members of groups in place of the groups."""
    name = function.__name__.replace("_objective", "_loss")
    operation = _KNOWN["mla_decode" if name == "decode" else name]  # of ContextParallel

    @functools.wraps(function)
    def call(*args: Any, **arguments: Any) -> _R:
        if operation.name in _WITH_DEFAULT_SCALE and "scale" not in arguments:
            arguments["scale"] = default_scale(*args[:1], **arguments)
        if not arguments.pop("check", False):
            return function(*args, **operation.grouped(arguments))
        with mla_cupy.checking():
            return function(*args, **operation.grouped(arguments))

    parameters: dict[str, inspect.Parameter] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        members = operation.members(name)
        parameters |= {member: operation.parameters[member] for member in members} or {name: parameter}
    call.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    return call


def default_scale(q: Any, q_rope: Any = None, **_: Any) -> float:
    """The oracle's: d_qk**-0.5; 1 for what has no width."""
    try:
        width = int(q.shape[-1]) + (0 if q_rope is None else int(q_rope.shape[-1]))
    except (AttributeError, IndexError, TypeError):
        return 1.0
    return float(width**-0.5) if width else 1.0


def flat_plan(function: Callable[..., _R]) -> Callable[..., _R]:
    """A function that makes plans, with the names of a call's arrays and options."""

    @functools.wraps(function)
    def call(*args: Any, **sizes: Any) -> _R:
        for name, renamed in (("record", "kv_format"), ("cu_seqlens_q", "packed"), ("out_cos", "out_rope")):
            if name in sizes:
                sizes[renamed] = sizes.pop(name)
        if "math" in sizes:
            sizes["fp8"] = Fp8(sizes.pop("math"))
        if {"cp_world", "cp_rank"} & sizes.keys():
            sizes["shard"] = Shard(sizes.pop("cp_world", 1), sizes.pop("cp_rank", 0))
        return function(*args, **sizes)

    return call


mla_decode, cascade_decode = flat(mla_cupy.mla_decode), flat(mla_cupy.cascade_decode)
plan_decode, plan_cascade = flat_plan(mla_cupy.plan_decode), flat_plan(mla_cupy.plan_cascade)
