"""`run claims`: what is counted, against small cases counted by hand, and the page that has the figures."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import claims, cli
from bench.core.errors import BenchError
from bench.core.implementation import Prepared
from bench.ops.indexer_loss import LossCase, LossOutputs
from mla_cupy import reference

PAGE = Path(__file__).resolve().parents[2] / "bench" / "log" / "claims.md"


def test_samples_by_hand():
    """Pages of 4, a prompt of 6, 2 samples of 3 tokens: one shared page, then 1, 1 and 2 pages of each sample's own."""
    saving = claims.parallel_samples(4, 6, 3, 2)
    assert saving == claims.Saving(shared=(3 + 3 + 5) / 3, alone=(4 + 4 + 6) / 3)
    assert saving.saved == pytest.approx(3 / 14)
    assert saving.times == pytest.approx(14 / 11)


def test_one_sequence_shares_nothing():
    assert claims.parallel_samples(8, 20, 9, 1).saved == 0
    assert claims.beams(8, 20, 9, 1).saved == 0


def test_beams_share_more_than_samples():
    """All have the prompt in common; beams that go on from one another have answers in common, too."""
    for seed in range(3):
        assert claims.beams(4, 16, 64, 4, seed).saved > claims.parallel_samples(4, 16, 64, 4, seed).saved


def test_common_prompts_by_hand():
    """Whole pages of the common tokens are held once."""
    saving = claims.system_prompt(4, 10, 1, 5)
    assert saving == claims.Saving(shared=2 + 5, alone=5 * 3)


def test_what_a_lone_sequence_wastes():
    """It has one token more in each step: pages of 8 and the power of two are filled evenly, the whole piece is not."""
    traffic = claims.Traffic(batch=1, steps=200, prompt=3, answer=40, longest=64)
    found = claims.waste(traffic, 8)
    assert 0 < found.paged < found.doubled < found.whole < 1
    assert claims.waste(traffic, 1).paged == 0
    assert claims.waste(traffic, 64).paged == found.whole


def test_the_page_has_what_the_command_says():
    lines = PAGE.read_text().splitlines()
    sizes = list(claims.PAGE_SIZES)
    for row in [*claims.waste_rows(sizes, 0), *claims.saving_rows(sizes, 0)]:
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


class Timed:
    """An implementation of the loss by the oracle, with calls that take `ms` ms on the host's clock."""

    def __init__(self, name, clock, both, forward):
        self.name, self._clock, self._both, self._forward = name, clock, both, forward

    def unsupported(self, case, dtype):
        return None

    def prepare(self, case, dtype, sets, device):
        exact = reference.indexer_warmup_loss(**sets[0].host, target="per_head")
        results = LossOutputs(exact.kl, exact.d_index_q, exact.d_index_k, exact.d_weights)

        def call(us):
            return lambda: self._clock.append(us)

        return Prepared(
            [call(self._both)], lambda index: results, device.recorder(), figures={"forward": [call(self._forward)]}
        )


def test_the_operator_s_ratios(device, monkeypatch):
    """Backward is both passes less the forward; a ratio above 1 says that ours takes longer."""
    passed = []
    monkeypatch.setattr(device, "clock", lambda: SimpleNamespace(start=lambda: None, stop_us=lambda: passed[-1]))
    own, flash = Timed("mla_cupy", passed, 9000.0, 3000.0), Timed("flash", passed, 6000.0, 2000.0)
    case = LossCase(2, 5, 2, 16, 2, 32, per_head=True)
    (row,) = claims.operator_rows([case], own, flash, device, calls=3)
    assert row == {
        "sequences": 2,
        "tokens of each": 5,
        "forward": "3.00",
        "FlashAttention-2": "2.00",
        "ratio": "1.50",
        "backward": "6.00",
        "its backward": "4.00",
        "their ratio": "1.50",
    }
    assert passed.count(9000.0) == 1 + 4


def test_a_wrong_operator_is_not_timed(device):
    own = Timed("mla_cupy", [], 1.0, 1.0)
    made = own.prepare

    def wrong(case, dtype, sets, device):
        prepared = made(case, dtype, sets, device)
        prepared.outputs(0).d_weights[0] += 1
        return prepared

    own.prepare = wrong
    with pytest.raises(BenchError, match=r"mla_cupy, case b1-s4.*wrong, d_weights"):
        list(claims.operator_rows([LossCase(1, 4, 2, 16, 2, 32, per_head=True)], own, own, device))


def test_the_operator_s_cases():
    """Equal numbers of tokens in sequences of 2,048, and in one."""
    shapes = [(case.b, case.s, case.h, case.d) for case in claims.operator_cases([2048, 8192])]
    assert shapes == [(1, 2048, 64, 128), (4, 2048, 64, 128), (1, 8192, 64, 128)]


@pytest.mark.parametrize("lengths", ["1000", "3000", "x", ""])
def test_bad_lengths(lengths, capsys):
    assert cli.main(["run", "claims", f"--operator={lengths},"]) == 2
    assert "--operator" in capsys.readouterr().err
