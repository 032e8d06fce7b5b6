from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from bench.cli import build_parser, main
from bench.core.errors import BenchError
from bench.core.implementation import Choices, Implementation, make
from bench.operations import DECODE, DENSE_DECODE_FP8, OPERATIONS, SPARSE_BACKWARD, SPARSE_FORWARD

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


COMMON = ["--case", "--quick", "--suite", "--peers", "--dtype", "--method", "--replays", "--json"]
COMMON += ["--no-check", "--no-limits", "--kernel", "--tag"]


@pytest.mark.parametrize(
    ("operation", "further"),
    [
        ("cache", []),
        ("cascade", ["--peers-dir"]),
        ("decode", ["--peers-dir"]),
        ("dense-decode-fp8", ["--peers-dir"]),
        ("sparse-forward", ["--peers-dir", "--indices"]),
        ("sparse-forward-fp8", ["--peers-dir", "--indices"]),
        ("indexer-logits", ["--peers-dir"]),
        ("sparse-decode", ["--peers-dir"]),
        ("indexer-topk", []),
        ("indexer-prepare", []),
        ("sparse-backward", ["--deterministic", "--indices"]),
    ],
)
def test_help_names_every_option(operation, further, capsys):
    with pytest.raises(SystemExit):
        main(["run", operation, "--help"])
    text = capsys.readouterr().out
    for option in COMMON + further:
        assert option in text


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
    methods = {name: parse(operation=name).method for name in OPERATIONS}
    assert methods == {
        "absorption": "graph",
        "cache": "graph",
        "cascade": "graph",
        "decode": "graph",
        "dense-decode-fp8": "graph",
        "sparse-forward": "graph",
        "sparse-forward-fp8": "graph",
        "sparse-backward": "events",
        "indexer-logits": "graph",
        "prefill": "graph",
        "prefill-backward": "graph",
        "sparse-decode": "graph",
        "indexer-loss": "events",
        "indexer-topk": "graph",
        "indexer-prepare": "graph",
        "layer": "graph",
        "prepare": "graph",
        "projection": "graph",
    }
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


@pytest.mark.parametrize(
    ("operation", "arguments", "text"),
    [
        ("sparse-forward", ["--case", "sq1"], "-topk<N>"),
        ("dense-decode-fp8", ["--quick", "--peers", "flashmla_fp8"], "--peers-dir"),
        (
            "dense-decode-fp8",
            ["--quick", "--peers", "flashmla_fp8", "--peers-dir", "/nowhere"],
            "_flashmla_extension_C",
        ),
        ("sparse-forward", ["--peers", "flashmla"], "--peers-dir"),
        ("sparse-forward", ["--peers", "cudnn"], "generic, attention_mma_163kb, attention_mma, flashmla"),
        ("sparse-backward", ["--peers", "cudnn"], "nvidia-cudnn-frontend"),
        ("sparse-backward", ["--peers", "flashmla"], "deterministic, generic, sparse_backward_mma_163kb, "),
    ],
)
def test_what_another_run_cannot_do(operation, arguments, text, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["run", operation, *arguments]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("operation", [SPARSE_FORWARD, SPARSE_BACKWARD], ids=lambda operation: operation.name)
def test_tilelang_is_said_not_to_be_available(operation):
    (_, tilelang) = make(["tilelang"], operation.implementations(Choices()))
    assert tilelang.unsupported(operation.suites["quick"][0], "bfloat16").startswith("not available: ")


def test_default_peers(tmp_path):
    nothing, directory = Choices(), Choices(tmp_path)
    assert DECODE.default_peers(nothing) == ["generic", "cupy"]
    assert DECODE.default_peers(directory) == ["generic", "cupy", "flashmla", "fa3"]
    assert (SPARSE_FORWARD.default_peers(nothing), SPARSE_FORWARD.default_peers(directory)) == ([], ["flashmla"])
    assert SPARSE_BACKWARD.default_peers(nothing) == []


def test_nothing_heavy_is_imported_for_list():
    code = (
        "import sys; from bench.cli import main; main(['list']); "
        "print([name for name in ('torch', 'cupy', 'jax', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_adapters_meet_the_protocol():
    """Each adapter has what `Implementation` asks for, with parameters of the very same names."""
    from bench.ops.decode import own as forms
    from bench.ops.decode.own import INVARIANT, NAMED, TREE, BatchInvariant, Decode, TreeMasked
    from bench.ops.dense_decode_fp8 import own as records
    from bench.ops.sparse_backward import own as backwards
    from bench.ops.sparse_forward import own as forwards
    from bench.peers.cudnn_sparse import CudnnSparse
    from bench.peers.cupy_unfused import CupyUnfused
    from bench.peers.fa3 import FlashAttention3
    from bench.peers.flashmla import FlashMla, FlashMlaFp8
    from bench.peers.flashmla_sparse import FlashMlaSparse
    from bench.peers.triton_mla import TritonMla

    own_calls = dict.fromkeys(("mla_cupy", "generic", *NAMED), Decode)
    own_calls |= {**dict.fromkeys(INVARIANT, BatchInvariant), TREE: TreeMasked}
    own_calls |= {forms.IN_PARTS: forms.InParts, forms.SINK: forms.WithSink, forms.TURNED: forms.Turned}
    own_calls |= dict.fromkeys((forms.PACKED, forms.VARYING), forms.Packed)
    decode = {**own_calls, "cupy": CupyUnfused, "flashmla": FlashMla}
    over_records = {
        **dict.fromkeys(("mla_cupy", records.EXACT, "generic", *records.NAMED), records.Fp8Decode),
        records.E4M3: records.CodedQueries,
        forms.SINK: records.Fp8WithSink,
        **dict.fromkeys(("rows", *NAMED), Decode),
        "flashmla": FlashMla,
        "flashmla_fp8": FlashMlaFp8,
        "fa3": FlashAttention3,
    }
    forward = dict.fromkeys(("mla_cupy", "generic", *forwards.NAMED), forwards.SparseForward)
    backward = dict.fromkeys(("mla_cupy", "deterministic", "generic", *backwards.NAMED), backwards.SparseBackward)
    adapters = {
        DECODE: {**decode, "fa3": FlashAttention3, "triton": TritonMla},
        DENSE_DECODE_FP8: over_records,
        SPARSE_FORWARD: {**forward, "flashmla": FlashMlaSparse},
        SPARSE_BACKWARD: {**backward, "cudnn": CudnnSparse},
    }
    for operation, own in adapters.items():
        assert own.keys() == operation.implementations(Choices()).keys() - {"tilelang"}
        for name, adapter in own.items():
            assert getattr(adapter, "name", name) == name
            for method in ("unsupported", "prepare"):
                asked = inspect.signature(getattr(Implementation, method))
                assert list(inspect.signature(getattr(adapter, method)).parameters) == list(asked.parameters)


def test_kernels_that_a_batch_may_get_are_peers_of_the_chosen_one():
    from bench.ops.decode.own import NAMED
    from mla_cupy.kernels.decode import DECODE as PIPELINE

    assert {kernel.name for kernel in PIPELINE.kernels if kernel.on_request} <= set(NAMED)
    assert set(NAMED) <= {kernel.name for kernel in PIPELINE.kernels}
    known = DECODE.implementations(Choices(kernel="attention_generic"))
    assert [one._kernel for one in make(NAMED, known)] == ["attention_generic", *NAMED]


def test_our_own_calls_have_names():
    forward, backward = (
        operation.implementations(Choices(kernel="some_kernel")) for operation in (SPARSE_FORWARD, SPARSE_BACKWARD)
    )
    names = ["generic"]
    assert [one.name for one in make(names, forward)] == ["mla_cupy", "generic"]
    assert [one.name for one in make([*names, "deterministic"], backward)] == ["mla_cupy", "generic", "deterministic"]


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
