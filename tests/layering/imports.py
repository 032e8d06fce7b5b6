"""Imports between modules, read from the source: nothing is executed."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "mla_cupy"

#: Part of the package -> the other parts that it may know. A package may always know itself.
MAY_KNOW: dict[str, set[str]] = {
    "errors": set(),
    "_version": set(),
    "dtypes": set(),
    "reference": set(),
    "arrays": set(),
    "runtime": {"_version"},
    "shapes": set(),
    "cache_formats": set(),
    "kernels": {"arrays.view", "runtime"},
    "ops": {"arrays", "kernels", "runtime.device", "runtime.driver", "runtime.env"},
    "cache": {"arrays", "ops", "reference", "runtime.device"},
    # Only who wants them imports these: nothing else knows them.
    "jax": {"arrays", "export.manifest", "export.xla", "ops", "parallel.zigzag"},
    "torch": {"arrays", "ops", "parallel.zigzag"},
    "compat": {"arrays", "ops", "torch"},
    "transformers": {"cache", "cache_formats", "ops.groups", "parallel.zigzag", "torch", ""},
    "integrations": {"ops.groups", "ops.indexer", "runtime.env", "terminal", "torch", "transformers"},
    "parallel": {"_version", "arrays", "kernels", "ops", "runtime.device"},
    "parts": set(),
    "simulation": {"arrays", "kernels", "ops", "parts", "runtime"},
    "export": {"_version", "arrays.view", "compiling", "kernels", "ops", "runtime", "terminal"},
    "selftest": {"_version", "arrays", "compiling", "kernels", "reference", "runtime", "simulation", "terminal", ""},
    "terminal": set(),
    "compiling": {"runtime", "terminal"},
    "cli": {
        "_version",
        "checkup",
        "compiling",
        "export",
        "kernels",
        "parts",
        "runtime",
        "demo",
        "selftest",
        "terminal",
    },
    "checkup": {"kernels", "ops", "reference", "runtime", ""},
    "demo": {"compiling", "kernels", "parts", "reference", "runtime", "simulation", "terminal", ""},
    "__main__": {"cli"},
    "": {"_version", "cache", "kernels", "ops", "reference", "runtime"},
}
FOR_ALL = {"cache_formats", "errors", "dtypes", "shapes"}
#: One module may know more than its package.
EXCEPTIONS: dict[str, set[str]] = {
    "ops.backend": {"reference"},
    "ops.choices": {"runtime.admission", "runtime.worker"},
    "cache.in_jax": {"jax"},
}

#: Packages from outside that may be imported at module level, by part; everywhere else none but the standard library.
LIBRARIES: dict[str, set[str]] = {
    "dtypes": {"numpy", "ml_dtypes"},
    "arrays": {"numpy", "ml_dtypes"},
    "reference": {"numpy"},
    "kernels": {"numpy"},
    "ops": {"numpy"},
    "cache": {"numpy"},
    "jax": {"numpy", "jax"},
    "torch": {"torch"},
    "compat": {"torch"},
    "integrations": {"torch", "transformers", "vllm", "sglang"},
    "transformers": {"torch", "transformers"},
    "checkup": {"numpy"},
    "demo": {"numpy"},
    "parallel": {"numpy"},
    "simulation": {"numpy"},
    "selftest": {"numpy"},
}
#: Those that may be imported within functions only, and where.
WITHIN_FUNCTIONS: dict[str, set[str]] = {
    "cupy": {"arrays", "runtime"},
    "cuda": {"runtime"},
    "nccl": {"parallel"},
    "torch": {"arrays"},
    "jax": {"arrays", "cache"},
    "platformdirs": {"runtime"},
    "rich": {"terminal"},
}


@dataclass(frozen=True)
class Import:
    """`module` is absolute; `lazy` if it is in a function, `typing_only` under `if TYPE_CHECKING`."""

    module: str
    line: int
    lazy: bool
    typing_only: bool


def imports(path: Path) -> Iterator[Import]:
    """Every import of a file. `from a import b` counts as a.b, since b may be a module."""
    yield from _visit(ast.parse(path.read_text()), lazy=False, typing_only=False)


def _visit(node: ast.AST, *, lazy: bool, typing_only: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for name in node.names:
            yield Import(name.name, node.lineno, lazy, typing_only)
    elif isinstance(node, ast.ImportFrom):
        for name in node.names:
            dots = "." * node.level
            yield Import(f"{dots}{node.module or ''}.{name.name}", node.lineno, lazy, typing_only)
    for child in ast.iter_child_nodes(node):
        yield from _visit(
            child,
            lazy=lazy or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)),
            typing_only=typing_only or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)),
        )


def violations(package: Path) -> list[str]:
    """Violations of the rules above, as `file:line: ...`."""
    found = []
    for path in sorted(package.rglob("*.py")):
        module = ".".join(path.relative_to(package).with_suffix("").parts).removesuffix("__init__").rstrip(".")
        part = module.partition(".")[0]
        if part not in MAY_KNOW:
            found.append(f"{path}: no rule for {part!r}")
            continue
        for entry in imports(path):
            if not entry.typing_only and (why := _problem(part, module, entry)):
                found.append(f"{path}:{entry.line}: {why}")
    return found


def _problem(part: str, module: str, entry: Import) -> str:
    if entry.module.startswith("."):
        return "a relative import"
    root, _, rest = entry.module.partition(".")
    if root == PACKAGE:
        known = MAY_KNOW[part] | FOR_ALL | EXCEPTIONS.get(module, set()) | {part}
        inner = rest.split(".")
        target = inner[0] if inner[0] in MAY_KNOW else ""
        allowed = target in known or ".".join(inner[:2]) in known
        return "" if allowed else f"{module or PACKAGE} may not know {entry.module}"
    if root in sys.stdlib_module_names:
        return ""
    if entry.lazy and part in WITHIN_FUNCTIONS.get(root, set()):
        return ""
    return "" if root in LIBRARIES.get(part, set()) else f"{module or PACKAGE} may not import {root} here"
