"""`run context-parallel-prefill` as far as it needs no GPU: the calls of each rank, efficiencies, the table."""

from __future__ import annotations

import itertools

import pytest

from bench.cli import console, main
from bench.context_parallel import prefill


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_rows(kind, monkeypatch, capsys):
    """Every step runs; the slower rank counts."""
    pytest.importorskip("torch")
    ms = itertools.cycle([10.0, 40.0, 4.0, 25.0, 5.0, 20.0])  # one GPU, the first rank, the last rank

    def once(task, replays):
        task()
        return next(ms)

    monkeypatch.setattr(prefill, "_median_ms", once)
    rows = list(prefill.measure(kind, 40, (2,), 2, 16, 3, place="cpu"))
    assert [(row["world"], row["rank"]) for row in rows] == [(1, 0), (2, 0), (2, 1)]
    assert rows[1]["efficiency"] == {prefill.FORWARD: 1.0, prefill.TRAINING: 0.8}
    prefill._show(console(), kind, rows)
    assert "0.800" in capsys.readouterr().out


def test_without_a_gpu(capsys, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["run", "context-parallel-prefill"]) == 2
    assert "no GPU" in capsys.readouterr().err
