"""The manifest: an exported module as JSON, for readers in any language, and the reader of this package.

It holds what the C source is written from: arguments, rules, launches as expressions, parameter structs, images. The
page `docs/reference/export-manifest.md` describes it. Whoever changes what a member means raises SCHEMA, and the reader
goes on reading the earlier ones.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_cupy._version import __version__
from mla_cupy.errors import ArgumentError, explain
from mla_cupy.export import expressions as ex
from mla_cupy.export.explore import Branch, Diagram
from mla_cupy.export.expressions import Expression
from mla_cupy.export.interface import STATUSES
from mla_cupy.export.module import INTERFACE_VERSION, Kernel, Module
from mla_cupy.export.record import Procedure, RecordedFill, RecordedMap, RecordedStep, Refusal
from mla_cupy.export.subject import DEVICE_ARGUMENTS, PLAN_ARGUMENTS, WORKSPACE, WORKSPACE_BYTES, Argument, Subject
from mla_cupy.runtime.device import number_of

SCHEMA = 1
"""Version of the manifest's form."""
_CODES = {"uint64": "Q", "int64": "q", "int32": "i", "float32": "f"}


# ---- Writing -------------------------------------------------------------------------------------------------------


def manifest(module: Module, image_names: Sequence[str]) -> dict[str, Any]:
    """The manifest of a module as plain data."""
    subject, table = module.subject, _Expressions()
    targets = {
        target.arch: {
            "compute_capability": list(divmod(number_of(target.arch), 10)),
            "procedures": {
                name: _procedure(module, at, procedure, table) for name, procedure in target.procedures.items()
            },
        }
        for at, target in enumerate(module.targets)
    }
    return {
        "schema": SCHEMA,
        "package": f"mla_cupy {__version__}",
        "licence": "MIT",
        "interface": INTERFACE_VERSION,
        "name": module.name,
        "operation": subject.operation.name,
        "sizes": dict(subject.sizes),
        "options": {name: value for name, value in subject.fixed.items() if value is not None},
        "notes": dict(subject.notes),
        "statuses": STATUSES,
        "arguments": [_argument(argument, subject) for argument in _all_arguments(module)],
        "arrays": [
            {
                "name": array.name,
                "axes": [axis.removesuffix("?") for axis in array.axes],
                "dtype": array.dtype,
                "strides": array.num_strides,
                "written": array.written,
                "input": array.name in {each.name for each in subject.operation.inputs},
            }
            for array in subject.arrays
        ],
        "structs": {
            name: {
                "bytes": layout.size,
                "members": [
                    {"name": member, "type": str(kind), "offset": at}
                    for member, (kind, at, *_) in (layout.dtype.fields or {}).items()
                ],
            }
            for name, layout in module.structs.items()
        },
        "kernels": [
            _kernel(kernel, module.targets[kernel.target].arch, image)
            for kernel, image in zip(module.kernels, image_names, strict=True)
        ],
        "expressions": table.rows,
        "targets": targets,
    }


def _all_arguments(module: Module) -> list[Argument]:
    plan = PLAN_ARGUMENTS if module.is_planned else ()
    return [*module.subject.arguments(), WORKSPACE, WORKSPACE_BYTES, *plan, *DEVICE_ARGUMENTS]


def _argument(argument: Argument, subject: Subject) -> dict[str, Any]:
    found: dict[str, Any] = {"name": argument.name, "kind": argument.kind}
    if argument.kind != "real":
        found |= {"low": argument.low, "high": argument.high}
    if argument.name in subject.defaults:
        found["default"] = _plain(subject.defaults[argument.name])
    elif argument.name in subject.free:
        found["required"] = True
    return found


def _kernel(kernel: Kernel, arch: str, image: str) -> dict[str, Any]:
    return {
        "target": arch,
        "kernel": kernel.spec.name,
        "variant": str(kernel.variant),
        "entry": kernel.spec.entry,
        "image": image,
        "format": "ptx" if kernel.ptx else "cubin",
        "bytes": len(kernel.image),
        "sha256": hashlib.sha256(kernel.image).hexdigest(),
        "nvrtc": kernel.build.info["nvrtc"],
        "threads": kernel.threads,
        "cluster": kernel.cluster,
        "shared_bytes": kernel.shared_bytes,
        "struct": kernel.params.__name__,
    }


def _plain(value: float) -> Any:
    """A number as JSON has it: infinities and NaN are texts."""
    return value if isinstance(value, int) or abs(value) < float("inf") else str(value)


class _Expressions:
    """The table of expressions: each row is an operator and its operands, rows by their numbers."""

    def __init__(self) -> None:
        self.rows: list[list[Any]] = []
        self._known: dict[Expression, int] = {}

    def row(self, expression: Expression) -> int:
        """The number of an expression's row."""
        found = self._known.get(expression)
        if found is None:
            if expression.op in (ex.INTEGER, ex.REAL, ex.VARIABLE):
                args = [_plain(arg) if expression.op != ex.VARIABLE else arg for arg in expression.args]
            else:
                args = [self.row(arg) for arg in expression.args]
            found = self._known[expression] = len(self.rows)
            self.rows.append([expression.op, *args])
        return found


def _procedure(module: Module, target: int, procedure: Procedure, table: _Expressions) -> dict[str, Any]:
    nodes = _Nodes(module, target, table)
    return {
        "bounds": [argument.name for argument in procedure.bounds],
        "rules": [nodes.node(rule) for rule in procedure.rules],
        "workspace": nodes.node(procedure.workspace),
        "steps": nodes.node(procedure.steps),
        "nodes": nodes.rows,
    }


class _Nodes:
    """The table of a procedure's diagrams: each row is a branch, or an outcome."""

    def __init__(self, module: Module, target: int, table: _Expressions) -> None:
        self._module, self._target, self._table = module, target, table
        self._known: dict[int, int] = {}
        self.rows: list[dict[str, Any]] = []

    def node(self, diagram: Diagram) -> int:
        """The number of a diagram's row."""
        found = self._known.get(id(diagram))
        if found is None:
            row = self._branch(diagram) if isinstance(diagram, Branch) else self._outcome(diagram.outcome)
            found = self._known[id(diagram)] = len(self.rows)
            self.rows.append(row)
        return found

    def _branch(self, branch: Branch) -> dict[str, Any]:
        then, otherwise = self.node(branch.then), self.node(branch.otherwise)
        return {"if": self._table.row(branch.condition), "then": then, "else": otherwise}

    def _outcome(self, outcome: Any) -> dict[str, Any]:
        row = self._table.row
        if outcome is None:
            return {"fine": True}
        if isinstance(outcome, Expression):
            return {"bytes": row(outcome)}
        if isinstance(outcome, Refusal):
            text = [piece if isinstance(piece, str) else [row(piece[0]), piece[1]] for piece in outcome.text]
            return {"refuse": outcome.kind, "text": text}
        return {"steps": [self._step(step) for step in outcome]}

    def _step(self, step: RecordedStep) -> dict[str, Any]:
        row = self._table.row
        if isinstance(step, RecordedFill):
            return {"fill": row(step.address), "bytes": row(step.nbytes)}
        return {
            "launch": self._module.index(self._target, step.build),
            "grid": [row(size) for size in step.grid],
            "struct": step.args.struct,
            "values": [row(value) for value in step.args.values],
            "maps": [self._map(each) for each in step.args.maps],
            "dependent": step.dependent,
        }

    def _map(self, each: RecordedMap) -> dict[str, Any]:
        row = self._table.row
        lists = {name: [row(size) for size in getattr(each, name)] for name in ("dims", "strides_bytes", "box")}
        return {"dtype": each.dtype, "base": row(each.base), **lists, "swizzle": each.swizzle, "l2": each.l2}


# ---- Reading -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReadKernel:
    """A kernel of a manifest."""

    kernel: str
    entry: str
    threads: int
    cluster: int
    shared_bytes: int
    image: str
    sha256: str


@dataclass(frozen=True)
class ReadLaunch:
    """A launch with its numbers: `params` are the bytes of the struct, `maps` what the tensor maps are encoded from."""

    kernel: ReadKernel
    grid: tuple[int, ...]
    params: bytes
    maps: tuple[dict[str, Any], ...]
    dependent: bool


@dataclass(frozen=True)
class ReadFill:
    """Zeros with their address."""

    address: int
    nbytes: int


class RefusedError(Exception):
    """Arguments that break a rule of a manifest; `kind` is the name of the package's exception."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Manifest:
    """A manifest that has been read.

    Attributes
    ----------
    data : dict
        As it was read.
    kernels : tuple of ReadKernel
    """

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = data
        schema = data.get("schema")
        if not isinstance(schema, int) or not 1 <= schema <= SCHEMA:
            raise ArgumentError(explain("schema", schema, f"1 to {SCHEMA}", "read it with the version that wrote it"))
        names = list(ReadKernel.__dataclass_fields__)
        self.kernels = tuple(ReadKernel(**{name: kernel[name] for name in names}) for kernel in data["kernels"])
        spans = {each["name"]: each for each in data["arguments"]}
        self._expressions: list[Expression] = []
        for op, *args in data["expressions"]:
            self._expressions.append(self._expression(op, args, spans))

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read a manifest's file."""
        return cls(json.loads(path.read_text()))

    def _expression(self, op: str, args: list[Any], spans: Mapping[str, Any]) -> Expression:
        if op == ex.INTEGER:
            return ex.integer(args[0])
        if op == ex.REAL:
            return ex.real(float(args[0]))
        if op == ex.VARIABLE:
            of = spans[args[0]]
            return ex.real_variable(args[0]) if of["kind"] == "real" else ex.variable(args[0], of["low"], of["high"])
        return ex.make(op, *(self._expressions[arg] for arg in args))

    def workspace(self, target: str, procedure: str, values: Mapping[str, Any]) -> int:
        """The bytes of workspace that arguments need."""
        found = self._outcome(self._procedure(target, procedure), "workspace", values)
        return int(self._value(found["bytes"], values))

    def steps(self, target: str, procedure: str, values: Mapping[str, Any]) -> list[ReadLaunch | ReadFill]:
        """Steps that a procedure enqueues for arguments, which are checked first.

        Raises
        ------
        RefusedError
            If they break a rule.
        """
        of = self._procedure(target, procedure)
        spans = {each["name"]: each for each in self.data["arguments"]}
        for name in of["bounds"]:
            low, high = spans[name]["low"], spans[name]["high"]
            if not low <= values[name] <= high:
                raise RefusedError("ShapeError", explain(name, values[name], f"{low} to {high}"))
        for rule in of["rules"]:
            found = self._walk(of, rule, values)
            if "refuse" in found:
                raise RefusedError(found["refuse"], self._text(found["text"], values))
        return [self._step(step, values) for step in self._outcome(of, "steps", values)["steps"]]

    def _procedure(self, target: str, procedure: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.data["targets"][target]["procedures"][procedure]
        return found

    def _outcome(self, of: Mapping[str, Any], what: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
        return self._walk(of, of[what], values)

    def _walk(self, of: Mapping[str, Any], at: int, values: Mapping[str, Any]) -> Mapping[str, Any]:
        row: Mapping[str, Any] = of["nodes"][at]
        while "if" in row:
            row = of["nodes"][row["then"] if self._value(row["if"], values) else row["else"]]
        return row

    def _value(self, row: int, values: Mapping[str, Any]) -> Any:
        return ex.evaluate(self._expressions[row], values.__getitem__)

    def _text(self, text: Sequence[Any], values: Mapping[str, Any]) -> str:
        return "".join(x if isinstance(x, str) else format(self._value(x[0], values), x[1]) for x in text)

    def _step(self, step: Mapping[str, Any], values: Mapping[str, Any]) -> ReadLaunch | ReadFill:
        if "fill" in step:
            return ReadFill(self._value(step["fill"], values), self._value(step["bytes"], values))

        def numbers(rows: Sequence[int]) -> tuple[Any, ...]:
            return tuple(self._value(row, values) for row in rows)

        maps = tuple(
            {
                **{name: numbers(each[name]) for name in ("dims", "strides_bytes", "box")},
                "base": self._value(each["base"], values),
                **{name: each[name] for name in ("dtype", "swizzle", "l2")},
            }
            for each in step["maps"]
        )
        layout, params = self.data["structs"][step["struct"]], bytearray()
        for member, value in zip(layout["members"], numbers(step["values"]), strict=True):
            params += bytes(member["offset"] - len(params)) + struct.pack("<" + _CODES[member["type"]], value)
        params += bytes(layout["bytes"] - len(params))
        return ReadLaunch(self.kernels[step["launch"]], numbers(step["grid"]), bytes(params), maps, step["dependent"])
