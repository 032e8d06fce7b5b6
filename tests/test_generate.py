"""Files written by the command are what it would write now; and a new file comes in by itself."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from mla_cupy.kernels import KERNELS
from mla_cupy.kernels.param_layout import NULL, values_of
from mla_cupy.kernels.params import Fp8ScaleAddresses, LseConvention
from tools.generate import LISTS, MADE_OF_RECORDS, params
from tools.generate.__main__ import ROOT, main
from tools.generate.files import outdated, with_block

READ = ("mla_cupy", "cuda_src", "bench", "ptxsim/ptxsim", "docs/reference", "tools", "ruff.toml")


def test_nothing_is_out_of_date() -> None:
    found = [path.relative_to(ROOT).as_posix() for path in outdated(ROOT, (*LISTS, *MADE_OF_RECORDS))]
    assert found == [], "run `python -m tools.generate`"


def test_without_ruff_the_command_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ruff.py").write_text("raise ImportError('No module named ruff')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert main(["--check"]) == 2
    (last,) = capsys.readouterr().err.splitlines()[-1:]
    assert last == "ruff: got ImportError: No module named ruff, expected success; pip install -e '.[test]'"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what is read."""
    for name in READ:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
        else:
            shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


OPERATION = '''"""An operation."""

from mla_cupy.ops.operation import Operation

OPERATION = Operation("novel_scale", inputs=())


def novel_scale() -> None: ...
'''


def test_new_files_are_listed(tree: Path) -> None:
    """A family with a kernel and a pipeline, an operation, its oracle: nine files list them."""
    family = tree / "mla_cupy" / "kernels" / "novel"
    family.mkdir()
    (family / "__init__.py").write_text('"""A family."""\n')
    (family / "scale.py").write_text('"""A kernel."""\n\nKERNEL = KernelSpec("novel_scale")\n')
    (family / "pipeline.py").write_text('"""A pipeline."""\n\nNOVEL = NovelPipeline()\n')
    (tree / "mla_cupy" / "ops" / "novel.py").write_text(OPERATION)
    (tree / "mla_cupy" / "reference" / "novel.py").write_text('"""An oracle."""\n\n\ndef novel_scale() -> None: ...\n')
    found = {path.relative_to(tree).as_posix(): text for path, text in outdated(tree, LISTS).items()}
    assert set(found) == {
        "docs/reference/jax.md",
        "docs/reference/torch.md",
        "mla_cupy/__init__.py",
        "mla_cupy/jax/__init__.py",
        "mla_cupy/kernels/__init__.py",
        "mla_cupy/kernels/novel/__init__.py",
        "mla_cupy/ops/__init__.py",
        "mla_cupy/reference/__init__.py",
        "mla_cupy/torch/__init__.py",
    }
    assert '"novel_scale": "ops",' in found["mla_cupy/__init__.py"]
    assert "scale.KERNEL,)" in found["mla_cupy/kernels/novel/__init__.py"]
    assert '    "KERNELS",\n    "NOVEL",\n' in found["mla_cupy/kernels/novel/__init__.py"]
    assert "    novel.OPERATION,\n" in found["mla_cupy/ops/__init__.py"]
    assert "from mla_cupy.reference.novel import novel_scale\n" in found["mla_cupy/reference/__init__.py"]
    assert "    novel_scale,\n" in found["mla_cupy/torch/__init__.py"]
    assert "\n   novel_scale\n" in found["docs/reference/jax.md"]


def test_the_bindings_follow_the_records(tree: Path) -> None:
    """A default and an option are found; a docstring is not copied."""
    source = tree / "mla_cupy" / "ops" / "merge.py"
    text = source.read_text()
    for before, after in (
        ("Partial outputs, each", "Outputs, each"),
        ('lse_base: str = "e"', 'lse_base: str = "2"'),
        ("    lse_base: str", "    turned: bool = False,\n    lse_base: str"),
    ):
        assert text.count(before) == 1
        text = text.replace(before, after)
    options = tree / "mla_cupy" / "kernels" / "merge" / "pipeline.py"
    fields = options.read_text()
    assert fields.count("    lse_base: str\n") == 1
    options.write_text(fields.replace("    lse_base: str\n", "    turned: bool\n    lse_base: str\n"))
    source.write_text(text)
    found = {path.relative_to(tree).as_posix(): text for path, text in outdated(tree, MADE_OF_RECORDS).items()}
    both = {f"mla_cupy/{library}/functions.py" for library in ("torch", "jax")}
    assert set(found) == {"mla_cupy/torch/operators.py", *both}
    for name in both:
        assert "Outputs, each normalised" not in found[name]
        assert '    turned: bool = False,\n    lse_base: str = "2",\n' in found[name]
        assert "options = (turned, lse_base, empty_lse, out_dtype)" in found[name]
    assert 'bool turned=False, str lse_base="2", float? empty_lse=None' in found["mla_cupy/torch/operators.py"]


def test_initialisers_are_defaults(tree: Path) -> None:
    """Defaults of numbers, addresses and strides; a member without one is required."""
    source = tree / "cuda_src" / KERNELS["merge_states"].source
    text = source.read_text()
    for before, after in (
        ("    float* lse; ", "    float* lse = nullptr; "),
        (
            "i64 out_stride_b_elems, out_stride_s_elems, out_stride_h_elems",
            "i64 out_stride_b_elems = 0, out_stride_s_elems = 8",
        ),
        ("float to_log2;", "float to_log2 = 1.f, half = 0.5f;"),
        ("i32 n, b,", "i32 n, b = 1,"),
    ):
        assert text.count(before) == 1
        text = text.replace(before, after)
    source.write_text(text)
    ((_, made),) = outdated(tree, [params.make]).items()
    (struct,) = re.findall(r"class MergeStatesParams.*?\n\n\n", made, re.DOTALL)
    assert "    lse: Address = NULL\n" in struct
    assert "    out_stride_b_s_elems: tuple[I64, I64] = (0, 8)\n" in struct
    assert "    to_log2: F32 = 1.0\n    half: F32 = 0.5\n" in struct
    assert "    n: I32\n    b: I32 = 1\n" in struct


def test_members_may_be_left_out_if_they_have_a_default() -> None:
    assert values_of(Fp8ScaleAddresses(kv_scales="a")) == [NULL, "a"]
    for given in ({}, {"factor": 1.0}, {"factor": 1.0, "empty": 0.0, "base": 2.0}):
        with pytest.raises(TypeError, match=r"LseConvention: missing or unknown: (base|empty)"):
            LseConvention(**given)


def test_a_block_that_is_not_there(tree: Path) -> None:
    with pytest.raises(ValueError, match="0 blocks 'packages'"):
        with_block("", "packages", "")
