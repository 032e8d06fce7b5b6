"""`mla_decode` over records, through its public call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

import mla_cupy
from mla_cupy.kernels.decode.sm90_fp8 import LEAST_ROWS_OF_TERMS

from ...core.device import Device
from ...core.implementation import OWN, Prepared
from ..decode.cases import DecodeCase
from ..decode.inputs import InputSet
from ..decode.own import Decode, InParts, Packed, WithSink
from .cases import Fp8DecodeCase
from .inputs import Fp8InputSet

E4M3 = "e4m3_queries"  # our own with queries that are in e4m3 already
#: Our own with weights, and queries in 16 bits, in two terms; and with queries that are in e4m3 already.
TERMS, CODED_TERMS = "fp8x2", "fp8x2_e4m3_queries"
EXACT = "exact"  # our own with conversion, where the case has products in FP8
FORMAT = "kv_format" if hasattr(mla_cupy, "checking") else "record"  # in older trees
GENERIC = "decode_generic_records"  # without tensor cores
NAMED = "decode_mma_records", "decode_mma_records_163kb"  # of GPUs without WGMMA


class Fp8Decode(Decode):
    """The call of a serving loop."""

    def __init__(self, kernel: str | None = None, name: str = OWN) -> None:
        super().__init__(kernel, name)

    def plan_options(self, case: DecodeCase) -> dict[str, Any]:
        assert isinstance(case, Fp8DecodeCase)
        return {**super().plan_options(case), FORMAT: case.record.name, **self._math(case)}

    def call_options(self, case: DecodeCase, device: Device) -> dict[str, Any]:
        return {**super().call_options(case, device), **self._math(case)}

    def _math(self, case: DecodeCase) -> dict[str, Any]:
        """Arithmetic of a call: the case's, or the default for peers that convert FP8 to 16 bits."""
        if self.name in (TERMS, CODED_TERMS):
            return {"fp8": mla_cupy.Fp8("fp8x2")}
        return {"fp8": mla_cupy.Fp8(case.math)} if self.name in (OWN, E4M3) and case.math != "exact" else {}

    def prepare(self, case: DecodeCase, dtype: str, sets: Sequence[InputSet], device: Device) -> Prepared:
        def over_records(inputs: InputSet) -> InputSet:
            assert isinstance(inputs, Fp8InputSet)
            return replace(inputs, kv_cache=inputs.records)

        return super().prepare(case, dtype, [over_records(inputs) for inputs in sets], device)


class Fp8WithSink(Fp8Decode, WithSink):
    """Call with a sink without effect."""


class Fp8InParts(Fp8Decode, InParts):
    """Call with queries in two arrays."""


class Fp8Packed(Fp8Decode, Packed):
    """Call with queries packed one sequence after another, of one length or of lengths that vary."""

    def __init__(self, name: str, *, varying: bool) -> None:
        Packed.__init__(self, name, varying=varying)


class TwoTerms(Fp8Decode):
    """Call with weights and queries in two terms."""

    def __init__(self, name: str = TERMS) -> None:
        super().__init__(None, name)

    def unsupported(self, case: DecodeCase, dtype: str) -> str | None:
        assert isinstance(case, Fp8DecodeCase)
        if not case.fp8_math:
            return "products in FP8 only: cases -fp8-math"
        rows = case.s_q * case.h_q
        return None if rows >= LEAST_ROWS_OF_TERMS else f"{LEAST_ROWS_OF_TERMS} and more query rows only"


class CodedQueries(Fp8Decode):
    """Call with queries in e4m3, as FlashMLA in FP8 gets them; `name` says with how many terms of weights."""

    def __init__(self, name: str = E4M3) -> None:
        super().__init__(None, name)

    def unsupported(self, case: DecodeCase, dtype: str) -> str | None:
        assert isinstance(case, Fp8DecodeCase)
        if not case.fp8_math:
            return "products in FP8 only: cases -fp8-math"
        if case.wide_queries:
            return "queries that e4m3 holds only: not of cases -q16"
        if self.name == CODED_TERMS and (reason := TwoTerms().unsupported(case, dtype)):
            return reason
        return None if dtype == "bfloat16" else "results are bfloat16"

    def plan_options(self, case: DecodeCase) -> dict[str, Any]:
        return {**super().plan_options(case), "dtype": "float8_e4m3fn"}

    def prepare(self, case: DecodeCase, dtype: str, sets: Sequence[InputSet], device: Device) -> Prepared:
        def coded(inputs: InputSet) -> InputSet:
            numbers = device.to_host(inputs.q).astype(ml_dtypes.float8_e4m3fn)  # which they are
            return replace(inputs, q=device.upload(numbers.view(np.uint8)))

        return super().prepare(case, dtype, [coded(inputs) for inputs in sets], device)
