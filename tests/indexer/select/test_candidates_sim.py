"""The selection through lists of candidates, in the simulator: what the oracle selects from the kernel's logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy.kernels.indexer.logits.problem import LogitsProblem
from mla_cupy.kernels.indexer.select import candidates
from mla_cupy.kernels.indexer.select.candidates import CandidateProblem, sampling_of
from mla_cupy.simulation import fake_gpu
from tests.indexer.select.candidate_cases import CHUNKS, KERNEL, LISTS, Array, CandidateCase, check
from tests.support.indexer_cases import LogitsCase, logits_inputs
from tests.support.recorder import Recorder
from tests.support.sim_driver import simulated

MODES = (("early", 0), ("late", 0), ("random", 3))
KINDS = ("equal", "levels", "zeros", "nan", "mostly-nan", "infinite", "rising", "falling")
FAILING = ("sample-above", "sample-below")
CASES = (
    *(CandidateCase(kind, s_q=10, ranges=ranges) for kind, ranges in zip(KINDS, ("none", "windows") * 4, strict=True)),
    *(CandidateCase(kind, s_q=9, s_kv=3000, ranges=ranges) for kind in FAILING for ranges in ("none", "causal")),
    CandidateCase("levels", ranges="wild", relative=False),
    CandidateCase("random", ranges="packed", rows=16, relative=False),
    CandidateCase("random", s_q=9, s_kv=700, k=300, ranges="causal"),
    CandidateCase("levels", s_q=3, s_kv=70, k=90, heads=3),
)


def select(case: CandidateCase, inputs: dict[str, Array], mode: tuple[str, int], **more: Any) -> tuple[Array, Array]:
    with simulated(3, (9, 0), *mode):
        found: tuple[Array, Array] = mla_cupy.indexer_select(**inputs, **case.options, kernel=LISTS, **more)
    return found


def logits_of(inputs: dict[str, Array]) -> Array:
    with simulated(3, (9, 0)):
        found: Array = mla_cupy.indexer_logits(**inputs, kernel=KERNEL)
    return found


def run(case: CandidateCase, mode: tuple[str, int]) -> None:
    inputs = case.inputs()
    check(case, inputs, select(case, inputs, mode), logits_of(inputs))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_selects_what_the_oracle_does(case: CandidateCase, mode: tuple[str, int]) -> None:
    run(case, mode)


@pytest.mark.parametrize("kind", FAILING)
def test_rows_whose_lists_lack_keys(kind: str) -> None:
    """In several chunks, of lists and of logits; others keep their results."""
    run(CandidateCase(kind, s_q=12, s_kv=6000, ranges="packed", rows=8), ("late", 0))


def test_random_inputs() -> None:
    """Empty and hostile ranges, NaN outside of them; more heads than a tile has."""
    inputs = logits_inputs(LogitsCase(s_q=20, s_kv=1500, h=10, dtype="uint8"))
    case = CandidateCase(k=100)
    check(case, inputs, select(case, inputs, ("random", 1)), logits_of(inputs))


def test_strides_and_given_arrays() -> None:
    case = CandidateCase("levels", s_q=9, ranges="windows")
    inputs = case.inputs()
    wanted = select(case, inputs, ("early", 0))
    apart = {"weights": np.zeros((18, 3), np.float32)[::2, ::3], "k_scale": np.zeros(3000, np.float32)[::2]}
    apart |= {"q": np.zeros((9, 2, 128), np.uint8)[:, 1:], "k": np.zeros((1500, 2, 128), np.uint8)[:, 1]}
    apart |= {"ks": np.zeros(27, np.int32)[::3], "ke": np.zeros((9, 2), np.int32)[:, 1]}
    for name, array in apart.items():
        array[...] = inputs[name]
    results = {"indices": np.full((9, 60), 7, np.int32)[:, :40], "counts": np.full(18, 7, np.int32)[::2]}
    got = select(case, apart, ("early", 0), **results)
    for x, y in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(x, y)
    assert (results["indices"].base[:, 40:] == 7).all()


def problem(k: int = 2048, order: str = "index", keeps: bool = False, **sizes: Any) -> CandidateProblem:
    given = {"num_tokens": 64, "num_keys": 131072, "heads": 64, "head_dim": 128, "dtype": "float8_e4m3fn"}
    return CandidateProblem(LogitsProblem(**{**given, **sizes}), k, order, keeps)


@pytest.mark.parametrize("keys", [16384, 131072, 2**20, 2**28 - 1])
@pytest.mark.parametrize("k", [1, 64, 512, 2048])
def test_samples_fit_into_lists(k: int, keys: int) -> None:
    shift, rank, capacity = sampling_of(k, keys)
    assert rank <= -(-keys // 2**shift) <= capacity
    assert max(k, rank << shift) < capacity


def test_what_lists_support() -> None:
    gpu = fake_gpu(132)
    assert candidates.unsupported(problem(), gpu) is None
    others = (
        problem(k=4096),
        problem(order="value"),
        problem(keeps=True),
        problem(head_dim=64),
        problem(dtype="bfloat16"),
        problem(accumulate="float16"),
        problem(aligned=False),
    )
    assert all(candidates.unsupported(other, gpu) for other in others)
    assert candidates.unsupported(problem(), fake_gpu(132, (10, 0)))


def test_they_are_chosen_where_they_win() -> None:
    assert candidates.preferred(problem())
    assert not candidates.preferred(problem(num_tokens=8))
    assert not candidates.preferred(problem(num_keys=8192))


def launches(recorder: Recorder, tokens: int = 64, **options: Any) -> int:
    """Launches of a call with 131,072 keys."""
    recorder.launches.clear()
    q, k = np.zeros((tokens, 1, 128), np.uint8), np.zeros((131_072, 128), np.uint8)
    mla_cupy.indexer_select(q, k, np.zeros((tokens, 1), np.float32), **options)
    return len(recorder.entries)


def test_the_call_takes_them(recorder: Recorder) -> None:
    """Four launches for lists, then two for the rows whose lists lack keys."""
    assert launches(recorder) == launches(recorder, kernel=KERNEL) == launches(recorder, kernel=LISTS) == 6
    assert launches(recorder, kernel=CHUNKS) == launches(recorder, tokens=8) == launches(recorder, keep_last=3) == 2
    assert launches(recorder, logits=np.zeros((64, 131_072), np.float32)) == 2
    assert launches(recorder, buffer_bytes=1 << 18, tokens=9, topk=2048) == 18
