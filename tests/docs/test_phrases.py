"""Phrases that a reader stumbles over, in pages and sources; and dates, which belong to bench/log and the changelog."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
TREES = ("docs", "cuda_src", "ptxsim", "examples", "tests")
PAGES = sorted(
    page
    for pages in (
        REPOSITORY.glob("*.md"),
        REPOSITORY.glob("bench/*.md"),
        *((REPOSITORY / x).rglob("*.md") for x in TREES),
    )
    for page in pages
    if "_generated" not in page.parts
)

PHRASES = (
    "that of",
    "those of",
    "of which",
    "whose",
    "so many",
    "as many",
    "what is there",
    "that is there",
    "what it has more",
    "once more",
    "of now",
    "of today",
    "it is said",
    "was asked",
    "plain kernel",
    "plain kernels",
    "of the caller's",
    "beside",
)
GOOD_IN_CODE = ("whose", "beside", "as many", "of the caller's")
"""Phrases that read well in docstrings and comments, such as "as many blocks as fit" and "of the caller's library"."""
SOURCES = ("mla_cupy", "bench", "tools", "ptxsim", "cuda_src")
SUFFIXES = frozenset((".py", ".cu", ".cuh"))


def _any_of(phrases: Iterable[str], gap: str) -> re.Pattern[str]:
    return re.compile(rf"\b(?:{'|'.join(phrases)})\b".replace(" ", gap), re.IGNORECASE)


STUMBLES = _any_of(PHRASES, r"\s+")
STUMBLES_IN_CODE = _any_of((x for x in PHRASES if x not in GOOD_IN_CODE), r"(?:[\s/\"']|#:?|\bf(?=[\"']))+")
"""Phrases in docstrings, comments and messages, also across lines: code has no two of these words in a row."""
DATE = re.compile(r"\b20\d\d-\d\d(?:-\d\d)?\b")

_FENCED = re.compile(r"^( *)(```+|~~~+).*?^\1\2$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
_TARGET = re.compile(r"\]\([^)]*\)")


def prose(text: str) -> str:
    """Blank out code and the targets of links, and keep the lines."""
    return _TARGET.sub("]", _CODE.sub("`", without_blocks(text)))


def without_blocks(text: str) -> str:
    """Blank out blocks of code, and keep the lines."""
    return _FENCED.sub(lambda block: "\n" * block[0].count("\n"), text)


def stumbles(text: str) -> list[str]:
    """List lines and phrases."""
    words = prose(text)
    found = [match for pattern in (STUMBLES, DATE) for match in pattern.finditer(words)]
    return [f"{words.count(chr(10), 0, match.start()) + 1}: {' '.join(match[0].split())}" for match in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_pages_have_no_stumbling_phrases(page: Path) -> None:
    assert stumbles(page.read_text()) == []


def stumbles_in_code(source: str) -> list[str]:
    return [f"{source.count(chr(10), 0, x.start()) + 1}: {x[0]!r}" for x in STUMBLES_IN_CODE.finditer(source)]


@pytest.mark.parametrize("tree", SOURCES)
def test_sources_have_no_stumbling_phrases(tree: str) -> None:
    """Docstrings, comments and messages repeat the noun and name the number."""
    found = []
    for path in sorted((REPOSITORY / tree).rglob("*")):
        if path.suffix in SUFFIXES:
            name = path.relative_to(REPOSITORY).as_posix()
            found += [f"{name}:{stumble}" for stumble in stumbles_in_code(path.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_pages_are_short(page: Path) -> None:
    """At most 200 lines without code; at most 120 characters in a line that is no row of a table."""
    lines = without_blocks(page.read_text()).splitlines()
    assert len([line for line in lines if line]) <= 200
    assert [line for line in lines if len(line) > 120 and not line.startswith("|")] == []


def test_stumbling_phrases_are_found() -> None:
    text = (
        "The scale of Q and that\nof K.\n```\nthat of\n```\n`once more`, [a](b-2026-11-27.md) on 2026-11-27: So many\n"
    )
    assert stumbles(text) == ["1: that of", "6: So many", "6: 2026-11-27"]


def test_stumbling_phrases_in_code_are_found() -> None:
    comments = "// The scale of Q and that\n// of K.\n#: once\n#: more\n"
    source = comments + 'raise E("there are so "\n    f"many")\nthat_of = those, of\n'
    assert [x.split(":")[0] for x in stumbles_in_code(source)] == ["1", "3", "5"]
