"""Rows of several runs: which are the same row, which is the newest, and which run stands for a case."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from .implementation import EXTERNAL
from .report import microseconds

Row = Mapping[str, Any]


class Case(NamedTuple):
    """Case of a benchmark. Two benchmarks can share a case's name: `decode` and `dense-decode-fp8`, for example."""

    benchmark: str
    op: str
    case: str
    dtype: str
    record: str  # of a cache, "" where there are 16-bit rows


class Key(NamedTuple):
    """A row's identity in all runs."""

    case: Case
    implementation: str


def case_of(row: Row) -> Case:
    """The case of a row."""
    return Case(row["benchmark"], row["op"], row["case"], row["dtype"], row["shape"].get("record", ""))


def newest(rows: Iterable[Row]) -> dict[Key, Row]:
    """The rows by key: the newest of each, and the last of those with one date."""
    by_key: dict[Key, Row] = {}
    for row in rows:
        key = Key(case_of(row), row["implementation"])
        if key not in by_key or _date(by_key[key]) <= _date(row):
            by_key[key] = row
    return by_key


def one_run_per_case(rows: Iterable[Row]) -> list[Row]:
    """The rows of one run for each case: the newest that timed another project's kernel, else the newest.

    So all rows of a case can be compared with each other, and a later run without peers hides no peer.
    """
    cases: dict[Case, dict[tuple[str, str], dict[str, Row]]] = {}
    for row in rows:
        runs = cases.setdefault(case_of(row), {})
        runs.setdefault((_date(row), row["repro"]), {})[row["implementation"]] = row
    return [row for runs in cases.values() for row in _chosen(runs).values()]


def _chosen(runs: Mapping[tuple[str, str], Mapping[str, Row]]) -> Mapping[str, Row]:
    at = max(enumerate(runs), key=lambda item: (_has_peer(runs[item[1]]), item[1][0], item[0]))[1]
    return runs[at]


def _has_peer(run: Mapping[str, Row]) -> bool:
    return any(name in EXTERNAL and microseconds(row) is not None for name, row in run.items())


def _date(row: Row) -> str:
    """The start of the run, in UTC in the ISO's form: later ones compare greater."""
    return str(row["env"].get("date") or "")
