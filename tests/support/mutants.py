"""Bugs planted in the sources of kernels: a text is replaced. Steps of synchronisation: see `mutant_suite`."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import ptxsim
from mla_cupy.kernels import KERNELS
from mla_cupy.runtime import cache, loader, nvrtc, sources, worker
from mla_cupy.runtime.build import Build, BuildRequest, compile_kernel

KNOWN: list[Mutant] = []
"""All that imported modules have."""
CAUGHT = (AssertionError, ptxsim.SimError)
"""Exceptions of a test that has caught a mutant."""

_KEPT_SECONDS = 14 * 24 * 3600


@dataclass(frozen=True)
class Mutant:
    """Text of a source that is replaced by another. `file` is a header, or the kernel whose source it is."""

    name: str
    file: str
    old: str
    new: str

    def __post_init__(self) -> None:
        if self.file in KERNELS:
            object.__setattr__(self, "file", KERNELS[self.file].source)
        KNOWN.append(self)

    @property
    def id(self) -> str:
        """Id of the test."""
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
            return to_ptx(request) if spoiled else sound(request)

        monkeypatch.setattr(loader, "_obtain", functools.cache(obtain))
        loader.forget()

    yield plant_it
    loader.forget()


@functools.cache
def sound(request: BuildRequest) -> Build:
    """Build from sources without a bug, for the simulator: what the kernels' own tests have compiled, or will."""
    places = cache.places()
    return worker.build_here(request.as_virtual(), nvrtc.find_nvrtc(), places.read, places.write)[0]


def to_ptx(request: BuildRequest) -> Build:
    """Build for the simulator; not in the kernels' cache, where bugs have no place, but next to it.

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
