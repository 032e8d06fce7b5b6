"""Waits of warps on one axis of time, from what kernels have recorded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .driver import Recorded
from .sites import UNKNOWN, Site, sites

MIN_CYCLES = 20
"""Shortest wait that a report shows: about what a wait takes for which nothing has to be waited."""

_BEGINS, _ENDS = 0, 1
_LONG_ENOUGH_NS = 1000
"""Shortest time between two moments that tells a clock rate: the timer has steps of 32 ns or more."""

TIME_OF_LAST_WARP = 1
"""`kTimeOfLastWarp` of `trace/waits.cuh`."""

Array = npt.NDArray[Any]


class Unit(NamedTuple):
    """Unit of time of a report: its name, and its length in what counts as a nanosecond."""

    name: str
    nanoseconds: float


MICROSECOND = Unit("us", 1000.0)
BASIC_BLOCK = Unit("basic blocks", 1.0)
"""The simulator's clock and timer both count executed basic blocks."""


class Wait(NamedTuple):
    """One wait: nanoseconds since the first warp of the launch began, and cycles."""

    begin: float
    end: float
    cycles: int
    site: Site


@dataclass(frozen=True)
class Warp:
    """One warp of one block, from its beginning to its end, or to its last record if others had no room."""

    block: int
    warp: int
    sm: int
    begin: float
    end: float
    waits: tuple[Wait, ...]
    places: frozenset[Site]
    """Places of all its waits, also of those that were too short."""

    @property
    def waiting(self) -> float:
        """Nanoseconds of all waits."""
        return sum(wait.end - wait.begin for wait in self.waits)


@dataclass(frozen=True)
class Trace:
    """The last launch of one kernel.

    Attributes
    ----------
    kernel, label : str
        Entry without "mla_", and the variant.
    ghz : float
        Rate of the SM's clock.
    warps : tuple of Warp
        Warps of launched blocks.
    dropped : int
        Records for which there was no room.
    spills : int
        Bytes of stores that the traced build spills.
    unit : Unit
    part : str
        Which part of the waits it has, such as "2 of 4", or "".
    """

    kernel: str
    label: str
    ghz: float
    warps: tuple[Warp, ...]
    dropped: int
    spills: int
    unit: Unit = MICROSECOND
    part: str = ""

    @property
    def name(self) -> str:
        """The kernel, with the part."""
        return f"{self.kernel}, part {self.part}" if self.part else self.kernel

    def of_role(self, indices: Sequence[int]) -> list[Warp]:
        """Return the warps with these numbers, of all blocks."""
        return [warp for warp in self.warps if warp.warp in indices]


def roles(traces: Sequence[Trace]) -> dict[str, list[int]]:
    """Return warps by role, in all blocks together: neighbours that wait at some place that not every warp comes to.

    Traces of several builds, with different waits of the same kernel each, cover more places than one trace.
    """
    places: dict[int, set[Site]] = {}
    for warp in (warp for trace in traces for warp in trace.warps):
        places.setdefault(warp.warp, set()).update(warp.places)
    shared = set.intersection(*places.values()) if len(places) > 1 else set()
    own = {index: sites - shared for index, sites in places.items()}
    groups: list[list[int]] = []
    for index in sorted(own):
        before = own.get(index - 1)
        if before is not None and (before & own[index] or not (before or own[index])):
            groups[-1].append(index)
        else:
            groups.append([index])
    return {_name(group): group for group in groups}


def _name(warps: list[int]) -> str:
    return f"warp {warps[0]}" if len(warps) == 1 else f"warps {warps[0]}-{warps[-1]}"


def trace_of(recorded: Recorded, clock_ghz: float, unit: Unit = MICROSECOND, min_cycles: int = 0) -> Trace:
    """Return the waits of a launch.

    Parameters
    ----------
    recorded : Recorded
    clock_ghz : float
        Rate of the clock where the launch does not tell it.
    unit : Unit
        Unit of the reports.
    min_cycles : int
        Shorter waits are left out: the warp counts as running.
    """
    ghz = clock_rate(recorded.moments) or clock_ghz
    recorded = replace(recorded, moments=with_times(recorded.moments, ghz))
    launched = recorded.moments[..., _ENDS]["nanoseconds"] > 0
    first = int(recorded.moments[launched][:, _BEGINS]["nanoseconds"].min(initial=np.iinfo(np.uint64).max))
    known = sites(recorded.files)
    room = recorded.records.shape[-1]
    return Trace(
        recorded.entry.removeprefix("mla_"),
        recorded.label,
        ghz,
        tuple(_warps(recorded, launched, known, ghz, first, min_cycles)),
        int(np.maximum(recorded.counts[launched].astype(np.int64) - room, 0).sum()),
        recorded.spills,
        unit,
    )


def with_times(moments: Array, ghz: float) -> Array:
    """Return moments that all have their nanoseconds: from their clocks, and when their block's last warp began."""
    last = moments[:, -1:, :1]
    cycles = (moments["clock"] - last["clock"]).astype(np.int32)  # modulo 2^32, like the clock
    found: Array = moments.copy()
    missing = moments["nanoseconds"] == TIME_OF_LAST_WARP
    found["nanoseconds"][missing] = (last["nanoseconds"].astype(np.int64) + np.rint(cycles / ghz).astype(np.int64))[
        missing
    ]
    return found


def clock_rate(moments: Array) -> float | None:
    """Return cycles per nanosecond, the median over warps that tell of two moments far enough apart."""
    both = moments[(moments["nanoseconds"] > 0).all(axis=-1)]
    nanoseconds = both["nanoseconds"][:, _ENDS].astype(np.int64) - both["nanoseconds"][:, _BEGINS].astype(np.int64)
    cycles = np.diff(both["clock"], axis=-1)[:, 0].astype(np.int64)  # modulo 2^32, like the clock
    far = nanoseconds >= _LONG_ENOUGH_NS
    return float(np.median(cycles[far] / nanoseconds[far])) if far.any() else None


def _warps(
    recorded: Recorded, launched: Array, known: Mapping[int, Site], ghz: float, first: int, min_cycles: int
) -> Iterator[Warp]:
    for block, warp in np.argwhere(launched).tolist():
        count = int(recorded.counts[block, warp])
        records = recorded.records[block, warp, :count]
        complete = len(records) == count
        yield _warp(block, warp, recorded.moments[block, warp], records, complete, known, ghz, first, min_cycles)


def _warp(
    block: int,
    warp: int,
    moments: Array,
    records: Array,
    complete: bool,
    known: Mapping[int, Site],
    ghz: float,
    first: int,
    min_cycles: int,
) -> Warp:
    start, last = moments[_BEGINS], moments[_ENDS]
    start_ns = float(int(start["nanoseconds"]) - first)
    clocks = np.append(records["end"], last["clock"]) if complete else records["end"]
    ends = start_ns + unwrapped(clocks, int(start["clock"])) / ghz
    lengths = records["end"] - records["begin"]  # modulo 2^32, like the clock
    places = {site: known.get(site, UNKNOWN) for site in np.unique(records["site"]).tolist()}
    (long,) = np.nonzero(lengths >= min_cycles)
    until, cycles = ends[long], lengths[long]
    found = map(places.__getitem__, records["site"][long].tolist())
    waits = tuple(map(Wait, (until - cycles / ghz).tolist(), until.tolist(), cycles.tolist(), found))
    return Warp(block, warp, int(start["sm"]), start_ns, float(ends[-1]), waits, frozenset(places.values()))


def unwrapped(clocks: Array, start: int) -> Array:
    """Return cycles since `start`, from clocks modulo 2^32 in ascending order."""
    steps = np.diff(clocks.astype(np.uint32), prepend=np.uint32(start))  # modulo 2^32
    return np.cumsum(steps.astype(np.int64))
