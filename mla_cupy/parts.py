"""The benches, inside this package or in a checkout next to it, and the simulator, a separate distribution."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

from mla_cupy.errors import ArgumentError, explain

SIMULATOR = "ptxsim"


def part(name: str, module: str = "") -> Any:
    """A module of the part `name`, or the part itself, under whichever name it has been imported already.

    Two copies of a part would not recognize each other's errors.

    Parameters
    ----------
    name : str
        "bench" or "ptxsim".
    module : str, optional
        Which module of it.

    Raises
    ------
    ArgumentError
        If it is not installed.
    """
    package = name if name == SIMULATOR or _is_whole(sys.modules.get(name)) else f"mla_cupy.{name}"
    if name == SIMULATOR:
        _find_simulator()
    try:
        return importlib.import_module(f"{package}.{module}" if module else package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        remedy = (
            "install it from a checkout: pip install ./ptxsim" if name == SIMULATOR else "install the package again"
        )
        raise ArgumentError(explain(name, "nothing", package, remedy)) from None


def simulator() -> Any:
    """The simulator.

    Raises
    ------
    ArgumentError
        If it is not installed.
    """
    return part(SIMULATOR)


def _find_simulator() -> None:
    """Let a checkout that is not installed find the simulator in its folder `ptxsim`.

    That folder is no package. On a path that leads to a checkout it imports as an empty namespace without a file.
    """
    if _is_whole(sys.modules.get(SIMULATOR)):
        return
    sys.modules.pop(SIMULATOR, None)
    spec = importlib.util.find_spec(SIMULATOR)
    folder = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), SIMULATOR)
    if (spec is None or spec.origin is None) and os.path.isdir(os.path.join(folder, SIMULATOR)):
        sys.path.append(folder)


def _is_whole(module: ModuleType | None) -> bool:
    return getattr(module, "__file__", None) is not None
