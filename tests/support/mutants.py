"""Bugs planted in the kernels: each must show somewhere.

A step of synchronisation is left out of the compiled kernel (`steps`), which needs no other build, and outlives every
renaming; any other bug is a text of a source that is replaced.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec

import pytest

import ptxsim
from mla_cupy.errors import KernelCompileError
from mla_cupy.runtime import cache, loader, nvrtc, sources, worker
from mla_cupy.runtime.build import Build, BuildRequest, compile_kernel
from mla_cupy.runtime.launching import LoadedKernel
from mla_cupy.simulation import SimDriver

Parameters = ParamSpec("Parameters")
KNOWN: list[Mutant] = []
"""All that imported modules have."""
CAUGHT = (AssertionError, ptxsim.SimError)
"""What a test raises that has caught one."""

_STATIC_ASSERTION = "static assertion failed"
_KEPT_SECONDS = 14 * 24 * 3600


class Steps(NamedTuple):
    """Steps of synchronisation of a compiled kernel: some of one kind, of which it has so many."""

    kind: str
    places: tuple[int, ...]
    of: int


def steps(kind: str, *places: int, of: int) -> tuple[Steps, str]:
    """What a `Mutant` replaces, and by what: the steps at some places among those of a kind are left out.

    `kind` is how their opcodes begin, such as "bar.sync"; a wait on an mbarrier is "mbarrier.try_wait". Places are
    counted from 0 in the text's order; `of` is how many there are, so that a bug cannot move to another step unseen.
    """
    return Steps(kind, places, of), ""


@dataclass(frozen=True)
class Mutant:
    """What is replaced in which source.

    Of `Steps`, the source is that of the kernel, where a text may be that of a header.
    """

    name: str
    file: str
    old: str | Steps
    new: str

    def __post_init__(self) -> None:
        if isinstance(self.old, Steps) and not self.file.endswith(".cu"):
            raise ValueError(
                f"{self.name!r}: got the header {self.file}, expected the .cu file of a kernel: steps are those of a"
                " compiled kernel; plant the bug in each kernel that includes the header and is tested"
            )
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
    idle: dict[str, Mutant] = {}

    def plant_it(mutant: Mutant) -> None:
        if isinstance(mutant.old, Steps):
            idle[mutant.file] = mutant
            _plant_steps(mutant, mutant.old, monkeypatch, lambda: idle.pop(mutant.file, None))
            return
        root = tmp_path / "cuda_src"
        shutil.copytree(original, root)
        text = (root / mutant.file).read_text()
        assert mutant.old in text, f"the text of {mutant.name!r} is no longer in {mutant.file}"
        (root / mutant.file).write_text(text.replace(mutant.old, mutant.new))
        monkeypatch.setenv("MLA_CUPY_CUDA_SRC", str(root))

        def obtain(request: BuildRequest) -> Build:
            spoiled = sources.gather(request.source) != sources.gather(request.source, original)
            return to_ptx(request) if spoiled else sound(request)

        monkeypatch.setattr(loader, "_obtain", functools.cache(obtain))
        loader.forget()

    yield plant_it
    loader.forget()
    for mutant in idle.values():
        pytest.fail(f"{mutant.name!r} was planted nowhere: the test has loaded no kernel of {mutant.file}")


def _plant_steps(mutant: Mutant, gone: Steps, monkeypatch: pytest.MonkeyPatch, planted: Callable[[], object]) -> None:
    """Leave steps out of each kernel of a source that the simulator loads, and call `planted` then."""
    load = SimDriver.load

    def load_without(driver: SimDriver, build: Build, device: int) -> LoadedKernel:
        kernel = load(driver, build, device)
        if build.info["source"] != mutant.file:
            return kernel
        module: Any = kernel.owner
        found = len(ptxsim.steps(module, build.entry, gone.kind))
        if found != gone.of:  # not an assertion: those catch mutants
            pytest.fail(f"{mutant.name!r}: {mutant.file} has {found} steps {gone.kind}, not {gone.of}: see its places")
        planted()
        return replace(kernel, owner=ptxsim.plant(module, build.entry, gone.kind, gone.places, driver.memory))

    monkeypatch.setattr(SimDriver, "load", load_without)


@functools.cache
def sound(request: BuildRequest) -> Build:
    """Build from sources without a bug, for the simulator: what the kernels' own tests have compiled, or will."""
    places = cache.places()
    return worker.build_here(request.as_virtual(), nvrtc.find_nvrtc(), places.read, places.write)[0]


def to_ptx(request: BuildRequest) -> Build:
    """What the simulator asks of a build; not in the kernels' cache, where bugs have no place, but beside it.

    To compile is the largest part of most such tests, and a bug's build is the same until the kernel's sources change.
    """
    request, place = request.as_virtual(), cache.cache_dir()
    if place is None:
        return compile_kernel(request)
    kept, library = place.parent / "planted", nvrtc.find_nvrtc()
    _forget_old(kept)
    build, _ = worker.build_here(request, library, (kept,), kept)
    with contextlib.suppress(OSError):
        os.utime(kept / cache.entry_name(request, library))
    return build


@functools.cache
def _forget_old(kept: Path) -> None:
    """Delete the builds that no test has asked for in the last days."""
    for entry in kept.glob("[!.]*"):
        with contextlib.suppress(OSError):  # another process may delete it meanwhile
            if time.time() - entry.stat().st_mtime > _KEPT_SECONDS:
                shutil.rmtree(entry)


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
