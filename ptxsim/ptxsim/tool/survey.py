"""Survey of the forms that a kernel needs and the simulator lacks: all of them, not only the first."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ..errors import SimError
from ..parsing.ir import Function, Imm, Instr, ModuleIR
from ..translation.cfg import Cfg
from ..translation.codegen import Codegen
from ..translation.lower import lower
from ..translation.registry import OPS, reason


@dataclass(frozen=True)
class Unknown:
    """A form that is not modelled: why, how often it occurs, and the first line that has it."""

    form: str
    why: str
    count: int
    line: int


def nothing(ins: Instr) -> Instr:
    """Return an instruction without effect in place of another."""
    return Instr("nanosleep", ["u32"], [Imm(0)], ins.line, f"(dropped) {ins.text}", loc=ins.loc)


def survey(module: ModuleIR, function: Function) -> tuple[int, list[Unknown]]:
    """Return how many instructions a kernel has, and what is not modelled.

    Parameters
    ----------
    module : ModuleIR
        Where called functions are found.
    function : Function
        The kernel.

    Raises
    ------
    SimError
        The kernel as a whole cannot be taken, such as for a recursive call.
    """
    code = lower(module, function)
    found: Counter = Counter()
    lines: dict[tuple, int] = {}

    def note(ins: Instr, why: str) -> None:
        key = (ins.opcode, why)
        found[key] += 1
        lines.setdefault(key, ins.line)

    for index, ins in enumerate(code.instrs):
        if ins.op not in OPS:
            note(ins, reason(ins.op))
            code.instrs[index] = nothing(ins)
    cfg = Cfg(code)
    for ins in code.instrs:
        generator = Codegen(cfg, True)
        try:
            generator.check(ins)
        except SimError as error:
            note(ins, why_of(error))
    unknown = [Unknown(form, why, count, lines[form, why]) for (form, why), count in found.most_common()]
    return len(code.instrs), unknown


def why_of(error: SimError) -> str:
    """Return the reason in an unknown-instruction error."""
    return str(error).split(": ", 3)[-1].splitlines()[0]
