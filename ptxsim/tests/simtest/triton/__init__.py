"""Output of Triton 3.9.0: PTX and descriptions of the kernels in kernels.py."""

from pathlib import Path

FOLDER = Path(__file__).parent
