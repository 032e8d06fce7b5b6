"""`mla-cupy engines check`: do the plugins support the installed engines?"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
from collections.abc import Callable, Iterator

from mla_cupy.integrations import sglang, vllm
from mla_cupy.integrations.probe import explained
from mla_cupy.integrations.versions import known
from mla_cupy.terminal import show, table

PROBES: dict[str, dict[str, Callable[[], str]]] = {
    "vllm": {"CUSTOM": vllm.dense_difference, "FLASHMLA_SPARSE": vllm.sparse_difference},
    "sglang": {"mla_cupy": lambda: sglang.difference() or sglang.backend_difference()},
}
"""Engine -> backends that the plugin offers -> obstacles."""
_HEADS = ("engine", "installed", "tried", "backend", "found")


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    command.add_argument("action", choices=("check",), help="compare the installed engines with what the plugins need")


def rows() -> Iterator[dict[str, str]]:
    """One for each backend of each engine."""
    for engine, probes in PROBES.items():
        try:
            version = importlib.metadata.version(engine)
        except importlib.metadata.PackageNotFoundError:
            yield dict(zip(_HEADS, (engine, "no", "-", "-", "not installed"), strict=True))
            continue
        for backend, probe in probes.items():
            found = _found(probe)
            yield dict(zip(_HEADS, (engine, version, known(engine, version), backend, found), strict=True))


def _found(probe: Callable[[], str]) -> str:
    """Run a probe; an engine that fails to import fails in its own ways."""
    try:
        return explained(probe) or "fits"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def run(options: argparse.Namespace) -> int:
    """Print the rows; returns 1 if a backend does not fit, or no engine is installed."""
    found = list(rows())
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        show(table("engines", _HEADS, ([row[head] for head in _HEADS] for row in found)))
    installed = [row for row in found if row["installed"] != "no"]
    return 0 if installed and all(row["found"] == "fits" for row in installed) else 1
