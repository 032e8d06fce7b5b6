"""The record of a layer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...core.implementation import OWN, Choices, Known
from ...core.operation import BenchOperation, Ratio
from ...peers.layer_calls import SEPARATE, SeparateCalls
from ...peers.layer_flashmla import FlashMlaLayer
from . import cases, check, inputs
from .own import FewLaunches

EXAMPLES = """examples:
  run layer                                 all models, with few launches and as separate calls
  run layer --case v3-hq32-b8-skv2048       any other sizes, named in the same form
"""
TIME, LAUNCHES = 0.75, 2 / 3
"""Aims: of the time of a dense layer of 64 sequences with 16 heads, and of the launches of V3.2."""


def implementations(choices: Choices) -> Known:
    """Ours with few launches, and of separate calls, with our attention or FlashMLA's."""
    return {
        OWN: FewLaunches,
        SEPARATE: SeparateCalls,
        "flashmla": lambda: FlashMlaLayer(choices.directory("flashmla")),
    }


def ratios(rows: Sequence[Mapping[str, Any]]) -> list[Ratio]:
    """Ratios of the time and of the launches to those of separate calls."""
    found = {row["implementation"]: row for row in rows if row["status"] == "ok"}
    if not {OWN, SEPARATE} <= found.keys():
        return []
    own, separate = found[OWN], found[SEPARATE]
    case = own["case"]
    times = [row["timing"]["us_median"] for row in (own, separate)]
    made = [Ratio(f"{case}: time of separate calls", times[0] / times[1], TIME if case == cases.MAIN.name else None)]
    said = [re.match(r"(\d+) launches", row["includes"]) for row in (own, separate)]
    counts = [int(match[1]) for match in said if match]
    if len(counts) == 2:
        text = f"{case}: {counts[0]} launches in place of {counts[1]}"
        made.append(Ratio(text, counts[0] / counts[1], LAUNCHES if case.startswith("v32-") else None))
    return made


LAYER = BenchOperation(
    name="layer",
    title="one decode layer between its projections and the output projection",
    examples=EXAMPLES,
    peers="separate (RoPE, LayerNorm and gate by kernels of their own, cache_append, both products by cuBLAS); "
    "flashmla (the same with its attention; --peers-dir); or none. Default: separate, and flashmla with --peers-dir",
    suites=cases.SUITES,
    case_form=cases.FORM,
    parse=cases.parse,
    inputs=inputs.make_inputs,
    expect=check.expect,
    judge=check.judge,
    results=("out",),
    implementations=implementations,
    default_peers=lambda choices: [SEPARATE, *(["flashmla"] if choices.peers_dir else [])],
    peers_dir=True,
    ratios=ratios,
)
