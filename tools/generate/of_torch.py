"""Functions and operators for PyTorch, as source."""

from __future__ import annotations

import inspect
import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from tools.generate.bound import (
    OBJECTIVES,
    Bound,
    answer_of,
    default_of,
    file_of,
    for_compilers,
    function_of,
    groups_of,
    left_out_of_objective,
    names_of,
    returned_by,
    returns_of,
    signature_of,
    tuple_of,
    ungrouped,
    value_of,
)

LEFT_OUT = ("stream",)
"""Parameters that functions for PyTorch have not."""
SCHEMA_WIDTH = 100
_CHANGED = "klmnopqrstuvw"
"""Names of inputs that are changed in place, in a schema."""


def _kind(one: Bound, name: str) -> str:
    """An argument of an operator, as a schema writes it."""
    parameter = one.parameters[name]
    arrays = {array.name: array for array in one.operation.inputs}
    if name in arrays:
        changed = f"({_CHANGED[one.inputs.index(name)]}!)" if arrays[name].written else ""
        default = "" if parameter.default is inspect.Parameter.empty else "=None"
        return f"Tensor{changed}{'?' * arrays[name].optional} {name}{default}"
    if name in {output.dtype_option for output in one.operation.outputs}:
        return f"ScalarType? {name}=None"
    if parameter.default == -math.inf:
        return f"float? {name}=None"
    kind = str(parameter.annotation).replace(" | None", "?")
    if kind.rstrip("?") not in ("int", "bool", "str", "float"):
        raise ValueError(f"{one.name}: no schema can have {name}: {parameter.annotation}")
    default = "" if parameter.default is inspect.Parameter.empty else f"={value_of(parameter.default)}"
    return f"{kind} {name}{default}"


def _schema(parts: Iterable[str]) -> str:
    """A part of a schema, as a string of one or more lines."""
    lines = [""]
    for part in parts:
        joined = f"{lines[-1]}, {part}" if lines[-1] else part
        if len(joined) <= SCHEMA_WIDTH:
            lines[-1] = joined
        else:
            lines[-1] += ", "
            lines.append(part)
    quoted = [repr(line) for line in lines]
    return quoted[0] if len(quoted) == 1 else "(" + "\n".join(quoted) + ")"


def operators(every: Sequence[Bound]) -> str:
    """Module of all operators: what their arguments are to the operation, and their schemas."""
    return (
        '"""Operators of all operations.\n\n'
        'Written by `python -m tools.generate` from the operations\' records.\n"""\n\n'
        "from __future__ import annotations\n\nfrom math import inf\nfrom typing import Any\n\n"
        "from mla_cupy.ops import BOUND_OPERATIONS\nfrom mla_cupy.ops.call import Invocation\n"
        "from mla_cupy.torch.library import Operators\n\n" + "\n".join(_operator(one) for one in every)
    )


def _operator(one: Bound) -> str:
    unwritten = [name for name in one.options if one.parameters[name].default == -math.inf]
    taken = [
        name + ("=None" if name in unwritten else default_of(for_compilers(one.parameters[name])))
        for name in one.arguments
    ]
    results = "".join(f", {name}: Any = None" for name in [*one.outputs, "workspace"]) if one.outputs else ""
    arrays, options = tuple_of([*one.inputs, *one.outputs]), tuple_of(one.options)
    # `inf` by its own name: an option may be called `math`.
    lines = [f"{name} = -inf if {name} is None else {name}" for name in unwritten]
    rest = f", options{', workspace' if one.outputs else ''}"
    lines += [f"arrays = {arrays}", f"options = {options}"]
    lines.append(f'return Invocation(BOUND_OPERATIONS["{one.name}"], arrays{rest})')
    typed = ", ".join(f"{x.partition('=')[0].strip()}: Any{'=' * ('=' in x)}{x.partition('=')[2]}" for x in taken)
    head = f"def _{one.name}({typed}{', *' * bool(results)}{results}) -> Invocation:"
    words = {"arguments": _schema(_kind(one, name) for name in one.arguments)}
    if one.outputs:
        named = zip("abcdefgh", one.operation.outputs, strict=False)
        words["results"] = _schema(
            f"Tensor({letter}!)? {x.name}=None" if x.needs or x.when else f"Tensor({letter}!) {x.name}"
            for letter, x in named
        )
        words["returns"] = repr("(" + ", ".join("Tensor" for _ in one.outputs) + ")")
    if unwritten:
        words["unwritten"] = tuple_of(map(repr, unwritten))
    said = ", ".join(f"{key}={value}" for key, value in words.items())
    return (
        f"{head}\n{textwrap.indent(chr(10).join(lines), '    ')}\n\n\n"
        f'{one.name.upper()} = Operators(BOUND_OPERATIONS["{one.name}"], _{one.name}, {said})\n\n'
    )


def functions(every: Sequence[Bound]) -> str:
    """The file of all functions."""
    names = [one.name.upper() for one in every]
    functions = [_function(one) for one in every]
    functions += [_objective(one) for one in every if one.name in OBJECTIVES]
    gradients = [one.module.rpartition(".")[2] for one in every if one.reverse]
    imports = (
        "import math\nfrom typing import Any\n\nimport torch\n",
        "from mla_cupy.ops.call import Invocation, run",
        groups_of(every),
        returns_of(every),
        "from mla_cupy.torch.call import call",
        "from mla_cupy.torch.docstrings import documented",
        *(f"from mla_cupy.torch.gradients import {stem} as {stem}_gradient" for stem in gradients),
        "from mla_cupy.torch.library import is_plain_call",
        "from mla_cupy.torch.losses import objective",
        f"from mla_cupy.torch.operators import {', '.join(names)}",
        "from mla_cupy.torch.plan import TorchDecodePlan, call_planned, plan_of",
    )
    return file_of("PyTorch's tensors", imports, "\n\n".join(functions))


def _function(one: Bound) -> str:
    head = f"def {one.name}({signature_of(one, LEFT_OUT, 'torch.Tensor')}) -> {returned_by(one, 'torch.Tensor')}:"
    return function_of(head, _body(one))


def _body(one: Bound) -> str:
    takes = one.parameters
    lines = [*ungrouped(one), f"arrays = {tuple_of([*one.inputs, *one.outputs])}"]
    lines.append(f"options = {tuple_of(one.options)}")
    plain = ["is_plain_call(arrays)", *_agreement(one)]
    if one.operation.derivative != "none":
        plain.insert(1, "not torch.is_grad_enabled()")
    others = ["workspace"] if "workspace" in takes else []
    at_once = [
        f"{one.name.upper()}.operation",
        "arrays",
        "options",
        *others,
        *(["plan=plan_of(plan)"] if "plan" in takes else []),
    ]
    by_operator = [one.name.upper(), "arrays", "options", *others]
    if one.reverse:
        stem = one.module.rpartition(".")[2]
        by_operator.append(f"gradient={stem}_gradient.transformed")
    made = f"{names_of(one.outputs)} = " if one.outputs else ""
    lines += [f"if {' and '.join(plain)}:", f"    {made}run(Invocation({', '.join(at_once)}))"]
    if "plan" in takes:
        lines += ["elif plan is not None:", f"    {made}call_planned(plan, arrays, options, workspace)"]
    lines += ["else:", f"    {made}call({', '.join(by_operator)})"]
    if one.outputs:
        lines.append(answer_of(one, one.outputs))
    return "\n".join(lines)


def _agreement(one: Bound) -> Iterator[str]:
    """Conditions that all results are given, or none."""
    always = [x.name for x in one.operation.outputs if not (x.needs or x.when)]
    if len(always) > 1:
        yield " is ".join(f"({name} is None)" for name in always)
    for group in dict.fromkeys((x.needs, x.when) for x in one.operation.outputs if x.needs or x.when):
        needs, when = group
        names = [x.name for x in one.operation.outputs if (x.needs, x.when) == group]
        agree = " is ".join(f"({name} is None)" for name in (always[0], *names))
        dtypes = {x.dtype_option for x in one.operation.outputs}
        absent = f"{needs or when} is {'None' if needs or when in dtypes else 'False'}"
        yield f"({absent} or {agree})"


def _objective(one: Bound) -> str:
    name, without = OBJECTIVES[one.name]
    left_out = (*LEFT_OUT, "workspace", *left_out_of_objective(one))
    more = ["straight_through: tuple[torch.Tensor, torch.Tensor] | None = None"]
    head = f"def {name}({signature_of(one, left_out, 'torch.Tensor', more)}) -> tuple[torch.Tensor, torch.Tensor]:"
    arrays = tuple_of("None" if x in without else x for x in one.inputs)
    options = tuple_of("True" if x == "gradients" else x for x in one.options)
    lines = (f"arrays = {arrays}", f"options = {options}")
    body = "\n".join(
        (*ungrouped(one, left_out), *lines, f"return objective({one.name.upper()}, arrays, options, straight_through)")
    )
    return function_of(head, body)
