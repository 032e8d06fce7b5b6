"""The examples run as a reader would run them, and what they print is correct."""

from __future__ import annotations

import functools
import json
import os
import re
import resource
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "examples"


@functools.cache
def can_import(library: str) -> bool:
    """Tried in another process: a library as large as these stays out of this one, and so do its warnings."""
    probe = [sys.executable, "-c", f"import {library}"]
    return subprocess.run(probe, capture_output=True, timeout=120, check=False).returncode == 0


def needs(library: str) -> None:
    """Skips the test where the library cannot be imported."""
    if not can_import(library):
        pytest.skip(f"{library} cannot be imported here")


def run(name: str, *arguments: str, backend: str = "numpy") -> str:
    """Output of an example; it must succeed."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "MLA_CUPY_BACKEND": backend, "MLA_CUPY_JIT": "lazy"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_numpy_decode(backend: str) -> None:
    text = run("numpy_decode.py", "--heads", "2", "--lengths", "70", "0", "1", backend=backend)
    assert "out (3, 1, 2, 512) bfloat16, lse (3, 2, 1) float32" in text
    rows = re.findall(r"(\d+) tokens: lse of head 0 = +(\S+), largest error of out = (\S+)", text)
    assert [(int(tokens), lse == "-inf") for tokens, lse, _ in rows] == [(70, False), (0, True), (1, False)]
    assert all(float(error) < 0.02 for *_, error in rows)
    assert [float(error) for tokens, _, error in rows if tokens == "0"] == [0]


def test_numpy_decode() -> None:
    check_numpy_decode("numpy")


@pytest.mark.gpu
def test_numpy_decode_on_gpu(gpu: object) -> None:
    check_numpy_decode("cuda")


def check_tree_verification(backend: str) -> None:
    text = run("tree_verification.py", "--heads", "2", "--lengths", "70", "0", "63", "5", backend=backend)
    paths = re.findall(r"(\d+) tokens: accepted drafts \[(.*)\], now (\d+) tokens", text)
    assert [int(length) for length, *_ in paths] == [70, 0, 63, 5]
    counts = [len(path.split(", ")) if path else 0 for _, path, _ in paths]
    assert [int(now) for *_, now in paths] == [n + kept for n, kept in zip((70, 0, 63, 5), counts, strict=True)]
    errors = [float(error) for error in re.findall(r"differs by (\S+)", text)]
    assert len(errors) == sum(count > 0 for count in counts) > 0
    assert max(errors) < 0.02


def test_tree_verification() -> None:
    check_tree_verification("numpy")


@pytest.mark.gpu
def test_tree_verification_on_gpu(gpu: object) -> None:
    check_tree_verification("cuda")


def check_continuous_batching(backend: str, *arguments: str) -> None:
    sizes = ("--steps", "40", "--heads", "2", "--pages", "48", "--arrivals", "0.7")
    text = run("continuous_batching.py", *sizes, *arguments, backend=backend)
    found = re.findall(r"(\d+) requests, (\d+) tokens; (\d+) pages copied, (\d+) tokens reused", text)
    assert all(int(number) > 0 for number in found[0]), "requests share prompts, and samples write to shared pages"
    (arrived,) = re.findall(r"requests that have arrived +\D? *(\d+)", text)[-1:]
    running, finished = re.findall(r"their samples running, finished +\D? *(\d+), (\d+)", text)[-1]
    assert arrived == found[0][0]
    assert int(running) + int(finished) >= int(arrived), "a request has one sample or more"


SELECTED = ("--topk", "20")


@pytest.mark.parametrize("arguments", [(), SELECTED], ids=["all", "selected"])
def test_continuous_batching(arguments: tuple[str, ...]) -> None:
    check_continuous_batching("numpy", *arguments)


def test_continuous_batching_plots(tmp_path: Path) -> None:
    needs("matplotlib")
    plot = tmp_path / "pages.png"
    check_continuous_batching("numpy", "--plot", str(plot))
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.gpu
@pytest.mark.parametrize("arguments", [(), SELECTED], ids=["all", "selected"])
def test_continuous_batching_on_gpu(gpu: object, arguments: tuple[str, ...]) -> None:
    check_continuous_batching("cuda", *arguments)


def check_dsa_decode(backend: str) -> None:
    sizes = ("--steps", "3", "--heads", "2", "--prompt", "130", "--batch", "2", "--topk", "20")
    text = run("dsa_decode.py", *sizes, backend=backend)
    assert "3 steps of 2 sequences, now [133] tokens; 1 pages copied" in text
    (exact, error) = re.findall(r"selection exact: (\w+); largest error of out: (\S+)", text)[0]
    assert exact == "True"
    assert 0 < float(error) < 2e-3, "more than nothing: it did go through 16 bits"


def test_dsa_decode() -> None:
    check_dsa_decode("numpy")


@pytest.mark.gpu
def test_dsa_decode_on_gpu(gpu: object) -> None:
    check_dsa_decode("cuda")


def check_layer(backend: str, dtype: str, allowed: float) -> None:
    text = run("deepseek_v3_layer.py", "--tokens", "2", "--page-size", "1", "--dtype", dtype, backend=backend)
    assert text.endswith("\nequal\n")
    (worst,) = re.findall(r"worst +(\S+) at token", text)
    assert 0 < float(worst) < allowed  # more than nothing: it did go through 16 bits


def test_deepseek_layer() -> None:
    check_layer("numpy", "bfloat16", 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "allowed"), [("bfloat16", 1e-2), ("float16", 1.5e-3)])
def test_deepseek_layer_on_gpu(gpu: object, dtype: str, allowed: float) -> None:
    check_layer("cuda", dtype, allowed)


def test_cupy_decode_without_a_gpu() -> None:
    needs("cupy")
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "cupy_decode.py")],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": "", "MLA_CUPY_JIT": "lazy"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "cupy_decode.py needs an NVIDIA GPU, and found none; numpy_decode.py needs none\n"


@pytest.mark.gpu
def test_cupy_decode(gpu: object) -> None:
    text = run("cupy_decode.py", "--batch", "3", "--heads", "16", "--length", "130", "--steps", "7", backend="cuda")
    (length, error) = re.findall(r"lengths are now (\d+); largest error of out: (\S+)", text)[0]
    assert int(length) == 130 + 7
    assert float(error) < 5e-3


def check_decode_loop(library: str, backend: str, *arguments: str) -> None:
    needs(library)
    sizes = ("--batch", "3", "--heads", "16", "--length", "130", "--steps", "7")
    text = run(f"{library}_decode.py", *sizes, *arguments, backend=backend)
    (length, error) = re.findall(r"lengths are now (\d+); largest error of out: (\S+)", text)[0]
    assert int(length) == 130 + 7
    assert 0 < float(error) < 0.01, "more than nothing: it did go through 16 bits"


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_decode_loop(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    check_decode_loop(library, "numpy", *(["--device", "cpu"] if library == "torch" else []))


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["torch", "jax"])
def test_decode_loop_on_gpu(gpu: object, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    check_decode_loop(library, "cuda")


def check_chunked_prefill(backend: str, *arguments: str) -> None:
    needs("torch")
    text = run("torch_chunked_prefill.py", *arguments, backend=backend)
    assert text.endswith("equal to one call\n")
    (error,) = re.findall(r"one call: out (\S+), lse", text)
    assert float(error) > 0, "the chunks are merged"


@pytest.mark.parametrize("record", ["bf16", "v32"])
def test_chunked_prefill(record: str) -> None:
    sizes = ("--tokens", "5", "--context", "30", "--chunk", "16", "--heads", "2")
    check_chunked_prefill("numpy", "--device", "cpu", "--record", record, *sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("record", ["bf16", "v32"])
def test_chunked_prefill_on_gpu(gpu: object, record: str) -> None:
    check_chunked_prefill("cuda", "--record", record)


def check_training(backend: str, *arguments: str) -> None:
    needs("torch")
    text = run("torch_training.py", *arguments, backend=backend)
    assert text.endswith("the layer learns\n")


def test_training() -> None:
    check_training("numpy", "--device", "cpu", "--tokens", "24", "--heads", "2", "--steps", "8")


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_training_on_gpu(gpu: object, compiled: bool) -> None:
    check_training("cuda", "--heads", "64", *(["--compile"] if compiled else []))


def errors(text: str) -> dict[str, float]:
    """The largest errors that an example prints, the last of each name."""
    found = re.findall(r"^ +(out|dq|dkv|d_sink) .*?(\d\S+)$", text, re.MULTILINE)
    return {name: float(error) for name, error in found}


SPARSE = {"torch": "equal to autograd\n", "jax": "equal to JAX's gradients\n"}
WAYS = {"torch": ("eager", "compiled"), "jax": ("outside jit", "inside jit")}


def check_sparse_attention(library: str, backend: str, *arguments: str) -> None:
    needs(library)
    text = run(f"{library}_sparse_attention.py", "--tokens", "20", "--topk", "9", *arguments, backend=backend)
    assert text.endswith(SPARSE[library])
    assert errors(text).keys() == {"out", "dq", "dkv", "d_sink"}
    assert all(0 < error < 0.01 for error in errors(text).values()), "more than nothing: it did go through 16 bits"
    first, second = WAYS[library]
    assert text.index(f" {first}:") < text.index(f" {second}:")


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("library", SPARSE)
def test_sparse_attention(library: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    on_host = ["--device", "cpu"] if library == "torch" else []
    check_sparse_attention(library, "numpy", "--heads", "3", "--dtype", dtype, *on_host)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("library", SPARSE)
def test_sparse_attention_on_gpu(gpu: object, library: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    check_sparse_attention(library, "cuda", "--heads", "64", "--dtype", dtype)


@pytest.mark.parametrize("library", SPARSE)
def test_a_wrong_gradient_is_said(library: str, tmp_path: Path) -> None:
    """The examples with a gradient of kv that is twice as large."""
    needs(library)
    source = (EXAMPLES / f"{library}_sparse_attention.py").read_text()
    constant = {"torch": "kv.detach()", "jax": "jax.lax.stop_gradient(kv)"}[library]
    wrong = source.replace("forward(q, kv, indices", f"forward(q, 2 * kv - {constant}, indices")
    assert wrong != source
    (tmp_path / "wrong.py").write_text(wrong)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "MLA_CUPY_BACKEND": "numpy", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(tmp_path / "wrong.py"), "--tokens", "4", "--topk", "3", "--heads", "2"]
    command += ["--device", "cpu"] if library == "torch" else []
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, "DIFFERENT" in done.stdout) == (1, True), done.stdout + done.stderr


def test_every_example_is_in_its_readme() -> None:
    listed = re.findall(r"^\| \[(\w+\.py)\]\(\1\)", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in EXAMPLES.glob("*.py"))


TIMED = re.findall(r"^\| \[(\w+\.py)\].* (\d+) s \|$", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
MOST_SECONDS = 20


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seconds"), [each for each in TIMED if "context_parallel" not in each[0]])
def test_defaults_fit_the_cpu(name: str, seconds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processor time, so that other work on the machine does not count."""
    library = name.partition("_")[0]
    if library in ("torch", "transformers", "jax"):
        needs(library)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run(name)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    took = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert took < 2 * MOST_SECONDS
    assert int(seconds) <= MOST_SECONDS


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_wrong_usage_is_said(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    library = name.partition("_")[0]
    if library in ("cupy", "torch", "transformers", "jax"):
        needs(library)
    if name.startswith("cuda_core"):
        needs("cuda.core")
    if name == "dsa_from_dense.py":
        needs("transformers")
    monkeypatch.setattr(sys, "argv", [name, "--no-such-option"])
    monkeypatch.syspath_prepend(EXAMPLES)
    with pytest.raises(SystemExit) as ended:  # in this process, which has imported what most of them do
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert ended.value.code == 2
    assert "usage:" in capsys.readouterr().err


def on_two_ranks(name: str, *arguments: str) -> str:
    """What an example prints in two processes, without a GPU."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "MLA_CUPY_BACKEND": "numpy", "MLA_CUPY_JIT": "lazy"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-m", "mla_cupy.parallel", "--gpus", "2", f"examples/{name}", *arguments]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("project_first", [False, True])
def test_context_parallel(project_first: bool) -> None:
    arguments = ["--tokens", "90", "--heads", "4", "--hidden", "64", *["--project-first"] * project_first]
    text = on_two_ranks("context_parallel.py", *arguments)
    assert "90 tokens on 2 ranks by HostTransport" in text
    assert text.endswith("agreed\n")


def test_context_parallel_training() -> None:
    needs("torch")
    text = on_two_ranks("torch_context_parallel.py", "--tokens", "37", "--heads", "2", "--width", "64", "--steps", "3")
    assert text.startswith("step 0: loss ")
    assert text.endswith("agreed\n")


FEW = ("--tokens", "64", "--topk", "8")
"""A size that the oracle takes no time for."""


def check_training_indexer(file: Path, backend: str, *arguments: str) -> dict[str, list[float]]:
    text = run("train_indexer.py", *arguments, "--json", str(file), backend=backend)
    assert text.endswith("\nthe indexer finds the keys\n")
    curve: dict[str, list[float]] = json.loads(file.read_text())
    return curve


def test_training_indexer(tmp_path: Path) -> None:
    plot = tmp_path / "curve.png"
    steps = ("--warmup-steps", "30", "--sparse-steps", "10", "--goal", "0.8", "--plot", str(plot))
    curve = check_training_indexer(tmp_path / "curve.json", "numpy", "--device", "cpu", *FEW, *steps)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert len(curve["loss"]) == 40
    assert curve["loss"][29] < 0.3 * curve["loss"][0]
    assert curve["loss"][39] < curve["loss"][30], "the sparse stage learns"


@pytest.mark.parametrize("library", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_training_indexer_with_autograd(tmp_path: Path, library: str) -> None:
    """The losses of every step match the hand-written gradients."""
    needs(library)
    few = ("--device", "cpu", *FEW, "--warmup-steps", "3", "--sparse-steps", "2", "--goal", "0")
    plain = check_training_indexer(tmp_path / "plain.json", "numpy", *few)
    found = check_training_indexer(tmp_path / "found.json", "numpy", *few, "--framework", library)
    assert found["loss"] == pytest.approx(plain["loss"], rel=5e-3)
    assert plain["loss"][2] < 0.95 * plain["loss"][0], "the steps are no small ones"


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["arrays", "torch", "jax"])
def test_training_indexer_on_gpu(gpu: object, tmp_path: Path, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if library != "arrays":
        needs(library)
    sizes = ("--size", "tiny", "--tokens", "512", "--heads", "64", "--topk", "64", "--goal", "0.8")
    check_training_indexer(tmp_path / "curve.json", "cuda", "--framework", library, "--device", "gpu", *sizes)


@pytest.mark.parametrize("pages", [48, 8])
def test_torch_serving(pages: int) -> None:
    """Requests wait and are preempted with few pages; logits equal those without a cache."""
    needs("torch")
    text = run("torch_serving.py", "--pages", str(pages), "--max-batch", "4")
    found = re.search(r"(\d+) prompt tokens found in the cache, (\d+) requests preempted", text)
    assert found is not None
    assert int(found[1]) > 0
    assert (int(found[2]) > 0) == (pages == 8)
    assert float(text.split()[-1]) < 0.03


@pytest.mark.parametrize("record", ["v32", "v4", "v41", "v41-fp4", "bf16", "fp16"])
def test_move_pages(record: str) -> None:
    """A description in JSON is enough to read pages of every record."""
    assert "equal what cache_gather reads" in run("move_pages.py", "--record", record)
