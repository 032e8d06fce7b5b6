"""Functions for JAX, as source."""

from __future__ import annotations

from collections.abc import Sequence

from tools.generate.bound import (
    OBJECTIVES,
    Bound,
    answer_of,
    file_of,
    function_of,
    groups_of,
    left_out_of_objective,
    names_of,
    returned_kind,
    returns_of,
    signature_of,
    tuple_of,
    ungrouped,
)

LEFT_OUT = ("stream", "workspace", "plan")
"""Parameters that functions for JAX have not."""
_SEGMENTS = (
    "segment_ids_q: jax.Array | None = None",
    "segment_ids_kv: jax.Array | None = None",
    "max_segments: int | None = None",
)
"""Parameters of attention over packed sequences that JAX's libraries have."""
_SEGMENTED = ("mla_prefill",)


def functions(every: Sequence[Bound]) -> str:
    """The file of all functions."""
    functions = [_function(one) for one in every]
    functions += [_objective(one) for one in every if one.name in OBJECTIVES]
    gradients = [one.module.rpartition(".")[2] for one in every if one.reverse]
    imports = (
        "import math\nfrom typing import Any\n\nimport jax\n",
        "from mla_cupy.ops import BOUND_OPERATIONS",
        groups_of(every),
        returns_of(every),
        "from mla_cupy.jax.docstrings import documented",
        *(f"from mla_cupy.jax.gradients import {stem} as {stem}_gradient" for stem in gradients),
        "from mla_cupy.jax.lowering import run",
        "from mla_cupy.jax.losses import objective",
    )
    return file_of("JAX's arrays", imports, "\n\n".join(functions))


def _function(one: Bound) -> str:
    segments = [*_SEGMENTS] * (one.name in _SEGMENTED)
    more = [*segments, *["deterministic: bool = False"] * one.reverse, "exportable: bool = False"]
    results = [*one.outputs, *one.operation.written[len(one.outputs) :]]
    kinds = [f"jax.Array{' | None' * bool(x.needs or x.when)}" for x in one.operation.outputs]
    kinds += [f"jax.Array{' | None' * (name in one.operation.optional)}" for name in results[len(kinds) :]]
    returned = f"tuple[{', '.join(kinds)}]" if len(kinds) > 1 else kinds[0]
    if one.operation.returns is not None:
        returned = returned_kind(one, "jax.Array")
    head = f"def {one.name}({signature_of(one, LEFT_OUT, 'jax.Array', more)}) -> {returned}:"
    lines = [*ungrouped(one), f"arrays = {tuple_of([*one.inputs, *one.outputs])}"]
    lines.append(f"options = {tuple_of(one.options)}")
    if one.reverse:
        others = "".join(f", {each.partition(':')[0]}" for each in segments)
        stem = one.module.rpartition(".")[2]
        lines.append(
            f"{names_of(results)} = {stem}_gradient.differentiable(arrays, options, deterministic, exportable{others})"
        )
    else:
        lines.append(f'{names_of(results)} = run(BOUND_OPERATIONS["{one.name}"], arrays, options, exportable)')
    lines.append(answer_of(one, results))
    return function_of(head, "\n".join(lines))


def _objective(one: Bound) -> str:
    name, without = OBJECTIVES[one.name]
    left_out = (*LEFT_OUT, *left_out_of_objective(one))
    more = ["straight_through: tuple[jax.Array, jax.Array] | None = None", "exportable: bool = False"]
    head = f"def {name}({signature_of(one, left_out, 'jax.Array', more)}) -> tuple[jax.Array, jax.Array]:"
    arrays = tuple_of("None" if x in without else x for x in one.inputs)
    options = tuple_of("True" if x == "gradients" else x for x in one.options)
    body = (
        "".join(f"{line}\n" for line in ungrouped(one, left_out)) + f"arrays = {arrays}\noptions = {options}\n"
        f'return objective(BOUND_OPERATIONS["{one.name}"], arrays, options, straight_through, exportable)'
    )
    return function_of(head, body)
