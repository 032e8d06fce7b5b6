"""A watchpoint: lists every access to some bytes of shared or global memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..synchronisation.shadow import Shadow
from .findings import Place, place_of


@dataclass(frozen=True)
class Access:
    """One access to watched bytes: when (in executed blocks), who, how, and at which instruction."""

    step: int
    block: tuple[int, ...]
    warp: int
    verb: str
    at: Place

    def __str__(self) -> str:
        return f"step {self.step}: block {self.block} warp {self.warp} {self.verb}, {self.at}"


@dataclass
class Watch:
    """Bytes to watch, to be passed to a launch.

    Attributes
    ----------
    offset : int
        The first byte: of a block's shared memory, or of ``array``.
    size : int
        How many bytes; accesses of the 4-byte words around them are listed.
    array : numpy.ndarray or None
        The array in global memory; None means shared memory.
    block : tuple of int or None
        Watch only this block's shared memory.
    accesses : list of Access
        What the launch found, in order.
    """

    offset: int
    size: int = 4
    array: np.ndarray | None = None
    block: tuple[int, ...] | None = None
    accesses: list[Access] = field(default_factory=list)

    def attach(self, launch: Any) -> None:
        """Let the detectors of a launch tell this watchpoint of accesses."""
        self.accesses.clear()
        wanted = None
        if self.array is not None:
            if launch.shadows is None:
                raise ValueError("watching global memory needs race_global=True")
            wanted = launch.shadows.of(launch.memory.find(launch.memory.map(self.array)))
        elif not launch.check:
            raise ValueError("watching shared memory needs check=True")
        low, high = self.offset // 4, -(-(self.offset + self.size) // 4)

        def tell(shadow: Shadow, words: np.ndarray, where: Any, verb: str) -> None:
            warp = where.warp
            if shadow is not wanted if wanted is not None else shadow.name or shadow.columns:
                return
            if wanted is None and self.block not in (None, shadow.block):
                return
            if ((words >= low) & (words < high)).any():
                place = place_of(warp.program, where.ins)
                self.accesses.append(Access(launch.steps, warp.home.ctaid, warp.index, verb, place))

        launch.watcher = tell
        if launch.detector:
            launch.detector.watch = tell
