"""A kernel ready to run: its blocks compiled to Python functions on demand, and its static memory layout."""

from __future__ import annotations

import linecache
from collections.abc import Callable

import numpy as np

from . import numeric
from .cfg import Cfg
from .codegen import Codegen, Park
from .ir import Function, ModuleIR, Sym, Variable, operand_regs
from .lower import lower
from .registry import OPS


def _put(old: np.ndarray, lanes: np.ndarray, value: np.ndarray) -> np.ndarray:
    new = old.copy()
    new[lanes] = value
    return new


def _put_mask(old: np.ndarray | None, lanes: np.ndarray, mask: np.ndarray | None) -> np.ndarray | None:
    if old is None and mask is None:
        return None
    new = np.zeros(32, bool) if old is None else old.copy()
    new[lanes] = False if mask is None else mask
    return new if np.count_nonzero(new) else None


def _or_masks(*masks: np.ndarray | None) -> np.ndarray:
    result = None
    for mask in masks:
        if mask is not None:
            result = mask if result is None else result | mask
    return result


def _select_mask(pred: np.ndarray, new: np.ndarray | None, old: np.ndarray | None) -> np.ndarray | None:
    if new is None and old is None:
        return None
    mask = np.where(pred, False if new is None else new, False if old is None else old)
    return mask if np.count_nonzero(mask) else None


def _any_mask(mask: np.ndarray) -> np.ndarray | None:
    return mask if np.count_nonzero(mask) else None


def environment() -> dict:
    """Return the globals of generated code."""
    return {
        "np": np,
        "Park": Park,
        "where": np.where,
        "cnt": np.count_nonzero,
        "full": np.full,
        "put": _put,
        "putq": _put_mask,
        "orq": _or_masks,
        "selq": _select_mask,
        "anyq": _any_mask,
        **{name: getattr(numeric, name) for name in ("fma32", "flush", "saturate", "mul_hi", "int_div", "int_rem")},
        "shift_left": numeric.shift_left,
        "shift_right": numeric.shift_right,
    }


class Program:
    """One kernel: control-flow graph, compiled blocks and variable offsets."""

    def __init__(self, module: ModuleIR, function: Function) -> None:
        self.name = function.name
        self.function = function
        self.cfg = Cfg(lower(module, function))
        self.blocks = self.cfg.blocks
        self.env = environment()
        self.full: dict[int, tuple[Callable, tuple[int, ...]]] = {}
        self.partial: list[Callable | None] = [None] * len(self.blocks)
        self._inflight: list[int] | None = None
        self._layout(module)
        zeros = {code: np.zeros(32, "bool" if code == "b1" else code) for code in set(self.cfg.storage) - {"q"}}
        zeros["q"] = np.zeros((32, 2), "u8")
        self._initial = [zeros[code] for code in self.cfg.storage]
        for block in self.blocks:
            for ins in block.instrs:
                self._check(ins)

    def _check(self, ins: object) -> None:
        """Emit once, so that an unknown instruction is an error when the kernel is loaded, not when it is reached."""
        generator = Codegen(self.cfg, dict(self.env), True)
        if OPS[ins.op].kind == "term":
            generator._terminator(ins, self.blocks[0])
        else:
            generator.emit(ins)

    def _layout(self, module: ModuleIR) -> None:
        """Place shared, local and parameter variables."""
        used = {name for ins in self.cfg.code.instrs for name in _symbols(ins.args)}
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

    def initial_registers(self) -> list[np.ndarray]:
        """Return a register file of zeros (all of it poison)."""
        return list(self._initial)

    def inflight_registers(self) -> list[int]:
        """Return the registers that may hold results still in flight: D of wgmma and copies of it."""
        if self._inflight is None:
            found: set[int] = set()
            moves: dict[int, list[int]] = {}
            for ins in self.cfg.code.instrs:
                if ins.op == "wgmma" and "mma_async" in ins.mods:
                    found.update(r.index for r in ins.args[0].items)
                elif ins.op == "tcgen05" and ins.mods[0] == "ld":
                    found.update(r.index for r in operand_regs(ins.args[0]))
                elif ins.op == "mov" and all(hasattr(a, "index") for a in ins.args):
                    moves.setdefault(ins.args[1].index, []).append(ins.args[0].index)
            work = list(found)
            while work:
                for target in moves.get(work.pop(), ()):
                    if target not in found:
                        found.add(target)
                        work.append(target)
            self._inflight = sorted(found)
        return self._inflight

    def superblock(self, start: int) -> tuple[Callable, tuple[int, ...]]:
        """Return the full-warp function that starts at a block, and the blocks it runs."""
        entry = self.full.get(start)
        if entry is None:
            run = [start]
            if not self.blocks[start].solo:
                while self._falls_into(run[-1]):
                    run.append(run[-1] + 1)
            entry = self.full[start] = (self._compile([self.blocks[i] for i in run], True), tuple(run))
        return entry

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
            function = self.partial[index] = self._compile([self.blocks[index]], False)
        return function

    def _compile(self, blocks: list, full: bool) -> Callable:
        name = f"b{blocks[0].index}_{'full' if full else 'part'}"
        source = Codegen(self.cfg, self.env, full).function(blocks, name)
        filename = f"<ptxsim {self.name} {name}>"
        linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
        exec(compile(source, filename, "exec"), self.env)
        return self.env[name]


def _symbols(args: list) -> set[str]:
    names: set[str] = set()

    def visit(node: object) -> None:
        if isinstance(node, Sym):
            names.add(node.name)
        for key in ("items", "parts"):
            for child in getattr(node, key, ()):
                visit(child)
        for key in ("base", "first", "second", "reg"):
            if hasattr(node, key):
                visit(getattr(node, key))

    for arg in args:
        visit(arg)
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
