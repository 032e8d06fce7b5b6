"""Phrases that a reader stumbles over, and dates, which belong to bench/log and the changelog."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDERS = ("docs", "docs/guides", "docs/project", "docs/reference", "docs/tutorials")
NOT_YET = ("context-parallelism.md", "dsa-from-dense.md")
PAGES = sorted(
    page for folder in (".", *FOLDERS) for page in (REPOSITORY / folder).glob("*.md") if page.name not in NOT_YET
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
STUMBLES = re.compile(rf"\b(?:{'|'.join(PHRASES)})\b".replace(" ", r"\s+"), re.IGNORECASE)
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
