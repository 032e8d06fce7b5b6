"""Functional simulator of PTX for sm_90a and sm_100a: runs what NVRTC emits on NumPy arrays, without a GPU."""

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
from .memory import Memory
from .module import Module
from .report import Report
from .tensormap import TensorMap, TensorMapError, encode_im2col, encode_tiled
from .timeline import Timeline

__all__ = [
    "DeadlockError",
    "DescriptorError",
    "KernelTrap",
    "Memory",
    "MemoryFault",
    "Module",
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
    "encode_im2col",
    "encode_tiled",
]
