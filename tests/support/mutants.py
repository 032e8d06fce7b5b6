"""Bugs planted in the kernels' sources: each must show somewhere."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec

import pytest

import ptxsim
from mla_cupy.errors import KernelCompileError
from mla_cupy.runtime import loader, sources
from mla_cupy.runtime.build import Build, BuildRequest, compile_kernel

Parameters = ParamSpec("Parameters")
KNOWN: list[Mutant] = []
"""All that imported modules have."""
CAUGHT = (AssertionError, ptxsim.SimError)
"""What a test raises that has caught one."""

_STATIC_ASSERTION = "static assertion failed"


@dataclass(frozen=True)
class Mutant:
    """What is replaced in which source."""

    name: str
    file: str
    old: str
    new: str

    def __post_init__(self) -> None:
        KNOWN.append(self)

    @property
    def id(self) -> str:
        """Of the test."""
        return self.name.replace(" ", "_")


Plant = Callable[[Mutant], None]


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plant]:
    """Plants a bug: for the rest of the test, kernels are built for the simulator from sources with the bug in them."""
    original = sources.source_root()

    def plant_it(mutant: Mutant) -> None:
        root = tmp_path / "cuda_src"
        shutil.copytree(original, root)
        text = (root / mutant.file).read_text()
        assert mutant.old in text, f"the text of {mutant.name!r} is no longer in {mutant.file}"
        (root / mutant.file).write_text(text.replace(mutant.old, mutant.new))
        monkeypatch.setenv("MLA_CUPY_CUDA_SRC", str(root))

        def obtain(request: BuildRequest) -> Build:
            spoiled = sources.gather(request.source) != sources.gather(request.source, original)
            return to_ptx(request) if spoiled else _sound(request)

        monkeypatch.setattr(loader, "_obtain", functools.cache(obtain))
        loader.forget()

    yield plant_it
    loader.forget()


@functools.cache
def _sound(request: BuildRequest) -> Build:
    """Of sources that the bug is not in: the other kernels of a call, the same for all mutants."""
    return to_ptx(request)


def to_ptx(request: BuildRequest) -> Build:
    """What the simulator asks of a build; not in the cache, where bugs have no place."""
    return compile_kernel(request.as_virtual())


def as_verdict(run: Callable[Parameters, object]) -> Callable[Parameters, str]:
    """`run`, which simulates and asserts, as a function that says what it shows: an error's name or "wrong result".

    A static assertion of the sources catches a mutant, too. One that does not compile for another reason raises.
    """

    @functools.wraps(run)
    def verdict(*arguments: Parameters.args, **options: Parameters.kwargs) -> str:
        try:
            run(*arguments, **options)
        except ptxsim.SimError as error:
            return type(error).__name__
        except KernelCompileError as error:
            if _STATIC_ASSERTION not in str(error):
                raise
            return _STATIC_ASSERTION
        except AssertionError:
            return "wrong result"
        return ""

    return verdict
