"""Exported programs of `mla_cupy.jax` inside XLA's command buffers: equal bits, Python only while these are made."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.bindings.captured_program import CAPTURING, NOTHING, RUNS, checksum
from tests.support import cases, dense_cases
from tests.support.flat import flat

REPOSITORY = Path(__file__).resolve().parents[2]


def decode(of_jax: Any) -> tuple[Any, list[Any]]:
    """Two layers; the second reads the first one's results."""
    inputs = cases.make(cases.DecodeCase(b=2, s_q=1, h_q=16, seqlens=(70, 5), strides="dense"))

    def step(q: Any, *cache: Any) -> Any:
        out, _ = flat(of_jax.mla_decode)(q, *cache, exportable=True)
        return flat(of_jax.mla_decode)(q.at[..., :512].add(out), *cache, exportable=True)

    return step, list(inputs.arguments)


def train(of_jax: Any) -> tuple[Any, list[Any]]:
    """Prefill within packed segments, and its gradients."""
    import jax

    inputs = dense_cases.make(dense_cases.DenseCase(((9, 9),), h_q=2, h_kv=2, k_rope="within", starts=False))
    ids = np.array([1, 1, 1, 0, 2, 2, 3, 3, 3], np.int32)

    def loss(q: Any, k: Any, v: Any, ids: Any) -> Any:
        options = {"segment_ids_q": ids, "max_segments": 4, "deterministic": True, "exportable": True}
        out, lse = flat(of_jax.mla_prefill)(q, k, v, **options)
        return (out.astype("float32") ** 2).sum() + jax.numpy.where(jax.numpy.isinf(lse), 0, lse).sum()

    return jax.value_and_grad(loss, argnums=(0, 1, 2)), [inputs.q, inputs.k, inputs.v, ids]


def stored(jax: Any, of_jax: Any, folder: Path, platform: str) -> list[str]:
    """Export the programs with their arrays; the checksums of what they return here, at once."""
    from jax import export

    sums = []
    for make in (decode, train):
        step, arrays = make(of_jax)
        given = [jax.device_put(np.ascontiguousarray(x), jax.devices(platform)[0]) for x in arrays]
        exported = export.export(
            jax.jit(step),
            platforms=["cuda" if platform == "gpu" else platform],
            disabled_checks=of_jax.disabled_checks(),
        )(*given)
        (folder / f"{make.__name__}.program").write_bytes(exported.serialize())
        bits = [np.asarray(x) for x in given]
        np.savez(folder / f"{make.__name__}.npz", *(x.view(f"u{x.itemsize}") for x in bits))
        sums.append(checksum(jax.jit(step)(*given)))
    return sums


def run(folder: Path, **environment: str) -> tuple[int, int, list[str]]:
    """The calls of another process, how many of them were captured, and its checksums."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.bindings.captured_program", str(folder)],
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'ptxsim'}", **environment},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = re.fullmatch(r"(\d+) calls, (\d+) captured: (.*)\n", done.stdout)
    assert told is not None, done.stdout
    return int(told[1]), int(told[2]), told[3].split()


@pytest.mark.slow
@pytest.mark.usefixtures("_numpy_backend")
def test_on_the_cpu(jax: Any, of_jax: Any, tmp_path: Path) -> None:
    """The programs travel; there is no graph, and nothing is enqueued."""
    pytest.importorskip("flatbuffers")
    sums = stored(jax, of_jax, tmp_path, "cpu")
    assert run(tmp_path, JAX_PLATFORMS="cpu", MLA_CUPY_BACKEND="numpy") == (0, 0, sums)


@pytest.mark.gpu
def test_on_a_gpu(jax_gpu: Any, of_jax: Any, tmp_path: Path) -> None:
    """Bit by bit what the same process returns without graphs."""
    pytest.importorskip("flatbuffers")
    sums = stored(jax_gpu, of_jax, tmp_path, "gpu")
    given = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    calls, captured, found = run(tmp_path, XLA_FLAGS=NOTHING, **given)
    assert (calls, captured, found) == (4 * RUNS, 0, sums)
    calls, captured, found = run(tmp_path, XLA_FLAGS=CAPTURING, **given)
    assert found == sums
    assert calls >= captured > 0
