"""`run claims`: what is counted, against small cases counted by hand, and the page that has the figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import cli
from bench.claims import command, memory

PAGE = Path(__file__).resolve().parents[2] / "docs" / "log" / "claims.md"


def test_samples_by_hand():
    """Pages of 4, a prompt of 6, 2 samples of 3 tokens: one shared page, then 1, 1 and 2 pages of each sample's own."""
    saving = memory.parallel_samples(4, 6, 3, 2)
    assert saving == memory.Saving(shared=(3 + 3 + 5) / 3, alone=(4 + 4 + 6) / 3)
    assert saving.saved == pytest.approx(3 / 14)
    assert saving.times == pytest.approx(14 / 11)


def test_one_sequence_shares_nothing():
    assert memory.parallel_samples(8, 20, 9, 1).saved == 0
    assert memory.beams(8, 20, 9, 1).saved == 0


def test_beams_share_more_than_samples():
    """All have the prompt in common; beams that go on from one another have answers in common, too."""
    for seed in range(3):
        assert memory.beams(4, 16, 64, 4, seed).saved > memory.parallel_samples(4, 16, 64, 4, seed).saved


def test_common_prompts_by_hand():
    """Whole pages of the common tokens are held once."""
    saving = memory.system_prompt(4, 10, 1, 5)
    assert saving == memory.Saving(shared=2 + 5, alone=5 * 3)


def test_what_a_lone_sequence_wastes():
    """It has one token more in each step: pages of 8 and the power of two are filled evenly, the whole piece is not."""
    traffic = memory.Traffic(batch=1, steps=200, prompt=3, answer=40, longest=64)
    found = memory.waste(traffic, 8)
    assert 0 < found.paged < found.doubled < found.whole < 1
    assert memory.waste(traffic, 1).paged == 0
    assert memory.waste(traffic, 64).paged == found.whole


def test_the_page_has_what_the_command_says():
    lines = PAGE.read_text().splitlines()
    sizes = list(command.PAGE_SIZES)
    for row in [*command.waste_rows(sizes, 0), *command.saving_rows(sizes, 0)]:
        assert "| " + " | ".join(map(str, row.values())) + " |" in lines


def test_the_command(tmp_path, capsys):
    file = tmp_path / "claims.jsonl"
    assert cli.main(["run", "claims", "--page-sizes", "64", "--seed", "3", "--json", str(file)]) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["claim"] for row in rows] == ["waste"] * 2 + ["saving"] * 7
    assert {row["seed"] for row in rows} == {3}
    printed = capsys.readouterr().out
    assert all(row["paged"] in printed for row in rows if "paged" in row)


@pytest.mark.parametrize("sizes", ["", "0", "16,x", "2048"])
def test_bad_pages(sizes, capsys):
    assert cli.main(["run", "claims", "--page-sizes", sizes]) == 2
    assert f"--page-sizes: got {sizes!r}" in capsys.readouterr().err
