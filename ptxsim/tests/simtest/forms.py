# ruff: noqa: E501 (lines of PTX are kept whole)
"""The forms of PTX ISA 8.8 for sm_90a and sm_100a, written in ``forms.txt``, one kernel line each.

A line is an opcode and its operands: ``h r d q p`` are registers of 16, 32, 64, 128 bits and predicates, ``[g] [s] [m]
[l] [c] [t]`` addresses of global memory, shared memory, an mbarrier, local, constant and tensor memory, ``[sg] [mg]`` the
generic addresses of the second and third, ``[tm]`` a tensor map's parameter, ``[tma]`` its address, ``[tma,{r,r}]`` the
same with coordinates. ``{a,b}`` in the opcode (and in an operand of literals) stands for a form per alternative. ``@100``
marks what only sm_100a has, ``!`` what the simulator refuses.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from simtest.golden.rows import alternatives

_PLACES = {
    "[g]": "[%d90]", "[s]": "[%r90]", "[sg]": "[%d92]", "[mg]": "[%d93]", "[t]": "[%r89]", "[tma]": "[%d94]", "[tm]": "[tm]",
    "[l]": "[l]", "[c]": "[c]",
}  # fmt: skip
_GENERIC_BARRIER = re.compile(
    r"(mbarrier\.\w+|cp\.async\.mbarrier\.arrive(\.noinc)?|mbarrier\.\w+_wait(\.parity)?)\.b64"
)


@dataclass(frozen=True)
class Form:
    """One line of the table: its architecture, whether it is refused, and the instructions it stands for."""

    line: str
    arch: int
    refused: bool
    codes: tuple[str, ...]


def _operands(opcode: str, tokens: tuple[str, ...]) -> str:
    """Return operands with registers numbered in order."""
    count = dict.fromkeys("hrdqp", 0)

    def one(token: str) -> str:
        if token in count:
            count[token] += 1
            return f"%{token}{count[token]}"
        if token == "[m]":
            return "[%d91]" if _GENERIC_BARRIER.fullmatch(opcode) else "[%r91]"
        if token in _PLACES:
            return _PLACES[token]
        if token == "!p":
            return "!" + one("p")
        if "|" in token:
            return "|".join(map(one, token.split("|")))
        if token.startswith("{"):
            return "{" + ", ".join(map(one, token[1:-1].split(","))) + "}"
        if match := re.match(r"\[(tma|d),(\{.*\})\]", token):
            return f"[%d9{4 if match.group(1) == 'tma' else 5}, {one(match.group(2))}]"
        return token

    return ", ".join(map(one, tokens))


def forms() -> Iterator[Form]:
    """Yield the lines of the table."""
    text = Path(__file__).with_name("forms.txt").read_text()
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.startswith("#"):
            continue
        rest = line.removeprefix("! ")
        arch = 100 if rest.startswith("@100 ") else 90
        opcode, *tokens = rest.removeprefix("@100 ").split()
        literal = re.compile(r"\{[%\d][^{}]*\}")
        choices = [t[1:-1].split(",") if literal.fullmatch(t) else [t] for t in tokens]
        codes = tuple(
            f"{each} {_operands(each, picked)};".replace(" ;", ";")
            for each in alternatives(opcode)
            for picked in itertools.product(*choices)
        )
        yield Form(line, arch, line.startswith("! "), codes)


DECLARED = (
    ".reg .b16 %h<99>; .reg .b32 %r<99>; .reg .b64 %d<99>; .reg .b128 %q<9>; .reg .pred %p<9>; .shared .align 1024 .b8 s[1024];"
    ".shared .align 8 .b8 m[8]; .local .align 16 .b8 l[64];"
)


def kernel(codes: tuple[str, ...], arch: int) -> str:
    """Return a kernel that holds some instructions, each in a scope and on a line of its own."""
    body = "\n".join("{" + code + "}" for code in codes)
    head = f".version 8.8\n.target sm_{arch}a\n.address_size 64\n.const .align 16 .b8 c[64];\n"
    return head + f".visible .entry k(.param .align 64 .b8 tm[128])\n{{\n{DECLARED}\n{body}\nL: ret;\n}}\n"
