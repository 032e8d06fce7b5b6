"""Ratios of times for the aims, each of two rows of one case, measured in turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...core.implementation import OWN
from ...core.operation import Ratio
from ...core.report import microseconds
from .own import DETERMINISTIC, FORWARD

CUDNN, FLASH = "cudnn", "flash"

Rows = Sequence[Mapping[str, Any]]


def ratios(rows: Rows) -> list[Ratio]:
    """Ratios whose rows were both timed. An aim is the largest ratio that is wanted."""
    shape = rows[0]["shape"]
    wanted: list[tuple[str, str, str, str, str, float | None]]
    steps = "cudnn-frontend's scores of the attention, scores of the indexer, and gradients"
    if shape["topk"]:
        wanted = [
            (OWN, "", CUDNN, "", f"loss and gradients / {steps}, over the selected keys", 1.0),
            (DETERMINISTIC, "", OWN, "", "deterministic / not deterministic", 1.5),
        ]
    elif shape["per_head"]:
        wanted = [
            (OWN, FORWARD, FLASH, FORWARD, "loss and output / FlashAttention-2's forward", 1.3),
            (OWN, "", FLASH, "", "loss, output and gradients / FlashAttention-2's forward and backward", 0.95),
        ]
    else:
        most = 0.65 if shape["d"] <= 128 else 0.70
        wanted = [
            (OWN, "", CUDNN, "", f"loss and gradients / {steps}", most),
            (OWN, FORWARD, OWN, "", "the loss alone / loss and gradients", None),
            (OWN, "", FLASH, "", "loss and gradients / FlashAttention-2's forward and backward", None),
        ]
    found = []
    for name, figure, other, other_figure, text, aim in wanted:
        us, other_us = _us(rows, name, figure), _us(rows, other, other_figure)
        if us and other_us:
            found.append(Ratio(text, us / other_us, aim))
    return found


def _us(rows: Rows, name: str, figure: str) -> float | None:
    """The time of a row, or of one of its figures."""
    row = next((row for row in rows if row["implementation"] == name), None)
    if row is None or microseconds(row) is None:
        return None
    return row["figures_us"].get(figure) if figure else microseconds(row)
