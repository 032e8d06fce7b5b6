"""Tests; commands among them (`python -m tests.engines`) find the simulator and the helpers as pytest does."""

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
for _place in (_ROOT / "tests", _ROOT / "ptxsim"):
    if str(_place) not in sys.path:
        sys.path.insert(0, str(_place))
