"""Absorbed attention alone: `mla_decode`, with a plan made before and results written in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...core.device import Device
from ...core.implementation import Prepared
from ..decode.cases import DecodeCase
from ..decode.inputs import InputSet
from ..decode.own import Decode
from .inputs import Outputs


class AbsorbedAttention(Decode):
    """Attention of queries that are absorbed already; what it returns is not projected yet."""

    def prepare(self, case: DecodeCase, dtype: str, sets: Sequence[InputSet], device: Device) -> Prepared:
        prepared = super().prepare(case, dtype, sets, device)
        return replace(
            prepared,
            outputs=lambda index: Outputs(prepared.outputs(index).out),
            includes="absorbed attention and merge; the plan is updated before, kv_b_proj is left out",
            figures={},
        )
