"""Makes ``import ptxsim`` work from a checkout, and compiles the test kernels."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
