"""A golden table's rows in the simulator, against what is known of their results."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

import ptxsim
from simtest.golden.rows import LANES, TABLES, Row, given, inputs, kernel, rows


def sources(code: str) -> list[str]:
    """Return the names of a row's inputs, in order."""
    return re.findall(r"%([islfghexy]\d)\b", code)


def compare(
    table: str,
    expected: Callable[[Row, dict[str, int]], int | None],
    alike: Callable[[Row, int, int], bool] = lambda row, got, want: got == want,
) -> tuple[int, list[str]]:
    """Run a table; return how many of its rows ``expected`` knows, and a line for each with a wrong lane.

    ``expected`` gets a row and the bits of a lane's inputs by name; it returns None for a row that it does not know.
    """
    arrays, rows_ = inputs(), rows(TABLES[table])
    wide = [np.concatenate([given(n, base) for n in range(4)]) for base in arrays.values()]
    out = np.zeros((len(rows_), LANES), "u8")
    ptxsim.Module(kernel(rows_, arrays)).launch("k", 1, LANES, [*wide, np.zeros((LANES, 4), "u8"), out])
    columns = {
        f"{name}{n}": given(n, base).view(f"u{base.itemsize}").tolist()
        for name, base in arrays.items()
        for n in range(4)
    }
    known, wrong = 0, []
    for row, results in zip(rows_, out.tolist(), strict=True):
        for lane, got in enumerate(results):
            want = expected(row, {name: column[lane] for name, column in columns.items()})
            if want is None:
                break
            known += not lane
            if not alike(row, got, want):
                given_bits = [hex(columns[name][lane]) for name in sources(row.code)]
                wrong.append(f"{row.code} lane {lane}: {got:#x} for {want:#x} of {given_bits}")
                break
    return known, wrong
