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

from tests.generate import of_jax, of_torch
from tests.generate.bound import bound
from tests.generate.files import Texts


def make(root: Path) -> Texts:
    """The texts of all files that are made of records; an empty one for a file that is no longer made."""
    environment = {**os.environ, "PYTHONPATH": str(root), "MLA_CUPY_JIT": "lazy"}
    command = [sys.executable, "-c", "from tests.generate.bindings import main; main()"]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the operations' records cannot be read:\n{done.stderr}")
    made: Texts = {root / name: text for name, text in json.loads(done.stdout).items()}
    for library in ("torch", "jax"):
        there = (root / "mla_cupy" / library / "functions").glob("*.py")
        made |= {path: "" for path in there if path.name != "__init__.py" and path not in made}
    return made


def main() -> None:
    """Print the texts by the files' names."""
    print(json.dumps(dict(texts())))


def texts() -> Iterator[tuple[str, str]]:
    """The files, and what they hold before they are formatted."""
    every = list(bound())
    yield "mla_cupy/torch/operators.py", of_torch.operators(every)
    modules = list(dict.fromkeys(one.module for one in every))
    stems = [module.rpartition(".")[2] for module in modules]
    if len(set(stems)) < len(stems):
        raise ValueError(f"modules of operations share a name: {sorted(stems)}")
    for module, stem in zip(modules, stems, strict=True):
        of_module = [one for one in every if one.module == module]
        yield f"mla_cupy/torch/functions/{stem}.py", of_torch.functions(module, of_module)
        yield f"mla_cupy/jax/functions/{stem}.py", of_jax.functions(module, of_module)
