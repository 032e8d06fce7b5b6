"""The intermediate form of PTX: operands, instructions, symbols and functions."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

TYPE_BITS = {
    "pred": 1,
    **{f"{k}{n}": n for k in "usb" for n in (8, 16, 32, 64)},
    "f16": 16,
    "bf16": 16,
    "f16x2": 32,
    "bf16x2": 32,
    "u16x2": 32,
    "s16x2": 32,
    "tf32": 32,
    "f32": 32,
    "f64": 64,
    "f32x2": 64,
    "b128": 128,
}
"""Width in bits of every fundamental and packed type the simulator knows."""


class Reg:
    """A virtual register: ``index`` is its slot in the register file of every warp, ``bits`` its declared width."""

    __slots__ = ("bits", "index", "name", "type")

    def __init__(self, name: str, type: str, index: int) -> None:
        self.name, self.type, self.index = name, type, index
        self.bits = TYPE_BITS[type]

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Imm:
    """A literal; ``kind`` is ``int``, ``f32`` or ``f64`` (the latter two hold raw bits in ``value``)."""

    value: int
    kind: str = "int"


@dataclass(frozen=True)
class SReg:
    """A special register such as ``%tid.x``."""

    name: str


@dataclass(frozen=True)
class Sym:
    """The address of a variable, or the name of a function."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Addr:
    """``[base + offset]`` with optional further parts (``[map, {coords}]``)."""

    base: Any
    offset: int = 0
    parts: tuple = ()


@dataclass(frozen=True)
class Vec:
    """``{a, b, ...}``."""

    items: tuple


@dataclass(frozen=True)
class Pair:
    """``d|p``: two destinations."""

    first: Any
    second: Any


@dataclass(frozen=True)
class Not:
    """``!p``."""

    reg: Any


@dataclass(frozen=True)
class Neg:
    """``-r`` in a source operand."""

    reg: Any


class Sink:
    """``_``: a destination that is thrown away."""

    def __repr__(self) -> str:
        return "_"


SINK = Sink()


Loc = tuple[tuple[int, int], ...]
"""File and line of an instruction, then of each call that it was inlined at; empty where no ``.loc`` tells."""


@dataclass(eq=False)
class Instr:
    """One PTX instruction.

    ``mods`` is the dotted tail of the opcode, in order; ``loc`` what ``.loc`` tells, ``number`` its
    place in its kernel, ``registers`` those it reads and writes (once somebody has asked for them), ``origin`` the
    instruction of the text that a lowered one was made from.
    """

    op: str
    mods: list[str]
    args: list
    line: int
    text: str
    guard: Reg | None = None
    guard_neg: bool = False
    targets: list[int] = field(default_factory=list)
    loc: Loc = ()
    number: int = -1
    registers: tuple[list[Reg], list[Reg]] | None = None
    origin: Instr | None = None

    @cached_property
    def opcode(self) -> str:
        """The full dotted opcode."""
        return ".".join([self.op, *self.mods])


@dataclass(eq=False)
class Variable:
    """A declared variable of any state space; ``data`` is its initial image (bytes) or None."""

    name: str
    space: str
    align: int
    size: int
    type: str = "b8"
    data: bytes | None = None
    relocs: list = field(default_factory=list)
    offset: int = 0
    extern: bool = False


@dataclass(eq=False)
class Param:
    """A kernel or function parameter; ``reg`` is its register when it is declared ``.reg``."""

    name: str
    type: str
    align: int
    size: int
    offset: int = 0
    space: str = "param"
    reg: Reg | None = None


@dataclass(eq=False)
class Body:
    """A function's code between its braces: instructions in order, label positions, and declarations."""

    instrs: list[Instr] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    regs: list[Reg] = field(default_factory=list)
    variables: dict[str, Variable] = field(default_factory=dict)


@dataclass(eq=False)
class Function:
    """An ``.entry`` or ``.func``. Its body is parsed when it is first asked for: few of a module's kernels run."""

    name: str
    entry: bool
    params: list[Param]
    returns: list[Param]
    read: Callable[[], Body] = Body
    directives: dict[str, tuple] = field(default_factory=dict)
    line: int = 0

    @cached_property
    def body(self) -> Body:
        """The parsed body; empty for a declaration."""
        return self.read()

    @property
    def instrs(self) -> list[Instr]:
        """Instructions in order."""
        return self.body.instrs

    @property
    def labels(self) -> dict[str, int]:
        """Positions of labels among the instructions."""
        return self.body.labels

    @property
    def regs(self) -> list[Reg]:
        """Registers by index."""
        return self.body.regs

    @property
    def variables(self) -> dict[str, Variable]:
        """Variables declared in the body."""
        return self.body.variables


_GOES_ON = re.compile(r"[\w$]")
"""First character of the rest of a longer name, such as a parameter's."""

FIRST_FUNCTION, FUNCTION_STEP = 1 << 32, 16
"""Address of a module's first function, and the distance to the next one."""


@dataclass(eq=False)
class ModuleIR:
    """A whole PTX file."""

    version: str
    target: str
    functions: dict[str, Function]
    variables: dict[str, Variable]
    files: dict[int, str] = field(default_factory=dict)
    text: str = ""

    def address_of(self, name: str) -> int:
        """Return the address by which a function is called. It lies in no state space, so it is unique."""
        return FIRST_FUNCTION + FUNCTION_STEP * list(self.functions).index(name)

    @cached_property
    def taken(self) -> set[str]:
        """Names of the functions whose addresses are put into variables or registers."""
        names = {name for var in self.variables.values() for *_, name, _, _ in var.relocs}
        if any(self._mentions(name) > 1 for name in self.functions):
            for function in self.functions.values():
                for ins in function.instrs:
                    if ins.op != "call":
                        names.update(arg.name for arg in ins.args if isinstance(arg, Sym))
        return names & set(self.functions)

    def _mentions(self, name: str) -> int:
        """Count how often the text names a function, where it is defined and elsewhere: bodies may be unread."""
        pieces = self.text.split(name)[1:]
        return sum(not _GOES_ON.match(piece) for piece in pieces)


def operand_regs(operand: Any) -> list[Reg]:
    """Return every register inside an operand, in order."""
    if isinstance(operand, Reg):
        return [operand]
    if isinstance(operand, (Imm, Sym)):
        return []
    if isinstance(operand, Vec):
        return [r for item in operand.items for r in operand_regs(item)]
    if isinstance(operand, Addr):
        return operand_regs(operand.base) + [r for part in operand.parts for r in operand_regs(part)]
    if isinstance(operand, Pair):
        return operand_regs(operand.first) + operand_regs(operand.second)
    if isinstance(operand, (Not, Neg)):
        return operand_regs(operand.reg)
    return []
