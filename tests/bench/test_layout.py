"""Allowed imports between the modules of the benches."""

from __future__ import annotations

from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from bench.operations import OPERATIONS
from tests.layering.imports import imports

BENCH = Path(__file__).parents[2] / "bench"
MODULES = {".".join(path.relative_to(BENCH.parent).with_suffix("").parts): path for path in BENCH.rglob("*.py")}
#: Which other folders a folder may import.
MAY_IMPORT = {
    "core": set(),
    "ops": {"core"},
    "peers": {"core", "ops"},
    "operations": {"core", "ops"},
    "model": {"core", "ops"},
    "trees": {"core", "operations"},
    "context_parallel": {"core"},
    "claims": {"core", "ops"},
    "calls": {"core", "ops"},
    "which": {"calls", "core", "operations"},
    "transformers_models": {"core"},
    "trace": {"core", "operations"},
    "cli": {
        "claims",
        "context_parallel",
        "core",
        "model",
        "operations",
        "trace",
        "transformers_models",
        "trees",
        "which",
    },
    "__main__": {"cli"},
    "__init__": set(),
}
#: Modules that may import peers, but in functions only, as peers import the operations.
NAMES_PEERS = {"ops", "claims"}


def imported(name: str, *, lazily: bool = True) -> set[str]:
    """The modules of the benches that a module imports, for types only, too, and in functions unless not `lazily`."""
    found = set()
    for entry in imports(MODULES[name]):
        if entry.lazy and not lazily:
            continue
        rest = entry.module.lstrip(".")
        dots = len(entry.module) - len(rest)
        if dots:
            base = name.split(".")[:-dots]
            parts = [*base, *filter(None, rest.split("."))]
            module = ".".join(parts)
            found.add(module if module in MODULES else ".".join(parts[:-1]))
    return {module for module in found if module in MODULES}


def folder(name: str) -> str:
    return name.split(".")[1]


@pytest.mark.parametrize("name", sorted(MODULES))
def test_layers(name):
    own = folder(name)
    assert {folder(module) for module in imported(name, lazily=False)} <= MAY_IMPORT[own] | {own}
    within_functions = {"peers"} if own in NAMES_PEERS else set()
    assert {folder(module) for module in imported(name)} <= MAY_IMPORT[own] | {own} | within_functions


def test_no_circles():
    list(TopologicalSorter({name: imported(name, lazily=False) for name in MODULES}).static_order())


def test_the_reader_of_imports_sees_the_benches():
    assert imported("bench.operations") >= {f"bench.ops.{name}" for name in ("decode", "sparse_forward")}
    assert "bench.core.table" in imported("bench.cli"), "a lazy import of several names"
    assert "bench.peers.flashmla" in imported("bench.ops.decode") - imported("bench.ops.decode", lazily=False)


def test_every_file_of_an_operation_is_registered():
    files = {path.stem for path in (BENCH / "ops").glob("*.py") if "= BenchOperation(" in path.read_text()}
    assert files == {name.replace("-", "_") for name in OPERATIONS}
