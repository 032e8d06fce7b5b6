# ruff: noqa: E501 (lines of the page are kept whole)
"""The page of instructions that the simulator knows, with the evidence for each: ``python -m simtest.coverage``.

Written into COVERAGE.md from the table of forms (``forms.txt``) and from the recordings of an H200 (``golden``).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ptxsim.parsing.parse import parse
from simtest.forms import Form, forms, kernel
from simtest.golden.case import FILE
from simtest.golden.cases import cases

PAGE = Path(__file__).resolve().parents[2] / "COVERAGE.md"
HEAD = """# Instructions, and the evidence for them

The forms of PTX ISA 8.8 for sm_90a and sm_100a, as `tests/simtest/forms.txt` has them; `{a,b}` stands for one form each.
Every form that is not refused is at least loaded, and its meaning written from the ISA's text and tested against a formula.

- **H200**: how many of the line's forms are in a kernel whose outputs an H200 has recorded, and which the simulator
  reproduces. The rest rests on formulas alone; so does everything that only sm_100a has, which could not be run here.
- **refused**: a clear error when the kernel is loaded.

`python -m simtest.golden` in `ptxsim/tests` builds the same kernels and their inputs for other GPUs and records what those
compute; `python -m simtest.golden compare FOLDER` says where the simulator differs.

"""


def recorded() -> set[str]:
    """Return the opcodes of all kernels with outputs of an H200."""
    with np.load(FILE) as file:
        known = set(file.files)
    found: set[str] = set()
    for case in cases():
        if f"{case.name} #0" in known:
            for function in parse(case.text()).functions.values():
                found |= {ins.opcode for ins in function.instrs}
    return found


def opcodes(form: Form) -> list[str]:
    """Return the opcode of each instruction that a form stands for."""
    return [ins.opcode for ins in parse(kernel(form.codes, form.arch)).functions["k"].instrs][: len(form.codes)]


def rows() -> Iterator[str]:
    """Yield the lines of the page below its head."""
    seen, lines = recorded(), iter(forms())
    totals = [0, 0, 0]
    body: list[str] = []
    for raw in (Path(__file__).with_name("forms.txt")).read_text().splitlines():
        if raw.startswith("#"):
            body += ["", f"## {raw.lstrip('# ')}", "", "| form | for | evidence |", "|---|---|---|"]
        elif raw.strip():
            form = next(lines)
            codes = [] if form.refused else opcodes(form)
            hits, count = sum(code in seen for code in codes), len(form.codes)
            totals = [a + b for a, b in zip(totals, (count, hits, count if form.refused else 0), strict=True)]
            evidence = "refused" if form.refused else f"H200: {hits} of {count}" if hits else "formula"
            text = form.line.removeprefix("! ").removeprefix("@100 ").replace("|", "\\|")
            body.append(f"| `{text}` | {'sm_100a' if form.arch == 100 else 'both'} | {evidence} |")
    yield f"{totals[0]} forms: {totals[1]} also recorded on an H200, {totals[2]} refused."
    yield from body


def page() -> str:
    """Return the page."""
    return HEAD + "\n".join(rows()) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
