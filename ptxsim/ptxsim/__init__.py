"""Functional simulator of PTX for sm_90a and sm_100a: runs what NVRTC emits on NumPy arrays, without a GPU."""

from ._version import __version__
from .errors import (
    DeadlockError,
    DescriptorError,
    KernelTrap,
    MemoryFault,
    PoisonError,
    PtxSyntaxError,
    RaceError,
    SimError,
    StepLimitError,
    StrictWarning,
    SyncError,
    UnknownInstruction,
)
from .memory.spaces import Memory
from .memory.tensormap import TensorMap, TensorMapError, encode_im2col, encode_tiled
from .module import Module
from .rules import RULES
from .state.findings import Finding, Place
from .state.report import Report
from .state.watch import Watch
from .tool.mutate import Mutation, Outcome, mutate, mutations, plant, steps
from .tool.timeline import Timeline

__all__ = [
    "RULES",
    "DeadlockError",
    "DescriptorError",
    "Finding",
    "KernelTrap",
    "Memory",
    "MemoryFault",
    "Module",
    "Mutation",
    "Outcome",
    "Place",
    "PoisonError",
    "PtxSyntaxError",
    "RaceError",
    "Report",
    "SimError",
    "StepLimitError",
    "StrictWarning",
    "SyncError",
    "TensorMap",
    "TensorMapError",
    "Timeline",
    "UnknownInstruction",
    "Watch",
    "__version__",
    "encode_im2col",
    "encode_tiled",
    "mutate",
    "mutations",
    "plant",
    "steps",
]


def __dir__() -> list[str]:
    """List the public names: the modules behind them are no part of the interface."""
    return list(__all__)
