"""Exported operations with their kernels, run by the simulator in a program of their own, beside the oracle."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mla_cupy import cli, reference
from mla_cupy.dtypes import numpy_dtype, round_to

REPOSITORY = Path(__file__).resolve().parents[2]
Arrays = dict[str, Any]
RNG = np.random.default_rng(34)


def normal(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float16)


def merge() -> tuple[Arrays, Mapping[str, Any]]:
    outs, lses = normal(3, 2, 1, 16, 512), RNG.standard_normal((3, 2, 16, 1)).astype(np.float32)
    lses[1, 0] = -np.inf
    out, lse = reference.merge_states(outs.astype(np.float64), lses.astype(np.float64))
    sizes = {"n": 3, "b": 2, "s_q": 1}
    return {"outs": outs, "lses": lses, **sized(sizes)}, {"out": out, "lse": lse}


def records() -> Any:
    """A cache of four pages of "v32"."""
    cache = np.zeros((4, 64, 656), np.uint8)
    reference.cache_append(normal(256, 512), normal(256, 64), cache, np.arange(256))
    return cache


def decode_records() -> tuple[Arrays, Mapping[str, Any]]:
    q, cache = normal(2, 1, 16, 576), records()
    table, seqlens = np.array([[2, 0], [1, 3]], np.int32), np.array([70, 9], np.int32)
    out, lse = reference.mla_decode(q, cache, table, seqlens)
    arrays = {"q": q, "kv_cache": cache, "block_table": table, "seqlens": seqlens}
    return arrays | sized({"b": 2, "num_pages": 4, "max_pages": 2}), {"out": out, "lse": lse}


def sparse_decode() -> tuple[Arrays, Mapping[str, Any]]:
    q, cache = normal(2, 1, 16, 576), records()
    indices, length = RNG.integers(-1, 256, (2, 1, 64)).astype(np.int32), np.array([60, 3], np.int32)
    out, lse = reference.sparse_mla_decode(q, cache, indices, topk_length=length)
    arrays = {"q": q, "kv_cache": cache, "indices": indices, "topk_length": length}
    return arrays | sized({"b": 2, "num_pages": 4}), {"out": out, "lse": lse}


def sparse_forward() -> tuple[Arrays, Mapping[str, Any]]:
    q, kv = normal(3, 16, 576), normal(200, 576)
    indices = RNG.integers(-1, 200, (3, 64)).astype(np.int32)
    out, lse, maxima = reference.sparse_mla_forward(q, kv, indices)
    found = {"out": out, "lse": lse, "max_logits": maxima}
    return {"q": q, "kv": kv, "indices": indices} | sized({"s_q": 3, "s_kv": 200}), found


def append() -> tuple[Arrays, Mapping[str, Any]]:
    latent, rope, slots = normal(5, 512), normal(5, 64), np.array([3, -1, 130, 7, 255])
    cache = np.full((4, 64, 656), 7, np.uint8)
    expected = cache.copy()
    reference.cache_append(latent, rope, expected, slots)
    arrays = {"latent": latent, "rope": rope, "cache": cache, "slots": slots}
    return arrays | sized({"n": 5, "num_pages": 4}), {"cache": expected}


def topk() -> tuple[Arrays, Mapping[str, Any]]:
    logits, ke = RNG.standard_normal((3, 500)).astype(np.float32), np.array([500, 40, 100], np.int32)
    logits[0, 10:60] = 0.5  # ties
    indices, counts = reference.indexer_topk(logits, k=64, ke=ke)[:2]
    return {"logits": logits, "ke": ke} | sized({"s_q": 3, "s_kv": 500, "ends": 3}), {
        "indices": indices,
        "counts": counts,
    }


def prefill() -> tuple[Arrays, Mapping[str, Any]]:
    q, k, v, starts = normal(40, 2, 192), normal(40, 2, 192), normal(40, 2, 128), np.array([0, 33, 40], np.int32)
    out, lse = reference.mla_prefill(q, k, v, cu_seqlens_q=starts, cu_seqlens_kv=starts)
    arrays = {"q": q, "k": k, "v": v, "cu_seqlens_q": starts, "cu_seqlens_kv": starts}
    return arrays | sized({"s_q": 40, "s_kv": 40, "b": 2}), {"out": out, "lse": lse}


def decode_fp8() -> tuple[Arrays, Mapping[str, Any]]:
    q, cache = normal(2, 1, 16, 576), RNG.integers(0, 256, (4, 64, 576), np.uint8) & 0xBF
    table, seqlens = np.array([[2, 0], [1, 3]], np.int32), np.array([70, 9], np.int32)
    out, lse = reference.mla_decode(q, cache, table, seqlens, math="fp8")
    arrays = {"q": q, "kv_cache": cache, "block_table": table, "seqlens": seqlens}
    return arrays | sized({"b": 2, "num_pages": 4, "max_pages": 2}), {"out": out, "lse": lse}


def prepare() -> tuple[Arrays, Mapping[str, Any]]:
    q, (arrays, _) = normal(5, 4, 576), append()
    positions, cache = np.array([0, 1, 7, 40_000, 3]), arrays["cache"].copy()
    tokens = arrays["latent"], arrays["rope"], cache, arrays["slots"]
    out, _, _ = reference.mla_prepare(q, *tokens, positions=positions, theta=10000.0)
    return arrays | {"q": q, "positions": positions}, {"out": out, "cache": cache}


def absorb() -> tuple[Arrays, Mapping[str, Any]]:
    q_nope, w_uk = normal(3, 4, 128), normal(4, 128, 512)
    (out,) = reference.absorb(q_nope, w_uk)
    return {"q_nope": q_nope, "w_uk": w_uk} | sized({"t": 3}), {"out": out}


def project() -> tuple[Arrays, Mapping[str, Any]]:
    arrays, _ = merge()
    w_uv = normal(16, 128, 512) / np.float16(16)
    out, lse = reference.merge_project(arrays["outs"], w_uv, lses=arrays["lses"])
    return arrays | {"w_uv": w_uv}, {"out": out, "lse": lse}


def index() -> tuple[Arrays, Mapping[str, Any]]:
    q, k, weights = bfloat(3, 8, 128), bfloat(3, 128), RNG.standard_normal((3, 8)).astype(np.float32)
    angles = RNG.uniform(-9, 9, (50, 32))
    cos, sin, positions = np.cos(angles, dtype=np.float32), np.sin(angles, dtype=np.float32), np.array([0, 49, 7])
    arrays = {"q": q, "weights": weights, "k": k, "cos": cos, "sin": sin, "positions": positions.astype(np.int32)}
    names = "codes", "folded", "k_codes", "k_scale"
    expected = dict(zip(names, reference.indexer_prepare(*arrays.values()), strict=True))
    expected |= {name: expected[name].astype(numpy_dtype("float8_e4m3fn")).view(np.uint8) for name in names[::2]}
    return arrays | sized({"n": 3, "max_position": 50, "rope_pairs": 32}), expected


def bfloat(*shape: int) -> Any:
    return round_to(RNG.standard_normal(shape), "bfloat16").astype(numpy_dtype("bfloat16"))


def sized(sizes: dict[str, int]) -> Arrays:
    """Sizes among the arrays of a file."""
    return {f"size.{name}": np.int64(size) for name, size in sizes.items()}


HALF = {"dtype": "float16"}
CASES: dict[str, tuple[str, dict[str, Any], Callable[[], tuple[Arrays, Mapping[str, Any]]]]] = {
    "merge_states": ("merge_states", {"h_q": 16, **HALF}, merge),
    "decode-v32": ("decode", {"h_q": 16, "page_size": 64, "kv_format": "v32", **HALF}, decode_records),
    "sparse_decode": (
        "sparse_decode",
        {"h_q": 16, "kv_format": "v32", "page_size": 64, "topk": 64, **HALF},
        sparse_decode,
    ),
    "sparse_forward": ("sparse_forward", {"h_q": 16, "topk": 64, **HALF}, sparse_forward),
    "cache_append": ("cache_append", {"kv_format": "v32", "page_size": 64, **HALF}, append),
    "indexer_topk": ("indexer_topk", {"topk": 64}, topk),
    "decode-fp8": ("decode", {"h_q": 16, "page_size": 64, "kv_format": "fp8", "math": "fp8", **HALF}, decode_fp8),
    "mla_prepare": ("mla_prepare", {"h_q": 4, "kv_format": "v32", "page_size": 64, "theta": 10000, **HALF}, prepare),
    "absorb": ("absorb", {"h_q": 4, **HALF}, absorb),
    "merge_project": ("merge_project", {"h_q": 16, **HALF}, project),
    "indexer_prepare": ("indexer_prepare", {"h_q": 8}, index),
    "prefill": ("prefill", {"h_q": 2, **HALF}, prefill),
}

TOLERANCES = {"decode-fp8": 3e-2}
"""Tolerances other than float16's: a score that is slightly off rounds an e4m3 weight to its neighbour."""


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_results_are_the_oracles(case: str, tmp_path: Path) -> None:
    """Results match to the precision of float16, or of `TOLERANCES`; whole numbers are equal."""
    operation, options, make = CASES[case]
    given, expected = make()
    flags = [word for name, value in options.items() for word in ("--" + name.replace("_", "-"), str(value))]
    folder = tmp_path / "module"
    assert cli.main(["export", "--op", operation, *flags, "--arch", "sm_90a", "--ptx", "--out", str(folder)]) == 0
    np.savez(tmp_path / "inputs.npz", **given)
    program = [sys.executable, "-m", "tests.export.host_program", str(folder), operation, json.dumps(options)]
    command = [sys.executable, "-m", "ptxsim", "run-host", "--sms", "2", *program]
    files = [str(tmp_path / "inputs.npz"), str(tmp_path / "outputs.npz")]
    paths = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "ptxsim")])
    environment = {**os.environ, "PYTHONPATH": paths, "MLA_CUPY_JIT": "off", "MLA_CUPY_BACKEND": "numpy"}
    done = subprocess.run(
        [*command, *files], env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing found" in done.stderr
    with np.load(tmp_path / "outputs.npz") as found:
        for name, right in expected.items():
            if found[name].dtype.kind in "iu":
                assert np.array_equal(found[name], right)
            else:
                limit = TOLERANCES.get(case, 4e-3)
                np.testing.assert_allclose(found[name].astype(np.float64), right, rtol=limit, atol=limit)
