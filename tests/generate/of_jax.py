"""Functions for JAX, as source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tests.generate import docstrings
from tests.generate.binding_texts import JAX, OBJECTIVES, Text
from tests.generate.bound import (
    Bound,
    docstring_of,
    docstring_of_objective,
    function_of,
    module_of,
    names_of,
    signature_of,
    tuple_of,
)
from tests.generate.docstrings import Docstring, Field, Words

WORDS = Words("array", ("stream", "check", "workspace", "plan"), {r"\s*It is changed in place\.": ""}, donated=True)


_SEGMENTS = {
    "segment_ids_q: jax.Array | None = None": Field(
        ("segment_ids_q",),
        "array, (s_q,), integers, optional",
        "In place of `cu_seqlens_q` and `cu_seqlens_kv`: queries attend to the keys whose id is theirs. Tokens of one "
        "id lie together, and both sides have theirs in one order, or else results are undefined; 0 and below is "
        "padding, whose results are 0. The device looks at the ids, the host does not.",
    ),
    "segment_ids_kv: jax.Array | None = None": Field(
        ("segment_ids_kv",),
        "array, (s_kv,), integers, optional",
        "Those of the keys. Default: those of the queries.",
    ),
    "max_segments: int | None = None": Field(
        ("max_segments",),
        "int, optional",
        "The most ids, without padding, that either side has; tokens of further ones count as padding. To be given "
        "with ids: workspaces grow with it as with the number of sequences, of which there are three for each.",
    ),
}
"""Parameters of attention over packed sequences that JAX's libraries have."""
_SEGMENTED = ("mla_prefill",)
_EXPORTABLE = Field(("exportable",), "bool", "Whether `jax.export` can serialise the call: see `disabled_checks`.")


def functions(module: str, every: Sequence[Bound]) -> str:
    functions = [_function(one) for one in every]
    functions += [_objective(one) for one in every if one.name in OBJECTIVES]
    body = "\n\n".join(functions)
    stem = module.rpartition(".")[2]
    constants = [one.constant for one in every if f"({one.constant}, " in body]
    known = {
        "-math.inf": "import math",
        ": Any": "from typing import Any",
        "jax.": "import jax",
        " differentiable(": f"from mla_cupy.jax.gradients.{stem} import differentiable",
        " run(": "from mla_cupy.jax.lowering import run",
        " objective(": "from mla_cupy.jax.losses import objective",
        "": f"from {module} import {', '.join(constants)}" if constants else "",
    }
    return module_of(module, "JAX's arrays", body, known)


def _function(one: Bound) -> str:
    segments = [*_SEGMENTS] * (one.name in _SEGMENTED)
    more = [*segments, *["deterministic: bool = False"] * one.reverse, "exportable: bool = False"]
    results = [*one.outputs, *one.operation.written[len(one.outputs) :]]
    kinds = [f"jax.Array{' | None' * bool(x.needs or x.when)}" for x in one.operation.outputs]
    kinds += [f"jax.Array{' | None' * (name in one.operation.optional)}" for name in results[len(kinds) :]]
    returned = f"tuple[{', '.join(kinds)}]" if len(kinds) > 1 else kinds[0]
    head = f"def {one.name}({signature_of(one, WORDS.left_out, 'jax.Array', more)}) -> {returned}:"
    lines = [f"arrays = {tuple_of([*one.inputs, *one.outputs])}", f"options = {tuple_of(one.options)}"]
    if one.reverse:
        others = "".join(f", {each.partition(':')[0]}" for each in segments)
        lines.append(f"{names_of(results)} = differentiable(arrays, options, deterministic, exportable{others})")
    else:
        lines.append(f"{names_of(results)} = run({one.constant}, arrays, options, exportable)")
    lines.append(f"return {', '.join(results)}")
    return function_of(head, _docstring(one), "\n".join(lines))


def _docstring(one: Bound) -> Docstring:
    found = docstring_of(one, WORDS, JAX.get(one.name, Text()), "For arrays of JAX")
    parameters = [*found.parameters, *(_SEGMENTS.values() if one.name in _SEGMENTED else ())]
    if one.reverse:
        backward = f"{one.name.removesuffix('_forward')}_backward"
        said = f"Whether the gradients are the same in every run: see `mla_cupy.{backward}`."
        parameters.append(Field(("deterministic",), "bool", said))
    changed = [
        Field((name,), _changed(one, name), "With the changes; in the old one's memory if that is donated.")
        for name in one.operation.written[len(one.outputs) :]
    ]
    return replace(
        found,
        parameters=(*parameters, _EXPORTABLE),
        returns=(*found.returns, *changed),
        notes=docstrings.filled(found.notes),
    )


def _changed(one: Bound, name: str) -> str:
    """The type of an input that is changed, as a docstring has it."""
    return "array, or None" if name in one.operation.optional else "array"


def _objective(one: Bound) -> str:
    name, without = OBJECTIVES[one.name]
    docstring = docstring_of(one, WORDS, JAX[name], "")
    left_out = (*WORDS.left_out, "gradients", *one.outputs, *without)
    more = ["straight_through: tuple[jax.Array, jax.Array] | None = None", "exportable: bool = False"]
    head = f"def {name}({signature_of(one, left_out, 'jax.Array', more)}) -> tuple[jax.Array, jax.Array]:"
    arrays = tuple_of("None" if x in without else x for x in one.inputs)
    options = tuple_of("True" if x == "gradients" else x for x in one.options)
    body = (
        f"arrays = {arrays}\noptions = {options}\n"
        f"return objective({one.constant}, arrays, options, straight_through, exportable)"
    )
    found = docstring_of_objective(docstring, JAX[name], left_out, "array")
    return function_of(head, replace(found, parameters=(*found.parameters, _EXPORTABLE)), body)
