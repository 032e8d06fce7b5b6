from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from bench.cases import DECODE, SUITES
from bench.cli import build_parser, main
from bench.errors import BenchError
from bench.peers import Implementation, make, registry

ROOT = Path(__file__).resolve().parents[2]


def parse(*arguments):
    return build_parser().parse_args(["run", "decode", *arguments])


@pytest.mark.parametrize("command", [[], ["run"], ["run", "decode"], ["list"], ["compare"], ["plot"]])
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*command, "--help"])
    assert stop.value.code == 0
    assert "usage:" in capsys.readouterr().out


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit):
        main(["run", "decode", "--help"])
    text = capsys.readouterr().out
    for option in (
        "--case",
        "--quick",
        "--suite",
        "--peers",
        "--peers-dir",
        "--dtype",
        "--replays",
        "--json",
        "--no-check",
        "--variant",
    ):
        assert option in text


def test_list_prints_every_case(capsys):
    assert main(["list"]) == 0
    text = capsys.readouterr().out
    for case in DECODE:
        assert case.name in text


def test_options():
    assert parse().suite == "targets"
    assert parse("--quick").suite == "quick"
    assert parse("--suite", "quick").suite == "quick"
    assert parse("--peers", "none").peers == []
    assert parse("--peers", "flashmla, cupy").peers == ["flashmla", "cupy"]
    assert parse("--case", "a", "--case", "b").case == ["a", "b"]
    assert parse("--peers-dir", "/x").peers_dir == Path("/x")
    assert set(SUITES) == {"targets", "quick"}


@pytest.mark.parametrize(
    "bad", [["--replays", "19"], ["--dtype", "float32"], ["--quick", "--case", "x"], ["--suite", "x"]]
)
def test_bad_options_are_refused(bad, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(*bad)
    assert stop.value.code == 2
    assert bad[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--case", "nonsense"], "nonsense"),
        (["--quick", "--peers", "flashmla"], "--peers-dir"),
        (["--quick", "--peers", "triton"], "triton"),
        (["--quick", "--peers", "fa3", "--peers-dir", "/nowhere"], "_vllm_fa3_C.abi3.so"),
    ],
)
def test_what_cannot_run_says_why(arguments, text, capsys):
    assert main(["run", "decode", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_nothing_heavy_is_imported_for_list():
    code = (
        "import sys; from bench.cli import main; main(['list']); "
        "print([name for name in ('torch', 'cupy', 'jax', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_adapters_meet_the_protocol():
    """Each adapter has what `Implementation` asks for, with the very same parameters."""
    from bench.peers.cupy_unfused import CupyUnfused
    from bench.peers.fa3 import FlashAttention3
    from bench.peers.flashmla import FlashMla
    from bench.peers.generic import Generic
    from bench.peers.project import Project

    adapters = {
        "mla_cupy": Project,
        "generic": Generic,
        "cupy": CupyUnfused,
        "flashmla": FlashMla,
        "fa3": FlashAttention3,
    }
    assert adapters.keys() == registry(None, None).keys()
    for name, adapter in adapters.items():
        assert adapter.name == name
        for method in ("unsupported", "prepare"):
            asked = inspect.signature(getattr(Implementation, method))
            assert inspect.signature(getattr(adapter, method)) == asked


def test_make_puts_the_project_first_and_each_once():
    assert [implementation.name for implementation in make(["generic", "cupy", "generic"], None, None)] == [
        "mla_cupy",
        "generic",
        "cupy",
    ]
    with pytest.raises(BenchError, match="unknown peer"):
        make(["mla"], None, None)


def test_an_adapter_without_torch_says_so(tmp_path, monkeypatch):
    (tmp_path / "_flashmla_C.abi3.so").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(BenchError, match="PyTorch"):
        make(["flashmla"], tmp_path, None)
