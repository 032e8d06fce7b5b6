"""README.md says what the code does: commands, variables, kernels."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import mla_cupy
from mla_cupy import cli
from mla_cupy.launchers import SPECS
from mla_cupy.runtime import env

REPOSITORY = Path(__file__).resolve().parents[1]
TEXT = (REPOSITORY / "README.md").read_text()
PAGES = [REPOSITORY / name for name in ("README.md", "CHANGELOG.md", "bench/README.md", "examples/README.md")] + sorted(
    (REPOSITORY / "cuda_src").rglob("*.md")
)


def first_cells(heading: str) -> list[str]:
    """The code in the first column of the table under a heading."""
    _, _, section = TEXT.partition(f"\n## {heading}\n")
    assert section, f"no section {heading!r}"
    return re.findall(r"^\| `([^`]+)`", section.partition("\n## ")[0], re.MULTILINE)


def test_environment_variables() -> None:
    assert sorted(first_cells("Environment variables")) == sorted(v.full_name for v in env.VARIABLES.values())


def test_kernels() -> None:
    assert sorted(first_cells("Kernels")) == sorted(SPECS)


def test_errors() -> None:
    listed = first_cells("Errors")
    assert sorted(listed) == sorted(name for name in mla_cupy.__all__ if name.endswith("Error"))


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    commands = re.findall(r"^    ([a-z][a-z-]*)\b", capsys.readouterr().out.partition("COMMAND\n")[2], re.MULTILINE)
    assert {cell.removeprefix("mla-cupy ").split()[0] for cell in first_cells("Command line")} == set(commands)


@pytest.mark.parametrize("name", ["mla_decode", "plan_decode", "merge_states"])
def test_signatures(name: str) -> None:
    """The signature that the README shows has the function's parameters, in order, with its defaults."""
    shown = re.findall(rf"^{name}\((.*?)\)$", TEXT, re.MULTILINE | re.DOTALL)
    assert len(shown) == 1
    parameters = inspect.signature(getattr(mla_cupy, name)).parameters.values()
    names = [part.partition("=")[0].strip() for part in shown[0].replace("\n", " ").split(",")]
    assert [part for part in names if part != "*"] == [parameter.name for parameter in parameters]
    defaults = dict(part.strip().split("=") for part in shown[0].replace("\n", " ").split(",") if "=" in part)
    assert {key: value.strip('"') for key, value in defaults.items()} == {
        parameter.name: str(parameter.default)
        for parameter in parameters
        if parameter.default is not inspect.Parameter.empty
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_links(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    broken = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert broken == []
