"""Modes of the simulator's asynchronous work, and numbers of multiprocessors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

MODES = (("early", 0), ("late", 0), ("random", 1), ("random", 2))
"""The mode of completion, and the seed."""
SM_COUNTS = (1, 3, 5)
"""Multiprocessors of the simulated GPU: how often a batch is cut."""


def parametrize_pairs(metafunc: pytest.Metafunc, pairs: Sequence[tuple[Any, str]]) -> None:
    """Parametrise over `case`, `kernel`, `mode` and `sm_count`.

    Each pair of a case and a kernel runs once; modes and SM counts take turns, out of step with each other.
    """
    turns = range(len(pairs))
    chosen = [(*pairs[i], MODES[i % len(MODES)], SM_COUNTS[i // 2 % len(SM_COUNTS)]) for i in turns]
    ids = [f"{case.id}-{kernel}-{mode}{seed}-{sms}sm" for case, kernel, (mode, seed), sms in chosen]
    metafunc.parametrize(("case", "kernel", "mode", "sm_count"), chosen, ids=ids)
