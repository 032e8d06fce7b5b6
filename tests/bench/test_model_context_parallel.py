"""`bench model context-parallel`: the model beside what was measured of its parts, and its limits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.cli import main
from bench.model import context_parallel as model
from bench.model.machine import CONTEXT_RATES as RATES


@pytest.mark.parametrize(("tokens", "world", "chunk_tokens", "forward", "training"), model.MEASURED)
def test_parts_that_were_measured(tokens: int, world: int, chunk_tokens: int, forward: float, training: float) -> None:
    """A rank's calls on one GPU, without exchanges: within 5 %."""
    found = model.compute_only(tokens, world, chunk_tokens, RATES)
    assert found == (pytest.approx(forward, rel=0.05), pytest.approx(training, rel=0.05))


def test_more_ranks_take_less_time_each_and_more_together() -> None:
    for backward in (False, True):
        shares = [model.share(131072, world, backward, RATES) for world in (1, *model.WORLDS)]
        times = [one.ms for one in shares]
        assert times == sorted(times, reverse=True)
        work = [one.ms * one.world for one in shares]
        assert work == sorted(work)


def test_bytes_of_a_rank() -> None:
    """Latents of the other ranks, 1,152 bytes each; in the backward once more, and their gradients."""
    forward, backward = (model.share(131072, 8, way, RATES).received_bytes for way in (False, True))
    assert forward == 131072 * 7 / 8 * 1152
    assert backward == 2 * forward


def test_slow_links_are_seen() -> None:
    """What attention does not hide is added."""
    slow = replace(RATES, nvlink_gbs=0.1)
    one = model.share(32768, 8, False, slow)
    assert one.exposed_ms > 0.5 * one.exchange_ms
    assert model.exchange_ms(1e9, 8, RATES) == pytest.approx(1e3 / RATES.nvlink_gbs)
    assert model.exchange_ms(1e9, 64, RATES) == pytest.approx(56 / 63 * 1e3 / RATES.infiniband_gbs)


def test_tables_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.json"
    assert main(["model", "context-parallel", "--json", str(path)]) == 0
    text = capsys.readouterr().out
    assert "PREDICTED, NOT MEASURED" in text
    assert "measured on one H200, exchanges left out" in text
    found = json.loads(path.read_text())
    assert len(found["predictions"]) == len(model.TOKENS) * len(model.WORLDS)
    assert found["label"] == model.LABEL


def test_options_of_others(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["model", "context-parallel", "--heads", "16"])
    assert "--heads: `model context-parallel` has cases of its own" in capsys.readouterr().err
