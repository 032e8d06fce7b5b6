"""Records of the engines' interfaces: what is in `recorded`, one file for each engine, written from the packages.

They say what the methods take and give that the plugins override, and how the engine calls them, version by version:
names of parameters, no code. Ordinary tests hold the plugins and the stand-ins against them without the packages.
"""

from __future__ import annotations

import ast
import json
from inspect import Signature
from pathlib import Path
from typing import Any

from tests.engines import packages
from tests.engines.compare import facts
from tests.engines.source import signature
from tests.engines.versions import VERSIONS

FOLDER = Path(__file__).parent / "recorded"


def read(engine: str) -> dict[str, dict[str, Any]]:
    """The record of an engine: version -> method of ours -> facts. Versions without a difference share their facts."""
    found: dict[str, dict[str, Any]] = json.loads((FOLDER / f"{engine}.json").read_text())
    made: dict[str, dict[str, Any]] = {}
    before: dict[str, Any] = {}
    for version, changed in found.items():
        before = {**before, **changed}
        made[version] = {label: told for label, told in before.items() if told is not None}
    return made


def text_of(engine: str) -> str:
    """The record as it is written: of each version what differs from the one before, null for what is gone."""
    found: dict[str, dict[str, Any]] = {}
    before: dict[str, Any] = {}
    for version in VERSIONS[engine]:
        told = facts(engine, packages.package(engine, version))
        found[version] = {
            label: told.get(label) for label in {**before, **told} if told.get(label) != before.get(label)
        }
        before = told
    return json.dumps(found, indent=1) + "\n"


def write(engine: str) -> Path:
    """Write the record of an engine with all versions fetched."""
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{engine}.json"
    path.write_text(text_of(engine))
    return path


def takes(told: dict[str, Any]) -> Signature:
    """The signature that a record spells."""
    (function,) = ast.parse(f"def method({told['takes']}): ...").body
    assert isinstance(function, ast.FunctionDef)
    return signature(function)
