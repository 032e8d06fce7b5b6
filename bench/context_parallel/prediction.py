"""Prediction of times on more GPUs from those measured on few: nothing here is a measurement."""

from __future__ import annotations

from dataclasses import dataclass

LINK_GBS = 372.0
"""Bytes per nanosecond from one H200 to another of its host, large copies, one direction (measured)."""


@dataclass(frozen=True)
class Exchange:
    """Time of the exchange and merge on the ranks that were measured.

    Attributes
    ----------
    world : int
        Ranks.
    us : float
        Microseconds of the exchange and merge.
    row_bytes : int
        What a row of a head's partial result takes.
    rows : int
        Rows of all heads: b * s_q * h_q.
    """

    world: int
    us: float
    row_bytes: int
    rows: int

    def sent_bytes(self, world: int) -> float:
        """Bytes that one rank of `world` sends: all rows except its own heads'."""
        return self.rows * (world - 1) / world * self.row_bytes

    def predicted_us(self, world: int) -> float:
        """Predict `world` ranks that all reach each other like the measured ones: more bytes, but the same hops."""
        return self.us + max(0.0, self.sent_bytes(world) - self.sent_bytes(self.world)) / (LINK_GBS * 1e3)


def efficiency(single_us: float, world: int, us: float) -> float:
    """Time on one GPU over `world` times the time on `world`."""
    return single_us / (world * us)
