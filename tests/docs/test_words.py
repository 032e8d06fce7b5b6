"""Docstrings and CUDA comments say what a thing is or does: they begin with a noun or a verb."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDERS = ("mla_cupy", "bench", "docs", "examples", "ptxsim/ptxsim", "tools")

NO_NOUN_OR_VERB = re.compile(
    r"(?:What|Whether|Where|Who|Whose|Which|When|Why|How|The same|Those|That|As|Of|At|By|For|From|In|On|To|With)\b"
)
RIDDLES_OF_COMMENTS = re.compile(r"(?:What|Whether|Where|The same|That|As|Of|By|So many|None where)\b")
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


def comment_riddles(source: str) -> list[str]:
    """Riddles among the comments: the first lines of blocks, below a heading `// ----` too, and ends of code lines."""
    found, continued = [], False
    for number, line in enumerate(source.splitlines(), 1):
        code, slashes, text = line.partition("// ")
        whole = bool(slashes) and not code.strip()
        if slashes and not (whole and continued) and RIDDLES_OF_COMMENTS.match(text):
            found.append(f"{number}: {text}")
        continued = whole and not text.startswith("----")
    return found


def test_cuda_comments_begin_with_a_noun_or_a_verb() -> None:
    root, found = REPOSITORY / "cuda_src", []
    for path in sorted((*root.rglob("*.cu"), *root.rglob("*.cuh"))):
        name = path.relative_to(root).as_posix()
        found += [f"{name}:{riddle}" for riddle in comment_riddles(path.read_text())]
    assert not found, "\n".join(found)


def test_riddles_of_comments_are_found() -> None:
    source = "// ---- Load ----\n// By a warp.\n// A tile.\n// As it is.\nint a;  // of a\nint b;  // What is kept\n"
    assert comment_riddles(source) == ["2: By a warp.", "6: What is kept"]
