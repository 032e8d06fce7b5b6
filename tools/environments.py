"""Tests that both environments of a CI run skip: `python -m tools.environments` reads `pytest --junitxml` reports.

The first environment lacks PyTorch and transformers; the second one runs the files in which that showed.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

MISSING = "could not import"
_PARTICULARS = re.compile(r"\d[\d.,]*( [KMGT]iB)?|'[^']*'|0x[0-9a-f]+")


class Result(NamedTuple):
    """A test, or a file that was skipped as a whole; `reason` is empty for what ran."""

    file: str
    reason: str


def results(report: Path) -> Iterator[Result]:
    """Results in a report of pytest's format `xunit1`."""
    for case in ElementTree.parse(report).iter("testcase"):
        skipped = case.find("skipped")
        reason = "" if skipped is None else skipped.get("message", "no reason given")
        if skipped is not None and reason == "collection skipped":  # of a whole file the text alone says why
            reason = skipped.text or reason
        yield Result(case.get("file") or case.get("name", "").replace(".", "/") + ".py", reason)


def files_without(report: Path) -> list[str]:
    """The files with a test that was skipped because it could not import something."""
    return sorted({result.file for result in results(report) if MISSING in result.reason})


def reasons_by_file(report: Path) -> Mapping[str, list[str]]:
    """Reasons of skipped tests by file; "" for each test that ran."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for file, reason in results(report):
        found[file].append(reason)
    return found


def counted(reasons: Iterable[str]) -> list[tuple[int, str]]:
    """Counts of the reasons, most frequent first.

    Reasons that differ in a number or a quoted name only are one, told in the words of the first.
    """
    first: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for reason in reasons:
        kind = _PARTICULARS.sub("*", reason)
        first.setdefault(kind, reason)
        counts[kind] += 1
    return [(count, first[kind]) for kind, count in counts.most_common()]


def never_run(reports: Sequence[Path]) -> list[str]:
    """The files without a test that ran in any environment."""
    ran: Counter[str] = Counter()
    for report in reports:
        for file, reasons in reasons_by_file(report).items():
            ran[file] += reasons.count("")
    return sorted(file for file, count in ran.items() if not count)


def summary(report: Path) -> str:
    """Numbers of tests that ran and were skipped, with the reasons."""
    reasons = [reason for _, reason in results(report)]
    skipped = [reason.replace("\n", " ") for reason in reasons if reason]
    lines = [f"{report.stem}: {len(reasons) - len(skipped):,} tests ran, {len(skipped):,} were skipped"]
    return "\n".join([*lines, *(f"{count:8,}  {reason}" for count, reason in counted(skipped))])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    options = _parser().parse_args(arguments)
    if options.command == "files":
        files = files_without(options.report)
        print(
            "\n".join(files) or f"{options.report}: no test lacked a package", file=sys.stdout if files else sys.stderr
        )
        return 0 if files else 1
    for report in options.report:
        print(summary(report))
    never = never_run(options.report)
    for file in never:
        print(f"no environment runs a test of {file}", file=sys.stderr)
    return 1 if never else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.environments", description=__doc__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    files = commands.add_parser("files", help="list the files with tests that lacked a package")
    files.add_argument("report", type=Path)
    compare = commands.add_parser(
        "compare", help="say what was skipped where and why; fail if no environment ran a file"
    )
    compare.add_argument("report", type=Path, nargs="+")
    return parser


if __name__ == "__main__":
    sys.exit(main())
