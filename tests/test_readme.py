"""README.md and the pages of the documentation say what the code does: figures, commands, variables, errors, links."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import mla_cupy
from mla_cupy import cli
from mla_cupy.runtime import env

REPOSITORY = Path(__file__).resolve().parents[1]
README = REPOSITORY / "README.md"
MAX_README_LINES = 120
REFERENCE = REPOSITORY / "docs" / "reference"
PAGES = [
    *(REPOSITORY / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "bench/README.md")),
    *(
        page
        for folder in ("bench/log", "cuda_src", "docs", "examples")
        for page in sorted((REPOSITORY / folder).rglob("*.md"))
    ),
]
PEERS = {"FlashMLA": "flashmla", "FA3": "fa3", "cudnn-frontend": "cudnn"}


def first_cells(page: str) -> list[str]:
    """The code in the first column of the tables of a page."""
    return re.findall(r"^\| `([^`]+)`", (REFERENCE / page).read_text(), re.MULTILINE)


def test_environment_variables() -> None:
    assert sorted(first_cells("environment.md")) == sorted(v.full_name for v in env.VARIABLES.values())


def test_errors() -> None:
    listed = first_cells("errors.md")
    assert sorted(listed) == sorted(name for name in mla_cupy.__all__ if name.endswith("Error"))


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    commands = re.findall(r"^    ([a-z][a-z-]*)\b", capsys.readouterr().out.partition("COMMAND\n")[2], re.MULTILINE)
    listed = {cell.removeprefix("mla-cupy ").split()[0] for cell in first_cells("command-line.md")}
    assert listed == set(commands)


def test_every_public_name_is_in_the_reference() -> None:
    text = "".join(page.read_text() for page in REFERENCE.glob("*.md"))
    assert [name for name in mla_cupy.__all__ if name not in text and not name.startswith("__")] == []


def test_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= MAX_README_LINES


def measured() -> dict[tuple[str, str], float]:
    """Microseconds of the kept runs that the README shows, by case and implementation."""
    rows = [
        json.loads(line)
        for name in (
            "decode-h200-2026-11-23",
            "sparse-h200-2026-11-22",
            "sparse-backward-h200-2026-11-23",
            "sparse-decode-h200-2026-11-23",
        )
        for line in (REPOSITORY / "bench" / "results" / f"{name}.jsonl").read_text().splitlines()
    ]
    operations = {
        "mla_decode": "decode",
        "sparse_mla_decode": "sparse decode, FP8",
        "sparse_mla_forward": "sparse forward",
        "sparse_mla_backward": "sparse backward",
    }
    return {
        (f"{operations[row['op']]} {row['case']}", row["implementation"]): row["timing"]["us_median"]
        for row in rows
        if row["timing"]
    }


def shown() -> Iterator[tuple[str, str, str]]:
    """(case, implementation, figure) of the README's table of speed."""
    header, *lines = re.findall(
        r"^\| .*$", README.read_text().partition("\n## Speed\n")[2].partition("\n## ")[0], re.MULTILINE
    )
    columns = [cell.strip() for cell in header.strip("|").split("|")][2:]
    for line in lines:
        operation, case, *figures = (cell.strip() for cell in line.strip("|").split("|"))
        for column, figure in zip(columns, figures, strict=True):
            if figure:
                yield f"{operation} {case.strip('`')}", PEERS.get(column, column), figure


def test_figures_are_those_of_the_kept_results() -> None:
    times = measured()
    figures = list(shown())
    assert len(figures) >= 20
    for case, implementation, figure in figures:
        ours = times[case, "mla_cupy"]
        exact = {
            f"{ours:.1f} us",
            f"{ours / 1000:.2f} ms",
            f"{times[case, implementation] / ours:.2f}x",
        }
        assert figure in exact


def test_the_mean_of_decode() -> None:
    """Speed over the better of both peers, as a geometric mean."""
    times = measured()
    cases = [case for case, implementation in times if implementation == "mla_cupy" and case.startswith("decode ")]
    ratios = [min(times[case, peer] for peer in ("flashmla", "fa3")) / times[case, "mla_cupy"] for case in cases]
    mean = math.prod(ratios) ** (1 / len(ratios))
    text = " ".join(README.read_text().split())
    assert f"{mean:.2f}x as fast as the better of FlashMLA and FlashAttention-3" in text
    assert f"geometric mean of the {len(ratios)} shapes above" in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_links(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    broken = [
        link
        for link in links
        if "://" not in link and not link.startswith("_generated/") and not (page.parent / link).exists()
    ]
    assert broken == []
