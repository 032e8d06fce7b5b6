"""The plugins, and the stand-ins that their tests run on, against the recorded interfaces of every version."""

from __future__ import annotations

import ast
import inspect
from inspect import Parameter
from typing import Any

import pytest

from mla_cupy.integrations.probe import misfit
from tests.bindings import stand_in_sglang, stand_in_vllm
from tests.engines import records
from tests.engines.compare import OURS, RELIANCE
from tests.engines.source import Class, callable_of, signature
from tests.engines.versions import FOR_TORCH_2_11, VERSIONS, pinned

RECORDS = {engine: records.read(engine) for engine in VERSIONS}
STAND_INS: dict[str, Any] = {"vllm": stand_in_vllm, "sglang": stand_in_sglang}
KNOWN_RESULTS = {"MlaCupySparseImpl._bf16_flash_mla_kernel": {"torch.Tensor", "tuple[torch.Tensor, torch.Tensor]"}}


def classes(engine: str) -> list[Class]:
    """A plugin's."""
    trees = ((module, OURS.tree(module)) for module in RELIANCE[engine].modules)
    return [Class(module, x) for module, tree in trees if tree for x in tree.body if isinstance(x, ast.ClassDef)]


def ours(engine: str) -> dict[str, Any]:
    """Every method of a plugin's classes, by the label that records have."""
    return {f"{kind.node.name}.{name}": method for kind in classes(engine) for name, method in kind.methods.items()}


ALL = [(engine, version) for engine, versions in RECORDS.items() for version in versions]


def test_every_version_has_a_record() -> None:
    for engine, versions in VERSIONS.items():
        assert tuple(RECORDS[engine]) == versions
        assert FOR_TORCH_2_11[engine] in versions
        assert len(set(pinned(engine))) == 3


@pytest.mark.parametrize(("engine", "version"), ALL)
def test_the_plugin_serves_a_version(engine: str, version: str) -> None:
    """Each call of its own methods that the engine may make, and each that it does make."""
    methods, told = ours(engine), RECORDS[engine][version]
    assert len(told) >= 6
    for label, fact in told.items():
        mine = callable_of(signature(methods[label], bound=True))
        theirs = callable_of(records.takes(fact))
        assert misfit(mine, theirs, shortest_only=label.endswith("__init__")) == "", label
        for call in fact["calls"]:
            count, *named = call.split()
            inspect.signature(mine).bind(*range(int(count)), **dict.fromkeys(named))
        assert fact["gives"] in KNOWN_RESULTS.get(label, {fact["gives"]}), label


@pytest.mark.parametrize("engine", VERSIONS)
def test_the_stand_in_is_the_newest_version(engine: str) -> None:
    """Parameter by parameter: a stand-in that lags behind hides what moved."""
    bases = {kind.node.name: ast.unparse(kind.node.bases[0]) for kind in classes(engine) if kind.node.bases}
    for label, fact in RECORDS[engine][VERSIONS[engine][-1]].items():
        kind, _, name = label.partition(".")
        method = getattr(getattr(STAND_INS[engine], bases[kind]), name)
        found = list(inspect.signature(method).parameters.values())
        found = found[1:] if found and found[0].name == "self" else found
        plain = [x for x in found if x.kind != Parameter.VAR_KEYWORD]  # mla_args: what ours passes on
        wanted = list(records.takes(fact).parameters.values())[: len(plain) if len(plain) < len(found) else None]
        assert [(x.name, x.kind, x.default is x.empty) for x in plain] == [
            (x.name, x.kind, x.default is x.empty) for x in wanted
        ], label


def test_a_parameter_that_appears_is_noticed() -> None:
    """The three that moved in the versions at hand, had our methods stayed as they were for vLLM 0.26."""
    older, newest = RECORDS["vllm"]["0.26.0"], RECORDS["vllm"][VERSIONS["vllm"][-1]]
    for label in (
        "MlaCupyBackend.get_supported_kernel_block_sizes",
        "MlaCupyMetadataBuilder._build_decode",
        "MlaCupySparseImpl._bf16_flash_mla_kernel",
    ):
        before, after = (callable_of(records.takes(x[label])) for x in (older, newest))
        assert "cannot be called with" in misfit(before, after)
