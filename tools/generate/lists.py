"""Contents of the `__init__` files and the registries: read from the sources, without imports."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.generate.bound import OBJECTIVES
from tools.generate.files import Texts, with_block

PACKAGE = "mla_cupy"


@dataclass(frozen=True)
class Module:
    """A module as its text says it is.

    Attributes
    ----------
    name : str
        Dotted.
    path : Path
    body : list of statements
    """

    name: str
    path: Path
    body: list[ast.stmt]

    @property
    def stem(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def docstring(self) -> str:
        """Docstring of the module, as a statement; the first lines of an `__init__` that is written whole."""
        text = self.path.read_text()
        return "\n".join(text.splitlines()[: self.body[0].end_lineno]) + "\n"

    def assigned(self) -> dict[str, ast.expr]:
        """Names that the module assigns at top level, and what it assigns."""
        found: dict[str, ast.expr] = {}
        for statement in self.body:
            if isinstance(statement, ast.Assign):
                found |= {name.id: statement.value for name in statement.targets if isinstance(name, ast.Name)}
            elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value:
                found[statement.target.id] = statement.value
        return found

    def defined(self) -> list[str]:
        """Classes and functions without an underscore."""
        kinds = (ast.FunctionDef, ast.ClassDef)
        return [node.name for node in self.body if isinstance(node, kinds) and not node.name.startswith("_")]

    def declared(self) -> list[str]:
        """Names in its `__all__`; empty without one."""
        value = self.assigned().get("__all__")
        return [] if value is None else list(ast.literal_eval(value))


def read(path: Path, name: str) -> Module:
    """A module by its file."""
    return Module(name, path, ast.parse(path.read_text()).body)


def modules(folder: Path, package: str) -> list[Module]:
    """The modules of a package, by name, without its `__init__` and without packages in it."""
    return [read(path, f"{package}.{path.stem}") for path in sorted(folder.glob("*.py")) if path.stem != "__init__"]


def subpackages(folder: Path) -> list[str]:
    """The packages in a package, by name."""
    return sorted(path.parent.name for path in folder.glob("*/__init__.py"))


def _is_call(value: ast.expr, ending: str) -> bool:
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id.endswith(ending)


def imports(names: Iterable[tuple[str, Iterable[str]]]) -> str:
    """`from module import names`, a line for each module that has names."""
    return "".join(f"from {module} import {', '.join(found)}\n" for module, found in names if found)


def all_of(names: Iterable[str]) -> str:
    """An `__all__`."""
    return "__all__ = [\n" + "".join(f'    "{name}",\n' for name in names) + "]\n"


# ---- Kernels --------------------------------------------------------------------------------------------------------


def kernel_lists(root: Path) -> Texts:
    """`KERNELS` of each family, and of all; the pipelines beside them."""
    return dict(_family_lists(root / PACKAGE / "kernels", f"{PACKAGE}.kernels"))


def _family_lists(folder: Path, package: str) -> Iterator[tuple[Path, str]]:
    families = subpackages(folder)
    for family in families:
        yield from _family_lists(folder / family, f"{package}.{family}")
    init = folder / "__init__.py"
    if package == f"{PACKAGE}.kernels":
        parts = "".join(f"    {family},\n" for family in families)
        block = f"from {package} import (\n{parts})\n" + imports([(f"{package}.spec", ["KernelSpec"])])
        block += f"\nFAMILIES = (\n{parts})\n"
        yield init, with_block(init.read_text(), "families", block)
        return
    whole = [module for module in modules(folder, package) if {"KERNEL", "KERNELS"} & module.assigned().keys()]
    pipelines = [
        (module.name, [name for name, value in module.assigned().items() if _is_call(value, "Pipeline")])
        for module in modules(folder, package)
    ]
    of_modules = [
        f"*{module.stem}.KERNELS" if "KERNELS" in module.assigned() else f"{module.stem}.KERNEL" for module in whole
    ]
    of_packages = [f"*{family}.KERNELS" for family in families]
    names = sorted(name for _, found in pipelines for name in found)
    text = (
        read(init, package).docstring
        + "# Written by `python -m tools.generate`, but for the line above.\n\n"
        + "from typing import Any\n\n"
        + imports([(package, [*families, *(module.stem for module in whole)]), *pipelines])
        + f"from {PACKAGE}.kernels.spec import KernelSpec\n\n"
        + all_of(sorted(["KERNELS", *names]))
        + f"\nKERNELS: tuple[KernelSpec[Any], ...] = ({', '.join((*of_packages, *of_modules))},)\n"
    )
    yield init, text


# ---- Operations -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Described:
    """An operation as a module describes it.

    Attributes
    ----------
    constant, name : str
        The record's name there, and the public one.
    internal : bool
        Whether it is for the package alone.
    bound : bool
        Whether the bindings have it.
    """

    constant: str
    name: str
    internal: bool
    bound: bool


def described(module: Module) -> list[Described]:
    """The operations that a module describes."""
    found = []
    for constant, value in module.assigned().items():
        if isinstance(value, ast.Call) and any(_is_call(value, kind) for kind in ("Operation", "Composite")):
            internal = any(word.arg == "internal" and ast.literal_eval(word.value) for word in value.keywords)
            bound = not internal and _is_call(value, "Operation")
            found.append(Described(constant, ast.literal_eval(value.args[0]), internal, bound))
    return found


def public_names(module: Module) -> list[str]:
    """Public names of a module of `ops`: its `__all__`, and the functions of its operations."""
    return sorted({*module.declared(), *(one.name for one in described(module))})


def operation_lists(root: Path) -> Texts:
    """The operations and the public names of `ops`, of the oracle, and of the package."""
    folder = root / PACKAGE / "ops"
    of_ops = modules(folder, f"{PACKAGE}.ops")
    for inner in subpackages(folder):
        of_ops += modules(folder / inner, f"{PACKAGE}.ops.{inner}")
    names = [(module.name, public_names(module)) for module in of_ops]
    every = sorted(name for _, found in names for name in found)
    operations = [one for module in of_ops for one in described(module)]
    internal = {one.name for one in operations if one.internal}
    return {
        folder / "__init__.py": _ops_init(folder / "__init__.py", of_ops, names, every),
        **_oracle_init(root, {one.name for one in operations}),
        **_binding_init(root, "torch", of_ops),
        **_binding_init(root, "jax", of_ops),
        **_package_init(root, [name for name in every if name not in internal]),
    }


def _ops_init(init: Path, of_ops: list[Module], names: list[tuple[str, list[str]]], every: list[str]) -> str:
    describing = [module for module in of_ops if described(module)]
    constants = "".join(f"    {m.stem}.{one.constant},\n" for m in describing for one in described(m))
    lists = ["BOUND_OPERATIONS", "COMPOSITE_OPERATIONS", "OPERATIONS", "POOL_OPERATIONS"]
    block = (
        imports([*((module.name.rpartition(".")[0], [module.stem]) for module in describing), *names])
        + f"from {PACKAGE}.ops.composite import Composite\n"
        + f"from {PACKAGE}.ops.operation import Operation\n\n"
        + all_of(sorted([*lists, *every]))
        + f"\n_DESCRIBED: tuple[Operation, ...] = (\n{constants})\n"
    )
    return with_block(init.read_text(), "operations and public names", block)


def _oracle_init(root: Path, operations: set[str]) -> Texts:
    """The oracle's functions have the names of operations."""
    folder = root / PACKAGE / "reference"
    names = [
        (module.name, sorted({*module.declared(), *(operations & set(module.defined()))}))
        for module in modules(folder, f"{PACKAGE}.reference")
    ]
    return _names_of_modules(folder / "__init__.py", "the oracle's functions", names)


def _binding_init(root: Path, library: str, of_ops: list[Module]) -> Texts:
    """The operations' functions, in a file that is written from their records; and what modules have in `__all__`."""
    folder = root / PACKAGE / library
    names = [(module.name, sorted(module.declared())) for module in modules(folder, f"{PACKAGE}.{library}")]
    bound = [one.name for module in of_ops for one in described(module) if one.bound]
    objectives = [OBJECTIVES[name][0] for name in bound if name in OBJECTIVES]
    names.append((f"{PACKAGE}.{library}.functions", sorted([*bound, *objectives])))
    page = root / "docs" / "reference" / f"{library}.md"
    return {
        **_names_of_modules(folder / "__init__.py", "names of the modules", names),
        page: _reference(page.read_text(), sorted(name for _, found in names for name in found)),
    }


def _reference(text: str, names: list[str]) -> str:
    """A page of reference with a table of a module's names, each with a page of its own."""
    rows = "".join(f"   {name}\n" for name in names)
    table = f".. autosummary::\n   :toctree: ../_generated\n   :nosignatures:\n\n{rows}\n"
    return with_block(text, "functions", table, ".. ")


def _names_of_modules(init: Path, block: str, names: list[tuple[str, list[str]]]) -> Texts:
    text = imports(names) + "\n" + all_of(sorted(name for _, found in names for name in found))
    return {init: with_block(init.read_text(), block, text)}


def _package_init(root: Path, public: list[str]) -> Texts:
    folder = root / PACKAGE
    errors = sorted(read(folder / "errors.py", "").defined())
    errors = [name for name in errors if name.endswith("Error")]
    cache = read(folder / "cache" / "__init__.py", "").declared()
    homes = {"errors": errors, "cache": sorted(cache), "ops": public}
    init = folder / "__init__.py"
    text = init.read_text()
    typed = f"    from {PACKAGE} import reference\n" + "".join(
        f"    from {PACKAGE}.{part} import (\n" + "".join(f"        {name},\n" for name in names) + "    )\n"
        for part, names in sorted(homes.items())
    )
    text = with_block(text, "names for type checkers", typed, "    ")
    every = sorted(["__version__", "reference", *(name for names in homes.values() for name in names)])
    found = "".join(f'    "{name}": "{part}",\n' for part, names in sorted(homes.items()) for name in names)
    block = all_of(every) + f"\n_HOMES = {{\n{found}}}\n"
    return {init: with_block(text, "public names", block)}


# ---- Benchmarks and distribution ------------------------------------------------------------------------------------


def bench_lists(root: Path) -> Texts:
    """The operations that can be benchmarked."""
    found = []
    for path in sorted((root / "bench" / "ops").glob("*.py")):
        names = [k for k, value in read(path, "").assigned().items() if _is_call(value, "BenchOperation")]
        found += [(f".ops.{path.stem}", name) for name in names]
    init = root / "bench" / "operations.py"
    block = (
        imports((module, [name]) for module, name in found)
        + "\n_KNOWN = (\n"
        + "".join(f"    {name},\n" for _, name in found)
        + ")\n"
    )
    return {init: with_block(init.read_text(), "benchmarks", block)}
