"""The command line, on the registry of `conftest.py`."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from mla_cupy import cli, kernels, terminal
from mla_cupy._version import __version__
from mla_cupy.runtime import cache, device, loader, nvrtc

REPOSITORY = Path(__file__).resolve().parents[2]


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
    assert sorted(os.listdir(out / "mla_copy-plain-sm_90a")) == ["info.json", "kernel.cubin", "kernel.ptx"]
    assert cli.main(["clear-cache"]) == 0
    monkeypatch.setenv("MLA_CUPY_CUBIN_DIR", str(out))
    monkeypatch.setenv("MLA_CUPY_JIT", "off")
    monkeypatch.setattr(nvrtc, "_candidates", lambda: iter(()))
    (variant,) = kernels.KERNELS["copy"].variants
    assert loader.obtain(kernels.KERNELS["copy"].request(variant, "sm_90a")).facts == {"smem_bytes": 1024}


@pytest.mark.parametrize(
    ("command", "builds"),
    [
        (["--arch", "sm_90a"], {"320", "288"}),
        (["--arch", "sm_80"], {"16", "32", "512", "320", "288"}),
        (["--arch", "sm_90a", "--kernels", "attention_mma_small"], {"16", "32", "512", "320", "288"}),
    ],
    ids=["hopper", "ampere", "named"],
)
def test_builds_that_never_run_by_default_are_compiled_where_they_are_named(
    command: list[str], builds: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Hopper runs this kernel for narrow values alone."""
    assert cli.main(["list", *command, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["variant"].split("-")[-1] for row in rows if row["kernel"] == "attention_mma_small"} == builds


@pytest.mark.parametrize(("arch", "sizes"), [("sm_80", {"99", "163"}), ("sm_89", {"99"}), ("sm_90a", {"99", "163"})])
def test_a_named_kernel_has_no_build_that_cannot_run(
    arch: str, sizes: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["list", "--arch", arch, "--kernels", "attention_mma", "--json"]) == 0
    assert {row["variant"].split("-")[1] for row in json.loads(capsys.readouterr().out)} == sizes


FULL = """
import resource, sys
from mla_cupy import cli, kernels
from mla_cupy.kernels.param_layout import Params
from mla_cupy.kernels.spec import KernelSpec, Variant
plain = (Variant(),)
kernels.KERNELS = {"copy": KernelSpec("copy", "copies a number", "copy.cu", Params, core=plain)}
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("json_too", [False, True])
def test_a_full_disk_is_said_and_is_the_exit_status(registry: Path, json_too: bool) -> None:
    """No file may have a byte. Both targets have the same cause, which is said once."""
    command = ["compile", "--arch", "sm_75,sm_80", *(["--json"] if json_too else [])]
    done = subprocess.run(
        [sys.executable, "-c", FULL, *command],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout.count("not kept") == 2
    assert done.stderr.count("expected room for the compiled kernels; set MLA_CUPY_CACHE_DIR") == 1
    assert "2 kernels: mla_copy-plain-sm_75, mla_copy-plain-sm_80" in done.stderr
    assert cache.usage()[0] == 0


def test_nothing_writable_is_said_and_is_the_exit_status(
    registry: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLA_CUPY_CACHE_DIR", "/proc/nowhere")
    monkeypatch.setattr(cache, "_temporary", lambda: None)
    command = ["compile", "--arch", "sm_75", "--kernels", "copy"]
    with pytest.warns(RuntimeWarning, match="kept in memory only"):
        assert cli.main(command) == 1
    said = capsys.readouterr()
    assert "not kept" in said.out
    assert "got no directory that can be written" in said.err
    assert cli.main([*command, "--out", str(registry / "images")]) == 0, "they are kept there"


def test_one_cause_is_said_once(
    registry: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nvrtc, "_candidates", lambda: iter(()))
    assert cli.main(["compile", "--arch", "sm_75,sm_80,sm_90a"]) == 1
    said = capsys.readouterr().err
    assert said.count("NVRTC: got none") == 1
    assert "4 kernels: mla_copy-plain-sm_75, " in said
    monkeypatch.undo()


def test_the_same_error_of_two_kernels_is_said_once(registry: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (registry / "cuda_src" / "copy.cu").write_text("nonsense\n")
    assert cli.main(["compile", "--arch", "sm_75,sm_80"]) == 1
    said = capsys.readouterr().err
    assert said.count("does not compile") == 1
    assert "mla-cupy: mla_copy-plain-sm_75 does not compile:\n" in said
    assert "2 kernels: mla_copy-plain-sm_75, mla_copy-plain-sm_80" in said


def test_out_that_cannot_be_written_is_one_line(registry: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (registry / "file").write_text("")
    assert cli.main(["compile", "--arch", "sm_90a", "--kernels", "copy", "--out", str(registry / "file" / "x")]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("mla-cupy: ")


def test_a_full_out_is_named(
    registry: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cache, "write", full)
    out = registry / "images"
    assert cli.main(["compile", "--arch", "sm_90a", "--kernels", "copy", "--out", str(out)]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"mla-cupy: --out {out}: got No space left on device, expected a writable directory")


def test_an_unknown_word_shows_the_usage_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("compile", "list", "info"):
        with pytest.raises(SystemExit) as end:
            cli.main([command, "bogus"])
        said = capsys.readouterr().err
        assert end.value.code == 2
        assert said.startswith(f"usage: mla-cupy {command} ")
        assert f"mla-cupy {command}: error: unrecognized arguments: bogus" in said


def test_sigterm_ends_the_compilers_too(tmp_path: Path) -> None:
    """They are gone when the command is; one that is just being started sees its pipe close, and ends at once."""
    command = [sys.executable, "-m", "mla_cupy", "compile", "--arch", "sm_90a", "--kernels", "decode_sm90_seesaw"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "MLA_CUPY_CACHE_DIR": str(tmp_path)}
    with subprocess.Popen([*command, "-j", "2"], env=environment, stdout=subprocess.DEVNULL) as parent:
        deadline = time.monotonic() + 60
        while not (compilers := children_of(parent.pid)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert compilers
        parent.terminate()
        assert parent.wait(30) == 128 + signal.SIGTERM
        deadline = time.monotonic() + 10
        while any(map(is_alive, compilers)) and time.monotonic() < deadline:
            time.sleep(0.02)  # one that was just being started sees its pipe close
        assert not [pid for pid in compilers if is_alive(pid)]


def is_alive(pid: int) -> bool:
    """True if the process runs; an ended one may wait for its new parent, which this test is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children_of(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(path.parent.name))
    return found


def test_progress_without_a_terminal_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also while one kernel takes long; the name is the longest-running kernel's."""
    monkeypatch.setattr(terminal, "FIRST_LINE_SECONDS", 0.02)
    monkeypatch.setattr(terminal, "LINE_SECONDS", 0.02)
    said = ""
    with terminal.progress("compiling", 3) as advance:
        for name in ("slow", "fast"):
            advance(name, False)
        advance("fast", True)
        deadline = time.monotonic() + 20
        while said.count("now slow") < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
            said += capsys.readouterr().err
        advance("slow", True)
    said += capsys.readouterr().err
    assert said.count("compiling: 1 of 3 done after 0 s, now slow\n") >= 2
    assert said.splitlines()[-1].startswith("compiling: 2 of 3 done after ")
    assert "now" not in said.splitlines()[-1]


def test_progress_of_little_work_and_quiet_progress_say_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with terminal.progress("compiling", 1) as advance:
        advance("kernel", True)
    monkeypatch.setattr(terminal, "FIRST_LINE_SECONDS", 0.0)
    with terminal.progress("compiling", 1, quiet=True) as advance:
        time.sleep(0.02)
        advance("kernel", True)
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "")


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
    assert ["copy", "plain", "sm_90a", "copy.cu", "yes", "yes"] in shown
    assert ["wrong", "plain", "sm_90a", "wrong.cu", "no", "no"] in shown


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
    assert facts["versions"].keys() >= {"torch", "triton", "jax", "vllm", "sglang"}
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


def test_info_without_nvrtc_promises_no_compiler(
    registry: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(device, "nvml_gpus", list)
    assert cli.main(["info"]) == 0
    assert "kernels can be compiled" in capsys.readouterr().out
    monkeypatch.setattr(nvrtc, "_candidates", lambda: iter(()))
    assert cli.main(["info"]) == 0
    said = capsys.readouterr().out
    assert "NVRTC: got none" in said
    assert "no kernel can be compiled: see NVRTC above" in said


def test_info_shows_text_as_it_is(
    registry: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Text that looks like markup, an emoji or a control sequence stays plain."""
    monkeypatch.setattr(nvrtc, "_candidates", lambda: iter(()))
    monkeypatch.setenv("MLA_CUPY_CUBIN_DIR", "[/x][bold]:smile:\x1b[31m\udcff")
    assert cli.main(["info"]) == 0
    shown = capsys.readouterr().out
    assert "[/x][bold]:smile:\\x1b[31m\\udcff" in shown
    assert '".[cu12]"' in shown


def test_info_names_what_is_wrong(
    registry: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLA_CUPY_JIT", "foo")
    monkeypatch.setenv("MLA_CUPY_CUBINDIR", "/x")
    assert cli.main(["info"]) == 0
    shown = capsys.readouterr().out
    assert "Problem: environment variable MLA_CUPY_JIT: got 'foo', expected one of import, lazy, off" in shown
    assert "got MLA_CUPY_CUBINDIR, expected MLA_CUPY_CUBIN_DIR" in shown


def test_targets_without_nvrtc(
    registry: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nvrtc, "_candidates", lambda: iter(()))
    assert cli.main(["list", "--arch", "sm_70"]) == 2
    assert "expected some of " + ", ".join(device.TARGETS) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        (["compile", "--arch", "foo"], 2, "--arch: got foo, expected some of sm_75, sm_80, "),
        (["compile", "--arch", "sm_70"], 2, "--arch: got sm_70, expected some of sm_75, sm_80, "),
        (["compile", "--arch", "sm_90"], 2, "--arch: got sm_90, expected some of sm_75, sm_80, "),
        (["compile", "--arch", ""], 2, "--arch: got nothing, expected some of sm_75, sm_80, "),
        (["compile", "--kernels", ""], 2, "--kernels: got nothing, expected all, or some of copy, wrong"),
        (["list", "--kernels", ", ,"], 2, "--kernels: got nothing, expected all, or some of copy, wrong"),
        (["compile", "--kernels", "cpoy"], 2, "--kernels: got cpoy, expected all, or some of copy, wrong"),
        (["compile", "--arch", "sm_75", "--kernels", "wrong"], 2, "--arch: got sm_75"),
    ],
)
def test_wrong_names(
    registry: Path, capsys: pytest.CaptureFixture[str], command: list[str], status: int, said: str
) -> None:
    assert cli.main(command) == status
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], ["fly"], *(["compile", "-j", jobs] for jobs in ("0", "x", "", "-1", "1.5"))])
def test_wrong_usage(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(command)
    assert caught.value.code == 2
    if "-j" in command:
        assert f"got {command[-1]!r}, expected an integer of at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", ["", "info", "compile", "list", "formats", "clear-cache", "demo", "engines", "bench"]
)
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"] if command else ["--help"])
    assert caught.value.code == 0
    assert "usage:" in capsys.readouterr().out


def test_formats(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["formats"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["v32", "rope", "bfloat16", "64", "0", "528", "656"] in lines
    assert cli.main(["formats", "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert described["v4"]["planes"] == [576, 8]
    assert described["v32"]["scale_rules"].keys() == {"power_of_2", "plain"}
    assert all(record["page_alignment"] == 16 for record in described.values())


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
