"""Which module of the benches may import which."""

from __future__ import annotations

from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from bench.operations import OPERATIONS
from tests.layering.imports import imports

BENCH = Path(__file__).parents[2] / "bench"
MODULES = {".".join(path.relative_to(BENCH.parent).with_suffix("").parts): path for path in BENCH.rglob("*.py")}
#: Which other folders a folder may import. `operation` is the record of an operation, which names the peers.
MAY_IMPORT = {
    "core": set(),
    "ops": {"core"},
    "peers": {"core", "ops"},
    "operation": {"core", "ops", "peers"},
    "operations": {"core", "operation"},
    "model": {"core", "ops"},
    "trees": {"core", "operations"},
    "context_parallel": {"core"},
    "claims": {"core", "operation", "ops", "peers"},
    "trace": {"core", "operations"},
    "cli": {"claims", "context_parallel", "core", "model", "operations", "trace", "trees"},
    "__main__": {"cli"},
    "__init__": set(),
}


def imported(name: str) -> set[str]:
    """The modules of the benches that a module imports, in functions and for types only, too."""
    found = set()
    for entry in imports(MODULES[name]):
        rest = entry.module.lstrip(".")
        dots = len(entry.module) - len(rest)
        if dots:
            base = name.split(".")[:-dots]
            parts = [*base, *filter(None, rest.split("."))]
            module = ".".join(parts)
            found.add(module if module in MODULES else ".".join(parts[:-1]))
    return {module for module in found if module in MODULES}


def folder(name: str) -> str:
    parts = name.split(".")[1:]
    return "operation" if parts[0] == "ops" and parts[-1] == "operation" else parts[0]


@pytest.mark.parametrize("name", sorted(MODULES))
def test_layers(name):
    own = folder(name)
    assert {folder(module) for module in imported(name)} <= MAY_IMPORT[own] | {own}


def test_no_circles():
    list(TopologicalSorter({name: imported(name) for name in MODULES}).static_order())


def test_the_reader_of_imports_sees_the_benches():
    assert imported("bench.operations") >= {f"bench.ops.{name}.operation" for name in ("decode", "sparse_forward")}
    assert "bench.core.table" in imported("bench.cli"), "a lazy import of several names"
    assert "bench.peers.flashmla" in imported("bench.ops.decode.operation")


def test_every_folder_of_an_operation_is_registered():
    folders = {path.parent.name for path in (BENCH / "ops").glob("*/operation.py")}
    assert folders == {name.replace("-", "_") for name in OPERATIONS}
