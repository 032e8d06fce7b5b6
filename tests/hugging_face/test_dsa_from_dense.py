"""The whole path from a dense model to a sparse one, as the example runs it on a CPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

_REPOSITORY = Path(__file__).parents[2]


def test_quick(tmp_path: Path) -> None:
    """The indexers learn what the attention looks at; sparse training costs nothing; two ways of the losses agree."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(_REPOSITORY),
        "MLA_CUPY_BACKEND": "numpy",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, str(_REPOSITORY / "examples" / "dsa_from_dense.py"), "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (random, learned) = re.findall(r"cover (\S+) of the attention at random, (\S+) after the warm-up", done.stdout)[0]
    assert float(learned) > float(random) + 0.3
    assert all(row["largest_difference"] < 1e-3 for row in _rows(tmp_path, "compare"))
    models = {row["model"]: row for row in _rows(tmp_path, "measure") if "text" in row}
    assert models["sparse"]["text"] < 1.02 * models["control"]["text"]


def _rows(folder: Path, stage: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{stage}.jsonl").read_text().splitlines()]
