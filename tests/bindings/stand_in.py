"""Modules of packages that are not installed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import pytest


def install_modules(patch: pytest.MonkeyPatch, modules: Mapping[str, Mapping[str, Any]]) -> None:
    """Make modules with these contents importable, and the packages above them."""
    for name, contents in modules.items():
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            above = ".".join(parts[:i])
            if above not in sys.modules:
                patch.setitem(sys.modules, above, ModuleType(above))
        # `from package import module` reads the package's attribute, which another test may have left behind.
        for i in range(1, len(parts)):
            package, module = ".".join(parts[:i]), sys.modules[".".join(parts[: i + 1])]
            patch.setattr(sys.modules[package], parts[i], module, raising=False)
        for key, value in contents.items():
            patch.setattr(sys.modules[name], key, value, raising=False)
