"""The functions of `mla_cupy.torch` and `mla_cupy.jax`, and PyTorch's operators, from the operations' records.

They are read in a process of their own, from the checkout that they are written to: `make` starts it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tools.generate import of_jax, of_torch
from tools.generate.bound import bound
from tools.generate.files import Texts


def make(root: Path) -> Texts:
    """The texts of all files that are made of records."""
    environment = {**os.environ, "PYTHONPATH": str(root), "MLA_CUPY_JIT": "lazy"}
    command = [sys.executable, "-c", "from tools.generate.bindings import main; main()"]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the operations' records cannot be read:\n{done.stderr}")
    return {root / name: text for name, text in json.loads(done.stdout).items()}


def main() -> None:
    """Print the texts by the files' names."""
    print(json.dumps(dict(texts())))


def texts() -> Iterator[tuple[str, str]]:
    """The files, and what they hold before they are formatted."""
    every = list(bound())
    yield "mla_cupy/torch/operators.py", of_torch.operators(every)
    yield "mla_cupy/torch/functions.py", of_torch.functions(every)
    yield "mla_cupy/jax/functions.py", of_jax.functions(every)
