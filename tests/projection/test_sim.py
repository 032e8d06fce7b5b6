"""The compiled kernels in the simulator against the oracle, and bugs planted in them.

A projection in float32 is off by what rounding latents to 16 bits may change: a flip at the middle between two of them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import dtypes, reference
from mla_cupy.kernels.attention import combine_project, projection
from mla_cupy.kernels.cache.absorb import ABSORB
from mla_cupy.kernels.decode import DECODE
from mla_cupy.kernels.decode.finish import ProjectAfterMerge
from mla_cupy.kernels.decode.problem import Batch, DecodeProblem
from mla_cupy.kernels.projection.pipeline import STATES
from tests.projection.inputs import States, kv_b_proj, states
from tests.support.calls import Array
from tests.support.cases import DecodeCase, make
from tests.support.flat import flat, mla_decode, plan_decode
from tests.support.mutant_suite import mutant_suite
from tests.support.mutants import Mutant
from tests.support.recorder import H200
from tests.support.sim_driver import fake_gpu, simulated
from tests.support.tolerance import check

MODES = (("late", 0), ("early", 0), ("random", 1), ("random", 2))
FEW = states(3, b=35, h=1, d_head=64)
MANY = states(35, b=2, s_q=2, h=1)
NARROW = states(2, b=1, s_q=3, h=1, d_head=64)  # eight columns of a block
ONE = states(1, b=37, h=1, d_head=64, outs_dtype="bfloat16")
SPLIT = DecodeCase(b=2, seqlens=(2300, 130), h_q=2)  # more cuts than a warp has threads
TWO_TILES = DecodeCase(b=2, s_q=35, seqlens=(50, 40), h_q=1)


def check_states(given: States, sm_count: int, mode: tuple[str, int] = ("early", 0), **options: Any) -> None:
    """Compare in float32 with the oracle's rounded latents; one flip is a unit of 16 bits of one latent."""
    dtype = given.w_uv.dtype.name
    with simulated(sm_count, mode=mode[0], seed=mode[1]) as driver:
        out, lse = mla_cupy.merge_project(**given.arrays, out_dtype="float32", **options)
    assert driver.launched == ["mla_projection_states"]
    exact, exact_lse = reference.merge_project(*given, rounding=dtype, **options)
    flip = 4 * dtypes.TABLE[dtype].unit_roundoff * float(np.abs(given.w_uv.astype(np.float32)).max())
    np.testing.assert_allclose(out, exact, rtol=1e-5, atol=flip)
    assert np.median(np.abs(out - exact)) < 1e-5
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-5, atol=1e-5)
    assert not out[0, 0, 0].any()


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("given", "sm_count", "share"),
    [
        (states(3), 2, 2),
        (states(2, b=1, s_q=3, h=1, d_head=64, dtype="float16"), 5, 8),
        (states(1, b=3, outs_dtype="bfloat16"), 4, 4),
        (states(8, b=2, h=3, d_head=192, outs_dtype="bfloat16"), 1, 4),
        (states(9, b=3, h=1, d_head=256), 2, 4),
        (states(40, b=1, h=1), 5, 8),
        (states(2, b=7, s_q=5, h=1, d_head=64), 1, 2),  # more tokens than a block takes at a time
        (states(2, b=9, s_q=2, h=1, d_head=64), 8, 4),  # and three shares of the tokens
    ],
    ids=lambda x: "x".join(map(str, x.outs.shape)) if isinstance(x, States) else str(x),
)
def test_states(given: States, sm_count: int, share: int) -> None:
    h, d_head, _ = given.w_uv.shape
    assert projection.share(h, d_head, given.outs.shape[1] * given.outs.shape[2], fake_gpu(sm_count)) == share
    check_states(given, sm_count, lse_base="2" if share > 2 else "e", empty_lse=7.0)


def test_results_in_16_bits_where_the_caller_wants_them() -> None:
    given = states(2, b=2, s_q=2)
    whole = np.full((2, 3, 4, 144), 7, given.w_uv.dtype)
    out = whole[:, :2, ::2, :128]
    with simulated(2):
        result, _ = mla_cupy.merge_project(**given.arrays, out=out)
    assert result is out
    exact, _ = reference.merge_project(*given, rounding="bfloat16")
    np.testing.assert_allclose(out.astype(float), exact, rtol=2**-8, atol=2e-3)
    whole[:, :2, ::2, :128] = 7
    assert (whole == 7).all()


def check_results(given: States, sm_count: int, mode: tuple[str, int] = ("early", 0)) -> None:
    """One state without an lse, in 16 bits: nothing is merged."""
    outs, whole = np.nan_to_num(given.outs), np.full((*given.gate.shape[:3], 256 + 4), 7, np.float32)
    out = whole[..., : given.gate.shape[3]]
    with simulated(sm_count, mode=mode[0], seed=mode[1]) as driver:
        _, lse = mla_cupy.merge_project(outs, given.w_uv, out=out)
    assert driver.launched == ["mla_projection_states"]
    assert lse is None
    exact = reference.merge_project(outs, given.w_uv)[0]
    np.testing.assert_allclose(out, exact, rtol=1e-5, atol=1e-5)
    whole[..., : given.gate.shape[3]] = 7
    assert (whole == 7).all()


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("given", "sm_count"),
    [
        (states(1, b=2, outs_dtype="bfloat16"), 2),
        (states(1, b=15, s_q=3, h=1, d_head=64, dtype="float16", outs_dtype="float16"), 1),
        (states(1, b=17, h=1, d_head=192, outs_dtype="bfloat16"), 8),
    ],
    ids=lambda x: "x".join(map(str, x.outs.shape)) if isinstance(x, States) else str(x),
)
def test_results_without_an_lse(given: States, sm_count: int) -> None:
    check_results(given, sm_count)


def test_without_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projection, "_CLUSTERS", ())
    check_states(states(3, b=5, s_q=4, h=1), 2)
    check_states(states(40, b=1, h=1), 2)
    check_results(ONE, 2)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_in_every_order(mode: tuple[str, int]) -> None:
    check_states(FEW, 2, mode)
    check_states(MANY, 2, mode)


def test_a_row_does_not_depend_on_the_others() -> None:
    """Same pieces, same bits: alone, and last of many tokens."""
    many = states(11, b=34, h=1, d_head=64)
    alone = States(many.outs[:, 33:], many.w_uv, many.lses[:, 33:], many.gate[33:])
    found = []
    for given in (many, alone):
        with simulated(1):
            found.append(mla_cupy.merge_project(**given.arrays)[0][-1].tobytes())
    assert found[0] == found[1]


def test_a_nan_stays_in_its_row() -> None:
    given = states(3)
    given.outs[1, 1, 0, 1, 5], given.lses[1, 1, 1, 0] = np.nan, 0.0
    given.lses[2, 0, 1, 0] = np.nan
    given.outs[2, 0, 0, 1] = 1
    with simulated(2):
        out, lse = mla_cupy.merge_project(**given.arrays, out_dtype="float32")
    assert np.isnan(out[1, 0, 1]).all()
    assert np.isnan(out[0, 0, 1]).all()
    assert np.isfinite(out[:, :, 0]).all()
    assert np.isnan(lse[0, 1, 0])
    assert np.isfinite(lse[1]).all()


# ---- Decode ----------------------------------------------------------------------------------------------------


def check_decode(
    case: DecodeCase,
    sm_count: int,
    mode: tuple[str, int] = ("early", 0),
    plan: Any = None,
    last: str = "mla_attention_combine_project",
    d_head: int = 128,
    **options: Any,
) -> list[str]:
    """Check W_UV and a gate, in the dtype of the queries; `plan` holds its options, `last` is the projecting kernel."""
    inputs, rng = make(case), np.random.default_rng(3)
    _, w_uv = kv_b_proj(rng, case.h_q, 128, d_head, case.dtype)
    gate = rng.standard_normal((case.b, case.s_q, case.h_q, d_head)).astype(w_uv.dtype)
    weights = {"w_uv": w_uv, "gate": gate}
    exact, rounded = (
        reference.mla_decode(*inputs.arguments, **weights, **case.options, rounding=rounding)
        for rounding in (None, case.dtype)
    )
    with simulated(sm_count, mode=mode[0], seed=mode[1]) as driver:
        if plan is not None:
            sizes = {"s_q": case.s_q, "h_q": case.h_q, "page_size": case.page_size}
            sizes |= {"max_pages": inputs.block_table.shape[1], "dtype": case.dtype, "device": 0, "d_head": d_head}
            options["plan"] = plan_decode(max_b=case.b + 1, **sizes, **plan)
            options["plan"].update(inputs.seqlens)
        got = mla_decode(*inputs.arguments, **weights, **case.options, **options)
    assert driver.launched[-1] == last
    assert last == "mla_projection_sm90_results" or "mla_attention_combine" not in driver.launched
    check(got, exact, rounded, case.dtype)
    return driver.launched


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("case", "sm_count", "options"),
    [
        (DecodeCase(b=2, seqlens=(300, 70), h_q=16), 4, {}),  # one split, one not
        (DecodeCase(b=1, seqlens=1400, h_q=2), 12, {"kernel": "attention_generic"}),  # many pieces
        (DecodeCase(b=3, seqlens=(66, 5, 131), s_q=4, h_q=12, dtype="float16"), 2, {}),
        (DecodeCase(b=2, seqlens=(700, 0), h_q=16), 3, {"kernel": "decode_sm90_small_cluster8"}),
        (DecodeCase(b=2, seqlens=(300, 70), h_q=16), 4, {"plan": {}}),
        (DecodeCase(b=2, seqlens=(300, 70), h_q=16), 4, {"plan": {"batch_invariant": True, "split_tokens": 64}}),
        (DecodeCase(b=1, seqlens=100, h_q=16), 1, {}),  # a single split
    ],
    ids=str,
)
def test_decode(case: DecodeCase, sm_count: int, options: dict[str, Any]) -> None:
    check_decode(case, sm_count, **options)


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("case", "sm_count", "options", "launches"),
    [
        (DecodeCase(b=2, seqlens=(300, 70), h_q=16), 4, {}, 4),  # one split, one not
        (DecodeCase(b=3, seqlens=(66, 5, 131), s_q=4, h_q=12, dtype="float16"), 2, {}, 3),
        (DecodeCase(b=2, seqlens=(700, 0), h_q=16), 3, {"kernel": "decode_sm90_small_cluster8"}, 2),
        (DecodeCase(b=2, seqlens=(300, 70), h_q=16), 4, {"plan": {}}, 4),
        (DecodeCase(b=1, seqlens=100, h_q=16), 1, {}, 3),  # a single split
    ],
    ids=str,
)
def test_decode_of_many_rows(
    case: DecodeCase, sm_count: int, options: dict[str, Any], launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W_UV after the combine, or in clusters after attention, in 16 bits."""
    monkeypatch.setattr(projection, "LEAST_ROWS_APART", case.b * case.s_q * case.h_q)
    launched = check_decode(case, sm_count, last="mla_projection_sm90_results", **options)
    assert len(launched) == launches


def check_many_rows(mode: tuple[str, int] = ("early", 0), **options: Any) -> None:
    """More tokens than a block takes at a time, two blocks of a head's columns, and none for the last ones."""
    least, projection.LEAST_ROWS_APART = projection.LEAST_ROWS_APART, 1
    try:
        check_decode(TWO_TILES, 1, mode, last="mla_projection_sm90_results", d_head=192, **options)
    finally:
        projection.LEAST_ROWS_APART = least


@pytest.mark.one_in(4)
@pytest.mark.parametrize("mode", MODES[:3], ids=str)
def test_many_rows_in_every_order(mode: tuple[str, int]) -> None:
    check_many_rows(mode, **({"out_dtype": "float32"} if mode[0] == "late" else {}))


def test_a_batch_invariant_plan_has_one_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of a row's sums must not depend on how many rows there are."""
    monkeypatch.setattr(projection, "LEAST_ROWS_APART", 1)
    case = DecodeCase(b=2, seqlens=(300, 70), h_q=16)
    check_decode(case, 4, plan={"batch_invariant": True, "split_tokens": 64})


@pytest.mark.one_in(8)
@pytest.mark.parametrize(("sm_count", "lengths"), [(4, (300, 70)), (1, (100, 0))])
@pytest.mark.parametrize("pair", [False, True])
def test_decode_with_a_sink(sm_count: int, lengths: tuple[int, int], pair: bool) -> None:
    """The sink lowers results before they are multiplied, split or not; queries may be in two arrays."""
    inputs, rng = make(DecodeCase(b=2, seqlens=lengths, h_q=16)), np.random.default_rng(4)
    q, *others = inputs.arguments
    parts = {"q_rope": np.ascontiguousarray(q[..., 512:])} if pair else {}
    if pair:
        q = np.ascontiguousarray(q[..., :512])
    _, w_uv = kv_b_proj(rng, 16, 128, 128, "bfloat16")
    more = {**parts, "attn_sink": 3 * rng.standard_normal(16).astype(np.float32), "w_uv": w_uv}
    exact, rounded = (reference.mla_decode(q, *others, **more, rounding=rounding) for rounding in (None, "bfloat16"))
    with simulated(sm_count) as driver:
        got = mla_decode(q, *others, **more)
    assert driver.launched[-1] == "mla_attention_combine_project"
    check(got, exact, rounded, "bfloat16")


def test_a_plan_without_w_uv_refuses_it() -> None:
    inputs = make(DecodeCase(b=1, seqlens=64, h_q=2))
    _, w_uv = kv_b_proj(np.random.default_rng(0), 2, 128, 128, "bfloat16")
    with simulated(1):
        sizes = {"max_b": 1, "s_q": 1, "h_q": 2, "max_pages": inputs.block_table.shape[1], "page_size": 64}
        plan = plan_decode(**sizes, dtype="bfloat16", device=0)
        plan.update(inputs.seqlens)
        with pytest.raises(mla_cupy.PlanError, match=r"plan: got d_head=0, expected d_head=128"):
            mla_decode(*inputs.arguments, w_uv=w_uv, plan=plan)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("sm_count", "lengths"), [(4, None), (2, (200, 3, 0))])
@pytest.mark.parametrize("apart", [False, True])
def test_sparse_decode(
    sm_count: int, lengths: tuple[int, ...] | None, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(projection, "LEAST_ROWS_APART", 1 if apart else 1000)
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((256, 576)).astype(dtypes.numpy_dtype("bfloat16"))
    cache, b = np.zeros((4, 64, 656), np.uint8), len(lengths or (1, 1))
    mla_cupy.cache_append(rows[:, :512], rows[:, 512:], cache, np.arange(256))
    _, w_uv = kv_b_proj(rng, 4, 128, 128, "bfloat16")
    call: dict[str, Any] = {
        "q": rng.standard_normal((b, 2, 4, 576)).astype(rows.dtype),
        "kv_cache": cache,
        "indices": rng.integers(-3, 256, (b, 2, 200)).astype(np.int32),
        "scale": 576**-0.5,
        "topk_length": None if lengths is None else np.array(lengths, np.int32),
        "attn_sink": rng.standard_normal(4).astype(np.float32),
        "w_uv": w_uv,
        "gate": rng.standard_normal((b, 2, 4, 128)).astype(rows.dtype),
    }
    with simulated(sm_count) as driver:
        got = flat(mla_cupy.sparse_mla_decode)(**call)
    assert driver.launched[-1] == ("mla_projection_sm90_results" if apart else "mla_attention_combine_project")
    exact, rounded = (reference.sparse_mla_decode(**call, rounding=x) for x in (None, "bfloat16"))
    error = np.abs(got[0].astype(float) - exact[0]).max()
    assert error < 2 * np.abs(rounded[0] - exact[0]).max() + 2**-8 * np.abs(exact[0]).max()
    np.testing.assert_allclose(got[1], exact[1], rtol=1e-5, atol=1e-5)


# ---- Absorption ------------------------------------------------------------------------------------------------


def check_absorb(
    t: int, h: int, d_nope: int, dtype: str, rope: bool, sm_count: int = 2, mode: tuple[str, int] = ("early", 0)
) -> Array:
    rng = np.random.default_rng(t)
    whole = (rng.standard_normal((t, h, d_nope + 64)) + 0.1).astype(dtypes.numpy_dtype(dtype))
    whole[0, 0, :d_nope] = 0
    whole[-1, -1, 0] *= 1000
    w_uk, _ = kv_b_proj(rng, h, d_nope, 128, dtype)
    q_nope, q_rope = whole[..., :d_nope], whole[..., d_nope:] if rope else None
    memory = np.full((t, h, 576), 7, whole.dtype)
    with simulated(sm_count, mode=mode[0], seed=mode[1]) as driver:
        mla_cupy.absorb(q_nope, w_uk, q_rope=q_rope, out=memory if rope else memory[..., :512])
    assert driver.launched == ["mla_cache_absorb"]
    (exact,) = reference.absorb(q_nope, w_uk, q_rope)
    got = (memory if rope else memory[..., :512]).astype(float)
    np.testing.assert_allclose(got, exact, rtol=1.01 * dtypes.TABLE[dtype].unit_roundoff, atol=1e-4)
    assert rope or (memory[..., 512:] == 7).all()
    return memory


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("t", "h", "d_nope", "dtype", "rope"),
    [
        (1, 2, 128, "bfloat16", True),
        (17, 1, 128, "float16", False),
        (40, 1, 192, "bfloat16", True),
        (3, 1, 64, "bfloat16", False),
        (2, 1, 256, "float16", True),
        (66, 3, 64, "float16", False),  # blocks of 128 columns, and a third step
    ],
)
def test_absorb(t: int, h: int, d_nope: int, dtype: str, rope: bool) -> None:
    check_absorb(t, h, d_nope, dtype, rope)


def test_decode_takes_absorbed_queries_without_a_copy() -> None:
    inputs, rng = make(DecodeCase(b=2, seqlens=(100, 3), h_q=4)), np.random.default_rng(0)
    w_uk, _ = kv_b_proj(rng, 4, 128, 128, "bfloat16")
    q_nope = rng.standard_normal((2, 4, 128)).astype(w_uk.dtype)
    with simulated(2):
        q = mla_cupy.absorb(q_nope, w_uk, q_rope=np.ascontiguousarray(inputs.q[:, 0, :, 512:]))
        out, _ = mla_decode(q.reshape(2, 1, 4, 576), *inputs.arguments[1:])
    exact = reference.mla_decode(q.reshape(2, 1, 4, 576), *inputs.arguments[1:])
    np.testing.assert_allclose(out.astype(float), exact[0], atol=0.05)


# ---- The host's choice -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("h", "d_head", "tokens", "share"),
    [
        (128, 128, 1, 2),
        (96, 128, 1, 2),
        (64, 128, 1, 4),
        (64, 128, 9, 2),
        (16, 128, 1, 8),
        (16, 128, 16, 4),
        (16, 128, 64, 2),
        (26, 64, 8, 8),
        (27, 64, 8, 4),
        (64, 256, 64, 4),
        (128, 256, 1, 4),
    ],
)
def test_blocks_of_a_head(h: int, d_head: int, tokens: int, share: int) -> None:
    variant = STATES.build("bfloat16", h, d_head, tokens, H200).variant
    assert variant.share == projection.parts(variant, d_head) == share
    assert d_head <= share * STATES.facts_of(variant)["columns"]


@pytest.mark.parametrize(
    ("tokens", "blocks", "shares"),
    [(1, 128, 1), (8, 128, 1), (9, 128, 2), (64, 128, 2), (512, 256, 1), (64, 66, 4), (64, 32, 8)],
)
def test_shares_of_the_tokens(tokens: int, blocks: int, shares: int) -> None:
    assert projection.token_shares(tokens, projection.LEAST_TOKENS, blocks, 2 * H200.sm_count) == shares


@pytest.mark.parametrize(
    ("h", "d_head", "tokens", "apart"),
    [
        (16, 128, 64, False),
        (128, 128, 39, False),
        (128, 64, 40, True),
        (96, 128, 64, True),
        (64, 256, 1, False),
        (64, 256, 2, True),
        (16, 192, 3, False),
    ],
)
def test_where_w_uv_is_multiplied(h: int, d_head: int, tokens: int, apart: bool) -> None:
    assert projection.is_apart(h, d_head, tokens) == apart


@pytest.mark.parametrize(("b", "apart"), [(64, True), (16, False)])
def test_the_combine_leaves_room_for_what_multiplies(b: int, apart: bool) -> None:
    """Half of its blocks, and the word that the next kernel may start."""
    wanted = DecodeProblem(1, 96, "bfloat16", batch=Batch(b, 4096))
    merging, projecting = (DECODE.configure(replace(wanted, d_head=width), H200) for width in (0, 128))
    assert isinstance(projecting.finish, ProjectAfterMerge) == apart
    assert projecting.combine_blocks * (2 if apart else 1) == merging.combine_blocks


def test_gpus_without_clusters_have_builds() -> None:
    for cc in ((7, 5), (8, 0), (8, 9), (12, 0)):
        gpu = replace(H200, cc=cc)
        for kernel in (STATES, combine_project.KERNEL):
            assert kernel.build("float16", 16, 128, 1, gpu).variant in kernel.defaults_on(gpu.arch)
        assert ABSORB.supports_arch(gpu.arch)


# ---- Planted bugs ----------------------------------------------------------------------------------------------

PROJECTION = "attention/projection.cuh"
TEXTS = [
    Mutant("what weighs nothing is counted", PROJECTION, "weight == 0.f ? 0.f : wide[i]", "wide[i]"),
]
TEXTS_OF_DECODE = [
    Mutant("a piece too few", "attention_combine_project", "pieces = cuts + 1;", "pieces = cuts;"),
]
TEXTS_OF_MANY_ROWS = [
    Mutant("columns of the first part", "projection_sm90_results", "blockIdx.x % parts * kColumns", "0"),
]
TEXTS_OF_ABSORPTION = [
    Mutant("rows past the last one stored", "cache_absorb", "if (row + 8 * half < count) {", "if (row < count) {"),
]

test_is_caught, test_as_it_is = mutant_suite(
    "projection_states",
    [
        partial(check_states, FEW, 1, MODES[0]),
        partial(check_states, MANY, 2, MODES[0]),
        partial(check_states, NARROW, 5, MODES[1]),
        partial(check_results, ONE, 1, MODES[0]),
    ],
    {
        "bar.sync": (9, [0, 4]),
        "barrier.cluster.arrive": (3, [0]),
        "barrier.cluster.wait": (2, [0]),
        "mbarrier.try_wait": (2, [0, 1]),
        "mbarrier.arrive": (1, [0]),
        "fence.mbarrier_init": (1, [0]),
        "cp.async.wait_group": (2, [0]),
    },
    TEXTS,
)
test_is_caught_of_decode, test_as_it_is_of_decode = mutant_suite(
    "attention_combine_project",
    [partial(check_decode, SPLIT, 40, mode) for mode in MODES[:2]],
    {
        "bar.sync": (6, [0, 5]),
        "barrier.cluster.wait": (2, [0]),
        "mbarrier.try_wait": (1, [0]),
    },
    TEXTS_OF_DECODE,
)
test_is_caught_of_many_rows, test_as_it_is_of_many_rows = mutant_suite(
    "projection_sm90_results",
    [partial(check_many_rows, mode) for mode in MODES[:3]],
    {
        "bar.sync": (1, [0]),
        "mbarrier.try_wait": (3, [0, 1]),
        "mbarrier.arrive": (3, [0]),
        "fence.mbarrier_init": (1, [0]),
        "wgmma.fence": (1, [0]),
        "wgmma.wait_group": (1, [0]),
    },
    TEXTS_OF_MANY_ROWS,
)
test_is_caught_of_absorption, test_as_it_is_of_absorption = mutant_suite(
    "cache_absorb",
    [partial(check_absorb, 67, 1, 64, "bfloat16", True, 1, mode) for mode in MODES[:3]],
    {
        "bar.sync": (3, [0, 1]),
        "cp.async.wait_group": (2, [0]),
    },
    TEXTS_OF_ABSORPTION,
)
