"""The page of instructions is current."""

from __future__ import annotations

from simtest.coverage import PAGE, page, sections


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(sections()), "run python -m simtest.coverage in ptxsim/tests"
