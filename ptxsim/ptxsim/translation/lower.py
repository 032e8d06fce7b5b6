"""Lowers a parsed function for execution: calls are inlined, guards of complex instructions become branches."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from ..errors import UnknownInstruction
from ..parsing.ir import (
    SINK,
    TYPE_BITS,
    Addr,
    Function,
    Imm,
    Instr,
    Loc,
    ModuleIR,
    Neg,
    Not,
    Pair,
    Param,
    Reg,
    Sym,
    Variable,
    Vec,
)
from .registry import kind_of

BUILTIN_CALLS = ("vprintf", "__assertfail", "malloc", "free")
_MAX_DEPTH = 16


class Lowered:
    """A kernel as one flat instruction list without calls."""

    def __init__(self, function: Function) -> None:
        self.name = function.name
        self.function = function
        self.instrs: list[Instr] = []
        self.labels: dict[str, int] = {}
        self.regs: list[Reg] = list(function.regs)
        self.variables: dict[str, Variable] = dict(function.variables)
        self.unique = 0
        self._carry: Reg | None = None

    @property
    def carry(self) -> Reg:
        """The carry flag of extended-precision arithmetic, as a predicate register."""
        if self._carry is None:
            self._carry = Reg("%cc", "pred", len(self.regs))
            self.regs.append(self._carry)
        return self._carry

    def label_here(self, name: str) -> None:
        """Bind a label to the next instruction."""
        self.labels[name] = len(self.instrs)

    def fresh(self, stem: str) -> str:
        """Return an unused label name."""
        self.unique += 1
        return f"{stem}~{self.unique}"


def rewrite(operand: Any, regs: dict[Reg, Reg], names: dict[str, str]) -> Any:
    """Return an operand with registers and symbol names replaced."""
    if isinstance(operand, Reg):
        return regs.get(operand, operand)
    if isinstance(operand, Sym):
        return Sym(names.get(operand.name, operand.name), operand.offset)
    if isinstance(operand, Vec):
        return Vec(tuple(rewrite(item, regs, names) for item in operand.items))
    if isinstance(operand, Addr):
        parts = tuple(rewrite(part, regs, names) for part in operand.parts)
        return Addr(rewrite(operand.base, regs, names), operand.offset, parts)
    if isinstance(operand, Pair):
        return Pair(rewrite(operand.first, regs, names), rewrite(operand.second, regs, names))
    if isinstance(operand, Not):
        return Not(rewrite(operand.reg, regs, names))
    if isinstance(operand, Neg):
        return Neg(rewrite(operand.reg, regs, names))
    return operand


def lower(module: ModuleIR, function: Function) -> Lowered:
    """Inline every call of a kernel and turn guarded non-ALU instructions into branches.

    Parameters
    ----------
    module : ModuleIR
        Where called functions are found.
    function : Function
        The kernel.

    Returns
    -------
    Lowered
        One instruction list; labels map to positions in it.
    """
    out = Lowered(function)
    _emit_body(module, function, out, {}, {}, None, (), ())
    out.instrs.append(Instr("exit", [], [], function.line, "exit"))
    return out


def _emit_body(
    module: ModuleIR,
    function: Function,
    out: Lowered,
    regs: dict[Reg, Reg],
    names: dict[str, str],
    return_label: str | None,
    stack: tuple[str, ...],
    called: Loc,
) -> None:
    """Append a function's instructions, renamed for this inlining.

    ``stack`` holds the names of the functions that it is inlined in, ``called`` the source of the call.
    """
    at: dict[int, list[str]] = {}
    for label, position in function.labels.items():
        at.setdefault(position, []).append(label)
    for position, ins in enumerate(function.instrs):
        for label in at.get(position, ()):
            out.label_here(names.get(label, label))
        # A kernel's own names stay (only calls rename what they inline); its instructions are copied all the same.
        args = [rewrite(arg, regs, names) for arg in ins.args] if stack else [*ins.args]
        guard = regs.get(ins.guard, ins.guard) if ins.guard else None
        loc = ins.loc + called
        new = Instr(ins.op, ins.mods, args, ins.line, ins.text, guard, ins.guard_neg, loc=loc, origin=ins)
        if new.op in ("addc", "subc", "madc") or (new.op in ("add", "sub", "mad") and "cc" in new.mods):
            new = _lower_carry(new, out)
        if new.op == "ret":
            new = _lower_return(new, return_label)
        skip = None
        if new.guard is not None and (new.op in ("call", "brx") or kind_of(new.op) in ("call", "sync", "direct")):
            skip = out.fresh("skip")
            text = f"@{'' if new.guard_neg else '!'}{new.guard} bra (around: {new.text})"
            out.instrs.append(Instr("bra", [], [Sym(skip)], new.line, text, new.guard, not new.guard_neg))
            new = replace(new, guard=None, guard_neg=False)
        if new.op == "call":
            _inline_call(module, new, out, stack)
        else:
            out.instrs.append(new)
        if skip is not None:
            out.label_here(skip)
    for label in at.get(len(function.instrs), ()):
        out.label_here(names.get(label, label))


def _lower_carry(ins: Instr, out: Lowered) -> Instr:
    """Make the carry flag an operand: ``carry_op d, carry out, sources..., carry in``."""
    writes, reads = "cc" in ins.mods, ins.op.endswith("c")
    mods = [m for m in ins.mods if m != "cc"]
    carry_in = [out.carry] if reads else []
    args = [ins.args[0], out.carry if writes else SINK, *ins.args[1:], *carry_in]
    return replace(ins, op=f"carry_{ins.op.removesuffix('c') if reads else ins.op}", mods=mods, args=args)


def _lower_return(ins: Instr, return_label: str | None) -> Instr:
    if return_label is None:
        return replace(ins, op="exit", mods=[], args=[])
    return replace(ins, op="bra", mods=[], args=[Sym(return_label)])


def _operands(ins: Instr) -> tuple[list, Any, list]:
    """Return a call's results, callee and arguments."""
    args = list(ins.args)
    returns = list(args.pop(0).items) if args and isinstance(args[0], Vec) else []
    callee = args.pop(0)
    return returns, callee, list(args.pop(0).items) if args and isinstance(args[0], Vec) else []


def _candidates(module: ModuleIR, ins: Instr, out: Lowered) -> list[Function]:
    """Return the functions that an indirect call may call: of its prototype, and with an address that is taken."""
    returns, _, actual = _operands(ins)

    def fits(params: list[Param], given: list) -> bool:
        sizes = [out.variables[each.name].size if isinstance(each, Sym) else None for each in given]
        return len(params) == len(given) and all(
            size in (None, param.size) for param, size in zip(params, sizes, strict=True)
        )

    taken = module.taken
    functions = [each for each in module.functions.values() if not each.entry and each.instrs and each.name in taken]
    return [each for each in functions if fits(each.params, actual) and fits(each.returns, returns)]


def _indirect_call(module: ModuleIR, ins: Instr, out: Lowered, stack: tuple[str, ...]) -> None:
    """Compare the address with each function that it may be, and inline each; another address is an error.

    A function that calls itself so cannot be inlined: that it is reached is an error, too.
    """
    end, callee = out.fresh("called"), _operands(ins)[1]
    for function in _candidates(module, ins, out):
        other, differs = out.fresh("other"), Reg("%callee", "pred", len(out.regs))
        out.regs.append(differs)
        text = f"(calls {function.name}?) {ins.text}"
        address = Imm(module.address_of(function.name))
        out.instrs.append(Instr("setp", ["ne", "u64"], [differs, callee, address], ins.line, text, loc=ins.loc))
        out.instrs.append(Instr("bra", [], [Sym(other)], ins.line, text, differs, loc=ins.loc))
        if function.name in stack:
            out.instrs.append(replace(ins, op="trap", mods=[], args=[], text=f"(recursion is not modelled) {ins.text}"))
        else:
            args = [Sym(function.name) if arg is callee else arg for arg in ins.args]
            _inline_call(module, replace(ins, args=args), out, stack)
        out.instrs.append(Instr("bra", [], [Sym(end)], ins.line, text, loc=ins.loc))
        out.label_here(other)
    text = f"(no function of this prototype is at the address) {ins.text}"
    out.instrs.append(replace(ins, op="trap", mods=[], args=[], text=text))
    out.label_here(end)


def _inline_call(module: ModuleIR, ins: Instr, out: Lowered, stack: tuple[str, ...]) -> None:
    """Replace one ``call`` by the callee's body; formal parameters become the caller's variables or registers."""
    where = f"kernel {out.name}, line {ins.line}"
    if len(stack) > _MAX_DEPTH:
        raise UnknownInstruction(f"{where}: recursive calls are not modelled: {ins.text}")
    actual_returns, callee, actual = _operands(ins)
    if not isinstance(callee, Sym):
        _indirect_call(module, ins, out, stack)
        return
    if callee.name in BUILTIN_CALLS:
        places = [Addr(given) for given in (*actual, *actual_returns)]
        out.instrs.append(Instr("builtin_call", [callee.name], places, ins.line, ins.text))
        return
    target = module.functions.get(callee.name)
    if target is None or not target.instrs:
        raise UnknownInstruction(f"{where}: function {callee.name!r} has no body here: {ins.text}")
    if len(actual) != len(target.params) or len(actual_returns) != len(target.returns):
        raise UnknownInstruction(f"{where}: argument count differs from the callee: {ins.text}")
    names = {label: out.fresh(label) for label in target.labels}
    regs = {}
    for reg in target.regs:
        regs[reg] = Reg(reg.name, reg.type, len(out.regs))
        out.regs.append(regs[reg])
    copies_back = []
    for formal, given, returned in [
        *((f, g, False) for f, g in zip(target.params, actual, strict=True)),
        *((f, g, True) for f, g in zip(target.returns, actual_returns, strict=True)),
    ]:
        before, after = _bind(formal, given, out, regs, names, ins)
        copies_back += after if returned else []
        out.instrs += [] if returned else before
    for name, var in target.variables.items():
        if var.space == "shared":
            out.variables[name] = var
            continue
        clone = copy.copy(var)
        clone.name = names[name] = out.fresh(name)
        out.variables[clone.name] = clone
    end = out.fresh("return")
    _emit_body(module, target, out, regs, names, end, (*stack, target.name), ins.loc)
    out.label_here(end)
    out.instrs += copies_back


def _bind(
    formal: Param, given: Any, out: Lowered, regs: dict[Reg, Reg], names: dict[str, str], ins: Instr
) -> tuple[list[Instr], list[Instr]]:
    """Connect a formal parameter with the call's argument; return copies before and after the body."""
    if formal.reg is None and isinstance(given, Sym):
        names[formal.name] = given.name
        return [], []
    bits = f"b{TYPE_BITS[formal.type]}" if formal.type != "pred" else "pred"
    inner: Any = regs.get(formal.reg) if formal.reg else None
    if inner is None:  # a register or a literal for a parameter in memory
        variable = Variable(out.fresh(formal.name), "param", formal.align, formal.size, formal.type)
        out.variables[variable.name] = variable
        names[formal.name] = variable.name
        place = Addr(Sym(variable.name))
        store = Instr("st", ["param", bits], [place, given], ins.line, ins.text)
        return [store], [Instr("ld", ["param", bits], [given, place], ins.line, ins.text)]
    if isinstance(given, Sym):
        place = Addr(given)
        load = Instr("ld", ["param", bits], [inner, place], ins.line, ins.text)
        return [load], [Instr("st", ["param", bits], [place, inner], ins.line, ins.text)]
    move = Instr("mov", [bits], [inner, given], ins.line, ins.text)
    return [move], [Instr("mov", [bits], [given, inner], ins.line, ins.text)]
