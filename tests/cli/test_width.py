"""The commands' output fits a terminal of 80 columns, without a break inside a number or a word."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import pytest

import bench.cli
from bench.core import report, table
from bench.core.implementation import OWN
from mla_cupy import cli, terminal

COLUMNS = 80
COMMANDS = (
    "info",
    "info --check",
    "list",
    "list --arch sm_80",
    "formats",
    "selftest --list",
    "engines check",
    "bench list",
    "which decode b128-sq1-hq128-skv4096 --arch sm_100a",
    "bench model sparse-backward --arch sm_100a",
    "bench model forward --arch sm_100a",
)


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))


def too_wide(text: str) -> list[str]:
    return [line for line in text.splitlines() if len(line) > COLUMNS]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(command.split())
    said = capsys.readouterr()
    assert said.out
    assert too_wide(said.out + said.err) == []


def helps(parser: argparse.ArgumentParser) -> Iterator[str]:
    yield parser.format_help()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from helps(command)


@pytest.mark.parametrize("first", ["", "export", "demo", "engines", "bench"])
def test_help(first: str) -> None:
    parser = bench.cli.build_parser() if first == "bench" else cli._parser([first])
    pages = list(helps(parser))
    assert len(pages) > 5
    assert [line for page in pages for line in too_wide(page)] == []


def figures(**more: Any) -> dict[str, Any]:
    """A row of a result, as `bench run` prints it."""
    timing = {"us_median": 12345.67, "spread": 0.123, "method": "graph"}
    shares = {"share_gemm": 0.987, "share_copy": 0.876, "share_roofline": 0.765, "speed_vs_best_peer": 1.234}
    sizes = {"tflops": 1234.5, "tbps": 4.32, "l2_bytes": 1, "l2_tbps": 1.23, "workspace_bytes": 123456789}
    host = {"repeated_call": 12.3, "call": 45.6, "empty_launch": 7.8}
    names = {"op": "sparse_mla_forward", "case": "sq4096-skv8192-hq128-topk2048", "dtype": "bfloat16"}
    own = {"implementation": OWN, "kernel": "sparse_forward_sm90_small_forms", "status": report.OK, "reason": ""}
    checked = {"check": {"out_rms": 1.23e-5, "out_bias": -4.5e-6}, "includes": "", "figures_us": {}}
    return {**names, **own, **shares, **sizes, **checked, "timing": timing, "host_us": host, **more}


def test_results(capsys: pytest.CaptureFixture[str]) -> None:
    table.show(
        terminal.console(), [figures(), figures(implementation="FlashMLA", kernel="", timing=None, status="error")]
    )
    said = capsys.readouterr().out
    assert too_wide(said) == []
    for figure in ("us: 12345.67", "roofline: 76.5%", "vs best peer: 1.234x", "workspace MB: 123.5", "bias: -4.50e-06"):
        assert figure in said


def test_a_table_that_fits_stays_one(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.show(terminal.table("title", ("name", "number", "text"), [("one", "1", "word " * 30), ("two", "22", "")]))
    first, heads, _, *lines = capsys.readouterr().out.splitlines()
    assert first == "title"
    assert heads.split() == ["name", "number", "text"]
    assert lines[0].split()[:3] == ["one", "1", "word"]
    assert lines[-1].split() == ["two", "22"]
    assert not too_wide("\n".join(lines))


def test_pipes_are_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS")
    assert terminal.console().width == terminal.PIPE_WIDTH
