"""A kernel ready to run: its blocks compiled to Python functions on demand, and its static memory layout."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

import numpy as np

from ..arithmetic import native, numeric, undefined
from ..arithmetic.numeric import Poison, count_nonzero
from ..parsing.ir import Addr, Function, Imm, Instr, ModuleIR, Neg, Not, Pair, Reg, Sym, Variable, Vec, operand_regs
from .cfg import Cfg, uses_defs
from .codegen import Codegen, Park
from .lower import lower
from .regions import decided, postdominators
from .registry import OPS

_RELEASES = frozenset(("bar", "barrier", "exit"))
"""Opcodes after which others may write what this warp has read (and arrivals on mbarriers)."""

_MAX_CALLS = 5
"""Most source lines reported per instruction; beyond it, library lines between the first and the last two go."""

_LIBRARY = re.compile(r"/(cute|cutlass|cub|thrust|cuda/std|crt)/")
"""Directories of headers whose frames say little: the caller's own main loop stands between them."""


def _put(old: np.ndarray, lanes: np.ndarray, value: np.ndarray) -> np.ndarray:
    new = old.copy()
    new[lanes] = value
    return new


def _or_masks(*masks: Poison) -> Poison:
    result = None
    for mask in masks:
        if mask is not None:
            result = mask if result is None or result is mask else result | mask
    return result if result.__class__ is not undefined.Bits else result.whole


def _environment() -> dict:
    """Return the globals of generated code."""
    return {
        "np": np,
        "Park": Park,
        "where": np.where,
        "cnt": count_nonzero,
        "CLEAN": {type(None)},
        "full": np.full,
        "put": _put,
        "Bits": undefined.Bits,
        "putq": undefined.put,
        "orq": _or_masks,
        "selq": undefined.select,
        "unsureq": _or_masks,
        "partq": undefined.part,
        "saturate": numeric.saturate,
        "mul_hi": numeric.mul_hi,
        **native.FUNCTIONS,
    }


_ENVIRONMENT = _environment()


@lru_cache(maxsize=1 << 14)
def _compiled(source: str) -> CodeType:
    """Compile the source of a block function."""
    return next(each for each in compile(source, "<ptxsim block>", "exec").co_consts if isinstance(each, CodeType))


class Program:
    """One kernel: control-flow graph, compiled blocks and variable offsets."""

    def __init__(self, module: ModuleIR, function: Function) -> None:
        self.name = function.name
        self.function = function
        self.cfg = Cfg(lower(module, function))
        self.blocks = self.cfg.blocks
        self.full: dict[int, tuple[Callable, tuple[int, ...]]] = {}
        self.poisoned: dict[int, Callable] = {}
        self.partial: list[Callable | None] = [None] * len(self.blocks)
        self.base: Program | None = None
        self.changed: set[int] = set()
        self._early: dict[Instr, Instr | None] = {}
        self._released: dict[Instr, Instr | None] = {}
        self._moved: dict[bool, list[int]] = {}
        self._layout(module)
        self.instructions = [ins for block in self.blocks for ins in block.instrs]
        self.files = module.files
        self._writers: dict[int, list] | None = None
        self._postdominators: list[int] = []
        self._decided: dict[int, tuple[int, list[int]] | None] = {}
        for number, ins in enumerate(self.instructions):
            ins.number = number
        zeros = {code: np.zeros(32, "bool" if code == "b1" else code) for code in set(self.cfg.storage) - {"q"}}
        zeros["q"] = np.zeros((32, 2), "u8")
        self._initial = [zeros[code] for code in self.cfg.storage]
        self._check()

    def variant(self, changes: Mapping[Instr, Instr]) -> Program:
        """Return the kernel with some instructions of its text replaced; it shares the code of all other blocks.

        A replacement reads and writes no registers but the instruction's, and does not branch.
        """
        other = copy.copy(self)
        other.base, other.changed = self, set()
        other.blocks = [*self.blocks]
        for block in self.blocks:
            instrs = [_replaced(ins, changes.get(ins.origin)) for ins in block.instrs]
            if instrs != block.instrs:
                other.blocks[block.index] = block.with_instrs(instrs)
                other.changed.add(block.index)
        other.cfg = copy.copy(self.cfg)
        other.cfg.blocks = other.blocks
        other.full, other.poisoned, other.partial = {}, {}, [None] * len(self.blocks)
        other._early, other._released, other._moved, other._writers = {}, {}, {}, None
        other._decided = {}
        other.instructions = [ins for block in other.blocks for ins in block.instrs]
        return other

    def _check(self) -> None:
        """Raise for an unknown instruction when the kernel is loaded, not when it is reached."""
        known = set()
        for ins in self.instructions:
            key = shape(ins)
            if key not in known:
                Codegen(self.cfg, True).check(ins)
                known.add(key)

    def _layout(self, module: ModuleIR) -> None:
        """Place shared, local and parameter variables."""
        others = [arg for ins in self.cfg.code.instrs for arg in ins.args if arg.__class__ not in (Reg, Imm)]
        used = _symbols(others)
        shared = [v for v in self.cfg.code.variables.values() if v.space == "shared"]
        shared += [v for v in module.variables.values() if v.space == "shared" and v.name in used]
        self.offsets: dict[str, tuple[str, int]] = {}
        position = 0
        for var in [v for v in shared if not v.extern]:
            position = -(-position // var.align) * var.align
            self.offsets[var.name] = ("shared", position)
            position += var.size
        dynamic = [v for v in shared if v.extern]
        align = max([16, *(v.align for v in dynamic)])
        self.static_shared = position
        self.dynamic_offset = -(-position // align) * align
        for var in dynamic:
            self.offsets[var.name] = ("shared", self.dynamic_offset)
        local = 0
        for var in self.cfg.code.variables.values():
            if var.space in ("local", "param"):
                local = -(-local // var.align) * var.align
                self.offsets[var.name] = ("local", local)
                local += var.size
        self.local_size = local
        for param in self.function.params:
            self.offsets[param.name] = ("param", param.offset)
        last = self.function.params[-1:]
        self.param_size = last[0].offset + last[0].size if last else 0

    @property
    def writers(self) -> dict[int, list]:
        """The instructions that write each register, in the text's order."""
        if self._writers is None:
            self._writers = {}
            for ins in self.instructions:
                for reg in uses_defs(ins)[1]:
                    self._writers.setdefault(reg.index, []).append(ins)
        return self._writers

    def decided(self, index: int) -> tuple[int, list[int]] | None:
        """Return what the branch at the end of a block decides (see :func:`~.regions.decided`)."""
        if index not in self._decided:
            self._postdominators = self._postdominators or postdominators(self.blocks)
            self._decided[index] = decided(self.blocks, self._postdominators, index)
        return self._decided[index]

    def source_line(self, ins: Instr) -> str:
        """Return file and line of an instruction's source, and of the calls around it ('' where no ``.loc`` tells)."""
        places = [f"{self.files.get(file, f'file {file}')}:{line}" for file, line in ins.loc]
        if len(places) > _MAX_CALLS:
            middle = ["..." if _LIBRARY.search(each) else each for each in places[1:-2]]
            places[1:-2] = [each for k, each in enumerate(middle) if each != "..." or middle[k - 1 : k] != ["..."]]
        return ", inlined at ".join(places)

    def initial_registers(self) -> list[np.ndarray]:
        """Return a register file of zeros (all of it poison)."""
        return list(self._initial)

    def inflight_registers(self) -> list[int]:
        """Return the registers that may hold accumulators in flight: D of wgmma and copies of it."""
        return self._copies(False)

    def loaded_registers(self) -> list[int]:
        """Return the registers that may hold tensor-memory loads in flight: of tcgen05.ld, and what packs them."""
        return self._copies(True)

    def early_use(self, load: Instr) -> Instr | None:
        """Return the first instruction that uses registers of a tcgen05.ld and may run before a tcgen05.wait::ld.

        Instructions that only move or pack the registers are not uses; the registers they write count as the load's.
        """
        if load not in self._early:
            self._early[load] = self._search_use(load)
        return self._early[load]

    def early_release(self, load: Instr) -> Instr | None:
        """Return the first instruction that tells others of a tcgen05.ld's end and may run before a tcgen05.wait::ld.

        Compilers move arithmetic and stores ahead of the wait, but never move the wait behind a barrier.
        """
        if load not in self._released:
            self._released[load] = self._search_release(load)
        return self._released[load]

    def _after(self, load: Instr) -> tuple[int, int]:
        """Return the block of an instruction and its place behind it."""
        start = next(b.index for b in self.blocks if any(ins is load for ins in b.instrs))
        return start, 1 + next(i for i, ins in enumerate(self.blocks[start].instrs) if ins is load)

    def _search_release(self, load: Instr) -> Instr | None:
        work, seen = [self._after(load)], set[int]()
        while work:
            index, first = work.pop()
            for ins in self.blocks[index].instrs[first:]:
                if ins.op == "tcgen05" and "wait::ld" in ins.mods:
                    break
                if ins.op in _RELEASES or (ins.op == "mbarrier" and ins.mods[0].startswith("arrive")):
                    return ins
            else:
                new = [each for each in self.blocks[index].succ if each not in seen]
                seen.update(new)
                work += [(each, 0) for each in new]
        return None

    def _search_use(self, load: Instr) -> Instr | None:
        registers = frozenset(r.index for r in operand_regs(load.args[0]))
        work = [(*self._after(load), registers)]
        seen: set[tuple] = set()
        while work:
            index, first, registers = work.pop()
            block = self.blocks[index]
            for ins in block.instrs[first:]:
                if ins.op == "tcgen05" and "wait::ld" in ins.mods:
                    break
                uses, defs = uses_defs(ins)
                used, defined = {r.index for r in uses}, {r.index for r in defs}
                if registers & used and ins.op != "mov":
                    return ins
                registers = registers | defined if registers & used else registers - defined
            else:
                new = [(each, 0, registers) for each in block.succ if (each, registers) not in seen]
                seen.update((each, registers) for each, _, registers in new)
                work += new if registers else []
        return None

    def _copies(self, loads: bool) -> list[int]:
        if loads not in self._moved:
            found: set[int] = set()
            moves: dict[int, list[int]] = {}
            for ins in self.cfg.code.instrs:
                source = "ld" in ins.mods[:1] if loads else "mma_async" in ins.mods
                if ins.op == ("tcgen05" if loads else "wgmma") and source:
                    found.update(r.index for r in operand_regs(ins.args[0]))
                elif ins.op == "mov" and (loads or all(hasattr(a, "index") for a in ins.args)):
                    for each in operand_regs(ins.args[1]):
                        moves.setdefault(each.index, []).extend(r.index for r in operand_regs(ins.args[0]))
            work = list(found)
            while work:
                for target in moves.get(work.pop(), ()):
                    if target not in found:
                        found.add(target)
                        work.append(target)
            self._moved[loads] = sorted(found)
        return self._moved[loads]

    def superblock(self, start: int) -> tuple[Callable, tuple[int, ...]]:
        """Return the full-warp function that starts at a block, and the blocks it runs."""
        entry = self.full.get(start)
        if entry is None:
            run = [start]
            if not self.blocks[start].solo:
                while self._falls_into(run[-1]):
                    run.append(run[-1] + 1)
            shared = self.base and self.changed.isdisjoint(run)
            function = self.base.superblock(start)[0] if shared else self._compile(run, "clean")
            entry = self.full[start] = (function, tuple(run))
        return entry

    def tainted(self, start: int) -> Callable:
        """Return the function of the superblock that starts at a block for registers with poison."""
        function = self.poisoned.get(start)
        if function is None:
            run = self.superblock(start)[1]
            shared = self.base and self.changed.isdisjoint(run)
            function = self.base.tainted(start) if shared else self._compile(run, "full")
            self.poisoned[start] = function
        return function

    def _falls_into(self, index: int) -> bool:
        """Tell whether a block always continues with the next, and that one may join its superblock."""
        last = self.blocks[index].instrs[-1]
        if OPS[last.op].kind == "term" or index + 1 >= len(self.blocks):
            return False
        return not self.blocks[index + 1].solo

    def block(self, index: int) -> Callable:
        """Return the function of one block for a part of a warp."""
        function = self.partial[index]
        if function is None:
            shared = self.base and index not in self.changed
            function = self.base.block(index) if shared else self._compile([index], "part")
            self.partial[index] = function
        return function

    def _compile(self, run: Sequence[int], variant: str) -> Callable:
        blocks = [self.blocks[index] for index in run]
        source, values = Codegen(self.cfg, variant != "part", variant == "clean").function(blocks)
        name = f"b{run[0]}_{variant}"
        return FunctionType(_compiled(source), _ENVIRONMENT, name, values)


def _replaced(ins: Instr, by: Instr | None) -> Instr:
    """Return the replacement of an instruction; a guard that became a branch stays there."""
    if by is None:
        return ins
    guard, negated = (ins.guard, ins.guard_neg) if by.guard else (None, False)
    new = replace(by, guard=guard, guard_neg=negated, loc=ins.loc, number=ins.number, registers=None)
    new.origin = ins.origin
    return new


def shape(ins: Instr) -> tuple:
    """Return the form that decides whether an instruction is known: all but its registers and addresses."""
    forms = [arg.type if arg.__class__ is Reg else _form(arg) for arg in ins.args]
    return ins.op, tuple(ins.mods), ins.guard is None, *forms


def _form(operand: Any) -> Any:
    if isinstance(operand, Reg):
        return operand.type
    if isinstance(operand, Vec):
        return ("{}", *(_form(item) for item in operand.items))
    if isinstance(operand, Addr) and not operand.parts:
        return "[]", _form(operand.base)
    if isinstance(operand, Imm) and operand.kind != "int":
        return operand.kind
    return operand  # itself: other operands are few, or their values matter


def _symbols(args: list) -> set[str]:
    """Return the names of variables and functions inside operands."""
    names, work = set(), [*args]
    while work:
        node = work.pop()
        if isinstance(node, Sym):
            names.add(node.name)
        elif isinstance(node, Vec):
            work += [item for item in node.items if item.__class__ is not Reg]
        elif isinstance(node, Addr):
            work += [node.base, *node.parts]
        elif isinstance(node, Pair):
            work += [node.first, node.second]
        elif isinstance(node, (Not, Neg)):
            work.append(node.reg)
    return names


def constant_image(module: ModuleIR) -> tuple[np.ndarray, dict[str, int]]:
    """Lay out the module's .const variables and return the image and their offsets."""
    offsets: dict[str, int] = {}
    position = 0
    variables = [v for v in module.variables.values() if v.space == "const"]
    for var in variables:
        position = -(-position // var.align) * var.align
        offsets[var.name] = position
        position += var.size
    image = np.zeros(position, np.uint8)
    for var in variables:
        place(image[offsets[var.name] :], var)
    return image, offsets


def place(target: np.ndarray, var: Variable) -> None:
    """Write a variable's initial bytes."""
    if var.data:
        target[: len(var.data)] = np.frombuffer(var.data, np.uint8)


__all__ = ["Program", "constant_image", "operand_regs", "place"]
