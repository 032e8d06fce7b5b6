"""Packages import downwards only, whole modules and at their top: no circle is hidden in a function."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import ptxsim

ROOT = Path(ptxsim.__file__).parent
#: From the bottom up.
LAYERS = (
    ("_version",), ("errors",), ("rules",), ("parsing",), ("arithmetic",), ("translation",), ("memory",),
    ("synchronisation",), ("state",), ("instructions",), ("tensor_cores",), ("module",), ("tool",),
    ("host", "testing", "triton"), ("__init__", "__main__"),
)  # fmt: skip
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
LAZY = {("__main__", "host")}
"""Imports inside functions, which save time at start."""


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """The layers that a file of the package imports from, and whether in a function."""
    depth = len(path.relative_to(ROOT).parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == depth:
            names = [node.module] if node.module else [alias.name for alias in node.names]
            yield from ((name.partition(".")[0], node.col_offset > 0) for name in names)


def test_packages_import_downwards() -> None:
    wrong = []
    for path in sorted(ROOT.rglob("*.py")):
        own = path.relative_to(ROOT).parts[0].removesuffix(".py")
        for name, lazy in imports(path):
            if LEVEL[name] >= LEVEL[own] or (lazy and (own, name) not in LAZY):
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert wrong == []


def test_every_file_has_a_layer() -> None:
    found = {path.relative_to(ROOT).parts[0].removesuffix(".py") for path in ROOT.rglob("*.py")}
    assert found == set(LEVEL)
