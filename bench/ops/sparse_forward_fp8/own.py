"""`sparse_mla_forward` over records, and the same in two calls: records gathered to rows first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import mla_cupy

from ...core.device import Device
from ...core.implementation import OWN, Prepared
from ...core.recorders import Call
from ..sparse.inputs import SparseInputs
from ..sparse_forward.cases import SparseForwardCase
from ..sparse_forward.own import SparseForward
from .cases import Fp8ForwardCase
from .inputs import Fp8ForwardInputs

DIRECT = "sparse_forward_sm90_records"  # converts what a query gathers
GENERIC = "sparse_forward_generic_records"  # without tensor cores


class Fp8Forward(SparseForward):
    """The call of a prefill over a cache of records."""

    def __init__(self, kernel: str | None = None, name: str = OWN) -> None:
        super().__init__(kernel, name)

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


def _gather_first(inputs: SparseInputs, call: Call | Callable[[], object]) -> None:
    assert isinstance(inputs, Fp8ForwardInputs)
    mla_cupy.cache_gather(inputs.records, inputs.slots, out=inputs.kv)
    call()
