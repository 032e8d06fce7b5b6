"""Places whose waits a traced build records: all, or some, and then the others are as without a trace."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from mla_cupy.runtime import loader
from mla_cupy.runtime.build import BuildRequest

from .sites import Site, sites

NOWHERE = "(?!)"
"""A pattern that finds no place."""
ONLY = "MLA_TRACE_ONLY"
"""The macro of `trace/waits.cuh` that lists the numbers of places."""
LEAN = "MLA_TRACE_LEAN"
_NUMBER = re.compile(rb"(?<![\w.])-?\d{4,10}(?![\w.])")
_WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class Choice:
    """Places that a regular expression finds, divided into `parts`, and one of these parts.

    Attributes
    ----------
    pattern : str
        Searched in a place's function, call, file and line: "run_load_role", "wgmma_wait", "math.cuh:1". "" finds all.
    part, parts : int
        Places are dealt out in the order of the sources: neighbours are in different parts, from 0 on.
    lean : bool
        With fewer registers and more instructions.
    """

    pattern: str = ""
    part: int = 0
    parts: int = 1
    lean: bool = False

    @property
    def name(self) -> str:
        """Such as "2 of 4"; "" if it is the only part."""
        return f"{self.part + 1} of {self.parts}" if self.parts > 1 else ""

    def easier(self) -> list[Choice]:
        """Return what to try where a build is refused: the same with fewer registers, or two halves of the places."""
        return self.halves if self.lean else [replace(self, lean=True)]

    @property
    def halves(self) -> list[Choice]:
        """Two parts of the same places."""
        half = replace(self, parts=2 * self.parts, lean=False)
        return [half, replace(half, part=self.part + self.parts)]

    def of(self, request: BuildRequest) -> BuildRequest:
        """Return the request of a traced build that records these waits only."""
        if self.lean:
            request = replace(request, defines=(*request.defines, (LEAN, "1")))
        if not self.pattern and self.parts == 1:
            return request
        numbers = ",".join(f"{number}u" for number in self._found(request)[self.part :: self.parts])
        return replace(request, defines=(*request.defines, (ONLY, numbers)))

    def finds(self, request: BuildRequest) -> bool:
        """True if the pattern finds a place of the request of a traced build."""
        return bool(self._found(request))

    def _found(self, request: BuildRequest) -> list[int]:
        return [number for number, site in places(request) if re.search(self.pattern, f"{site.function} {site}")]


def places(request: BuildRequest) -> list[tuple[int, Site]]:
    """Return the places at which a traced build records waits, in the order of the sources.

    Their numbers are constants of its PTX. So functions that the kernel does not call have none.
    """
    constants = {int(number) & _WORD for number in _NUMBER.findall(loader.obtain(request.as_virtual()).ptx)}
    known = sites(request.files())
    return sorted(
        ((number, site) for number, site in known.items() if number in constants),
        key=lambda place: (place[1].file, place[1].line),
    )
