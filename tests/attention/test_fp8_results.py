"""Results in e4m3 with a scale per 128 columns: the oracle, the kernel alone, and calls of decode and sparse decode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mla_cupy
from mla_cupy import dtypes
from mla_cupy.kernels.attention import quantize_output
from mla_cupy.kernels.pipeline import Call, Layout, Prepared
from mla_cupy.ops.decode import OPERATION
from mla_cupy.ops.schema import contiguous_view
from mla_cupy.reference.fp8_results import COLUMNS, quantise_results
from tests.sparse_decode.runs import SparseDecodeCase
from tests.sparse_decode.runs import make as make_sparse
from tests.support.calls import Array
from tests.support.cases import DecodeCase, make
from tests.support.flat import flat, mla_decode, plan_decode
from tests.support.gpu import upload
from tests.support.mutant_suite import mutant_suite
from tests.support.mutants import Mutant
from tests.support.sim_driver import fake_gpu, simulated

CODES = "float8_e4m3fn"
KERNEL = "mla_attention_quantize_output"
HALF = ("bfloat16", "float16")
RULES = ("plain", "power_of_2")
sparse_decode = flat(mla_cupy.sparse_mla_decode)

# ---- Oracle ------------------------------------------------------------------------------------------------------


def hostile(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Array:
    """Results with blocks of zeros, of tiny and giant numbers, of ties, with NaN and with infinity."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape).astype(dtypes.numpy_dtype(dtype))
    blocks = x.reshape(-1, COLUMNS)
    largest = float(ml_dtypes.finfo(x.dtype).max)
    # Multiples of 1/16 from 1 to 2 are e4m3 numbers or midpoints between two where the scale is 1.
    ties = np.concatenate([[448, -0.0], 1 + np.arange(32) % 16 / 16, 2.0**-10 * np.arange(94)])
    rare = [np.zeros(COLUMNS), np.full(COLUMNS, -(2.0**-14)), [largest, *np.ones(COLUMNS - 1)], ties, -ties]
    for number, one in enumerate(rare):
        blocks[number % len(blocks)] = one
    blocks[len(rare) % len(blocks), 5] = np.nan
    blocks[(len(rare) + 1) % len(blocks), -1] = -np.inf
    return x


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", HALF)
def test_the_rule(dtype: str, rule: str) -> None:
    """Each code is the nearest e4m3 number, in float64; scales follow from the largest magnitude."""
    x = hostile((3, 4, 512), dtype).reshape(-1, COLUMNS)
    codes, scales = quantise_results(x, rule)
    exact = x.astype(np.float64)
    numbers = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    for block, code, scale in zip(exact, codes, scales[:, 0], strict=True):
        if not np.isfinite(block).all():
            assert (code == 0x7F).all()
            assert np.isnan(scale)
            continue
        least = max(np.abs(block).max(), 1e-4) / 448
        wanted = least if rule == "plain" else 2.0 ** np.ceil(np.log2(least * (1 - 2**-22)))
        np.testing.assert_allclose(scale, wanted, rtol=2**-22 if rule == "plain" else 0)
        got = code.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        best = np.abs(numbers - np.abs(block / scale)[:, None]).min(axis=1)
        np.testing.assert_allclose(np.abs(got - block / scale), best, atol=448 * 2**-22)


def test_ties_go_to_even_and_nothing_overflows() -> None:
    """With a scale of 1 halfway numbers keep the even mantissa, and the largest number is 448."""
    x = np.zeros((1, COLUMNS), np.float32)
    x[0, :4] = 448, 1.0625, 1.1875, -1.0625
    codes, scales = quantise_results(x)
    assert scales == 1
    assert codes.view(ml_dtypes.float8_e4m3fn)[0, :4].astype(float).tolist() == [448, 1, 1.25, -1]
    for largest in np.random.default_rng(0).uniform(1e-3, 1e3, 400).astype(np.float32):
        codes, _ = quantise_results(np.full((1, COLUMNS), largest))
        assert (codes == 0x7E).all()


def test_a_block_of_zeros_has_a_scale() -> None:
    codes, scales = quantise_results(np.zeros((2, 256), np.float16))
    assert not codes.any()
    np.testing.assert_array_equal(scales, np.float32(1e-4) * np.float32(1 / 448))


# ---- Kernel alone ------------------------------------------------------------------------------------------------


def quantised(x: Array, rule: str, mode: tuple[str, int] = ("early", 0)) -> tuple[Array, Array]:
    """Codes and scales of results in the workspace, written to arrays with gaps, which stay as they are."""
    *outer, columns = x.shape
    whole = np.full((*outer[:-1], outer[-1] + 1, columns + 32), 9, np.uint8)
    codes = whole[..., 1:, 16 : 16 + columns]
    turned = np.full((columns // COLUMNS, *outer), -7, np.float32)  # as a GEMM reads it: tokens side by side
    scales = np.moveaxis(turned, 0, -1)
    steps = tuple(step // scales.itemsize for step in scales.strides)
    views = {
        "out": contiguous_view(codes.shape, "uint8", 0)._replace(strides=codes.strides),
        "out_scales": contiguous_view(scales.shape, "float32", 0)._replace(strides=steps),
    }
    call = Call(views, OPERATION.options_of(scale=1.0, scales=rule))
    step = quantize_output.launch(call, x.dtype.name)
    layout = Layout(quantize_output.workspace(x.size // columns, columns))
    room = np.full(layout.nbytes + 512, 0xFF, np.uint8)
    workspace = room[-room.ctypes.data % 256 :][: layout.nbytes]
    workspace[: x.nbytes] = x.reshape(-1).view(np.uint8)
    with simulated(2, mode=mode[0], seed=mode[1]) as target:
        address = target.memory.map
        prepared = Prepared([step], tuple(views), layout, fake_gpu(2), 0)
        first = address(whole) + codes.ctypes.data - whole.ctypes.data
        prepared.enqueue([0, first, address(turned)], address(workspace), 0)
    kept = whole.copy()
    kept[..., 1:, 16 : 16 + columns] = 9
    assert (kept == 9).all()
    return codes.copy(), scales.copy()


def check_alone(shape: tuple[int, ...], dtype: str, rule: str = "plain", mode: tuple[str, int] = ("early", 0)) -> None:
    x = hostile(shape, dtype)
    codes, scales = quantised(x, rule, mode)
    wanted_codes, wanted_scales = quantise_results(x, rule)
    np.testing.assert_array_equal(codes, wanted_codes)
    np.testing.assert_array_equal(scales, wanted_scales)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("shape", [(2, 3, 5, 512), (7, 3, 256), (1, 1, 1, 128), (3, 2, 17, 128)], ids=str)
def test_the_kernel(shape: tuple[int, ...], dtype: str, rule: str) -> None:
    check_alone(shape, dtype, rule, ("random", len(shape)))


# ---- Calls -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ResultCase:
    """A call with results in 16 bits; `parts` are optional inputs, `plan` options of a plan."""

    case: DecodeCase | SparseDecodeCase
    kernel: str | None = None
    parts: tuple[str, ...] = ()
    plan: dict[str, Any] | None = None
    sm_count: int = 3

    def __str__(self) -> str:
        name = self.case.id if isinstance(self.case, DecodeCase) else f"sparse-{self.case}"
        return "-".join([name, *self.parts, self.kernel or "", *map(str, self.plan or ())])

    def call(self) -> tuple[Callable[..., Any], dict[str, Any]]:
        """The function, and its arguments."""
        if isinstance(self.case, SparseDecodeCase):
            arguments = make_sparse(self.case) | self._projection(self.case.b, self.case.s_q)
            return sparse_decode, arguments | {"kernel": self.kernel}
        inputs = make(self.case)
        names = ("q", "kv_cache", "block_table", "seqlens")
        arguments = dict(zip(names, inputs.arguments, strict=True)) | self.case.options
        arguments |= self._projection(self.case.b, self.case.s_q)
        if "packed" in self.parts:
            q = arguments["q"].reshape(-1, *arguments["q"].shape[2:])
            arguments |= {"q": q, "cu_seqlens_q": np.array([0, 1, 1, len(q) - 1], np.int32)}
        if "window" in self.parts:
            arguments |= {"window": 30}
        if "out_rope" in self.parts:
            angles = np.random.default_rng(1).uniform(-3, 3, (9, 32))
            tables = {"out_cos": np.cos(angles), "out_sin": np.sin(angles)}
            arguments |= {name: x.astype(np.float32) for name, x in tables.items()}
            arguments["out_positions"] = np.arange(self.case.b * self.case.s_q, dtype=np.int32).reshape(self.case.b, -1)
        return mla_decode, arguments | {"kernel": self.kernel}

    def _projection(self, b: int, s_q: int) -> dict[str, Any]:
        d_head = next((int(part.removeprefix("w_uv")) for part in self.parts if part.startswith("w_uv")), 0)
        if not d_head:
            return {}
        rng = np.random.default_rng(3)
        shapes = {"w_uv": (self.case.h_q, d_head, 512), "gate": (b, s_q, self.case.h_q, d_head)}
        return {name: rng.standard_normal(x).astype(dtypes.numpy_dtype(self.case.dtype)) for name, x in shapes.items()}


def check_call(
    given: ResultCase, to: Callable[[Array], Any], back: Callable[[Any], Array], seed: int = 0, mode: str = "early"
) -> None:
    """A result in e4m3 has the codes of the call's result in 16 bits, and the same lse bit by bit."""
    function, arguments = given.call()
    sent = {name: to(x) if isinstance(x, np.ndarray) else x for name, x in arguments.items()}
    results = {}
    for out_dtype in (None, "uint8"):
        plans = {}
        if given.plan is not None:
            plan = plan_decode(**given.plan, fp8_out=out_dtype is not None)
            plan.update(sent["seqlens"])
            plans["plan"] = plan
        results[out_dtype] = [back(x) for x in function(**sent, **plans, out_dtype=out_dtype)]
    (out, lse), (codes, same, scales) = results[None], results["uint8"]
    wanted_codes, wanted_scales = quantise_results(out)
    np.testing.assert_array_equal(codes, wanted_codes)
    np.testing.assert_array_equal(scales, wanted_scales)
    np.testing.assert_array_equal(same, lse)
    assert np.isfinite(scales).all()


def plan_sizes(case: DecodeCase, max_b: int, **options: Any) -> dict[str, Any]:
    inputs = make(case)
    sizes = {"max_b": max_b, "s_q": case.s_q, "h_q": case.h_q, "max_pages": inputs.block_table.shape[1]}
    return {**sizes, "page_size": case.page_size, "dtype": case.dtype, "d_qk": case.d_qk, **options}


RAGGED = DecodeCase(b=3, s_q=2, h_q=3, seqlens="ragged-200")  # an empty sequence, and one that is split
LATENT = replace(RAGGED, d_qk=512, dtype="float16")
DENSE = (
    ResultCase(RAGGED),
    ResultCase(replace(RAGGED, dtype="float16"), "attention_generic"),
    ResultCase(DecodeCase(b=2, h_q=64, seqlens=(130, 0)), "decode_sm90_seesaw"),
    ResultCase(DecodeCase(b=1, h_q=16, seqlens=300), "decode_sm90_small_cluster8", sm_count=16),
    ResultCase(RAGGED, parts=("packed",)),
    ResultCase(RAGGED, parts=("window",)),
    ResultCase(LATENT, parts=("out_rope",)),
    ResultCase(RAGGED, parts=("w_uv128",)),
    ResultCase(replace(RAGGED, h_q=2), parts=("w_uv256",)),
    ResultCase(replace(RAGGED, d_qk=320), "attention_generic"),
    ResultCase(replace(RAGGED, record="v32")),
    ResultCase(DecodeCase(b=2, h_q=4, seqlens=(300, 5), record="fp8", math="fp8")),
)
IN_PIECES: dict[str, Any] = {"batch_invariant": True, "split_tokens": 64}
PLANNED = (
    ResultCase(RAGGED, plan=plan_sizes(RAGGED, 4)),
    ResultCase(RAGGED, plan=plan_sizes(RAGGED, 3, **IN_PIECES)),
    ResultCase(RAGGED, parts=("w_uv128",), plan=plan_sizes(RAGGED, 3, d_head=128, **IN_PIECES)),
)
SPARSE = (
    ResultCase(SparseDecodeCase(record="v4", b=1, h_q=6, topk=640, sm_count=5, turned=True), sm_count=5),
    ResultCase(SparseDecodeCase(h_q=9, lengths=True, sink=True, empty=True, s_q=2)),
    ResultCase(SparseDecodeCase(dtype="float16", topk=140, b=1), parts=("w_uv128",)),
    ResultCase(SparseDecodeCase(record="v41", topk=19, extra=40, extra_record="v41-fp4"), "sparse_decode_generic"),
)
CASES = (*DENSE, *PLANNED, *SPARSE)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("given", [*DENSE, *SPARSE], ids=str)
def test_codes_are_those_of_a_result_in_16_bits(given: ResultCase) -> None:
    with simulated(given.sm_count, mode="random", seed=4) as target:
        check_call(given, lambda x: x, np.asarray)
        assert target.launched[-1] == KERNEL


@pytest.mark.parametrize("given", PLANNED, ids=str)
def test_with_a_plan(given: ResultCase) -> None:
    with simulated(given.sm_count) as target:
        check_call(given, lambda x: x, np.asarray)
        assert target.launched[-1] == KERNEL


@pytest.mark.gpu
@pytest.mark.parametrize("given", CASES, ids=str)
def test_on_a_gpu(given: ResultCase, hopper: object) -> None:
    import cupy

    check_call(given, upload, cupy.asnumpy)


SOURCE = "attention_quantize_output"
test_is_caught, test_as_it_is = mutant_suite(
    SOURCE,
    [partial(check_alone, (3, 2, 17, 128), "bfloat16"), partial(check_alone, (2, 3, 5, 512), "float16")],
    {},
    [
        Mutant("half of the lanes", SOURCE, "step < kLanes; step", "step < kLanes / 2; step"),
    ],
)
