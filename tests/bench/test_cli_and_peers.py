from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.cli import build_parser, main
from bench.core.errors import BenchError
from bench.core.implementation import Choices, make
from bench.operations import DECODE, OPERATIONS, SPARSE_BACKWARD, SPARSE_FORWARD

ROOT = Path(__file__).resolve().parents[2]


def parse(*arguments, operation="decode"):
    return build_parser().parse_args(["run", operation, *arguments])


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["run"],
        *(["run", name] for name in OPERATIONS),
        ["list"],
        ["compare"],
        ["compare-trees"],
        ["compare-code"],
        ["plot"],
    ],
    ids=" ".join,
)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*command, "--help"])
    assert stop.value.code == 0
    assert "usage:" in capsys.readouterr().out


def test_list_prints_every_case(capsys):
    assert main(["list"]) == 0
    text = capsys.readouterr().out
    for operation in OPERATIONS.values():
        for case in operation.suites["targets"]:
            assert case.name in text


def test_list_of_an_operation_has_no_others(capsys):
    assert main(["list", "cascade", "absorption"]) == 0
    text = capsys.readouterr().out
    titles = [line.strip() for line in text.splitlines() if line.strip() in OPERATIONS]
    assert titles == ["cascade", "absorption"]
    with pytest.raises(SystemExit):
        main(["list", "nothing"])
    assert "got 'nothing', expected one of absorption, cache" in capsys.readouterr().err


def test_options():
    assert parse().suite == "targets"
    assert parse("--quick").suite == "quick"
    assert parse("--suite", "quick").suite == "quick"
    assert parse("--peers", "none").peers == []
    assert parse("--peers", "flashmla, cupy").peers == ["flashmla", "cupy"]
    assert parse("--case", "a", "--case", "b").case == ["a", "b"]
    assert parse("--peers-dir", "/x").peers_dir == Path("/x")
    assert all({"targets", "quick"} <= set(operation.suites) for operation in OPERATIONS.values())
    events = {name for name in OPERATIONS if parse(operation=name).method == "events"}
    assert events == {"sparse-backward", "indexer-loss"}
    assert parse("--method", "events", operation="sparse-forward").method == "events"


@pytest.mark.parametrize(
    "bad", [["--replays", "19"], ["--dtype", "float32"], ["--quick", "--case", "x"], ["--suite", "x"]]
)
def test_bad_options_are_refused(bad, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(*bad)
    assert stop.value.code == 2
    assert bad[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("operation", "arguments", "text"),
    [
        ("decode", ["--case", "nonsense"], "nonsense"),
        ("decode", ["--quick", "--peers", "flashmla"], "--peers-dir"),
        ("decode", ["--quick", "--peers", "triton"], "triton"),
        ("decode", ["--quick", "--peers", "fa3", "--peers-dir", "/nowhere"], "_vllm_fa3_C.abi3.so"),
        ("sparse-forward", ["--case", "sq1"], "-topk<N>"),
        ("dense-decode-fp8", ["--quick", "--peers", "flashmla_fp8"], "--peers-dir"),
        (
            "dense-decode-fp8",
            ["--quick", "--peers", "flashmla_fp8", "--peers-dir", "/nowhere"],
            "_flashmla_extension_C",
        ),
        ("sparse-forward", ["--peers", "flashmla"], "--peers-dir"),
        (
            "sparse-forward",
            ["--peers", "cudnn"],
            "generic, attention_mma, batch_invariant, batch_invariant_256, flashmla",
        ),
        ("sparse-backward", ["--peers", "cudnn"], "nvidia-cudnn-frontend"),
        ("sparse-backward", ["--peers", "flashmla"], "deterministic, generic, sparse_backward_mma"),
    ],
)
def test_what_cannot_run_says_why(operation, arguments, text, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["run", operation, *arguments]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("operation", [SPARSE_FORWARD, SPARSE_BACKWARD], ids=lambda operation: operation.name)
def test_tilelang_is_said_not_to_be_available(operation):
    (_, tilelang) = make(["tilelang"], operation.implementations(Choices()))
    assert tilelang.unsupported(operation.suites["quick"][0], "bfloat16").startswith("not available: ")


def test_default_peers(tmp_path):
    nothing, directory = Choices(), Choices(tmp_path)
    assert DECODE.peers_of(nothing) == ["generic", "cupy"]
    assert DECODE.peers_of(directory) == ["generic", "cupy", "flashmla", "fa3"]
    assert (SPARSE_FORWARD.peers_of(nothing), SPARSE_FORWARD.peers_of(directory)) == ([], ["flashmla"])
    assert SPARSE_BACKWARD.peers_of(nothing) == []


def test_nothing_heavy_is_imported_for_list():
    code = (
        "import sys; from bench.cli import main; main(['list']); "
        "print([name for name in ('torch', 'cupy', 'jax', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_kernels_that_a_batch_may_get_are_peers_of_the_chosen_one():
    from bench.ops.decode import NAMED
    from mla_cupy.kernels.decode import DECODE as PIPELINE

    assert {kernel.name for kernel in PIPELINE.kernels if kernel.on_request} <= set(NAMED)
    assert set(NAMED) <= {kernel.name for kernel in PIPELINE.kernels}
    known = DECODE.implementations(Choices(kernel="attention_generic"))
    assert [one._kernel for one in make(NAMED, known)] == ["attention_generic", *NAMED]


def test_make_puts_the_project_first_and_each_once():
    known = DECODE.implementations(Choices())
    assert [implementation.name for implementation in make(["generic", "cupy", "generic"], known)] == [
        "mla_cupy",
        "generic",
        "cupy",
    ]
    with pytest.raises(BenchError, match="unknown peer"):
        make(["mla"], known)


@pytest.mark.parametrize("operation", [DECODE, SPARSE_FORWARD], ids=lambda operation: operation.name)
def test_an_adapter_without_torch_says_so(operation, tmp_path, monkeypatch):
    (tmp_path / "_flashmla_C.abi3.so").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(BenchError, match="PyTorch"):
        make(["flashmla"], operation.implementations(Choices(tmp_path)))
