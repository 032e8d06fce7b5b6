"""Parts that are modules of the installed package and directories beside it in a checkout: benches and simulator."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from mla_cupy.errors import ArgumentError, explain


def part(name: str, place: str, module: str = "") -> Any:
    """A module of the part `name`, or the part itself.

    Parameters
    ----------
    name : str
        "bench" or "ptxsim".
    place : str
        Where it lies in a checkout, relative to its root.
    module : str, optional
        Which module of it.

    Raises
    ------
    ArgumentError
        If it is in neither place.
    """
    suffix = f".{module}" if module else ""
    if importlib.util.find_spec(f"mla_cupy.{name}") is not None:
        return importlib.import_module(f"mla_cupy.{name}{suffix}")
    found = Path(__file__).resolve().parents[1] / place
    if not (found / "__init__.py").is_file():
        raise ArgumentError(explain(name, "nothing", f"mla_cupy.{name} in the package, or {place} in a checkout"))
    if str(found.parent) not in sys.path:
        sys.path.insert(0, str(found.parent))
    return importlib.import_module(f"{name}{suffix}")


def simulator() -> Any:
    """The simulator, under whichever name it has been imported already: two copies would not know each other's errors.

    Raises
    ------
    ArgumentError
        If it is neither in the package nor in a checkout.
    """
    return sys.modules.get("ptxsim") or part("ptxsim", "ptxsim/ptxsim")
