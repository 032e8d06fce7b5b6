"""Launches that may start before their predecessor has ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mla_cupy.kernels.attention import schedule
from mla_cupy.kernels.pipeline import bind
from mla_cupy.kernels.spec import PLAIN
from mla_cupy.runtime import driver, launching, loader
from mla_cupy.runtime.launching import ArgumentBlock


@pytest.mark.parametrize(
    ("arch", "dependent"), [("sm_75", False), ("sm_80", False), ("sm_90a", True), ("sm_100a", True), ("sm_103a", True)]
)
def test_only_where_the_gpu_knows_them(monkeypatch: pytest.MonkeyPatch, arch: str, dependent: bool) -> None:
    asked: list[bool] = []

    def prepare(*arguments: Any) -> launching.PreparedLaunch:
        asked.append(arguments[-1])
        return lambda stream: None

    monkeypatch.setattr(loader, "loaded", lambda request, device, stream: object())
    monkeypatch.setattr(loader, "obtain", lambda request: SimpleNamespace(facts={"threads": 32}, dynamic_smem=0))
    with driver.use(SimpleNamespace(prepare=prepare, wanted=lambda request: request)):  # type: ignore[arg-type]
        bind(schedule.KERNEL.request(PLAIN[0], arch), 0, (1, 1, 1), ArgumentBlock((8,)), 0, dependent=True)
        bind(schedule.KERNEL.request(PLAIN[0], arch), 0, (1, 1, 1), ArgumentBlock((8,)), 0, dependent=False)
    assert asked == [dependent, False]
