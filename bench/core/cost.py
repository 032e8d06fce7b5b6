"""The work of one call, and how long it takes at given limits."""

from __future__ import annotations

from dataclasses import dataclass

D_QK = 576
D_V = 512
ELEMENT_BYTES = 2  # bfloat16 and float16
SINGLE_BYTES = 4  # float32 and int32


@dataclass(frozen=True)
class Cost:
    """Floating-point operations and bytes of one call.

    `nbytes` is the memory traffic if nothing moves twice. `l2_bytes` is what a sparse operation moves between the L2
    and the SMs for its scattered rows; None for other operations.
    """

    flops: int
    nbytes: int
    l2_bytes: int | None = None

    @property
    def intensity(self) -> float:
        """FLOPs per byte, which decides which of the two limits applies."""
        return self.flops / self.nbytes

    def tflops(self, us: float) -> float:
        """TFLOP/s of a call that takes `us` microseconds."""
        return self.flops / us / 1e6

    def tbps(self, us: float) -> float:
        """TB/s of a call that takes `us` microseconds."""
        return self.nbytes / us / 1e6

    def l2_tbps(self, us: float) -> float | None:
        """TB/s of the scattered rows."""
        return None if self.l2_bytes is None else self.l2_bytes / us / 1e6


def roofline_us(cost: Cost, tflops: float | None, tbps: float | None) -> float | None:
    """The minimum microseconds at the given limits; None where no limit is known."""
    times = [cost.flops / tflops / 1e6] if tflops else []
    times += [cost.nbytes / tbps / 1e6] if tbps else []
    return max(times, default=None)
