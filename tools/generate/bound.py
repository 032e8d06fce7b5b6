"""Operations of the bindings, as their records describe them, and pieces of source that both libraries need."""

from __future__ import annotations

import inspect
import math
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

#: Losses with a form that is differentiable: its name, and the inputs of the loss that it has not.
OBJECTIVES = {
    "indexer_sparse_loss": ("indexer_sparse_objective", ()),
    "indexer_warmup_loss": ("indexer_warmup_objective", ("v",)),
}


@dataclass(frozen=True)
class Bound:
    """An operation of the bindings.

    Attributes
    ----------
    operation : mla_cupy.ops.operation.Operation
    function : function
        The public one.
    constant : str
        The record's name in the function's module.
    """

    operation: Any
    function: Callable[..., Any]
    constant: str

    @property
    def name(self) -> str:
        return str(self.operation.name)

    @property
    def module(self) -> str:
        """Module of the public function."""
        return self.function.__module__

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """Parameters of the public function, with the members of groups in place of the groups."""
        return dict(self.operation.parameters)

    @property
    def signature(self) -> dict[str, inspect.Parameter]:
        """Parameters of the public function."""
        return dict(inspect.signature(self.function).parameters)

    @property
    def inputs(self) -> list[str]:
        return [array.name for array in self.operation.inputs]

    @property
    def outputs(self) -> list[str]:
        return [output.name for output in self.operation.outputs]

    @property
    def options(self) -> list[str]:
        return list(self.operation.bound_options)

    @property
    def arguments(self) -> list[str]:
        """Inputs and options in the order of the public function."""
        mine = {*self.inputs, *self.options}
        return [name for name in self.parameters if name in mine]

    @property
    def reverse(self) -> bool:
        """Tell whether the bindings have its gradient."""
        return bool(self.operation.derivative == "reverse")


def bound() -> Iterator[Bound]:
    """The operations of the bindings, by modules."""
    from mla_cupy import ops

    for name, operation in ops.BOUND_OPERATIONS.items():
        function = inspect.unwrap(getattr(ops, name))
        (constant,) = (key for key, value in vars(sys.modules[function.__module__]).items() if value is operation)
        yield Bound(operation, function, constant)


# ---- Pieces of Python ------------------------------------------------------------------------------------------------


def value_of(value: Any) -> str:
    """A default, as source."""
    return "-math.inf" if value == -math.inf else repr(value).replace("'", '"')


def tuple_of(items: Iterable[str]) -> str:
    found = list(items)
    return f"({', '.join(found)},)" if len(found) == 1 else f"({', '.join(found)})"


def names_of(items: Sequence[str]) -> str:
    """Targets of an assignment of results."""
    return ", ".join(items) if len(items) > 1 else tuple_of(items)


def default_of(parameter: inspect.Parameter) -> str:
    return "" if parameter.default is inspect.Parameter.empty else f" = {value_of(parameter.default)}"


def signature_of(one: Bound, left_out: Sequence[str], array: str, more: Sequence[str] = ()) -> str:
    """The parameters of a binding's function, as source."""
    arrays = {*one.inputs, *one.outputs, "workspace"}
    optional = {array.name for array in one.operation.inputs if array.optional} | {*one.outputs, "workspace"}
    unbound = {*one.operation.options._fields} - {*one.options}
    found: list[str] = []
    for name, parameter in one.signature.items():
        if name in left_out or name in unbound:
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in found:
            found.append("*")
        kind = str(parameter.annotation)
        if name in arrays:
            kind = f"{array} | None" if name in optional else array
        elif name == "plan":
            kind = "TorchDecodePlan | None"
        found.append(f"{name}: {kind}{default_of(for_compilers(parameter))}")
    if more and "*" not in found:
        found.append("*")
    return ", ".join([*found, *more])


def for_compilers(parameter: inspect.Parameter) -> inspect.Parameter:
    """A default of 1.0 as 1: `torch.compile` takes a float there for an input of the graph."""
    value = parameter.default
    return parameter.replace(default=int(value)) if isinstance(value, float) and value.is_integer() else parameter


def returned_by(one: Bound, array: str) -> str:
    """The type of what a function returns."""
    if one.operation.returns is not None:
        return returned_kind(one, array)
    kinds = [f"{array} | None" if x.needs or x.when else array for x in one.operation.outputs]
    return f"tuple[{', '.join(kinds)}]" if len(kinds) > 1 else kinds[0] if kinds else "None"


def returned_kind(one: Bound, array: str) -> str:
    """The type of what a function returns that does not return all results: a named tuple, or one of any length."""
    returns = one.operation.returns
    return str(returns.__name__) if isinstance(returns, type) else f"tuple[{array}, ...]"


def function_of(head: str, body: str) -> str:
    """A function, which gets its docstring where it is defined."""
    return f"@documented\n{head}\n{textwrap.indent(body, '    ')}\n"


def answer_of(one: Bound, results: Sequence[str]) -> str:
    """The statement that returns the results."""
    made = ", ".join(results)
    return f"return {made}" if one.operation.returns is None else f"return {one.operation.returns.__name__}({made})"


def left_out_of_objective(one: Bound) -> tuple[str, ...]:
    """Parameters of a loss that its differentiable form has not."""
    return ("gradients", *one.outputs, *one.operation.result_groups, *OBJECTIVES[one.name][1])


def returns_of(every: Sequence[Bound]) -> str:
    """The import of the named tuples that functions return."""
    kinds = {one.operation.returns for one in every if one.operation.returns is not None}
    return "\n".join(sorted(f"from {kind.__module__} import {kind.__name__}" for kind in kinds))


def ungrouped(one: Bound, left_out: Sequence[str] = ()) -> list[str]:
    """Statements that take the members out of groups."""
    lines = []
    for group, kind in one.operation.groups.items():
        if group in left_out:
            continue
        members = one.operation.members(group)
        names = tuple_of(f'"{name}"' for name in members)
        absent = tuple_of(value_of(for_compilers(one.parameters[name]).default) for name in members)
        take = f'taken({group}, {kind.__name__}, "{group}", {names})'
        lines.append(f"{names_of(members)} = {absent} if {group} is None else {take}")
    return lines


def groups_of(every: Sequence[Bound]) -> str:
    """The import of the groups."""
    kinds = sorted({kind.__name__ for one in every for kind in one.operation.groups.values()})
    return f"from mla_cupy.ops.groups import {', '.join([*kinds, 'taken'])}" if kinds else ""


def file_of(arrays: str, imports: Sequence[str], body: str) -> str:
    """A file of functions."""
    return (
        f'"""The operations as functions of {arrays}. Their docstrings are made from `mla_cupy`\'s.\n\n'
        'Written by `python -m tools.generate` from the operations\' records.\n"""\n\n'
        "from __future__ import annotations\n\n" + "\n".join(imports) + f"\n\n{body}"
    )
