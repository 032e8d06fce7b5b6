"""Follow renames in the kernels' sources: `python -m tests.reanchor` says which planted bugs have lost their text.

A bug is planted by replacing a text (`tests.support.mutants`). Where that text is no longer in its file, this looks for
it in another one, and compares the file with what git has of it: if the lines differ by names only, the bug gets the
new names. With `--write` the tests are edited; what cannot be followed is listed for the author. Steps that are left
out of a compiled kernel have no text: the test that plants them says when the kernel has other steps.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tests.support import mutants
from tests.support.mutants import Mutant

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "cuda_src"
_TOKEN = re.compile(r"[A-Za-z_]\w*|\s+|.", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*")


class Anchored(NamedTuple):
    """A planted bug where it has gone."""

    file: str
    old: str
    new: str


def known() -> list[tuple[Path, Mutant]]:
    """Every planted bug of the tests, and the test that has it."""
    texts = {path: path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py"))}
    texts = {path: text for path, text in texts.items() if "Mutant(" in text}
    for path in texts:
        importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    return [
        (path, mutant)
        for mutant in mutants.KNOWN
        for path in [next((path for path, text in texts.items() if f'"{mutant.name}"' in text), None)]
        if path is not None
    ]


def lost() -> list[tuple[Path, Mutant]]:
    """Those whose text is not in their file."""
    texts = {str(path.relative_to(SOURCES)): path.read_text() for path in SOURCES.rglob("*.cu*")}
    return [
        (path, mutant)
        for path, mutant in known()
        if isinstance(mutant.old, str) and mutant.old not in texts.get(mutant.file, "")
    ]


def find(mutant: Mutant) -> Anchored | None:
    """Where the bug's text is now; None if that cannot be told."""
    if isinstance(mutant.old, mutants.Steps):
        return None
    texts = {str(path.relative_to(SOURCES)): path.read_text() for path in sorted(SOURCES.rglob("*.cu*"))}
    moved = [file for file, text in texts.items() if mutant.old in text]
    if len(moved) == 1:
        return Anchored(moved[0], mutant.old, mutant.new)
    before = last_text(mutant)
    if moved or before is None or mutant.file not in texts:
        return None
    renamed = follow(before, texts[mutant.file], mutant.old, mutant.new)
    return renamed and Anchored(mutant.file, *renamed)


def last_text(mutant: Mutant) -> str | None:
    """The bug's file in the newest commit that has its text in it."""
    if isinstance(mutant.old, mutants.Steps):
        return None
    path = f"cuda_src/{mutant.file}"
    commits = _git("log", "--format=%H", "-S", mutant.old, "--", path).split()
    for commit in ("HEAD", *(f"{commit}^" for commit in commits)):
        text = _git("show", f"{commit}:{path}")
        if mutant.old in text:
            return text
    return None


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


def follow(before: str, after: str, old: str, new: str) -> tuple[str, str] | None:
    """`old` and `new` with the names that the lines of `old` have got; None if more than names has changed."""
    start = before.index(old)
    first, last = before.count("\n", 0, start), before.count("\n", 0, start + len(old))
    was, now = before.splitlines(), after.splitlines()
    names: dict[str, str] = {}
    for line, other in _paired(was, now).items():
        if first <= line <= last and not _add_names(names, was[line], now[other]):
            return None
    found = _with_names(old, names), _with_names(new, names)
    return found if found[0] in after else None


def _paired(was: list[str], now: list[str]) -> dict[int, int]:
    """Lines that are each other's, or may be: by number."""
    pairs: dict[int, int] = {}
    for kind, a, a_end, b, b_end in difflib.SequenceMatcher(None, was, now, autojunk=False).get_opcodes():
        if kind == "equal" or (kind == "replace" and a_end - a == b_end - b):
            pairs |= zip(range(a, a_end), range(b, b_end), strict=True)
    return pairs


def _add_names(names: dict[str, str], was: str, now: str) -> bool:
    """Add what names of one line are called in the other. False if anything else differs."""
    pairs = list(zip(_TOKEN.findall(was.strip()), _TOKEN.findall(now.strip()), strict=False))
    if len(pairs) != max(len(_TOKEN.findall(line.strip())) for line in (was, now)):
        return False
    for a, b in pairs:
        alike = bool(_NAME.fullmatch(a) and _NAME.fullmatch(b)) or a == b
        if not alike or names.setdefault(a, b) != b:
            return False
    return True


def _with_names(text: str, names: Mapping[str, str]) -> str:
    return "".join(names.get(token, token) for token in _TOKEN.findall(text))


def rewrite(source: str, mutant: Mutant, to: Anchored) -> str | None:
    """A test's source with the bug's texts where they are now; None if they are not literals there."""
    calls = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and node.args and _text(node.args[0]) == mutant.name
    ]
    if len(calls) != 1 or len(calls[0].args) != 4:
        return None
    _, file, old, new = calls[0].args
    edits: list[tuple[ast.expr, str]] = []
    if to.file != mutant.file:
        edits.append((file, to.file))
    for node, text, wanted in ((old, mutant.old, to.old), (new, mutant.new, to.new)):
        if text == wanted:
            continue
        if _text(node) != text:
            return None
        edits.append((node, wanted))
    lines = source.encode().splitlines(keepends=True)
    starts = [sum(map(len, lines[:i])) for i in range(len(lines))]
    raw = source.encode()
    for node, text in sorted(edits, key=lambda edit: -edit[0].lineno * 10_000 - edit[0].col_offset):
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        raw = raw[:begin] + repr(text).encode() + raw[end:]
    return raw.decode()


def _text(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def main() -> int:
    """Report, or edit, and return how many bugs are left without their text."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.reanchor",
        description="Find planted bugs whose text is no longer in the kernels' sources, and follow moves and renames.",
    )
    parser.add_argument("--write", action="store_true", help="edit the tests; run `ruff format` afterwards")
    write = parser.parse_args().write
    left = 0
    for path, mutant in lost():
        to = find(mutant)
        edited = to and rewrite(path.read_text(), mutant, to)
        said = "cannot be followed" if to is None else "is not a literal in the test" if edited is None else "moved"
        if edited is None or not write:
            left += 1
        else:
            path.write_text(edited)
        print(f"{path.relative_to(ROOT)}: {mutant.name!r} in {mutant.file}: {said}")
        if to is not None:
            print(f"    {to.file}: {to.old!r} -> {to.new!r}")
    print(f"{left} without their text" if left else "every planted bug has its text")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
