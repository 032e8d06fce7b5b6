"""The functions of the bindings take what the public functions take, name it, and document it."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import pytest

from mla_cupy import ops
from tools.generate.bound import OBJECTIVES

NOT_THERE = {
    "torch": {"stream", "check", "independent"},
    "jax": {"stream", "check", "independent", "workspace", "plan"},
}
"""Parameters that a compiled program replaces by its own means, or that it cannot promise."""
MORE = {"torch": set[str](), "jax": {"exportable"}}
SEGMENTS = {"segment_ids_q", "segment_ids_kv", "max_segments"}
"""Parameters that describe packed sequences in JAX's libraries."""
libraries = pytest.mark.parametrize("library", NOT_THERE)


@pytest.fixture
def module(library: str, request: pytest.FixtureRequest) -> Any:
    """The binding to a library."""
    request.getfixturevalue(library)
    return importlib.import_module(f"mla_cupy.{library}")


def parameters(function: Any) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


@libraries
@pytest.mark.parametrize("name", ops.BOUND_OPERATIONS)
def test_an_operation_s_parameters(module: Any, library: str, name: str) -> None:
    """The public function's parameters, with their kinds and defaults, in its order."""
    public, taken = parameters(getattr(ops, name)), parameters(getattr(module, name))
    reverse = ops.BOUND_OPERATIONS[name].derivative == "reverse"
    own = MORE[library] | ({"deterministic"} if library == "jax" and reverse else set())
    own |= SEGMENTS if (library, name) == ("jax", "mla_prefill") else set()
    assert [x for x in taken if x not in own] == [x for x in public if x not in NOT_THERE[library]]
    assert own <= set(taken)
    for key in public.keys() & taken.keys():
        assert (taken[key].default, taken[key].kind) == (public[key].default, public[key].kind), key


@libraries
def test_objectives(module: Any, library: str) -> None:
    """They take what their losses take, but for results, and what e4m3 codes stand for."""
    for loss, (name, without) in OBJECTIVES.items():
        left_out = {*NOT_THERE[library], "results", *without, "gradients", "workspace"}
        wanted = [x for x in parameters(getattr(ops, loss)) if x not in left_out]
        assert list(parameters(getattr(module, name))) == [*wanted, "straight_through", *MORE[library]]


@libraries
def test_every_parameter_is_named_and_documented(module: Any, library: str) -> None:
    functions = [getattr(module, name) for name in module.__all__ if inspect.isfunction(getattr(module, name))]
    assert len(functions) > len(ops.BOUND_OPERATIONS)
    for function in functions:
        taken = parameters(function)
        assert not [x for x in taken.values() if x.kind in (x.VAR_KEYWORD, x.VAR_POSITIONAL)], function
        text = inspect.getdoc(function)
        assert text is not None
        section = re.search(r"^Parameters\n-+\n(.*?)(?=^\w+\n-+\n|\Z)", text, re.MULTILINE | re.DOTALL)
        heads = re.findall(r"^(\w.*?)(?: : .*)?$", section[1], re.MULTILINE) if section else []
        assert [x for head in heads for x in head.split(", ") if x not in taken] == [], function
        assert set(taken) <= {x for head in heads for x in head.split(", ")}, function
