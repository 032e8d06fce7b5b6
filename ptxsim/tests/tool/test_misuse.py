"""Wrong command lines end in a line that says what is wrong, before the work where possible; never in a traceback."""

from __future__ import annotations

import argparse
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import ptxsim
from ptxsim.__main__ import main, parser
from ptxsim.tool.arguments import HELP
from ptxsim.tool.options import fitted
from simtest.single import HEADER

HOUSE = Path(__file__).resolve().parents[2]
SAXPY = HOUSE / "examples" / "saxpy.ptx"
WORDS = ("randn:f4:40", "zeros:f4:40", "float:2.5", "int:40", "--grid", "2")
CALLS = 200


def error_of(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """Run a command that fails, and return what it says."""
    assert main([str(word) for word in words]) == 1
    said = capsys.readouterr()
    assert said.err.startswith("error: ")
    assert "Traceback" not in said.err
    return said.err


def test_a_png_without_matplotlib_fails_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(ptxsim.Module, "launch", lambda *args, **options: pytest.fail("launched"))
    assert "extra `plot`" in error_of(capsys, "run", SAXPY, *WORDS, "--png", tmp_path / "t.png")


def test_a_file_that_cannot_be_written_is_said_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ptxsim.Module, "launch", lambda *args, **options: pytest.fail("launched"))
    for option in ("--json", "--trace", "--html", "--save"):
        for path in (tmp_path, tmp_path / "none" / "file", "x\0y"):
            said = error_of(capsys, "run", SAXPY, *WORDS, option, path)
            assert said.startswith(f"error: {option}: {str(path)!r}")


def test_a_full_disk_names_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    if Path("/dev/full").exists():
        assert error_of(capsys, "run", SAXPY, *WORDS, "--json", "/dev/full").startswith("error: --json: '/dev/full'")


def test_cuda_files_need_an_extra(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert "extra `cuda`" in error_of(capsys, "run", HOUSE / "examples" / "saxpy.cu", *WORDS)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("bogus:1", "unknown kind 'bogus', expected one of zeros, arange, randn, int, float, struct, data, map"),
        ("zeros:f4", "expected zeros:DTYPE:SHAPE"),
        ("zeros:f4:4x", "sizes '4x'"),
        ("zeros:O:4", "dtype 'O', expected a number's"),
        ("data:bogus:f4:4", "unknown kind of array 'bogus', expected one of zeros, arange, randn"),
        ("int:1.5", "got '1.5', expected a whole number"),
        ("struct:u8=@0", "array number '0', expected one of the 0 before"),
        ("map:0:8:128B", "array number '0'"),
    ],
)
def test_a_wrong_argument_is_explained(word: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in error_of(capsys, "run", SAXPY, word)


def test_the_first_example_of_the_readme_runs() -> None:
    """As it stands there, in a checkout."""
    text = (HOUSE / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.+?)```", text, re.DOTALL)[:1]
    code = f"import sys; sys.path.insert(0, {str(HOUSE)!r})\n{code}"
    done = subprocess.run([sys.executable, "-c", code], cwd=HOUSE.parent, capture_output=True, text=True, check=True)
    assert re.search(r"kernel saxpy: \d+ warp-instructions in \d+ basic blocks", done.stdout)
    (command,) = re.findall(r"`ptxsim (run ptxsim/examples/saxpy[^`]+)`", text)
    assert main(command.replace("ptxsim/examples/saxpy.ptx", str(SAXPY)).split()) == 0


def test_help_is_wrapped_and_lists_the_rules(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for command in ("check", "run", "mutate", "run-host", "replay"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        text = capsys.readouterr().out
        assert max(map(len, text.splitlines())) <= 80
        if command in ("run", "mutate"):
            assert HELP.splitlines()[1] in text
            assert re.search(r"options:\n  -h.*\n  --mode", text)
            joined = " ".join(text.split())
            assert all(f"{name} {meaning}" in joined for name, meaning in ptxsim.RULES.items())


def test_every_option_has_help() -> None:
    main_parser = parser("ptxsim")
    (commands,) = (each for each in main_parser._actions if isinstance(each, argparse._SubParsersAction))
    for name, command in commands.choices.items():
        assert [each.dest for each in command._actions if not each.help] == [], name


@pytest.mark.parametrize("at", [0, 2, 4])
def test_options_stand_anywhere(at: int, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*WORDS[:at], "--grid", "2", "--mode", "late", *WORDS[at:4]]
    assert main(["run", str(SAXPY), *words]) == 0
    assert "kernel saxpy" in capsys.readouterr().out


def test_a_closed_pipe_ends_quietly() -> None:
    code = f"import sys; from ptxsim.__main__ import main; sys.exit(main(['run', {str(SAXPY)!r}, *{WORDS!r}]))"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], cwd=HOUSE, **pipes) as run:
        run.stdout.close()
        said = run.stderr.read()
    assert (run.returncode, said) == (141, b"")


def test_long_lines_are_wrapped_on_a_terminal() -> None:
    terminal = SimpleNamespace(isatty=lambda: True)
    text = fitted("short\n  " + "word " * 40 + "\n" + "x" * 90, terminal).splitlines()
    assert text[0] == "short"
    assert max(map(len, text[1:-1])) <= 80
    assert text[2].startswith("      word")
    assert text[-1] == "x" * 90


def test_only_public_names_are_listed() -> None:
    assert dir(ptxsim) == sorted(ptxsim.__all__)


# ---- Any command line ----------------------------------------------------------------------------------------------

_WORDS = (
    *("bogus:1", "zeros", "zeros:", "zeros:i4", "zeros:i4:", "zeros:i4:0", "zeros:i4:-1", "zeros:i4:4x", "zeros:O:4"),
    *("zeros:U4:4", "zeros:V0:4", "zeros:f2:32:3", "zeros:i4:99999999999999", "randn:bf16:32", "randn:c8:4"),
    *("arange:e4m3:8x8", "arange:?:4", "ok.npy", "object.npy", "text.npy", "none.npy", "int:", "int", "int:1.5"),
    *("int:-1", "int:99999999999999999999999", "float:", "float:nan", "float:x", "struct:", "struct:u4", "struct:u4=1"),
    *("struct:u4=@0", "struct:u8=@-1", "struct:u8=@x", "struct:zz=1", "struct:f4=x", "struct:u1=300", "data:"),
    *("data:zeros", "data:zeros:i4:4", "map:0:8:128B", "map:0:8", "map:-1:8:none", "map:0:axb:none", "map:0:0:none"),
    *("map:0:8:bogus", ":", "::", "", "x=y", " ", "\u00e9", "\0", "\n"),
)
_OPTIONS = {
    "--grid": ("8", "1x1x1", "0", "-1", "1x1x1x1", "", "a", "2147483648", "99999999999"),
    "--block": ("1", "1024", "1025", "0", "1x1x65", "x"),
    "--cluster": ("1", "2", "17", "0", "", "a"),
    "--smem": ("1024", "-1", "999999999", "x"),
    "--seed": ("-1", "9999999999999999999999", "x"),
    "--elect": ("random", "x"),
    "--resident": ("9", "0", "-1", "x"),
    "--jobs": ("0", "-1", "x"),
    "--max-steps": ("1", "0", "-1", "x"),
    "--kernel": ("saxpy", "none", "", "\0"),
    "--mode": ("late", "random", "x"),
    "--allow": ("poison", "bogus"),
    "--watch": ("4", "99999999", "-1", "x"),
    "--json": ("out", "", "\0", "none/out"),
    "--save": ("out", "", "\0", "none/out"),
}
_FLAGS = ("--race-global", "--race-lanes", "--lenient", "--no-check", "--keep-going", "--coverage", "--banks")
_OTHERS = (
    *(["replay"], ["replay", "none"], ["replay", "launch"], ["replay", ".", "--close", "x"]),
    *(["run-host"], ["run-host", "none"], ["run-host", "--sms", "0"], ["check", "none.ptx"], ["bogus"], []),
)


@pytest.fixture(name="place")
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with files of every kind, that is the working one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.ptx").write_text(HEADER)
    (tmp_path / "binary.ptx").write_bytes(bytes(range(128, 256)))
    (tmp_path / "directory.ptx").mkdir()
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "launch.json").write_text("{")
    (tmp_path / "text.npy").write_text("x")
    np.save(tmp_path / "ok.npy", np.zeros(32, np.float32))
    np.save(tmp_path / "object.npy", np.array([{}], object), allow_pickle=True)
    return tmp_path


def commands(rng: random.Random) -> Iterator[list[str]]:
    """Yield command lines, most of them wrong in one or two places."""
    files = [str(SAXPY)] * 9 + ["empty.ptx", "binary.ptx", "directory.ptx", "none.ptx"]
    while True:
        if rng.random() < 0.1:
            yield rng.choice(_OTHERS)
            continue
        words = list(WORDS[:4])
        for _ in range(rng.choice((0, 0, 1, 2))):
            words[rng.randrange(len(words))] = rng.choice(_WORDS)
        options = [
            word for name in rng.sample(list(_OPTIONS), rng.randrange(3)) for word in (name, rng.choice(_OPTIONS[name]))
        ]
        yield [
            "run",
            rng.choice(files),
            *words[: rng.choice((4, 4, 4, 3))],
            *options,
            *rng.sample(_FLAGS, rng.randrange(2)),
        ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))])
def test_any_command_line_ends_well(seed: int, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With status 0, or with 1 or 2 and a reason."""
    statuses = []
    for _, words in zip(range(CALLS), commands(random.Random(seed)), strict=False):
        try:
            status = main(words)
        except SystemExit as end:
            status = end.code
        said = capsys.readouterr()
        statuses.append(status)
        assert status in (0, 1, 2), words
        assert status == 0 or said.err or "error:" in said.out, words
        assert "Traceback" not in said.err, words
    assert set(statuses) == {0, 1, 2}
