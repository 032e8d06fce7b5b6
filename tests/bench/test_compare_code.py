"""`bench compare-code`: which builds count as identical, renamed or different."""

from __future__ import annotations

import pytest

from bench.cli import main
from bench.trees.code import Code, compare, read
from mla_cupy.kernels import KERNELS
from mla_cupy.runtime import elf
from tools import budgets

A, B, C = Code((b"a" * 32,), 40), Code((b"b" * 32,), 40), Code((b"a" * 32,), 48)


def target(kernel, arch="sm_90a"):
    return budgets.Target(12, kernel, KERNELS[kernel].variants[0], arch)


def write(folder, **cubins):
    folder.mkdir()
    for name, made in cubins.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "kernel.cubin").write_bytes(made.cubin)
    return str(folder)


@pytest.fixture(scope="module")
def two_builds():
    if not budgets.library(12):
        pytest.skip("no NVRTC wheel of CUDA 12")
    return budgets.build(target("cache_update")), budgets.build(target("cache_copy_pages"))


def test_each_build_is_found_once():
    old = {"same": A, "code": A, "registers": A, "old_name": B, "gone": C}
    new = {"same": A, "code": B, "registers": C, "new_name": B, "added": A}
    found = compare(old, new)
    assert found.identical == ["same"]
    assert found.different == ["code", "registers"]
    assert found.renamed == [("old_name", "new_name")]
    assert (found.only_old, found.only_new) == (["gone"], ["added"])


def test_two_old_builds_are_not_one_renamed_build():
    found = compare({"a": A, "b": A}, {"c": A})
    assert (found.renamed, found.only_old, found.only_new) == ([("a", "c")], ["b"], [])


def test_a_cubin_is_read_as_it_was_built(two_builds, tmp_path):
    made, _ = two_builds
    write(tmp_path / "old", update=made)
    code = read(tmp_path / "old")["update"]
    assert code.registers == made.info["registers"]
    assert [entry.name for entry in elf.entries(made.cubin)] == [made.entry]
    assert code.instructions > 50
    assert all(part in made.cubin for part in code.parts)


def test_the_command_counts_and_names_builds(two_builds, tmp_path, capsys):
    first, second = two_builds
    old = write(tmp_path / "old", same=first, old_name=second, changed=first)
    assert main(["compare-code", old, old]) == 0
    assert "3 identical, 0 renamed, 0 different" in capsys.readouterr().out
    new = write(tmp_path / "new", same=first, new_name=second, changed=second)
    assert main(["compare-code", old, new]) == 1
    shown = capsys.readouterr().out
    assert "differs  changed: " in shown
    assert "renamed  old_name -> new_name" in shown
    assert "1 identical, 1 renamed, 1 different, 0 only in old, 0 only in new" in shown


def test_what_cannot_be_compared_is_said(tmp_path, capsys):
    assert main(["compare-code", str(tmp_path), str(tmp_path)]) == 2
    assert "no build in it" in capsys.readouterr().err
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "kernel.cubin").write_text("no cubin")
    assert main(["compare-code", str(tmp_path), str(tmp_path)]) == 2
    assert "expected a cubin" in capsys.readouterr().err
