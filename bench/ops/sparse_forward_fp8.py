"""The sparse forward from FP8 records: cases of the sparse forward over "v32", or "v4" of 512 columns.

With `fp8_math` they are over "fp8", and our own call has both products in FP8. Peers read 16-bit rows of the numbers
that the records hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

import mla_cupy
from mla_cupy.cache_formats import FP8, V4, V32, CacheFormat
from mla_cupy.shapes import D_QK

from ..core.cost import D_V, ELEMENT_BYTES, SINGLE_BYTES, Cost
from ..core.device import Device
from ..core.implementation import Choices, Known, Prepared, own_kernels
from ..core.operation import BenchOperation
from ..core.recorders import Call
from ..core.samples import Sample, judge
from .dense_decode_fp8 import e4m3_numbers
from .sparse import CASE_OPTIONS, FORM, PATTERN, SparseInputs, choose_indices, expect_forward, fields_of
from .sparse_forward import CASES as ROWS
from .sparse_forward import SparseForward, SparseForwardCase

# ---- Cases -----------------------------------------------------------------------------------------------------------

PAGE_SIZE = 64


@dataclass(frozen=True)
class Fp8ForwardCase(SparseForwardCase):
    """Case over records; the peers read 16-bit rows of the same numbers."""

    fp8_math: bool = False

    @property
    def name(self) -> str:
        return super().name + "-fp8-math" * self.fp8_math

    @property
    def record(self) -> CacheFormat:
        if self.fp8_math:
            return FP8
        return V32 if self.d_qk == D_QK else V4

    @property
    def cost(self) -> Cost:
        """Cost of records: peers that read rows move 1.76 times the bytes."""
        rows = self.s_q * self.h_q
        nbytes = self.record.token_bytes
        queries_and_out = ELEMENT_BYTES * rows * (self.d_qk + D_V)
        return Cost(
            flops=super().cost.flops,
            nbytes=self.s_kv * nbytes + queries_and_out + SINGLE_BYTES * self.pairs,
            l2_bytes=self.pairs * nbytes,
        )

    def shape(self) -> dict[str, Any]:
        return {**super().shape(), "record": self.record.name, **({"math": "fp8"} if self.fp8_math else {})}


CASES = (
    *(Fp8ForwardCase(case.s_q, case.s_kv, case.h_q) for case in ROWS),
    Fp8ForwardCase(4096, 32768, 128, d_qk=512),
    *(Fp8ForwardCase(4096, s_kv, 128, fp8_math=True) for s_kv in (8192, 32768)),
)


def case_of(*groups: Any) -> Fp8ForwardCase:
    *sizes, fp8_math = groups
    case = Fp8ForwardCase(**fields_of(*sizes), fp8_math=bool(fp8_math))
    if case.fp8_math and case.d_qk != FP8.d_qk:
        raise ValueError(f"products in FP8 have keys of {FP8.d_qk}")
    if case.s_kv % PAGE_SIZE:
        raise ValueError(f"skv must be a multiple of {PAGE_SIZE}, the tokens of a page")
    return case


# ---- Inputs and outputs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fp8ForwardInputs(SparseInputs):
    """One set of inputs; `kv` has the rows."""

    records: Any  # (num_pages, 64, bytes of a token) uint8
    slots: Any  # (s_kv,) int32: all of them


def make_inputs(case: Fp8ForwardCase, dtype: str, seed: int, device: Device) -> Fp8ForwardInputs:
    """Random queries and latents, quantised with scales that are powers of two, with the case's indices.

    "fp8" has the scale 1, and queries that are numbers of e4m3, so that all compute the same.
    """
    record, pages = case.record, case.s_kv // PAGE_SIZE
    whole = device.empty((pages, record.page_bytes(PAGE_SIZE)), "uint8")
    records = whole[:, : PAGE_SIZE * record.token_bytes].reshape(pages, PAGE_SIZE, record.token_bytes)
    slots = device.upload(np.arange(case.s_kv, dtype=np.int32))
    latent = device.normal((case.s_kv, record.d_latent), dtype, 3 * seed + 2)
    rope = device.normal((case.s_kv, record.d_rope), dtype, 3 * seed + 3)
    with device.current():
        mla_cupy.cache_append(latent, rope, records, slots)
        rows = mla_cupy.cache_gather(records, slots, out_dtype=dtype)
    indices = choose_indices(case, seed)
    return Fp8ForwardInputs(
        q=_queries(case, dtype, 3 * seed + 1, device),
        kv=rows,
        indices=device.upload(indices),
        host_indices=indices,
        records=records,
        slots=slots,
    )


def _queries(case: Fp8ForwardCase, dtype: str, seed: int, device: Device) -> Any:
    """Random queries; over "fp8" numbers of e4m3, rounded as the tokens of a cache are."""
    shape = (case.s_q, case.h_q, case.d_qk)
    queries = device.normal(shape, dtype, seed)
    return e4m3_numbers(queries.reshape(-1, case.d_qk), dtype, device).reshape(shape) if case.fp8_math else queries


# ---- What is timed ---------------------------------------------------------------------------------------------------

DIRECT = "sparse_forward_sm90_records"  # converts what a query gathers
GENERIC = "sparse_forward_generic_records"  # without tensor cores


class Fp8Forward(SparseForward):
    """The call of a prefill over a cache of records."""

    def call_options(self, case: SparseForwardCase) -> dict[str, Any]:
        return {"fp8": mla_cupy.Fp8("fp8")} if isinstance(case, Fp8ForwardCase) and case.fp8_math else {}

    def prepare(self, case: SparseForwardCase, dtype: str, sets: Sequence[SparseInputs], device: Device) -> Prepared:
        return super().prepare(case, dtype, [_over_records(inputs) for inputs in sets], device)


class GatheredForward(SparseForward):
    """All records to rows of 16 bits, and then attention to these."""

    def __init__(self) -> None:
        super().__init__(None, "gathered")

    def prepare(self, case: SparseForwardCase, dtype: str, sets: Sequence[SparseInputs], device: Device) -> Prepared:
        prepared = super().prepare(case, dtype, sets, device)
        calls = [partial(_gather_first, inputs, call) for inputs, call in zip(sets, prepared.calls, strict=True)]
        return replace(prepared, calls=calls)


def _over_records(inputs: SparseInputs) -> SparseInputs:
    assert isinstance(inputs, Fp8ForwardInputs)
    return replace(inputs, kv=inputs.records)


def _gather_first(inputs: SparseInputs, call: Call) -> None:
    assert isinstance(inputs, Fp8ForwardInputs)
    mla_cupy.cache_gather(inputs.records, inputs.slots, out=inputs.kv)
    call()


# ---- Check -----------------------------------------------------------------------------------------------------------


def expect(case: Fp8ForwardCase, dtype: str, inputs: Fp8ForwardInputs, device: Device) -> list[Sample]:
    """The oracle's results of a few queries: over rows, or, with products in FP8, over the records.

    Queries are then numbers of e4m3, so only the tolerance differs.
    """
    if not case.fp8_math:
        return expect_forward(case, dtype, inputs, device)
    return expect_forward(case, dtype, replace(inputs, kv=inputs.records), device, math="fp8")


# ---- The operation ---------------------------------------------------------------------------------------------------


def implementations(choices: Choices) -> Known:
    """Everything that computes it: ours from the records, the others from rows of the same numbers."""
    from ..peers.flashmla_sparse import FlashMlaSparse

    return {
        "rows": lambda: SparseForward(None, "rows"),
        "gathered": GatheredForward,
        "direct": lambda: Fp8Forward(DIRECT, "direct"),
        **own_kernels(Fp8Forward, choices, GENERIC),
        "flashmla": choices.from_dir(FlashMlaSparse, "flashmla"),
    }


SPARSE_FORWARD_FP8 = BenchOperation(
    name="sparse-forward-fp8",
    title="sparse forward from FP8 records; the peers read 16-bit rows of the same numbers",
    examples="""examples:
  run sparse-forward-fp8 --peers-dir peers                 all cases, our own over rows, FlashMLA
  run sparse-forward-fp8 --quick --peers rows,gathered,direct
  run sparse-forward-fp8 --case sq512-skv4096-hq16-topk512 any other shape, named in the same form
  run sparse-forward-fp8 --case sq4096-skv8192-hq128-topk2048-fp8-math --peers rows    products in FP8
""",
    peers="rows (our own over 16-bit rows), gathered (the same, after all records were made rows by its own call), "
    "direct (the kernel that converts whatever a query gathers), flashmla "
    "(imports torch and needs --peers-dir), generic; or none. Default: rows, and flashmla where --peers-dir is given",
    suites={"targets": CASES, "quick": (CASES[0], CASES[3])},
    case_form=f"{FORM}[-fp8-math]",
    pattern=PATTERN + "(-fp8-math)?",
    case_of=case_of,
    inputs=make_inputs,
    expect=expect,
    judge=judge,
    implementations=implementations,
    default_peers=("rows",),
    peers_from_dir=("flashmla",),
    case_options=CASE_OPTIONS,
)
