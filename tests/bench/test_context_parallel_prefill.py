"""`run context-parallel-prefill` as far as it needs no GPU: calls of each rank, exchanges, efficiencies, the table."""

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

    def once(task, replays, together):
        task()
        return next(ms)

    monkeypatch.setattr(prefill, "_median_ms", once)
    rows = list(prefill.measure(prefill.Case(kind, 40, 2, 16, 3), (2,), place="cpu"))
    assert [(row["world"], row["rank"]) for row in rows] == [(1, 0), (2, 0), (2, 1)]
    assert rows[1]["efficiency"] == {prefill.FORWARD: 1.0, prefill.TRAINING: 0.8}
    prefill._show(console(), kind, rows)
    assert "0.800" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_ranks_together(kind):
    """Processes exchange rows, and each has the times of all."""
    pytest.importorskip("torch")
    from tests.parallel.ranks import on_all_ranks

    found = on_all_ranks(2, _together, kind)
    assert found[0] == found[1], found
    expected = [(1, 0, "none"), (2, 0, "copies"), (2, 1, "copies"), (2, 0, "NCCL"), (2, 1, "NCCL")]
    assert [(row["world"], row["rank"], row["exchanges"]) for row in found[0]] == expected
    assert found[0][-1]["efficiency"] == {prefill.FORWARD: 0.25, prefill.TRAINING: 0.25}


def _together(rank, kind):
    def counted(task, replays, together):
        task()
        together()
        return 1.0 + rank

    prefill._median_ms = counted
    return prefill.together(2, rank, prefill.Case(kind, 40, 2, 16, 3), "cpu")


def test_more_gpus_than_there_are(capsys, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert main(["run", "context-parallel-prefill", "--gpus", "2"]) == 2
    assert "--gpus: got 2" in capsys.readouterr().err


def test_without_a_gpu(capsys, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["run", "context-parallel-prefill"]) == 2
    assert "no GPU" in capsys.readouterr().err
