"""`mla_decode` over records, through its public call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...core.device import Device
from ...core.implementation import OWN, Prepared
from ..decode.cases import DecodeCase
from ..decode.inputs import InputSet
from ..decode.own import Decode
from .cases import Fp8DecodeCase
from .inputs import Fp8InputSet

GENERIC = "decode_generic_records"  # without tensor cores
NAMED = "decode_mma_records", "decode_mma_records_163kb"  # of GPUs without WGMMA


class Fp8Decode(Decode):
    """The call of a serving loop."""

    def __init__(self, kernel: str | None = None, name: str = OWN) -> None:
        super().__init__(kernel, name)

    def plan_options(self, case: DecodeCase) -> dict[str, Any]:
        assert isinstance(case, Fp8DecodeCase)
        return {"record": case.record.name}

    def prepare(self, case: DecodeCase, dtype: str, sets: Sequence[InputSet], device: Device) -> Prepared:
        def over_records(inputs: InputSet) -> InputSet:
            assert isinstance(inputs, Fp8InputSet)
            return replace(inputs, kv_cache=inputs.records)

        return super().prepare(case, dtype, [over_records(inputs) for inputs in sets], device)
