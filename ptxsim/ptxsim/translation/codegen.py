"""Turns basic blocks into Python functions over 32-lane NumPy vectors.

Every value is an array with one element per active lane, and next to it a *poison* mask: None (all lanes clean) or a
boolean array. A block function has the signature ``f(W, R, Q, L)``: the warp, its registers, their poison masks and
the active lanes (None when all 32 are). It returns the next block, a ``(predicate, taken, fallthrough)`` split, or
a :class:`Park`.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from functools import lru_cache
from operator import itemgetter
from typing import Any

import numpy as np

from ..arithmetic import numeric
from ..errors import SimError
from ..parsing.ir import SINK, TYPE_BITS, Addr, Imm, Instr, Neg, Not, Reg, SReg, Sym
from .cfg import VIEWS, Block, Cfg
from .registry import OPS, Mods, unknown

EXIT = -1
"""Returned by a block function whose lanes all exit."""

WIDTH = 32


class Park:
    """Returned by a synchronising instruction: the fragment waits until ``ready()``; ``redo`` repeats the block.

    ``what`` describes the wait in a deadlock report, or is called for that when there is one; ``name`` is what
    statistics count it under.
    """

    __slots__ = ("_what", "name", "ready", "redo", "since")

    def __init__(self, ready: Any, what: str | Callable[[], str], redo: bool = False, name: str | None = None) -> None:
        self.ready, self._what, self.redo = ready, what, redo
        self.name = name or self.what.removeprefix("waits for ")
        self.since = 0

    @property
    def what(self) -> str:
        """Describe what the fragment waits for, as it is now."""
        return self._what if isinstance(self._what, str) else self._what()


@lru_cache(maxsize=1 << 14)
def _constant(value: int, view: str) -> tuple[np.generic, np.ndarray]:
    """Return raw bits as a scalar of a type code and as an array of 32."""
    bits = int(view[1:]) * 8 if view != "b1" else 1
    scalar = numeric.from_bits(value & ((1 << bits) - 1), view)
    array = np.full(WIDTH, scalar, dtype=scalar.dtype)
    array.flags.writeable = False
    return scalar, array


class Codegen:
    """Generates the function of a run of blocks in one variant.

    Its text names neither registers nor other objects: those are default values of its parameters. So blocks of the
    same form, in whatever kernel, have the same text, which is compiled once.

    It is for a full warp or for some of its lanes (``full``), and for registers without poison only (``clean``) or for
    all: most blocks never meet any, and without it their code is half as long.
    """

    def __init__(self, cfg: Cfg, full: bool, clean: bool = False) -> None:
        self.cfg, self.full, self.clean = cfg, full, clean
        self.expected: dict[int, str] = {}
        self.names: list[str] = []
        self.values: list[Any] = []
        self.numbers: dict[int, str] = {}
        self.kernel = cfg.code.name
        self.prologue: list[str] = []
        self.body: list[str] = []
        self.views: dict[int, dict[str, str]] = {}
        self.masks: dict[int, str | None] = {}
        self.lanes: dict[str, str] = {}
        self.merged: dict[tuple[str, ...], str] = {}
        self.dirty: dict[int, Reg] = {}
        self.counter = 0
        self.consts: dict[tuple, str] = {}
        self.sources: list[str] = []
        self.ins: Instr | None = None

    # ---- names -------------------------------------------------------------------------------------------------
    def name(self, stem: str) -> str:
        """Return a new local variable name."""
        self.counter += 1
        return f"{stem}_{self.counter}"

    def line(self, text: str) -> None:
        """Append a statement."""
        self.body.append(text)

    def bind(self, value: Any, stem: str = "H") -> str:
        """Make a Python object a default value of the function and return its name."""
        name = f"{stem}{len(self.names)}"
        self.names.append(name)
        self.values.append(value)
        return name

    def number(self, value: int) -> str:
        """Return the name of a number: of a register or a block."""
        if value not in self.numbers:
            self.numbers[value] = self.bind(value, "K")
        return self.numbers[value]

    def const(self, value: int, view: str) -> str:
        """Return the name of a constant array; ``value`` are the raw bits."""
        key = (value, view)
        if key not in self.consts:
            scalar, array = _constant(value, view)
            if self.full:
                self.consts[key] = self.bind(array, "C")
            else:
                name = self.name("c")
                self.prologue.append(f"{name} = full(N, {self.bind(scalar, 'S')})")
                self.consts[key] = name
        return self.consts[key]

    # ---- sources -----------------------------------------------------------------------------------------------
    def _load(self, reg: Reg) -> None:
        """Bring a live-in register into locals."""
        if reg.index in self.views:
            return
        name, mask = self.name("r"), None if self.clean else self.name("q")
        index = "" if self.clean else self.number(reg.index)
        if self.clean:
            self.expected[reg.index] = name
        elif self.full:
            self.prologue.append(f"{name} = R[{index}]; {mask} = Q[{index}]")
        else:
            self.prologue.append(f"{name} = R[{index}][L]; {mask} = Q[{index}]")
            self.prologue.append(f"if {mask} is not None: {mask} = partq({mask}, L)")
        self.views[reg.index] = {self.cfg.storage[reg.index]: name}
        self.masks[reg.index] = mask

    def _view(self, reg: Reg, view: str) -> str:
        """Return a local that holds a register under a type code of its own width."""
        self._load(reg)
        known = self.views[reg.index]
        if view not in known:
            base = next(iter(known.values()))
            known[view] = self.name("r")
            self.line(f"{known[view]} = {base}.view({view!r})")
        return known[view]

    def src(self, operand: Any, type_name: str) -> str:
        """Return an expression for a source operand as an array of a PTX type; its poison is remembered."""
        view = VIEWS[type_name]
        if isinstance(operand, Reg):
            return self._src_reg(operand, type_name, view)
        if isinstance(operand, Imm):
            return self.const(self.immediate(operand, type_name), view)
        if isinstance(operand, Not):
            return f"(~{self.src(operand.reg, type_name)})"
        if isinstance(operand, Neg):
            return f"(-{self.src(operand.reg, type_name)})"
        if isinstance(operand, SReg):
            name = self.name("s")
            pick = "" if self.full else "[L]"
            self.line(f"{name} = W.special({operand.name!r}){pick}")
            if view not in ("u4",):
                self.line(f"{name} = {name}.astype({view!r})")
            return name
        if isinstance(operand, Sym):
            name = self.name("a")
            self.line(f"{name} = full(N, {self._symbol(operand.name, operand.offset)}).astype({view!r})")
            return name
        raise unknown(self.kernel, self.ins, f"operand {operand!r} is not a value")

    def _symbol(self, name: str, offset: int) -> str:
        """Return the expression for a variable's address."""
        return f"W.symbol({self.bind(name)}, {self.bind(offset)})"

    def _src_reg(self, reg: Reg, type_name: str, view: str) -> str:
        want, have = TYPE_BITS[type_name], reg.bits
        self._load(reg)
        mask = self.masks[reg.index]
        if mask is not None and mask not in self.sources:
            self.sources.append(mask)
        if (reg.type == "pred") != (type_name == "pred"):
            raise unknown(self.kernel, self.ins, f"register {reg} of type .{reg.type} used as .{type_name}")
        if type_name == "pred" or want == have:
            return self._view(reg, view)
        if want < have:
            unsigned = self._view(reg, f"u{have // 8}")
            name = self.name("t")
            self.line(f"{name} = {unsigned}.astype('u{want // 8}').view({view!r})")
            return name
        raise unknown(self.kernel, self.ins, f"register {reg} is narrower than .{type_name}")

    def immediate(self, imm: Imm, type_name: str) -> int:
        """Return the bits of a literal in a type."""
        bits = TYPE_BITS[type_name]
        if imm.kind == "int":
            if type_name == "f32":
                return struct.unpack("<I", struct.pack("<f", float(imm.value)))[0]
            if type_name == "f64":
                return struct.unpack("<Q", struct.pack("<d", float(imm.value)))[0]
            return imm.value & ((1 << bits) - 1)
        if imm.kind == "f32":
            if bits == 64 and type_name == "f64":
                raise unknown(self.kernel, self.ins, "a single-precision literal in a .f64 instruction")
            return imm.value
        if type_name in ("f32", "b32"):
            value = struct.unpack("<d", struct.pack("<Q", imm.value))[0]
            return struct.unpack("<I", struct.pack("<f", value))[0]
        return imm.value

    def addr(self, operand: Addr, bits: int = 64) -> str:
        """Return an expression for an address operand as u4 (``bits=32``) or u8."""
        view = f"u{bits // 8}"
        if isinstance(operand.base, Reg):
            reg = operand.base
            self._load(reg)
            mask = self.masks[reg.index]
            if mask is not None and mask not in self.sources:
                self.sources.append(mask)
            expr = self._view(reg, f"u{reg.bits // 8}")
            if reg.bits != bits:
                name = self.name("t")
                self.line(f"{name} = {expr}.astype({view!r})")
                expr = name
        elif isinstance(operand.base, Imm):
            return self.const(operand.base.value + operand.offset, view)
        elif isinstance(operand.base, Sym):
            name = self.name("a")
            offset = operand.base.offset + operand.offset
            self.line(f"{name} = full(N, {self._symbol(operand.base.name, offset)}).astype({view!r})")
            return name
        else:
            raise unknown(self.kernel, self.ins, "bad address operand")
        if operand.offset:
            return f"({expr} + {self.const(operand.offset, view)})"
        return expr

    # ---- destinations ------------------------------------------------------------------------------------------
    def poison(self, bits: bool = False) -> str | None:
        """Return the expression for the poison of a result of the sources read so far.

        All bits of the result are undefined where some of a source are; ``bits`` tells that a single source is moved.
        """
        if len(self.sources) == 1 and bits:
            return self.sources[0]
        names = tuple(dict.fromkeys(self.lanes_only(name) for name in self.sources))
        if len(names) < 2:
            return names[0] if names else None
        if names not in self.merged:
            merged = f"{names[0]} if {' is '.join(names)} else orq({', '.join(names)})"
            self.merged[names] = self._only_lanes(merged)
        return self.merged[names]

    def lanes_only(self, mask: str) -> str:
        """Return the local that holds a mask without its knowledge of single bits."""
        if mask not in self.lanes:
            self.lanes[mask] = self._only_lanes(f"{mask} if {mask}.__class__ is not Bits else {mask}.whole")
        return self.lanes[mask]

    def _only_lanes(self, expr: str) -> str:
        """Return a new local that holds a mask which knows nothing of single bits."""
        name = self.name("q")
        self.line(f"{name} = {expr}")
        self.lanes[name] = name
        return name

    def masked(self, operand: Any, type_name: str) -> tuple[str, str]:
        """Return the expressions for a source operand and its poison; the poison is remembered with earlier ones."""
        earlier, self.sources = self.sources, []
        value = self.src(operand, type_name)
        mask = self.sources[0] if self.sources else "None"
        self.sources = list(dict.fromkeys([*earlier, *self.sources]))
        return value, mask

    def bitwise(self, dst: Any, type_name: str, expr: str, mask: Any, pairs: list[tuple[str, str]]) -> None:
        """Assign a result that ``mask`` (a function of :mod:`~..arithmetic.undefined`) knows the undefined bits of.

        ``pairs`` are the values and masks that :meth:`masked` gave for the operands, in the order of ``mask``.
        """
        if not self.sources:
            return self.out(dst, type_name, expr)
        chain = " is ".join([*self.sources, "None"])
        given = ", ".join(part for pair in pairs for part in pair)
        return self.out(dst, type_name, expr, f"None if {chain} else {self.bind(mask)}({given})")

    def out(self, dst: Any, type_name: str, expr: str, poison: str | bool | None = True) -> None:
        """Assign a result to a destination register, honouring the guard and the register's width.

        ``poison`` True derives the mask from the sources; a string is an expression; None means clean.
        """
        if dst is SINK:
            return
        if not isinstance(dst, Reg):
            raise unknown(self.kernel, self.ins, f"bad destination {dst!r}")
        bits, view = TYPE_BITS[type_name], VIEWS[type_name]
        if dst.bits < bits or (dst.type == "pred") != (type_name == "pred"):
            raise unknown(self.kernel, self.ins, f"destination {dst} of type .{dst.type} for .{type_name}")
        if dst.bits > bits and type_name != "pred":
            wide = f"{'i' if type_name[0] == 's' else 'u'}{dst.bits // 8}"
            raw = f"({expr}).view('u{bits // 8}')" if view[0] == "f" else f"({expr})"
            expr, view = f"{raw}.astype({wide!r})", wide
        mask = self.poison() if poison is True else poison or None
        if self.ins.guard is not None and OPS[self.ins.op].kind == "alu":
            expr, mask = self._guarded(dst, view, expr, mask)
        self.views[dst.index] = {view: self.named(expr, "r")}
        self.masks[dst.index] = None if mask is None else self.named(mask, "q")
        self.dirty[dst.index] = dst

    def named(self, expr: str, stem: str) -> str:
        """Return a local that holds an expression; an expression that is a name already needs no new local."""
        if expr.isidentifier() and expr != "None":
            return expr
        name = self.name(stem)
        self.line(f"{name} = {expr}")
        return name

    def _guarded(self, dst: Reg, view: str, expr: str, mask: str | None) -> tuple[str, str | None]:
        """Merge a guarded result with the old value of its destination."""
        pred, unsure = self.guard_value()
        old = self._view(dst, view)
        old_mask = self.masks[dst.index]
        merged = f"selq({pred}, {mask}, {old_mask})" if mask or old_mask else None
        if unsure:
            merged = f"unsureq({unsure}, {merged})"
        return f"where({pred}, {expr}, {old})", merged

    def guard_value(self) -> tuple[str, str]:
        """Return the locals that hold the guard's truth value and its poison ('' if it has none)."""
        guard = self.ins.guard
        saved, self.sources = self.sources, []
        value = self.src(guard, "pred")
        unsure = self.sources[0] if self.sources else ""
        self.sources = saved
        return self._negated(value), unsure

    def _negated(self, value: str) -> str:
        """Return the local that holds a guard's truth value where the guard may be ``@!p``."""
        if not self.ins.guard_neg:
            return value
        name = self.name("g")
        self.line(f"{name} = ~{value}")
        return name

    def here(self) -> str:
        """Return the name of the current instruction object."""
        return self.bind(self.ins, "I")

    # ---- run-time calls ----------------------------------------------------------------------------------------
    def call(self, function: Any, sources: list[tuple], results: list[tuple], bits: bool = False) -> None:
        """Emit a call ``function(W, L, s0, q0, s1, q1, ...) -> (d0, p0, d1, p1, ...)``.

        Parameters
        ----------
        function : callable
            Run-time behaviour of the instruction.
        sources : list of (operand, type)
            ``type`` may be ``addr32`` or ``addr64`` for an :class:`~..parsing.ir.Addr`.
        results : list of (operand, type)
            Destinations.
        bits : bool, optional
            The masks of the results may know single bits.
        """
        given = ["W", "L"]
        for operand, type_name in sources:
            self.sources = []
            if type_name in ("addr32", "addr64"):
                given.append(self.addr(operand, int(type_name[4:])))
            else:
                given.append(self.src(operand, type_name))
            mask = self.sources[0] if self.sources else "None"
            given.append(mask if mask == "None" or self.ins.op == "st" else self.lanes_only(mask))
        name = self.bind(function)
        outs = []
        for _ in results:
            outs += [self.name("o"), self.name("p")]
        if not bits:
            self.lanes.update(zip(outs[1::2], outs[1::2], strict=True))
        call = f"{name}({', '.join(given)})"
        if OPS[self.ins.op].kind == "sync":
            result = self.name("z")
            self.line(f"{result} = {call}")
            self.line(f"if {result}.__class__ is Park: return {result}")
            if outs:
                self.line(f"{', '.join(outs)} = {result}")
        elif outs:
            self.line(f"{', '.join(outs)} = {call}")
        else:
            self.line(call)
        for (operand, type_name), value, mask in zip(results, outs[::2], outs[1::2], strict=False):
            self.out(operand, type_name, value, mask)

    def check(self, ins: Instr) -> None:
        """Emit an instruction as a trial; operands that cannot be emitted make it an unknown form."""
        try:
            if OPS[ins.op].kind == "term":
                self._terminator(ins, self.cfg.blocks[0])
            else:
                self.emit(ins)
        except SimError:
            raise
        except Exception as error:  # an operand of a kind that the emitter does not expect
            raise unknown(self.kernel, ins, f"operand form ({type(error).__name__}: {error})") from error

    # ---- whole functions ---------------------------------------------------------------------------------------
    def emit(self, ins: Instr) -> None:
        """Emit one instruction."""
        self.ins, self.sources = ins, []
        mods = Mods(ins, self.kernel)
        OPS[ins.op].emit(self, ins, mods)
        mods.done()

    def function(self, blocks: list[Block]) -> tuple[str, tuple]:
        """Return the source of the function for a run of blocks that follow each other, and its default values."""
        last = blocks[-1]
        terminator = None
        for block in blocks:
            for ins in block.instrs:
                if OPS[ins.op].kind == "term":
                    terminator = ins
                else:
                    self.emit(ins)
        tail = self._terminator(terminator, last)
        body, self.body = self.body, []
        epilogue = self._epilogue(last)
        size = "32" if self.full else "len(L)"
        text = "\n".join([*self.prologue, *body, *tail])
        lines = [
            *([f"N = {size}"] if re.search(r"\bN\b", text) else []),
            *self._entry(blocks[0]),
            *self.prologue,
            *body,
            *epilogue,
            *tail,
        ]
        given = ", ".join(["W", "R", "Q", "L", *self.names])
        return f"def block({given}):\n  " + "\n  ".join(lines) + "\n", tuple(self.values)

    def _entry(self, first: Block) -> list[str]:
        """Return the test of the clean variant, which leaves registers with poison to the other one."""
        if not self.expected:
            return []
        pick = self.bind(itemgetter(*self.expected), "G")
        masks = f"{{*map(type, {pick}(Q))}} != CLEAN" if len(self.expected) > 1 else f"{pick}(Q) is not None"
        return [
            f"if {masks}: return W.program.tainted({self.number(first.index)})(W, R, Q, L)",
            f"{', '.join(self.expected.values())} = {pick}(R)",
        ]

    def _epilogue(self, last: Block) -> list[str]:
        lines = []
        for index, reg in self.dirty.items():
            if not last.live_out >> index & 1:
                continue
            self.body, at = [], self.number(index)
            value = self._view(reg, self.cfg.storage[index])
            lines += self.body
            mask = self.masks[index] or "None"
            if self.full:
                lines.append(f"R[{at}] = {value}; Q[{at}] = {mask}")
            else:
                lines.append(f"R[{at}] = put(R[{at}], L, {value}); Q[{at}] = putq(Q[{at}], L, {mask})")
        return lines

    def _terminator(self, ins: Instr | None, last: Block) -> list[str]:
        if ins is None:
            return [f"return {self.number(last.index + 1)}"]
        self.ins, self.sources = ins, []
        mods = Mods(ins, self.kernel)
        target = OPS[ins.op].emit(self, ins, mods)
        mods.done()
        target = self.number(target) if isinstance(target, int) else target
        if ins.guard is None:
            return [f"return {target}"]
        pred, unsure = self.guard_value()
        if unsure:
            report = f"W.doubt({unsure}, {self.here()}, {self.number(last.index)}, L)"
            self.line(f"if {unsure} is not None: {report}")
        count = self.name("n")
        self.line(f"{count} = cnt({pred})")
        fall = self.number(last.index + 1)
        return [
            f"if {count} == N: return {target}",
            f"if {count} == 0: return {fall}",
            f"return ({pred}, {target}, {fall})",
        ]
