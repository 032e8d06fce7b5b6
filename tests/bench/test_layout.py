"""Which module of the benches may import which, and what a new operation takes."""

from __future__ import annotations

from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import numpy as np
import pytest

from bench.core import report
from bench.core.cost import Cost
from bench.core.implementation import OWN, Prepared
from bench.core.operation import BenchOperation
from bench.core.runner import Options, run_case
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


# ---- A new operation is one record: core needs nothing else ---------------------------------------------------------


@dataclass(frozen=True)
class Doubling:
    size: int
    op = "double"
    seen = {"target": None}  # noqa: RUF012

    @property
    def name(self):
        return f"n{self.size}"

    @property
    def cost(self):
        return Cost(flops=self.size, nbytes=4 * self.size)

    def shape(self):
        return {"size": self.size}


@dataclass
class Doubled:
    out: np.ndarray


@dataclass(frozen=True)
class Verdict:
    ok: bool
    reason: str = ""


class Doubler:
    name = OWN

    def __init__(self, factor, device):
        self.factor, self.device = factor, device

    def unsupported(self, case, dtype):
        return None

    def prepare(self, case, dtype, sets, device):
        results = [Doubled(device.empty(x.shape, dtype)) for x in sets]

        def call(index):
            results[index].out[...] = self.factor * sets[index]
            device.watch.now_us += 3.0

        calls = [lambda index=index: call(index) for index in range(len(sets))]
        return Prepared(calls, lambda index: results[index], device.recorder())


@pytest.mark.parametrize(("factor", "status"), [(2, "ok"), (3, "wrong")])
def test_a_toy_operation(device, limits, factor, status):
    toy = BenchOperation(
        name="double",
        title="twice its input",
        examples="",
        peers="none",
        suites={"targets": (Doubling(64),), "quick": ()},
        case_form="n<N>",
        parse=lambda name: Doubling(int(name[1:])),
        inputs=lambda case, dtype, seed, device: device.normal((case.size,), dtype, seed),
        expect=lambda case, dtype, x, device: [2 * x],
        judge=lambda expected, outputs, dtype, device: Verdict(bool((outputs.out == expected[0]).all()), "not twice"),
        results=("out",),
        implementations=lambda choices: {OWN: lambda: Doubler(factor, device)},
        default_peers=lambda choices: [],
    )
    (case,) = toy.select(["n64"], "targets")
    (row,) = run_case(toy, case, [Doubler(factor, device)], device, Options("float16", 20, True, limits, {}, ""))
    report.validate(row)
    assert (row["op"], row["case"], row["status"]) == ("double", "n64", status)
    if status == "ok":
        assert row["timing"]["us_median"] == pytest.approx(3.0)
        assert row["host_us"]["repeated_call"] > 0
