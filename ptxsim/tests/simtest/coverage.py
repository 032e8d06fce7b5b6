"""The evidence for each instruction that the simulator models: ``python -m simtest.coverage`` prints it.

It also writes the summary, COVERAGE.md. Sources are the table of forms (``forms.txt``) and the recordings of an H200
(``golden``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ptxsim.parsing.parse import parse
from simtest.forms import Form, forms, kernel
from simtest.golden.case import FILE
from simtest.golden.cases import cases

PAGE = Path(__file__).resolve().parents[2] / "COVERAGE.md"
HEAD = """# Instructions, and the evidence for them

ptxsim models PTX ISA 8.8 for sm_90a and sm_100a, form by form: `tests/simtest/forms.txt` lists every form, and
`python -m simtest.coverage` in `ptxsim/tests` prints each with its evidence and writes this summary.
`ptxsim check kernel.ptx` tells what of your own kernel is not modelled.

- **recorded**: forms in a kernel with outputs recorded on an H200, which the simulator reproduces.
- **by formula**: forms tested only against a formula written from the ISA's text, such as all of tcgen05.
- **refused**: forms that raise a clear error when the kernel is loaded.

`python -m simtest.golden` builds the recorded kernels for other Hopper GPUs; `python -m simtest.golden compare FOLDER`
says where the simulator differs.

"""


@dataclass
class Section:
    """The forms below one heading of the table: lines with their evidence, and how many forms have which."""

    title: str
    lines: list[str] = field(default_factory=list)
    refused_lines: list[str] = field(default_factory=list)
    forms: int = 0
    recorded: int = 0
    refused: int = 0

    def add(self, form: Form, seen: set[str]) -> None:
        """Count one line of the table."""
        text = form.line.removeprefix("! ").removeprefix("@100 ")
        hits = 0 if form.refused else sum(code in seen for code in opcodes(form))
        self.forms += len(form.codes)
        self.recorded += hits
        self.refused += len(form.codes) if form.refused else 0
        evidence = "refused" if form.refused else f"H200: {hits} of {len(form.codes)}" if hits else "formula"
        self.lines.append(f"{text}  ({'sm_100a' if form.arch == 100 else 'both'}; {evidence})")
        if form.refused:
            self.refused_lines.append(text)

    @property
    def row(self) -> str:
        """The row of the summary."""
        formula = self.forms - self.recorded - self.refused
        return f"| {self.title} | {self.forms} | {self.recorded} | {formula} | {self.refused} |"


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


def sections() -> list[Section]:
    """Return the sections of the table of forms, counted."""
    seen, lines = recorded(), iter(forms())
    found: list[Section] = []
    for raw in Path(__file__).with_name("forms.txt").read_text().splitlines():
        if raw.startswith("#"):
            found.append(Section(raw.lstrip("# ")))
        elif raw.strip():
            found[-1].add(next(lines), seen)
    return found


def page(found: list[Section]) -> str:
    """Return the page: a row per section, and the forms that are refused."""
    total = Section("**all**", forms=sum(s.forms for s in found))
    total.recorded, total.refused = sum(s.recorded for s in found), sum(s.refused for s in found)
    rows = "\n".join(section.row for section in (*found, total))
    refused = "\n".join(f"- `{text}`" for section in found for text in section.refused_lines)
    table = f"| forms | all | recorded | by formula | refused |\n|---|---|---|---|---|\n{rows}"
    return f"{HEAD}{table}\n\n## Refused\n\n`{{a,b}}` stands for one form each.\n\n{refused}\n"


if __name__ == "__main__":
    counted = sections()
    for one in counted:
        print(f"\n{one.title}\n", *one.lines, sep="\n")
    PAGE.write_text(page(counted))
