"""A pytest fixture that runs kernels in every mode: ``pytest_plugins = ["ptxsim.testing"]`` in a ``conftest.py``.

A test that uses the fixture ``simulate`` runs four times: early, late, and with two seeds of random. Asynchronous work
that a kernel does not wait for, and an order of warps that it takes for granted, show in one of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from .errors import SimError
from .module import Module
from .state.report import Report
from .tool.cuda_file import compile_cuda

MODES = (("early", 0), ("late", 0), ("random", 1), ("random", 2))
"""Modes and seeds of the fixture."""


class Simulation:
    """Launches kernels in one mode.

    Attributes
    ----------
    mode, seed
        As :meth:`ptxsim.Module.launch` takes them.
    """

    def __init__(self, mode: str, seed: int) -> None:
        self.mode, self.seed = mode, seed

    def __call__(
        self,
        source: Module | Path | str,
        kernel: str = "",
        *,
        grid: int | Sequence[int] = 1,
        block: int | Sequence[int] = 32,
        args: Sequence[Any] = (),
        arch: str = "sm_90a",
        **options: Any,
    ) -> Report:
        """Run a kernel to its end.

        Parameters
        ----------
        source : Module, Path or str
            A module, the path of a ``.ptx`` or ``.cu`` file, or PTX text.
        kernel : str, optional
            The entry function; not needed where there is only one.
        grid, block : int or sequence of int
            In blocks and in threads.
        args : sequence
            One per parameter; NumPy arrays receive the results.
        arch : str
            What a ``.cu`` file is compiled for.
        **options
            More of what :meth:`ptxsim.Module.launch` takes.

        Returns
        -------
        Report
            Statistics of the launch.

        Raises
        ------
        SimError
            What the simulator finds wrong; or the module has several kernels and none is named.
        """
        __tracebackhide__ = True  # pytest shows the line of the test, not where the simulator noticed
        module = load(source, arch)
        if not kernel and len(module.kernels) != 1:
            raise SimError(f"name one of the kernels {', '.join(module.kernels) or '(there is none)'}")
        options = {"mode": self.mode, "seed": self.seed, **options}
        try:
            return module.launch(kernel or module.kernels[0], grid, block, args, **options)
        except SimError as error:
            raise error.with_traceback(None) from None


def load(source: Module | Path | str, arch: str) -> Module:
    """Return the module that a source denotes."""
    if isinstance(source, Module):
        return source
    if isinstance(source, str) and re.search(r"^\s*\.version\b", source, re.MULTILINE):
        return Module(source)
    path = Path(source)
    return Module(compile_cuda(path, arch) if path.suffix == ".cu" else path.read_text())


@pytest.fixture(params=MODES, ids=lambda each: each[0] if each[0] != "random" else f"random{each[1]}")
def simulate(request: pytest.FixtureRequest) -> Simulation:
    """A function that launches a kernel in the simulator; the test runs once for each mode."""
    return Simulation(*request.param)
