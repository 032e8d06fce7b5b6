"""Operations that a warp has issued to the tensor core, and the order in which the ISA keeps them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import SyncError
from ..parsing.ir import Instr
from ..state.warp import Warp


@dataclass
class Region:
    """Tensor-memory cells that an operation in flight touches: columns, lanes (a bit mask), and how."""

    low: int
    high: int
    lanes: int
    writes: bool

    def meets(self, other: Region) -> bool:
        """Tell whether two regions share cells and one of them is written."""
        if not (self.writes or other.writes):
            return False
        return self.low < other.high and other.low < self.high and bool(self.lanes & other.lanes)


def region(lanes: np.ndarray, columns: np.ndarray, writes: bool) -> Region:
    """Return the region of lanes x columns (consecutive columns)."""
    flags = np.zeros(128, np.uint8)
    flags[lanes.reshape(-1)] = 1
    mask = int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")
    return Region(int(columns[0]), int(columns[-1]) + 1, mask, writes)


@dataclass
class Flight:
    """An mma, cp or shift in flight."""

    clock: int
    name: str
    key: Any
    regions: list[Region]


def in_order(first: Flight, second: Flight) -> bool:
    """Tell whether the ISA executes two operations of one thread in order (9.7.16.6.2, pipelined instructions)."""
    if second.name == "mma":
        return first.name in ("cp", "shift") or first.key == second.key
    if second.name == "shift":
        return first.name == "mma"
    return first.name == "shift" and second.key == "4x256b"


class Pipe:
    """Operations that a warp has issued to the tensor core, and its loads and stores in flight."""

    def __init__(self, W: Warp) -> None:
        self.issued = self.loads = self.stores = 0
        self.loads_done = self.stores_done = 0
        self.pending_loads: list[tuple] = []
        self.unreleased: dict[int, int] = {}
        self.flights: list[Flight] = []
        detector = W.cta.cluster.detector
        if detector:
            names = ("tcgen05 pipe", "tcgen05.ld", "tcgen05.st")
            self.agents = tuple(detector.new_agent(f"{name} of {W.name}", False) for name in names)

    def launch(self, W: Warp, ins: Instr, name: str, key: Any, regions: list[Region]) -> None:
        """Check a new operation (number ``issued``) against those in flight that nothing orders before it."""
        detector = W.cta.cluster.detector
        if not detector:
            return
        done = detector.tensor_knows(W.agent, self.agents[0])
        flight = Flight(self.issued, name, key, regions)
        kept = []
        for other in self.flights:
            if other.clock <= done:
                continue
            if in_order(other, flight):
                if other.name == name and other.key == key and other.regions == regions:
                    continue
            elif any(a.meets(b) for a in other.regions for b in regions):
                self._conflict(W, ins, other, flight)
            kept.append(other)
        self.flights = [*kept[-255:], flight]

    def _conflict(self, W: Warp, ins: Instr, other: Flight, flight: Flight) -> None:
        if other.name == flight.name == "mma" and other.regions[0].meets(flight.regions[0]):
            why = f"D overlaps the accumulator of tcgen05.mma number {other.clock}, still in flight with another shape"
            W.fail(SyncError, ins, why)
        why = f"tensor memory is in use by tcgen05.{other.name} number {other.clock}, which is not ordered before this"
        W.bend("tcgen05-order", SyncError, ins, why)


def pipe_of(W: Warp) -> Pipe:
    """Return a warp's tensor-core state."""
    if "tcgen05" not in W.state:
        W.state["tcgen05"] = Pipe(W)
    return W.state["tcgen05"]


def check_group(W: Warp, ins: Instr, group: int) -> None:
    """All tcgen05 instructions of a kernel use one .cta_group."""
    used = W.cta.launch.counters.setdefault("tcgen05 cta_group", group)
    if used != group:
        why = f".cta_group::{group} after .cta_group::{used}: a kernel must use only one of them"
        W.bend("cta-group", SyncError, ins, why)


def pair(W: Warp, ins: Instr, group: int) -> list:
    """Return the block, or the two blocks of the pair in rank order."""
    if group == 1:
        return [W.cta]
    low = W.cta.rank & ~1
    return [W.cta.cluster.member(W, ins, low), W.cta.cluster.member(W, ins, low + 1)]
