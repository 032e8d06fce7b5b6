"""Errors of the simulator. Each names the kernel, the PTX line and, where known, the thread that caused it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class SimError(RuntimeError):
    """Any failure while parsing or running PTX.

    Attributes
    ----------
    finding : Finding or None
        What is wrong, as an object, where an instruction is to blame.
    findings : list of Finding
        Everything that the launch found before it stopped, this last.
    """

    finding: Any = None
    findings: Sequence = ()


class PtxSyntaxError(SimError):
    """The text is not PTX that the parser understands."""


class UnknownInstruction(SimError):  # noqa: N818
    """An opcode, modifier or operand form that the simulator does not implement."""


class PoisonError(SimError):
    """A value that was never written (or is still in flight) reached a place where it matters."""


class MemoryFault(SimError):  # noqa: N818
    """An access out of bounds, misaligned, or to memory that the instruction may not touch."""


class RaceError(SimError):
    """Two accesses conflict and nothing orders them (or no proxy fence makes the first visible)."""


class SyncError(SimError):
    """A barrier, mbarrier or asynchronous group is used against its rules."""


class DescriptorError(SimError):
    """A matrix, instruction or tensor-map descriptor breaks a rule of the ISA."""


class DeadlockError(SimError):
    """No thread can run and nothing asynchronous is left that could wake one."""


class StepLimitError(SimError):
    """The launch executed more blocks than its step limit allows."""


class KernelTrap(SimError):  # noqa: N818
    """The kernel executed ``trap`` or a failed device assertion."""


class StrictWarning(UserWarning):
    """A broken rule of the ISA that the launch allows (see ``rules.RULES``)."""
