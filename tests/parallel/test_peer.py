"""The peer transport of one rank on a simulated GPU: set-up, arguments, failures. With peers: test_gpus."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import ArgumentError, DTypeError, ParallelError, ShapeError, reference
from mla_cupy.parallel import ContextParallel, LocalGroup, PeerTransport
from mla_cupy.parallel.transport import Result
from tests.parallel.shards import PAGE, Batch
from tests.support.flat import flat, mla_decode, plan_decode
from tests.support.sim_driver import SimDriver, simulated
from tests.support.tolerance import check


@pytest.fixture
def gpu_alone() -> Iterator[SimDriver]:
    with simulated() as target:
        yield target


def partials(h_q: int = 6, d: int = 64, dtype: str = "float32") -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    outs = rng.standard_normal((2, 3, h_q, d)).astype(dtype)
    lses = rng.standard_normal((2, h_q, 3)).astype(np.float32)
    lses[0, 1] = -np.inf
    outs[0, :, 1] = np.nan
    return outs, lses


def transport(**options: Any) -> PeerTransport:
    return PeerTransport(LocalGroup(1).member(0), **{"max_rows": 40, "max_d": 64, **options})


@pytest.mark.parametrize("lse_base", ["e", "2"])
@pytest.mark.parametrize("given", [False, True])
def test_alone(gpu_alone: SimDriver, lse_base: str, given: bool) -> None:
    context = ContextParallel(transport())
    outs, lses = partials()
    out, lse = reference.merge_states(outs[None], lses[None], lse_base=lse_base, empty_lse=7.0)
    targets = {"out": np.empty_like(outs), "lse": np.empty_like(lses)} if given else {}
    for _ in range(3):
        found = context.merge(outs, lses, lse_base=lse_base, empty_lse=7.0, **targets)
        np.testing.assert_allclose(found[0], out, rtol=1e-6)
        np.testing.assert_allclose(found[1], lse, rtol=1e-6)
    assert gpu_alone.launched == ["mla_merge_exchange"] * 3
    assert (found[0] is targets["out"]) if given else True


def test_a_group_does_not_keep_transports(gpu_alone: SimDriver) -> None:
    """Python's garbage collector would otherwise free them amid another transport's exchange."""
    group = LocalGroup(1)
    last = PeerTransport(group.member(0), max_rows=40, max_d=64)
    context, alive = ContextParallel(last), weakref.ref(last)
    context.merge(*partials())
    del last, context
    assert alive() is None
    assert group.member(0).gather(b"on") == [b"on"]


def test_results_may_be_narrow(gpu_alone: SimDriver) -> None:
    outs, lses = partials()
    out, _ = ContextParallel(transport()).merge(outs, lses, out_dtype="float16")
    assert out.dtype == np.float16


@pytest.mark.parametrize("partial_dtype", ["float32", "bfloat16"])
def test_split_requests_are_merged_on_the_way(gpu_alone: SimDriver, partial_dtype: str) -> None:
    """A decode with a plan needs no launch for its own merge."""
    batch = Batch((140, 70, 3), s_q=2, h_q=4)
    shard = batch.shard(1, 0)
    table = shard[2]
    plan = mla_cupy.plan_decode(
        max_b=3,
        s_q=2,
        h_q=4,
        max_pages=table.shape[1],
        page_size=PAGE,
        dtype="bfloat16",
        kernel="decode_sm90_small",
        device=0,
    )
    plan.update(shard[3])
    context = ContextParallel(transport(max_d=512), partial_dtype=partial_dtype)
    out, lse = flat(context.decode)(*shard, plan=plan, out_dtype="float32", lse_base="2")
    assert gpu_alone.launched == ["mla_attention_schedule", "mla_decode_sm90_small", "mla_merge_exchange"]
    expected, expected_lse = batch.expected(rounding="bfloat16")
    np.testing.assert_allclose(out, expected, rtol=0.02, atol=0.02)
    np.testing.assert_allclose(lse, expected_lse / np.log(2), rtol=1e-3, atol=1e-3)
    plain = mla_decode(*shard, plan=plan, out_dtype="float32", lse_base="2")
    assert gpu_alone.launched[-1] == "mla_attention_combine"
    for found, wanted in zip((out, lse), plain, strict=True):
        exact = partial_dtype == "float32"
        np.testing.assert_allclose(found, wanted, rtol=1e-5 if exact else 2**-7, atol=1e-6 if exact else 1e-3)


class OneOfTwo:
    """A transport that returns its input."""

    world = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def check(self) -> None:
        """All is well."""

    def merge(self, outs: Any, lses: Any, result: Result) -> tuple[Any, Any]:
        """All heads of this rank's tokens."""
        return np.array(outs), np.array(lses)


@pytest.mark.parametrize("planned", [False, True])
def test_local_lengths_on_the_gpu(gpu_alone: SimDriver, planned: bool) -> None:
    """Tokens in any order on two ranks; one rank has none of the first request."""
    batch, parts = Batch((140, 70), h_q=4, seed=6), []
    for rank in range(2):
        shard = batch.scattered(2, rank)
        sizes = {"max_b": 2, "s_q": 1, "h_q": 4, "max_pages": shard[2].shape[1], "page_size": PAGE}
        plan = plan_decode(**sizes, dtype="bfloat16", kernel="decode_sm90_small", device=0)
        plan.update(shard[3])
        context = ContextParallel(OneOfTwo(rank))
        options = {"plan": plan} if planned else {"kernel": "decode_sm90_small"}
        parts.append(flat(context.decode)(*shard, local_seqlens=True, **options))
    out, lse = reference.merge_states(*(np.stack(part) for part in zip(*parts, strict=True)))
    expected, expected_lse = batch.expected(rounding="bfloat16")
    np.testing.assert_allclose(out, expected, rtol=0.02, atol=0.02)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-3, atol=1e-3)


def test_partial_results_of_16_bits(gpu_alone: SimDriver) -> None:
    """The decode and its merge of split requests both round, into rows with heads outermost."""
    batch, parts = Batch((140, 0, 67), s_q=2, h_q=6, seed=3), []
    for rank in range(2):
        context = ContextParallel(OneOfTwo(rank), partial_dtype="bfloat16")
        parts.append(flat(context.decode)(*batch.shard(2, rank), kernel="decode_sm90_small"))
    assert gpu_alone.launched == 2 * ["mla_attention_schedule", "mla_decode_sm90_small", "mla_attention_combine"]
    out, lse = reference.merge_states(*(np.stack(part) for part in zip(*parts, strict=True)))
    check((out.astype(parts[0][0].dtype), lse), batch.expected(), batch.expected(rounding="bfloat16"), batch.dtype)


def test_plans_whose_requests_are_not_split(gpu_alone: SimDriver) -> None:
    """Batch-invariant plans have a merge of their own, clusters none at all."""
    batch = Batch((140, 3), h_q=2)
    shard = batch.shard(1, 0)
    sizes = {"max_b": 2, "s_q": 1, "h_q": 2, "max_pages": shard[2].shape[1], "page_size": PAGE, "dtype": "bfloat16"}
    plan = plan_decode(**sizes, batch_invariant=True, split_tokens=64, kernel="decode_sm90_small", device=0)
    plan.update(shard[3])
    out, _ = flat(ContextParallel(transport(max_d=512)).decode)(*shard, plan=plan, out_dtype="float32")
    assert gpu_alone.launched[-2:] == ["mla_decode_combine_pieces", "mla_merge_exchange"]
    np.testing.assert_allclose(out, batch.expected(rounding="bfloat16")[0], rtol=0.02, atol=0.02)


def test_no_rows(gpu_alone: SimDriver) -> None:
    out, lse = ContextParallel(transport()).merge(np.zeros((0, 3, 6, 64), np.float32), np.zeros((0, 6, 3), np.float32))
    assert (out.shape, lse.shape) == ((0, 3, 6, 64), (0, 6, 3))
    assert gpu_alone.launched == []


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"outs": np.zeros((2, 3, 6), np.float32)}, ShapeError, r"outs.shape.*\(b, s_q, h_q, d\)"),
        ({"lses": np.zeros((2, 6, 4), np.float32)}, ShapeError, r"lses.shape.*\(2, 6, 3\)"),
        ({"lses": np.zeros((2, 6, 3))}, DTypeError, "lses.dtype.*float64"),
        ({"outs": np.zeros((2, 3, 6, 64))}, DTypeError, "outs.dtype.*float64"),
        ({"outs": np.zeros((2, 3, 6, 66), np.float32)}, ShapeError, "16 bytes"),
        ({"outs": np.zeros((2, 3, 6, 128), np.float32)[..., ::2]}, ShapeError, "16 bytes"),
        (
            {"outs": np.zeros((20, 3, 6, 64), np.float32), "lses": np.zeros((20, 6, 3), np.float32)},
            ShapeError,
            "max_rows",
        ),
        ({"lse_base": "10"}, ArgumentError, "lse_base"),
        ({"out": np.zeros((2, 3, 5, 64), np.float32)}, ShapeError, r"out: got \(2, 3, 5, 64\)"),
        ({"out": np.zeros((2, 3, 6, 64))}, DTypeError, "out.dtype"),
        ({"out": np.zeros((2, 3, 6, 128), np.float32)[..., ::2]}, ShapeError, "contiguous last axis"),
    ],
)
def test_bad_calls(gpu_alone: SimDriver, change: dict[str, Any], error: type[Exception], text: str) -> None:
    outs, lses = partials()
    arguments = {"outs": outs, "lses": lses, **change}
    with pytest.raises(error, match=text):
        ContextParallel(transport()).merge(arguments.pop("outs"), arguments.pop("lses"), **arguments)
    assert gpu_alone.launched == []


def test_results_over_inputs_are_refused(gpu_alone: SimDriver) -> None:
    outs, lses = partials()
    with pytest.raises(ArgumentError, match=r"out.*outs|outs.*out"):
        ContextParallel(transport()).merge(outs, lses, out=outs)


@pytest.mark.parametrize(
    "options", [{"max_rows": 0}, {"max_rows": 1.5}, {"max_d": -1}, {"timeout": 0}, {"timeout": float("nan")}]
)
def test_bad_sizes(gpu_alone: SimDriver, options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(options))):
        PeerTransport(LocalGroup(1).member(0), **options)


def test_a_failed_exchange_shows_in_the_next_call(gpu_alone: SimDriver) -> None:
    failing = transport()
    failing._report["failure"] = 5 << 32 | 3 << 8 | 1
    with pytest.raises(ParallelError, match="exchange 5: got rank 3 has not sent its part in time"):
        ContextParallel(failing).merge(*partials())
    with pytest.raises(ParallelError, match="exchange 5"):
        failing.check()
    assert gpu_alone.launched == []
