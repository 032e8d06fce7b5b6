"""Parts that a wheel has inside this package and a checkout beside it: benches and simulator."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from mla_cupy.errors import ArgumentError, explain


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
    # A folder called ptxsim, on a path that leads to a checkout, imports as an empty namespace without a file.
    package = name if getattr(sys.modules.get(name), "__file__", None) else f"mla_cupy.{name}"
    try:
        return importlib.import_module(f"{package}.{module}" if module else package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ArgumentError(explain(name, "nothing", package, "install the package again")) from None


def simulator() -> Any:
    """The simulator.

    Raises
    ------
    ArgumentError
        If it is not installed.
    """
    return part("ptxsim")
