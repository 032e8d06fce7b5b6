"""Docstrings say what a thing is or does: they begin with a noun or a verb."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDERS = ("mla_cupy", "bench", "docs", "examples", "ptxsim/ptxsim")

NO_NOUN_OR_VERB = re.compile(
    r"(?:What|Whether|Where|Who|Whose|Which|When|Why|How|The same|Those|That|As|Of|At|By|For|From|In|On|To|With)\b"
)
NAMED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Lines and texts of modules, classes and functions, and below a name's assignment."""
    for node in ast.walk(tree):
        if not isinstance(node, NAMED):
            continue
        for before, statement in zip([None, *node.body], node.body, strict=False):
            if before is None or isinstance(before, (ast.Assign, ast.AnnAssign)):
                match statement:
                    case ast.Expr(ast.Constant(str() as text)):
                        yield statement.lineno, text.strip()


def riddles(source: str) -> list[str]:
    return [f"{line}: {text.splitlines()[0]}" for line, text in docstrings(ast.parse(source)) if is_riddle(text)]


def is_riddle(text: str) -> bool:
    return NO_NOUN_OR_VERB.match(text) is not None


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_begin_with_a_noun_or_a_verb(folder: str) -> None:
    found = []
    for path in sorted((REPOSITORY / folder).rglob("*.py")):
        name = path.relative_to(REPOSITORY).as_posix()
        found += [f"{name}:{riddle}" for riddle in riddles(path.read_text())]
    assert not found, "\n".join(found)


def test_riddles_are_found() -> None:
    names = '"""Module."""\nA = 1\n"""Of a."""\ndef f():\n    """Whether."""\n'
    source = names + 'class C:\n    """Asset."""\n    b = 1\n    "The same"\n'
    assert sorted(riddles(source)) == ["3: Of a.", "5: Whether.", "9: The same"]
