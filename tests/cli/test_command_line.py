"""The command line, with a registry of one tiny kernel and one that does not compile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from mla_cupy import cli, launchers
from mla_cupy._version import __version__
from mla_cupy.launchers.spec import KernelSpec, Variant
from mla_cupy.runtime import cache, kernels, nvrtc

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCE = """extern "C" __constant__ const int mla_fact_smem_bytes = 1024;
extern "C" __global__ void mla_copy(float* x) { x[0] = x[1]; }
"""


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Two kernels: `copy` for every target, `wrong` for sm_90a only."""
    root = tmp_path / "cuda_src" / "generic"
    root.mkdir(parents=True)
    (root / "copy.cu").write_text(SOURCE)
    (root / "wrong.cu").write_text("nonsense\n")
    monkeypatch.setenv("MLA_CUPY_CUDA_SRC", str(root.parent))
    monkeypatch.setenv("MLA_CUPY_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("CUBIN_DIR", "JIT", "NVRTC", "LINEINFO", "TMEM_CHECK"):
        monkeypatch.delenv(f"MLA_CUPY_{name}", raising=False)
    plain = (Variant(),)
    specs = {
        "copy": KernelSpec("copy", "generic/copy.cu", plain, plain, lambda arch: True, None),
        "wrong": KernelSpec("wrong", "generic/wrong.cu", plain, (), lambda arch: arch == "sm_90a", None),
    }
    monkeypatch.setattr(launchers, "SPECS", specs)
    kernels.forget()
    yield tmp_path
    kernels.forget()


def test_compile_prints_a_table_and_fills_the_cache(registry: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["compile", "--arch", "sm_90a,sm_75", "--kernels", "copy", "-j", "2"]
    assert cli.main(command) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(("kernel ", "copy "))]
    assert lines[0] == ["kernel", "variant", "target", "regs", "smem", "spills", "seconds", "state"]
    assert [line[:3] + line[4:6] + line[7:] for line in lines[1:]] == [
        ["copy", "plain", "sm_90a", "1024", "0", "compiled"],
        ["copy", "plain", "sm_75", "1024", "0", "compiled"],
    ]
    assert cache.usage()[0] == 2
    assert cli.main([*command, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["state"] for row in rows] == ["cached", "cached"]
    assert set(rows[0]) >= {"kernel", "variant", "target", "registers", "smem", "spills", "stack", "seconds"}


def test_a_failure_is_shown_and_is_the_exit_status(registry: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compile", "--arch", "sm_90a", "--json"]) == 1
    said = capsys.readouterr()
    assert {row["kernel"]: row["state"] for row in json.loads(said.out)} == {"copy": "compiled", "wrong": "failed"}
    assert "mla_wrong-plain-sm_90a does not compile" in said.err


def test_out_is_what_cubin_dir_takes(
    registry: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = registry / "images"
    assert cli.main(["compile", "--arch", "sm_90a", "--kernels", "copy", "--out", str(out)]) == 0
    assert f"MLA_CUPY_CUBIN_DIR={out}" in capsys.readouterr().out
    assert sorted(os.listdir(out / "mla_copy-plain-sm_90a")) == ["kernel.cubin", "kernel.ptx", "record.json"]
    assert cli.main(["clear-cache"]) == 0
    monkeypatch.setenv("MLA_CUPY_CUBIN_DIR", str(out))
    monkeypatch.setenv("MLA_CUPY_JIT", "off")
    monkeypatch.setattr(nvrtc, "_candidates", lambda: iter(()))
    (variant,) = launchers.SPECS["copy"].variants
    assert kernels.obtain(launchers.SPECS["copy"].request(variant, "sm_90a")).facts == {"smem_bytes": 1024}


def test_out_that_cannot_be_written_is_one_line(registry: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (registry / "file").write_text("")
    assert cli.main(["compile", "--arch", "sm_90a", "--kernels", "copy", "--out", str(registry / "file" / "x")]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("mla-cupy: ")


def test_list_tells_what_is_built(registry: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compile", "--arch", "sm_90a", "--kernels", "copy", "--json"]) == 0
    capsys.readouterr()
    assert cli.main(["list", "--arch", "sm_90a,sm_80", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["kernel"], row["target"], row["core"], row["built"]) for row in rows] == [
        ("copy", "sm_90a", True, True),
        ("wrong", "sm_90a", False, False),
        ("copy", "sm_80", True, False),
    ]
    assert cli.main(["list", "--arch", "sm_90a"]) == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["copy", "plain", "sm_90a", "generic/copy.cu", "yes", "yes"] in shown
    assert ["wrong", "plain", "sm_90a", "generic/wrong.cu", "no", "no"] in shown


def test_list_without_nvrtc(
    registry: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nvrtc, "_candidates", lambda: iter(()))
    assert cli.main(["list", "--arch", "sm_75", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["built"] == "unknown: no NVRTC"
    assert cli.main(["compile", "--arch", "sm_75"]) == 1
    assert "pip install" in capsys.readouterr().err


def test_clear_cache(registry: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["compile", "--arch", "sm_90a", "--kernels", "copy", "--json"])
    capsys.readouterr()
    assert cli.main(["clear-cache", "--json"]) == 0
    gone = json.loads(capsys.readouterr().out)
    assert gone["kernels"] == 1
    assert gone["bytes"] > 0
    assert cli.main(["clear-cache"]) == 0
    assert "Deleted 0 kernels" in capsys.readouterr().out


def test_info(registry: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["versions"]["mla_cupy"] == __version__
    assert len(facts["nvrtc"]["version"].split(".")) == 3
    assert Path(facts["nvrtc"]["path"]).is_file()
    assert facts["cache"]["directory"] == str(registry / "cache" / cache.LAYOUT)
    assert {row["name"]: row["value"] for row in facts["environment"]}["MLA_CUPY_CUDA_SRC"] == str(
        registry / "cuda_src"
    )
    monkeypatch.setattr(nvrtc, "_candidates", lambda: iter(()))
    assert cli.main(["info"]) == 0
    shown = capsys.readouterr().out
    assert "expected an installed libnvrtc" in shown
    assert "MLA_CUPY_CACHE_DIR" in shown


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        (["compile", "--kernels", "cpoy"], 2, "--kernels: got cpoy, expected all, or some of copy, wrong"),
        (["compile", "--arch", "sm_75", "--kernels", "wrong"], 2, "--arch: got sm_75"),
    ],
)
def test_wrong_names(
    registry: Path, capsys: pytest.CaptureFixture[str], command: list[str], status: int, said: str
) -> None:
    assert cli.main(command) == status
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], ["fly"], ["compile", "-j", "0"]])
def test_wrong_usage(command: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(command)
    assert caught.value.code == 2


@pytest.mark.parametrize("command", ["", "info", "compile", "list", "clear-cache", "demo", "bench"])
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"] if command else ["--help"])
    assert caught.value.code == 0
    assert "usage:" in capsys.readouterr().out


def test_demo_and_bench_are_handed_their_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Demo:
        @staticmethod
        def add_arguments(parser: object) -> None:
            parser.add_argument("--size", type=int)  # type: ignore[attr-defined]

        @staticmethod
        def run(options: object) -> int:
            seen.append(options.size)  # type: ignore[attr-defined]
            return 5

    monkeypatch.setattr(cli, "_demo_module", lambda: Demo)
    monkeypatch.setattr(cli, "_part", lambda *names: SimpleNamespace(main=lambda argv: seen.append(argv) or 6))
    assert cli.main(["demo", "--size", "3"]) == 5
    assert cli.main(["bench", "run", "decode", "--help"]) == 6
    assert seen == [3, ["run", "decode", "--help"]]


def test_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "mla_cupy", "--version"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == f"mla-cupy {__version__}"
