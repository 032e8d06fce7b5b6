"""One probe run in this process: whatever becomes of it is a result."""

from __future__ import annotations

import time
from dataclasses import dataclass

from mla_cupy.selftest.probe import Machine, Probe, UnfitError

PASSED, FAILED, DIED, HUNG, SKIPPED, UNFIT = "passed", "failed", "died", "hung", "skipped", "unfit"
BAD = (FAILED, DIED, HUNG)
_MAX_MESSAGE = 600


@dataclass(frozen=True)
class Result:
    """Result of a probe.

    status
        "passed"; "failed": wrong values; "died": an error of the compiler, CUDA or the simulator; "hung"; "skipped",
        because another one failed; "unfit": the probe does not apply.
    message
        The first difference, the error, or why it was skipped.
    compared
        Description of the comparison.
    """

    name: str
    status: str
    seconds: float
    message: str = ""
    compared: str = ""


def attempt(probe: Probe, machine: Machine) -> Result:
    """Run a probe here; whatever it raises is a result."""
    start = time.perf_counter()

    def result(status: str, message: str = "", compared: str = "") -> Result:
        return Result(probe.name, status, round(time.perf_counter() - start, 3), message, compared)

    try:
        finding = probe.run(machine)
    except UnfitError as error:
        return result(UNFIT, str(error))
    except Exception as error:
        return result(DIED, f"{type(error).__name__}: {error}"[:_MAX_MESSAGE])
    return result(FAILED if finding.difference else PASSED, finding.difference, finding.compared)
