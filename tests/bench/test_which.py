"""`bench which`: every case of its operations is a call that some kernel runs."""

from __future__ import annotations

import json

import pytest

from bench import calls, which
from bench.operations import OPERATIONS
from mla_cupy import cli
from mla_cupy.kernels.gpus import gpu_of
from mla_cupy.ops.choices import which as which_of


@pytest.mark.parametrize("name", calls.NAMES)
def test_every_case_is_a_call(name: str) -> None:
    for case in OPERATIONS[name].suites["targets"]:
        choice = which_of(calls.call_of(name, case, "bfloat16"), arch="sm_90a")
        assert choice.operation == case.op
        assert choice.launches
        us = which.expected_us(case, gpu_of("sm_90a"))
        assert us is not None
        assert us > 0


def test_json_has_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["which", "decode", "b128-sq1-hq128-skv4096", "--arch", "sm_89", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kernel"] == "attention_mma"
    assert found["has_run"] is False
    assert found["roofline_us"] == pytest.approx(885, rel=0.01)
    assert found["passed_over"]["decode_sm90_seesaw"].startswith("needs compute capability 9.0")


def test_gpus_without_rates_have_no_roofline(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["which", "decode", "b1-sq1-hq16-skv1024", "--arch", "sm_86"]) == 0
    assert "unknown" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["decode nonsense", "decode b1-sq1-hq16-skv1024 --arch sm_42"])
def test_mistakes_are_exit_status_2(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["which", *command.split()]) == 2
    assert "expected" in capsys.readouterr().err
