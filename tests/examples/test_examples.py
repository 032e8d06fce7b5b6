"""The examples run as a reader would run them, and what they print is right."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "examples"


def run(name: str, *arguments: str, backend: str = "numpy") -> str:
    """What an example prints; it must succeed."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "MLA_CUPY_BACKEND": backend, "MLA_CUPY_JIT": "lazy"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_numpy_decode(backend: str) -> None:
    text = run("numpy_decode.py", "--heads", "2", "--lengths", "70", "0", "1", backend=backend)
    assert "out (3, 1, 2, 512) bfloat16, lse (3, 2, 1) float32" in text
    rows = re.findall(r"(\d+) tokens: lse of head 0 = +(\S+), largest error of out = (\S+)", text)
    assert [(int(tokens), lse == "-inf") for tokens, lse, _ in rows] == [(70, False), (0, True), (1, False)]
    assert all(float(error) < 0.02 for *_, error in rows)
    assert [float(error) for tokens, _, error in rows if tokens == "0"] == [0]


def test_numpy_decode() -> None:
    check_numpy_decode("numpy")


@pytest.mark.gpu
def test_numpy_decode_on_gpu(gpu: object) -> None:
    check_numpy_decode("cuda")


def check_layer(backend: str, dtype: str, allowed: float) -> None:
    text = run("deepseek_v3_layer.py", "--tokens", "2", "--page-size", "1", "--dtype", dtype, backend=backend)
    assert text.endswith("\nequal\n")
    (worst,) = re.findall(r"worst +(\S+) at token", text)
    assert 0 < float(worst) < allowed  # more than nothing: it did go through 16 bits


def test_deepseek_layer() -> None:
    check_layer("numpy", "bfloat16", 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "allowed"), [("bfloat16", 1e-2), ("float16", 1.5e-3)])
def test_deepseek_layer_on_gpu(gpu: object, dtype: str, allowed: float) -> None:
    check_layer("cuda", dtype, allowed)


@pytest.mark.gpu
def test_cupy_decode(gpu: object) -> None:
    text = run("cupy_decode.py", "--batch", "3", "--heads", "16", "--length", "130", "--steps", "7", backend="cuda")
    (length, error) = re.findall(r"lengths are now (\d+); largest error of out: (\S+)", text)[0]
    assert int(length) == 130 + 7
    assert float(error) < 5e-3


def test_every_example_is_in_its_readme() -> None:
    listed = re.findall(r"^\| \[(\w+\.py)\]\(\1\)", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_wrong_usage_is_said(name: str) -> None:
    if name.startswith("cupy"):
        pytest.importorskip("cupy")
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), "--no-such-option"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "MLA_CUPY_JIT": "lazy"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "usage:" in done.stderr
