"""Launches of `mla_prefill_backward`, without running it: kernels, workspaces, gradients as views of one array."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import ShapeError
from mla_cupy.kernels import pipeline
from mla_cupy.kernels.dense import DENSE_BACKWARD
from mla_cupy.kernels.dense.backward import kv_heads_at_once
from mla_cupy.kernels.dense.problem import DenseBackwardProblem
from mla_cupy.ops import call
from tests.dense.backward_runs import GENERIC, HOPPER
from tests.support.dense_cases import DenseCase
from tests.support.dense_gradients import GradientInputs, make_gradients
from tests.support.flat import flat
from tests.support.recorder import Recorder
from tests.support.sim_driver import fake_gpu

PROBLEM = DenseBackwardProblem(
    s_q=1000, s_kv=8192, h_q=16, h_kv=4, d_qk=192, d_v=128, dtype="bfloat16", sequences=3, shared_rope=True
)


def test_rows() -> None:
    """Wherever the sequences begin, at multiples of 16 rows, the last one's tile may be read whole."""
    assert PROBLEM.num_rows == 1088 + 112  # 1000 + 5 * 15 rounded up; the last group's 16 rows and 112 more
    assert replace(PROBLEM, s_q=2).num_rows == 2 * 16 + 112
    rng = np.random.default_rng(0)
    for _ in range(200):
        problem = replace(PROBLEM, s_q=int(rng.integers(1, 300)), sequences=int(rng.integers(1, 40)))
        starts = np.sort(rng.integers(0, problem.s_q + 1, problem.sequences + 1))
        lengths = np.diff([0, *starts, problem.s_q])
        rows = -(-lengths // 16) * 16
        tiles = [
            first + tile for first, n in zip(np.cumsum([0, *rows]), lengths, strict=False) for tile in range(0, n, 128)
        ]
        assert max(tiles) + 128 <= problem.num_rows


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("shared_rope", [False, True])
def test_workspace_is_what_the_page_says(deterministic: bool, shared_rope: bool) -> None:
    """The fallback's workspace: statistics, the last columns' parts by heads, lists."""
    problem = replace(PROBLEM, deterministic=deterministic, shared_rope=shared_rope)
    layout = DENSE_BACKWARD.workspace(DENSE_BACKWARD.configure(problem, fake_gpu(132), GENERIC))
    statistics = 8 * 16 * problem.num_rows
    lists = 32 * (problem.most_tiles + problem.most_key_tiles) + 28 * 5 + 16
    parts = 256 * 4 * 8192 if shared_rope else 0
    assert 0 <= layout.nbytes - statistics - lists - parts < 256 * 8


@pytest.mark.parametrize("deterministic", [False, True])
def test_workspace_on_hopper(deterministic: bool) -> None:
    """Sums of dq and of one dk_rope by default; without, a dk_rope of each KV head."""
    problem = replace(PROBLEM, deterministic=deterministic)
    layout = DENSE_BACKWARD.workspace(DENSE_BACKWARD.configure(problem, fake_gpu(132), HOPPER))
    statistics = 8 * 16 * problem.num_rows
    lists = 32 * (problem.most_tiles + problem.most_key_tiles) + 28 * 5 + 16
    sums = 256 * 4 * 8192 if deterministic else 256 * 8192 + 4 * 192 * 16 * problem.num_rows
    assert 0 <= layout.nbytes - statistics - lists - sums < 256 * 9


@pytest.mark.parametrize(
    ("options", "launches"),
    [
        ({}, ["delta", "sm90_backward_keys", "dq"]),
        (
            {"deterministic": True},
            ["delta", "sm90_backward_keys", "dk_rope", "sm90_backward_queries"],
        ),
        (
            {"kernel": GENERIC},
            ["delta", "generic_backward_keys", "dk_rope", "generic_backward_queries"],
        ),
    ],
    ids=["default", "deterministic", "plain"],
)
def test_launches(recorder: Recorder, options: dict[str, Any], launches: list[str]) -> None:
    """The fewest launches: nothing is zeroed by a separate launch. Several sequences add a schedule."""
    inputs = make_gradients(DenseCase(((3, 4),), h_q=2))
    flat(mla_cupy.mla_prefill_backward)(*inputs.arguments, **inputs.options, **options)
    assert recorder.memsets == []
    assert [one.entry for one in recorder.launches] == [f"mla_dense_{name}" for name in launches]
    recorder.launches.clear()
    inputs = make_gradients(DenseCase(((3, 4), (1, 1)), h_q=2))
    flat(mla_cupy.mla_prefill_backward)(*inputs.arguments, **inputs.options, **options)
    assert [one.entry for one in recorder.launches] == [f"mla_dense_{name}" for name in ("schedule", *launches)]


@pytest.mark.parametrize(
    ("options", "blocks"),
    [({}, 2), ({"deterministic": True}, 3), ({"kernel": GENERIC}, 2)],
    ids=["default", "deterministic", "plain"],
)
def test_launches_share_their_arguments(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], blocks: int
) -> None:
    """Addresses are written once for the statistics, and once for what follows; other boxes of rows are other maps."""
    written: list[Any] = []
    write = pipeline._Block.write
    monkeypatch.setattr(pipeline._Block, "write", lambda self, places: (written.append(self), write(self, places)))
    inputs = make_gradients(DenseCase(((3, 4),), h_q=2))
    flat(mla_cupy.mla_prefill_backward)(*inputs.arguments, **inputs.options, **options)
    assert len(written) == blocks


@pytest.mark.parametrize(("s_q", "kv_heads"), [(100, 4), (8192, 1), (1300, 4), (2000, 2), (0, 4)], ids=str)
def test_heads_at_once(s_q: int, kv_heads: int) -> None:
    """The most heads with queries, dout and sums that fit into L2."""
    device = replace(fake_gpu(132), l2_bytes=50 << 20)
    assert kv_heads_at_once(replace(PROBLEM, s_q=s_q), device, sums_dq=True) == kv_heads


def test_kernel_of_a_problem() -> None:
    assert DENSE_BACKWARD.configure(replace(PROBLEM, aligned=False), fake_gpu(1)).kernel.name == GENERIC
    assert DENSE_BACKWARD.configure(PROBLEM, fake_gpu(1, (10, 0))).kernel.name == GENERIC


def gradients(inputs: GradientInputs) -> dict[str, Any]:
    """Memory for all; dk and dv are views of one array."""
    s_kv, h_kv, d_k = inputs.forward.k.shape
    both = np.zeros((s_kv, h_kv, d_k + inputs.forward.v.shape[2]), inputs.dout.dtype)
    return {
        "dq": np.zeros_like(inputs.forward.q),
        "dk": both[..., :d_k],
        "dv": both[..., d_k:],
        "dk_rope": np.zeros_like(inputs.options["k_rope"]),
    }


def test_gradients_as_views_of_one_array(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeated call with other addresses is not prepared again."""
    inputs = make_gradients(DenseCase(((3, 4),), h_q=2))

    def again() -> None:
        flat(mla_cupy.mla_prefill_backward)(*inputs.arguments, **inputs.options, **gradients(inputs))

    again()
    launches = len(recorder.launches)
    monkeypatch.setattr(call, "_prepare", None)
    kept = [gradients(inputs) for _ in range(3)]  # so that addresses differ
    again()
    assert len(recorder.launches) == 2 * launches
    assert kept


def test_gradients_that_overlap(recorder: Recorder) -> None:
    """After a good call, too: rows that lie between each other's are told from rows that meet."""
    inputs = make_gradients(DenseCase(((3, 4),), h_q=2))
    good = gradients(inputs)
    flat(mla_cupy.mla_prefill_backward)(*inputs.arguments, **inputs.options, **good)
    both = good["dk"].base
    for first in (120, 0, 64):
        with pytest.raises(ShapeError, match=r"memory that overlaps d[kv]"):
            flat(mla_cupy.mla_prefill_backward)(
                *inputs.arguments, **inputs.options, **{**good, "dv": both[..., first : first + 128]}
            )
