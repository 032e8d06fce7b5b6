"""The kernels of the warm-up loss in the simulator, through the public call, against the oracle."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mla_cupy
from mla_cupy import UnsupportedDeviceError, reference
from mla_cupy.kernels.indexer.loss import LOSS, heuristics
from mla_cupy.kernels.indexer.loss.problem import LossProblem
from tests.support.flat import flat
from tests.support.loss_cases import FIELDS, TENSOR_CORE_ERROR, LossCase, check_loss, loss_inputs, run_loss, splits_of
from tests.support.sim_driver import fake_gpu, simulated

GENERIC, HOPPER = "indexer_loss_generic_scores", "indexer_loss_sm90_scores"
HEADS = "indexer_loss_sm90_heads"
CASES = [
    LossCase(),
    LossCase(s_q=4, s_kv=7, causal=False, lse=True, d_v=20, row_weights=False),
    LossCase(s_q=5, s_kv=12, h=5, h_i=3, d=7, d_i=64, lse=True, sequences=((2, 3), (0, 2), (2, 5))),
    LossCase(s_q=4, s_kv=8, h=3, h_i=3, target="per_head", d_v=33, target_scale=0.3, weights="bfloat16"),
    LossCase(s_q=6, s_kv=4, h=2, h_i=2, target="per_head", spread=40, sequences=((1, 0), (4, 3))),
    LossCase(s_q=1, s_kv=1, h=1, h_i=1, d=1),
    LossCase(s_q=4, s_kv=5, h=4, d=72, h_kv=2, d_v=6, pairs="qk", lse=True, codes="float8_e4m3fn"),
    LossCase(s_q=3, s_kv=4, h=2, h_i=2, d=70, h_kv=2, pairs="K", target="per_head", codes="uint8"),
    LossCase(s_q=5, s_kv=6, h=3, d=66, h_kv=3, pairs="q", sequences=((2, 3), (2, 2))),
]


def run(case: LossCase, inputs: dict[str, Any], cc: tuple[int, int] = (9, 0), **options: Any) -> tuple[Any, ...]:
    with simulated(2, cc):
        return run_loss(mla_cupy.indexer_warmup_loss, **inputs, **{**case.options, "kernel": GENERIC, **options})


@pytest.mark.one_in(8)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_generic(case: LossCase) -> None:
    """Chunks of one token, with poison in the keys that nobody sees."""
    inputs = loss_inputs(case)
    got = run(case, inputs, (8, 0) if case.causal else (9, 0), buffer_bytes=1 if case.s_q < 5 else 1 << 20)
    check_loss(got, reference.indexer_warmup_loss(**inputs, **case.options))


SIZES = {"s_q": 4, "s_kv": 4, "heads": 2, "index_heads": 2, "head_dim": 128, "index_dim": 64}
#: (mode of completion, seed)
MODES = (("late", 0), ("random", 1), ("early", 0), ("random", 2), ("random", 3), ("late", 1), ("early", 1))
HOPPER_CASES = [
    LossCase(s_q=3, s_kv=130, h=2, h_i=2, d=128, d_i=64, lse=True, causal=False),  # two tiles of keys
    LossCase(
        s_q=9, s_kv=12, h=1, h_i=3, d=136, d_i=128, lse=True, sequences=((4, 2), (0, 3), (4, 6)), weights="bfloat16"
    ),
    LossCase(s_q=3, s_kv=130, h=2, h_i=1, d=64, d_i=32, causal=False),  # its own log-sum-exps
    LossCase(s_q=4, s_kv=6, h=4, h_i=3, d=192, d_i=128, h_kv=4, pairs="k", lse=True),  # a prefill's
    LossCase(s_q=3, s_kv=5, h=2, h_i=2, d=136, d_i=64, h_kv=2, codes="uint8"),  # whole keys, and their log-sum-exps
    LossCase(
        s_q=6,
        s_kv=4,
        h=3,
        h_i=1,
        d=128,
        d_i=128,
        pairs="qk",
        lse=True,
        codes="float8_e4m3fn",
        sequences=((4, 1), (2, 3)),
    ),
]
LARGE_HOPPER_CASES = [
    LossCase(s_q=130, s_kv=140, h=2, h_i=3, d=128, d_i=128, lse=True),
    LossCase(s_q=70, s_kv=300, h=2, h_i=66, d=576, d_i=64, lse=True, sequences=((30, 140), (39, 150))),
    LossCase(s_q=40, s_kv=520, h=3, h_i=5, d=64, d_i=32, d_v=16),
    LossCase(s_q=400, s_kv=400, h=1, h_i=1, d=8, d_i=32, lse=True, row_weights=False),
    LossCase(s_q=9, s_kv=300, h=2, h_i=2, d=136, d_i=128, sequences=((4, 2), (0, 3), (4, 295))),
    LossCase(s_q=130, s_kv=140, h=1, h_i=1, d=64, d_i=32, spread=6),
    LossCase(s_q=140, s_kv=270, h=3, h_i=2, d=192, d_i=64, h_kv=3, pairs="qk", sequences=((60, 130), (79, 139))),
    LossCase(s_q=20, s_kv=270, h=4, h_i=3, d=256, d_i=128, h_kv=2, pairs="K", codes="uint8", lse=True),
    LossCase(s_q=20, s_kv=140, h=2, h_i=66, d=576, d_i=32, pairs="qk", codes="uint8", weights="bfloat16"),
]


HEAD_CASES = [
    LossCase(s_q=3, s_kv=130, h=2, h_i=2, d=128, d_i=64, d_v=128, target="per_head", causal=False),
    LossCase(
        s_q=9,
        s_kv=12,
        h=2,
        h_i=2,
        d=40,
        d_i=128,
        target="per_head",
        sequences=((4, 2), (0, 3), (4, 6)),
        weights="bfloat16",
    ),
    LossCase(s_q=2, s_kv=4, h=2, h_i=1, d=64, d_i=32, d_v=20),  # attention alone, with sums over heads
]
LARGE_HEAD_CASES = [
    LossCase(s_q=130, s_kv=140, h=1, h_i=1, d=64, d_i=32, d_v=20, target="per_head", target_scale=0.3),
    LossCase(s_q=150, s_kv=400, h=2, h_i=2, d_i=128, d_v=128, target="per_head", sequences=((60, 140), (90, 260))),
    LossCase(s_q=40, s_kv=300, h=3, h_i=3, d=16, d_i=64, target="per_head", spread=8, row_weights=False),
    LossCase(s_q=140, s_kv=280, h=2, h_i=1, d=128, d_i=32, d_v=128, sequences=((70, 140), (70, 140))),
]
ALL_HOPPER_CASES = [*HOPPER_CASES, *LARGE_HOPPER_CASES, *HEAD_CASES, *LARGE_HEAD_CASES]


def hopper_kernels(case: LossCase) -> tuple[str, set[str]]:
    """The main kernel, and the kernel for requested or missing results of the attention."""
    if case.target == "per_head":
        return HEADS, set()
    if case.d_v:
        return HOPPER, {f"mla_{HEADS}" if max(case.d, case.d_v) <= 128 else "mla_indexer_loss_generic_attention"}
    return HOPPER, set() if case.lse else {"mla_indexer_loss_sm90_lse"}


def run_hopper(case: LossCase, mode: tuple[str, int], **options: Any) -> tuple[Any, ...]:
    inputs = loss_inputs(case)
    main, attention = hopper_kernels(case)
    with simulated(2, (9, 0), *mode) as target:
        got = run_loss(mla_cupy.indexer_warmup_loss, **inputs, **case.options, kernel=main, **options)
    makers = {f"mla_{HEADS}", "mla_indexer_loss_generic_attention", "mla_indexer_loss_sm90_lse"}
    assert f"mla_{main}" in target.launched
    assert makers & set(target.launched) == attention | ({f"mla_{main}"} & makers)
    check_loss(got, reference.indexer_warmup_loss(**inputs, **case.options), TENSOR_CORE_ERROR)
    return got


@pytest.mark.one_in(8)
@pytest.mark.parametrize("case", HOPPER_CASES, ids=lambda case: case.id)
def test_hopper(case: LossCase) -> None:
    run_hopper(case, MODES[HOPPER_CASES.index(case)])


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", HEAD_CASES, ids=lambda case: case.id)
def test_heads_on_hopper(case: LossCase) -> None:
    run_hopper(case, MODES[HEAD_CASES.index(case)])


def test_values_that_are_not_finite() -> None:
    """They reach the tokens that see them, and no other of a tile."""
    case = LossCase(s_q=4, s_kv=6, h=1, h_i=1, d=8, d_i=32, d_v=16, target="per_head")
    inputs = loss_inputs(case)
    inputs["v"][4, 1], inputs["v"][3, 9] = np.nan, -np.inf
    with simulated(1, (9, 0)):
        got = run_loss(mla_cupy.indexer_warmup_loss, **inputs, **case.options, kernel=HEADS, gradients=False)
    exact = reference.indexer_warmup_loss(**inputs, **case.options, gradients=False)
    check_loss(got, exact, TENSOR_CORE_ERROR)
    assert np.isnan(got[6][2:, :, 1].astype(float)).all()
    assert np.isfinite(got[6][:1].astype(float)).all()


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize(
    "case", [*HOPPER_CASES, *LARGE_HOPPER_CASES, *HEAD_CASES, *LARGE_HEAD_CASES], ids=lambda case: case.id
)
def test_hopper_in_every_mode(case: LossCase, mode: tuple[str, int]) -> None:
    run_hopper(case, mode)


@pytest.mark.slow
def test_chunks_on_hopper() -> None:
    """Rows have the same bits in chunks of any size; the keys' gradients are added in another order."""
    case = LossCase(s_q=20, s_kv=140, h=2, h_i=2, d=64, d_i=32, lse=True)
    whole, cut = (run_hopper(case, MODES[0], buffer_bytes=size) for size in (1 << 20, 7 * 10 * 256))
    for name, x, y in zip(FIELDS[:6], whole, cut, strict=False):
        assert name == "d_index_k" or x.tobytes() == y.tobytes(), name


def test_splits_divide_the_tokens_that_see_a_tile() -> None:
    """So a sequence's gradient by keys has the same bits alone and before another one."""
    case = LossCase(s_q=16, s_kv=256, h=1, h_i=2, d=64, d_i=32, lse=True, sequences=((8, 128), (8, 128)))
    packed = loss_inputs(case)
    cut = {"k": 128, "index_k": 128, "cu_seqlens_q": 2, "cu_seqlens_kv": 2}
    alone = {name: x[: cut.get(name, 8)] for name, x in packed.items()}
    sums = []
    for inputs in (packed, alone):
        to = np.full(inputs["index_k"].shape, 7, np.float32)
        with splits_of(2, most=2), simulated(2, (9, 0)):
            run_loss(mla_cupy.indexer_warmup_loss, **inputs, **case.options, kernel=HOPPER, d_index_k=to)
        sums.append(to)
    np.testing.assert_allclose(sums[0], reference.indexer_warmup_loss(**packed).d_index_k, atol=2e-2)
    assert sums[0][:128].tobytes() == sums[1].tobytes()


def test_a_block_takes_several_pairs_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than it has stages for queries."""
    monkeypatch.setattr(heuristics, "MAX_QUERY_BLOCKS", 2)
    run_hopper(
        LossCase(s_q=15, s_kv=12, h=1, h_i=3, d=64, d_i=32, lse=True, sequences=((4, 2), (0, 3), (9, 6))), MODES[1]
    )


def test_what_hopper_does_not_take() -> None:
    """Odd addresses, no token, wide heads with targets of their own: the plain kernels do."""
    per_head = {"per_head": True}
    for kernel, changes, word in (
        (HOPPER, {"aligned": False}, "16 bytes"),
        (HOPPER, {"s_q": 0}, "one"),
        (HOPPER, {"head_dim": 136, "pairs": True}, "first columns are a multiple of 64"),
        (HEADS, {**per_head, "kv_heads": 2}, "all heads share"),
        (HEADS, {**per_head, "codes": True}, "bfloat16"),
        (HEADS, {**per_head, "aligned": False}, "16 bytes"),
        (HEADS, {**per_head, "head_dim": 136}, "d up to 128"),
        (HEADS, {**per_head, "value_dim": 136}, "d_v up to 128"),
    ):
        problem = LossProblem(**{**SIZES, **changes})  # type: ignore[arg-type]
        assert LOSS.configure(problem, fake_gpu(1)).kernel.name == GENERIC
        with pytest.raises(UnsupportedDeviceError, match=word):
            LOSS.configure(problem, fake_gpu(1), kernel)


def test_each_target_has_its_kernel() -> None:
    for changes, taken, other, word in (({}, HOPPER, HEADS, "per head"), ({"per_head": True}, HEADS, HOPPER, "summed")):
        problem = LossProblem(**{**SIZES, **changes})  # type: ignore[arg-type]
        assert LOSS.configure(problem, fake_gpu(1)).kernel.name == taken
        with pytest.raises(UnsupportedDeviceError, match=word):
            LOSS.configure(problem, fake_gpu(1), other)


@pytest.mark.slow
def test_generic_of_wide_heads() -> None:
    case = LossCase(s_q=3, s_kv=140, h=2, h_i=2, d=576, d_i=128, d_v=512)
    inputs = loss_inputs(case)
    check_loss(run(case, inputs), reference.indexer_warmup_loss(**inputs, **case.options))


def test_chunks_do_not_change_bits() -> None:
    case = LossCase(s_q=5, s_kv=6, lse=True)
    inputs = loss_inputs(case)
    whole, cut = (run(case, inputs, buffer_bytes=size) for size in (1 << 20, 2 * 8 * 128))
    for x, y in zip(whole[:6], cut[:6], strict=True):
        assert x.tobytes() == y.tobytes()


def test_the_workspace_is_bounded() -> None:
    """It grows with the keys, not with their square: by the rows of one token and the sums of keys."""
    sizes = []
    for s in (128, 256, 512):
        inputs = loss_inputs(LossCase(s_q=s, s_kv=s, d=4, lse=True))
        with simulated(1):
            sizes.append(
                mla_cupy.workspace_bytes(flat(mla_cupy.indexer_warmup_loss), **inputs, scale=1.0, buffer_bytes=1)
            )
    assert sizes[2] - sizes[1] == 2 * (sizes[1] - sizes[0])


@pytest.mark.parametrize(
    ("changes", "kernel", "mebibytes"),
    [
        ({}, HOPPER, 577),
        ({"needs_lse": True}, HOPPER, 641),
        ({"codes": True}, HOPPER, 583),
        ({"buffer_bytes": 64 << 20}, HOPPER, 161),
        ({"per_head": True, "heads": 64, "head_dim": 128, "value_dim": 128, "index_dim": 64}, HEADS, 81),
    ],
    ids=["lse", "its own lse", "codes", "a smaller buffer", "per head"],
)
def test_the_workspace_of_131072_keys(changes: dict[str, Any], kernel: str, mebibytes: int) -> None:
    """The workspace matches the kernels' page; a float32 per query and key would be 64 GiB."""
    sizes = {"s_q": 131_072, "s_kv": 131_072, "heads": 128, "index_heads": 64, "head_dim": 576, "index_dim": 128}
    config = LOSS.configure(LossProblem(**{**sizes, **changes}), fake_gpu(1))
    assert config.kernel.name == kernel
    assert round(LOSS.workspace(config).nbytes / 2**20) == mebibytes


def test_only_the_loss() -> None:
    """And gradients in float32, for the same loss."""
    case = LossCase(s_q=3, s_kv=5)
    inputs = loss_inputs(case)
    alone = run(case, inputs, gradients=False)
    assert alone[3:] == (None,) * 5
    shapes = {"d_index_q": inputs["index_q"].shape, "d_index_k": inputs["index_k"].shape}
    wide = {name: np.full(shape, 7, np.float32) for name, shape in shapes.items()}
    got = run(case, inputs, **wide)
    assert got[3] is wide["d_index_q"]
    check_loss(got, reference.indexer_warmup_loss(**inputs, **case.options))
    narrow = run(case, inputs)
    np.testing.assert_array_equal(got[3].astype(ml_dtypes.bfloat16), narrow[3])
    for x, y in zip(alone[:3], got[:3], strict=True):
        assert x.tobytes() == y.tobytes()


@pytest.mark.parametrize(("s_q", "s_kv"), [(0, 3), (3, 0)])
def test_no_token_or_no_key(s_q: int, s_kv: int) -> None:
    """There is no divergence, and the gradients are zeros."""
    case = LossCase(s_q=s_q, s_kv=s_kv, causal=False)
    inputs = loss_inputs(case)
    targets = {name: np.full(inputs[name[2:]].shape, 7, np.float32) for name in ("d_index_q", "d_index_k", "d_weights")}
    got = run(case, inputs, **targets)
    assert (got[0] == 0).all()
    assert all((x == 0).all() for x in targets.values())


def test_hostile_sequences() -> None:
    """Starts beyond the arrays, backwards, and overlapping."""
    case = LossCase(s_q=4, s_kv=6)
    inputs = loss_inputs(case)
    for starts_q, starts_kv in (([-5, 2, 2**31 - 1], [-9, 4, 2**31 - 1]), ([3, 0, 4], [5, 2, 6])):
        sequences = {"cu_seqlens_q": np.array(starts_q, np.int32), "cu_seqlens_kv": np.array(starts_kv, np.int32)}
        got = run(case, {**inputs, **sequences})
        check_loss(got, reference.indexer_warmup_loss(**inputs, **sequences))


def test_nothing_where_it_is_not_seen() -> None:
    """NaN in a row reaches that row's results, and the keys' results, only."""
    case = LossCase(s_q=4, s_kv=6, lse=True)
    inputs = loss_inputs(case)
    exact = run(case, inputs)
    inputs["index_k"][5] = np.nan  # the last query alone sees it
    got = run(case, inputs)
    for x, y in zip(got[:3], exact[:3], strict=True):
        np.testing.assert_array_equal(x[:3], y[:3])
    np.testing.assert_array_equal(got[3][:3], exact[3][:3])
