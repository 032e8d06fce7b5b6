"""Includes are found, and decide the digest."""

from __future__ import annotations

from pathlib import Path

import pytest

from mla_cupy.errors import ArgumentError, KernelCompileError
from mla_cupy.runtime import env, sources


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_cu", ".cu")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_gather_follows_includes_once(tmp_path: Path) -> None:
    write(
        tmp_path,
        k__main_cu='#include "c/a.cuh"\n  #  include "c/b.cuh" // why\nint x;\n',
        c__a_cuh='#include "c/b.cuh"\r\n',
        c__b_cuh='#include "c/a.cuh"\n',
        c__unused_cuh="",
    )
    files = sources.gather("k/main.cu", tmp_path)
    assert sorted(files) == ["c/a.cuh", "c/b.cuh", "k/main.cu"]
    assert next(iter(files)) == "k/main.cu"
    assert files["c/b.cuh"] == b'#include "c/a.cuh"\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("#include <cuda_bf16.h>\n", "<cuda_bf16.h>"),
        ("#include MACRO\n", "MACRO"),
        ('#include "../b.cuh"\n', "'../b.cuh'"),
        ('#include "/etc/passwd"\n', "'/etc/passwd'"),
        ('#include "./b.cuh"\n', "'./b.cuh'"),
        ('#include "c/none.cuh"\n', "No such file"),
    ],
)
def test_other_includes_are_errors_that_name_the_file(tmp_path: Path, text: str, said: str) -> None:
    write(tmp_path, k__main_cu=text)
    with pytest.raises(KernelCompileError, match=r"k/main\.cu") as caught:
        sources.gather("k/main.cu", tmp_path)
    assert said in str(caught.value)


def test_digest_depends_on_reachable_bytes_only(tmp_path: Path) -> None:
    write(tmp_path, k__main_cu='#include "c/a.cuh"\n', c__a_cuh="int a;\n", c__other_cuh="1")
    before = sources.digest(sources.gather("k/main.cu", tmp_path))
    write(tmp_path, c__other_cuh="2")
    assert sources.digest(sources.gather("k/main.cu", tmp_path)) == before
    write(tmp_path, c__a_cuh="int b;\n")
    assert sources.digest(sources.gather("k/main.cu", tmp_path)) != before


def test_digest_ignores_order_and_tells_names_from_bytes() -> None:
    assert sources.digest({"a": b"1", "b": b"2"}) == sources.digest({"b": b"2", "a": b"1"})
    assert sources.digest({"a": b"1", "b": b"2"}) != sources.digest({"a": b"2", "b": b"1"})
    assert sources.digest({"a": b"1b"}) != sources.digest({"a1": b"b"})


def test_root_is_the_variable_or_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_CUDA_SRC", str(tmp_path))
    assert sources.source_root() == tmp_path
    monkeypatch.setenv("MLA_CUPY_CUDA_SRC", str(tmp_path / "none"))
    with pytest.raises(KernelCompileError, match="MLA_CUPY_CUDA_SRC"):
        sources.source_root()
    monkeypatch.delenv("MLA_CUPY_CUDA_SRC")
    assert (sources.source_root() / "common").is_dir()


def test_a_variable_with_a_wrong_value_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_JIT", "sometimes")
    with pytest.raises(ArgumentError, match=r"MLA_CUPY_JIT.*'sometimes'.*import, lazy, off"):
        env.get("JIT")
    monkeypatch.setenv("MLA_CUPY_JIT", "")
    assert env.get("JIT") == "import"
