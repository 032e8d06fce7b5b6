"""Runs unmodified CUDA host programs: stub libraries in their process send the calls to the simulator in this one."""

from .command import run_program
from .record import Recording
from .session import Settings

__all__ = ["Recording", "Settings", "run_program"]
