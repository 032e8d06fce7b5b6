"""Contents of a package's classes, read from source without importing it: its dependencies may be missing."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from inspect import Parameter
from pathlib import Path
from typing import Any

Definition = ast.ClassDef | ast.FunctionDef | ast.Assign | ast.AnnAssign


@dataclass(frozen=True)
class Class:
    """A class, and the module that has it."""

    module: str
    node: ast.ClassDef

    @property
    def methods(self) -> dict[str, ast.FunctionDef]:
        """Its own methods. Of an overloaded one, the last: that is the one that runs."""
        return {x.name: x for x in self.node.body if isinstance(x, ast.FunctionDef)}

    @property
    def names(self) -> set[str]:
        """Defined names: methods, class attributes, and attributes that its methods assign to `self`."""
        found = set(self.methods)
        for statement in self.node.body:
            found |= _targets(statement)
        for node in ast.walk(self.node):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node):
                found.add(node.attr)
        return found

    @property
    def read(self) -> set[str]:
        """Attributes that its methods read from `self`, wherever they are defined."""
        loads = (x for x in ast.walk(self.node) if isinstance(x, ast.Attribute) and isinstance(x.ctx, ast.Load))
        return {x.attr for x in loads if _is_self(x)}


@dataclass
class Package:
    """A folder with Python packages, such as an unpacked wheel.

    Attributes
    ----------
    root : Path
    """

    root: Path
    _trees: dict[str, ast.Module | None] = field(default_factory=dict, repr=False)

    def tree(self, module: str) -> ast.Module | None:
        """A module's syntax tree, None if there is no such module."""
        if module not in self._trees:
            self._trees[module] = self._parse(module)
        return self._trees[module]

    def _parse(self, module: str) -> ast.Module | None:
        stem = self.root.joinpath(*module.split("."))
        for path in (stem.with_name(f"{stem.name}.py"), stem / "__init__.py"):
            if path.exists():
                return ast.parse(path.read_text(encoding="utf-8"))
        return None

    def mentioning(self, word: str, above: str) -> Iterator[str]:
        """The modules of a package, those below it included, whose text has a word: only they need to be parsed."""
        for path in sorted(self.root.joinpath(*above.split(".")).rglob("*.py")):
            if word in path.read_text(encoding="utf-8"):
                parts = path.relative_to(self.root).with_suffix("").parts
                yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def find(self, module: str, name: str) -> tuple[str, Definition] | None:
        """Definition of a module's name, through its imports; None if there is none."""
        tree = self.tree(module)
        for statement in _statements(tree) if tree else ():
            if isinstance(statement, ast.ClassDef | ast.FunctionDef) and statement.name == name:
                return module, statement
            if isinstance(statement, ast.Assign | ast.AnnAssign) and name in _targets(statement):
                return module, statement
            if isinstance(statement, ast.ImportFrom):
                for alias in statement.names:
                    if (alias.asname or alias.name) == name:
                        return self.find(self._source(module, statement), alias.name)
        return None

    def _source(self, module: str, statement: ast.ImportFrom) -> str:
        if not statement.level:
            return statement.module or ""
        package = self.root.joinpath(*module.split("."), "__init__.py").exists()
        above = module.split(".")[: len(module.split(".")) - statement.level + package]
        return ".".join([*above, *filter(None, [statement.module])])

    def lineage(self, module: str, name: str) -> list[Class]:
        """A class and its bases, as far as they are in this package: nearest first."""
        found = self.find(module, name)
        if found is None or not isinstance(found[1], ast.ClassDef):
            return []
        made = Class(found[0], found[1])
        lines = [made]
        for base in made.node.bases:
            plain = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(plain, ast.Name):
                lines += self.lineage(made.module, plain.id)
        return list({(x.module, x.node.name): x for x in lines}.values())


@dataclass(frozen=True)
class Call:
    """Form of a call's arguments.

    Attributes
    ----------
    module, line
        Where it is.
    positional : int
    named : tuple of str
    """

    module: str
    line: int
    positional: int
    named: tuple[str, ...]


def calls(package: Package, above: str, name: str) -> Iterator[Call]:
    """Every call of a method or function of this name in a package; those that unpack something are left out."""
    for module in package.mentioning(f"{name}(", above):
        for node in _calls_of(package, module):
            function = node.func
            called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)
            on_super = isinstance(function, ast.Attribute) and ast.unparse(function.value).startswith("super(")
            unpacked = any(isinstance(x, ast.Starred) for x in node.args) or any(x.arg is None for x in node.keywords)
            if called == name and not on_super and not unpacked:
                yield Call(module, node.lineno, len(node.args), tuple(str(x.arg) for x in node.keywords))


def _calls_of(package: Package, module: str) -> list[ast.Call]:
    tree = package.tree(module)
    return [x for x in ast.walk(tree) if isinstance(x, ast.Call)] if tree else []


def signature(function: ast.FunctionDef, *, bound: bool = False) -> inspect.Signature:
    """The signature of a function definition; what a default is does not count, only that there is one.

    Parameters
    ----------
    function : ast.FunctionDef
    bound : bool
        Without the first parameter of a method or a class method.
    """
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    first_default = len(positional) - len(given.defaults)
    made = []
    for number, argument in enumerate(positional):
        kind = Parameter.POSITIONAL_ONLY if number < len(given.posonlyargs) else Parameter.POSITIONAL_OR_KEYWORD
        made.append(Parameter(argument.arg, kind, default=_default(number >= first_default)))
    if given.vararg:
        made.append(Parameter(given.vararg.arg, Parameter.VAR_POSITIONAL))
    for argument, value in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        made.append(Parameter(argument.arg, Parameter.KEYWORD_ONLY, default=_default(value is not None)))
    if given.kwarg:
        made.append(Parameter(given.kwarg.arg, Parameter.VAR_KEYWORD))
    if bound and "staticmethod" not in decorators(function):
        made = made[1:]
    return inspect.Signature(made)


def _default(there: bool) -> Any:
    return ... if there else Parameter.empty


def decorators(function: ast.FunctionDef) -> set[str]:
    """The last names of a function's decorators."""
    plain = (x.func if isinstance(x, ast.Call) else x for x in function.decorator_list)
    return {ast.unparse(x).rpartition(".")[2] for x in plain}


def callable_of(made: inspect.Signature) -> Any:
    """Something that has this signature."""

    def stand_in() -> None: ...

    stand_in.__signature__ = made  # type: ignore[attr-defined]
    return stand_in


def _is_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def _targets(statement: ast.stmt) -> set[str]:
    given = statement.targets if isinstance(statement, ast.Assign) else []
    given = [statement.target] if isinstance(statement, ast.AnnAssign) else given
    return {x.id for x in given if isinstance(x, ast.Name)}


def _statements(tree: ast.Module) -> list[ast.stmt]:
    """A module's statements, those under `if` and `try` included. The last definition of a name comes first."""
    return _flat(tree)


@functools.cache
def _flat(tree: ast.Module) -> list[ast.stmt]:
    found: list[ast.stmt] = []

    def add(body: list[ast.stmt]) -> None:
        for statement in body:
            found.append(statement)
            for part in ("body", "orelse", "finalbody"):
                if isinstance(statement, ast.If | ast.Try | ast.With):
                    add(getattr(statement, part, []))
            for handler in getattr(statement, "handlers", []):
                add(handler.body)

    add(tree.body)
    return found[::-1]
