"""The command `mla-cupy export`: what it refuses, and what it says."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from mla_cupy import cli
from mla_cupy.export import command
from mla_cupy.export.operations import OPERATIONS
from tests.export import modules

DECODE = ("--op", "decode", "--h-q", "16", "--page-size", "64")
WRONG = {
    ("--op", "sparse_mla_backward"): "--op: got sparse_mla_backward, expected one of decode, ",
    ("--op", "decode", "--h-q", "16"): "--page-size: got nothing, expected a value",
    ("--op", "merge_states", "--h-q", "16", "--topk", "5"): "--topk: got 5, expected only the options of merge_states",
    (*DECODE, "--with", "seqlens"): "--with: got seqlens, expected one of q_rope, ",
    (*DECODE, "--with", "gate"): "gate: got an array, expected None without a w_uv",
    (*DECODE, "--d-head", "128"): "--d-head: got 128, expected none without --with w_uv",
    (*DECODE, "--d-head", "99", "--with", "w_uv"): "--d-head: got 99, expected one of ",
    (*DECODE, "--math", "fp8"): "math: got 'fp8', expected \"exact\" for 16-bit rows",
    (*DECODE, "--math", "fp8x3"): "--math: got 'fp8x3', expected one of exact, fp8, fp8x2",
    (*DECODE, "--math", "fp8x2"): "math: got 'fp8x2', expected \"exact\" for 16-bit rows",
    (*DECODE, "--dtype", "float8_e4m3fn"): "--dtype: got 'float8_e4m3fn', expected one of bfloat16, float16",
    (*DECODE, "--window", "64", "--with", "tree_mask"): "window: got 64, expected None with a tree_mask",
    (
        "--op",
        "mla_prepare",
        "--h-q",
        "16",
        "--page-size",
        "64",
    ): "--page-size: got 64, expected a value with --kv-",
    ("--op", "mla_prepare", "--h-q", "16", "--d-qk", "100"): "--d-qk: got 100, expected one of 576, ",
    ("--op", "mla_prepare", "--h-q", "16", "--with", "cos"): "sin: got None, expected an array",
    (*DECODE, "--dtype", "int8"): "--dtype: got 'int8', expected one of bfloat16, float16",
    (*DECODE, "--kv-format", "v9"): "--kv-format: got 'v9', expected one of v32, v4, fp8",
    (*DECODE, "--prefix", "9-"): "--prefix: got '9-', expected lower-case letters",
    (*DECODE, "--arch", "sm_1"): "--arch: got sm_1, expected some of ",
    ("--op", "prefill", "--h-q", "16", "--d-qk", "100"): "--d-qk: got 100, expected one of ",
    ("--op", "decode", "--h-q", "0", "--page-size", "64"): "q.shape[2]: got h_q=0, expected at least 1",
    ("--op", "prefill", "--h-q", "16", "--h-kv", "3"): "q.shape[1]: got 16, expected a multiple of h_kv=3",
    (*DECODE, "--h-kv", "2"): "--h-kv",
    ("--op", "decode", "--h-q", "16", "--page-size", "64", "--d-qk", "99"): "expected 576 or 512",
}


@pytest.mark.parametrize("arguments", WRONG)
def test_wrong_usage(arguments: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The status is 2, nothing is written, and what was wrong is said."""
    more = () if "--arch" in arguments else ("--arch", "sm_90a")
    assert cli.main(["export", *arguments, *more, "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert WRONG[arguments] in said
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    arguments = ["--op", "merge_states", "--h-q", "16", "--arch", "sm_90a", "--out", str(tmp_path / "file")]
    assert cli.main(["export", *arguments]) == 1
    assert "expected a writable directory with free space" in capsys.readouterr().err


MERGE = modules.merge()
FILES = ("mla_merge_states.h", "mla_merge_states.c", "mla_merge_states_images.c", "mla_merge_states.json")


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "out"
    elsewhere.write_text("mine")
    folder.mkdir()
    (folder / FILES[0]).symlink_to(elsewhere)
    command.write(MERGE, folder)
    assert elsewhere.read_text() == "mine"
    assert not (folder / FILES[0]).is_symlink()
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)


@pytest.mark.parametrize("name", FILES)
def test_all_files_are_written_or_none(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(IsADirectoryError):
        command.write(MERGE, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_full_disk_leaves_the_files_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, write = command.write(MERGE, tmp_path), Path.write_text

    def failing(path: Path, text: str) -> int:
        if path.name.startswith(f".{FILES[1]}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, "new")

    before = [path.read_bytes() for path in paths]
    monkeypatch.setattr(Path, "write_text", failing)
    with pytest.raises(OSError, match="No space"):
        command.write(MERGE, tmp_path)
    assert [path.read_bytes() for path in paths] == before
    assert len([*tmp_path.iterdir()]) == len(FILES)


@pytest.mark.parametrize("arguments", [("compile",), ("export", *DECODE), ("selftest", "--json"), ("demo", "--html")])
def test_an_empty_path_is_no_path(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    option = () if arguments[-1].startswith("--") else ("--out",)
    with pytest.raises(SystemExit) as error:
        cli.main([*arguments, *option, ""])
    assert error.value.code == 2
    assert "got '', expected a path; name a file or directory" in capsys.readouterr().err


def test_the_guide_has_every_operation() -> None:
    guide = (Path(__file__).resolve().parents[2] / "docs" / "guides" / "c.md").read_text()
    for name, operation in OPERATIONS.items():
        row = next(line for line in guide.splitlines() if line.startswith(f"| `{name}` |"))
        spelled = ["--" + option.replace("_", "-") for option in operation.options]
        required = ["--" + option.replace("_", "-") for option in operation.required]
        given, _, optional = row.split("|")[3].partition(";")
        assert [x.strip(" `,") for x in given.split(",")] == required
        assert sorted([*required, *(x.strip(" `,") for x in optional.split(",") if x.strip())]) == sorted(spelled)
