"""Shared code of ptxsim's tests: programs, compilers, references, golden cases and mutants."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
