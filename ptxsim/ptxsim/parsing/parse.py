"""PTX text to :class:`~.ir.ModuleIR`: directives, declarations, scopes and instructions."""

from __future__ import annotations

import bisect
import re
import struct
from functools import partial
from typing import Any

from ..errors import PtxSyntaxError
from .ir import TYPE_BITS, Body, Function, Imm, Instr, Loc, ModuleIR, Not, Param, Reg, Sym, Variable
from .scan import matching, parse_number, parse_operand, split_top, statements, strip_comments

_LINKAGE = re.compile(r"\.(visible|extern|weak|common)\s+")
_FILE = re.compile(r'\.file\s+(\d+)\s+"([^"]*)"')
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+(\d+)(?:.*\binlined_at\s+(\d+)\s+(\d+)\s+(\d+))?")
_MALFORMED = (LookupError, ValueError, TypeError, AttributeError, RecursionError, OverflowError, struct.error)
"""Errors that taking apart a text that is not PTX may raise."""

_SPACES = ("global", "const", "shared", "local", "param")
_REG_FAMILY = re.compile(r"(.+?)<(\d+)>$")
_INSTRUCTION = re.compile(r"(?:@(!?)\s*([\w$%]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.S)
"""The guard, its register, the opcode and the operands."""


class _Scope:
    """One ``{ }`` scope: registers, variables and labels declared in it."""

    def __init__(self, parent: _Scope | None) -> None:
        self.parent = parent
        self.names: dict[str, Any] = {}
        self.operands: dict[str, Any] = {}

    def find(self, name: str) -> Any | None:
        """Look a name up through the chain of scopes."""
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.parent
        return None


class Parser:
    """Parses one PTX module."""

    def __init__(self, text: str) -> None:
        self.text = strip_comments(text.rstrip("\0"))  # tools save the C string whole
        self.line_starts = [0] + [m.end() for m in re.finditer("\n", self.text)]
        self.module = ModuleIR("", "", {}, {}, text=self.text)
        self.unique = 0

    def line_of(self, pos: int) -> int:
        """Return the 1-based line of an offset."""
        return bisect.bisect_right(self.line_starts, pos)

    def parse(self) -> ModuleIR:
        """Parse everything and return the module."""
        text, pos = self.text, 0
        while True:
            while pos < len(text) and (text[pos].isspace() or text[pos] == ";"):
                pos += 1
            if pos >= len(text):
                return self.module
            try:
                pos = self._top_level(pos)
            except PtxSyntaxError as error:
                if "line" in str(error):
                    raise
                raise PtxSyntaxError(f"line {self.line_of(pos)}: {error}") from None
            except _MALFORMED as error:
                raise PtxSyntaxError(f"line {self.line_of(pos)}: cannot be read ({error})") from error

    def _top_level(self, pos: int) -> int:
        text = self.text
        line_end = text.find("\n", pos)
        line_end = len(text) if line_end < 0 else line_end
        line = text[pos:line_end]
        for key in ("version", "target", "address_size", "file", "loc"):
            if line.startswith("." + key):
                if key in ("version", "target"):
                    setattr(self.module, key, line.split(None, 1)[1].strip().split(",")[0])
                elif match := _FILE.match(line):
                    self.module.files[int(match[1])] = match[2]
                return line_end
        if line.startswith(".section"):
            return matching(text, text.index("{", pos)) + 1
        if line.startswith((".pragma", ".alias")):
            return text.index(";", pos) + 1
        if line.startswith("@@"):
            return line_end
        extern = False
        while match := _LINKAGE.match(text, pos):
            extern |= match.group(1) in ("extern", "common")
            pos = match.end()
        if text.startswith((".entry", ".func"), pos):
            return self._function(pos)
        if any(text.startswith("." + space, pos) for space in _SPACES):
            end = self._declaration_end(pos)
            for var in self._variables(text[pos:end], extern):
                self.module.variables[var.name] = var
            return end + 1
        raise PtxSyntaxError(f"unknown module-level statement {line[:60]!r}")

    def _declaration_end(self, pos: int) -> int:
        depth = 0
        for index in range(pos, len(self.text)):
            char = self.text[index]
            depth += (char == "{") - (char == "}")
            if char == ";" and not depth:
                return index
        raise PtxSyntaxError("declaration without end")

    def _function(self, pos: int) -> int:
        text = self.text
        line = self.line_of(pos)
        entry = text.startswith(".entry", pos)
        pos += len(".entry") if entry else len(".func")
        returns: list[Param] = []
        head = re.compile(r"\s*(\.noreturn\s+)?").match(text, pos)
        pos = head.end()
        if text[pos] == "(":
            end = matching(text, pos)
            returns = self._params(text[pos + 1 : end])
            pos = end + 1
        name_match = re.compile(r"\s*([\w$%]+)\s*").match(text, pos)
        if not name_match:
            raise PtxSyntaxError("function without a name")
        pos = name_match.end()
        params: list[Param] = []
        if pos < len(text) and text[pos] == "(":
            end = matching(text, pos)
            params = self._params(text[pos + 1 : end])
            pos = end + 1
        function = Function(name_match.group(1), entry, params, returns, line=line)
        match = re.compile(r"[^{;]*").match(text, pos)
        for directive in re.finditer(r"\.(\w+)\s*([\d,\s]*)", match.group()):
            values = tuple(int(v) for v in re.findall(r"\d+", directive.group(2)))
            function.directives[directive.group(1)] = values
        pos = match.end()
        if text[pos] == ";":
            self.module.functions.setdefault(function.name, function)
            return pos + 1
        end = matching(text, pos)
        function.read = partial(_read, self, function, pos + 1, end)
        self.module.functions[function.name] = function
        return end + 1

    def _params(self, text: str) -> list[Param]:
        params, offset = [], 0
        for piece in split_top(text):
            match = re.match(r"\.(param|reg)\s+(.*)", piece, re.S)
            if not match:
                raise PtxSyntaxError(f"bad parameter {piece!r}")
            body = match.group(2)
            align = 0
            if ptr := re.search(r"\.ptr\b(\s*\.(global|const|shared|local))?(\s*\.align\s+\d+)?", body):
                body = body[: ptr.start()] + body[ptr.end() :]
            if found := re.search(r"\.align\s+(\d+)", body):
                align = int(found.group(1))
                body = body[: found.start()] + body[found.end() :]
            decl = re.match(r"\s*\.(\w+)\s+([\w$%]+)\s*((?:\[\s*\d*\s*\])*)\s*$", body)
            if not decl:
                raise PtxSyntaxError(f"bad parameter {piece!r}")
            width = TYPE_BITS[decl.group(1)] // 8
            size = width
            for dim in re.findall(r"\[\s*(\d*)\s*\]", decl.group(3)):
                size *= int(dim or 0)
            align = align or width
            offset = -(-offset // align) * align
            params.append(Param(decl.group(2), decl.group(1), align, size, offset, match.group(1)))
            offset += size
        return params

    def _variables(self, text: str, extern: bool = False) -> list[Variable]:
        """Parse ``.space [.align n] [.vN] .type name[dims] [= init], ...``."""
        text = text.strip()
        space = re.match(r"\.(\w+)", text).group(1)
        rest = text[len(space) + 1 :]
        align, vector, type_name = 0, 1, ""
        while match := re.match(r"\s*\.(\w+)(?:\s+(\d+)(?=\s))?", rest):
            key = match.group(1)
            if key == "align":
                align = int(match.group(2))
            elif key in ("v2", "v4", "v8"):
                vector = int(key[1:])
            elif key in TYPE_BITS:
                type_name = key
            rest = rest[match.end() :]
            if key == "attribute":
                rest = rest[rest.index(")") + 1 :]
        if not type_name:
            raise PtxSyntaxError(f"a variable without a type in {text[:60]!r}")
        width = TYPE_BITS[type_name] // 8
        result = []
        for piece in split_top(rest):
            decl, _, init = piece.partition("=")
            match = re.match(r"\s*([\w$%]+)\s*((?:\[\s*[\dxXa-fA-F]*\s*\])*)(?:<(\d+)>)?\s*$", decl)
            if not match:
                raise PtxSyntaxError(f"bad declaration {piece[:60]!r}")
            count = vector
            dims = re.findall(r"\[\s*([\dxXa-fA-F]*)\s*\]", match.group(2))
            for dim in dims:
                count *= int(dim, 0) if dim else 0
            var = Variable(match.group(1), space, align or width * vector, count * width, type_name, extern=extern)
            if init.strip():
                self._initialise(var, init.strip(), width)
            result.append(var)
        return result

    def _initialise(self, var: Variable, init: str, width: int) -> None:
        """Fill ``var.data`` and ``var.relocs`` from an initialiser list."""
        items = split_top(init[1:-1]) if init.startswith("{") else [init]
        flat: list[str] = []
        for item in items:
            flat.extend(split_top(item[1:-1]) if item.startswith("{") else [item])
        data = bytearray()
        for item in flat:
            number = parse_number(item)
            if number is None:
                match = re.match(r"(generic\()?\s*([\w$%]+)\s*\)?\s*(\+\s*(\d+))?$", item)
                if not match:
                    raise PtxSyntaxError(f"bad initialiser {item!r}")
                var.relocs.append((len(data), width, match.group(2), bool(match.group(1)), int(match.group(4) or 0)))
                data += bytes(width)
            elif number.kind == "int":
                data += (number.value & ((1 << 8 * width) - 1)).to_bytes(width, "little")
            elif number.kind == "f64" and width == 4:
                value = struct.unpack("<d", struct.pack("<Q", number.value))[0]
                data += struct.pack("<f", value)
            else:
                data += number.value.to_bytes(width, "little")
        var.size = max(var.size, len(data))
        var.data = bytes(data).ljust(var.size, b"\0")


def _read(parser: Parser, function: Function, pos: int, end: int) -> Body:
    """Parse the body of a function, between two offsets."""
    reader = _BodyParser(parser, function)
    reader.run(pos, end)
    return reader.body


class _BodyParser:
    """Parses the body of one function; names are resolved after the whole body is read."""

    def __init__(self, parser: Parser, function: Function) -> None:
        self.parser, self.function, self.body = parser, function, Body()
        self.scope = _Scope(None)
        for param in [*function.params, *function.returns]:
            if param.space == "reg":
                self._declare([param.name], param.type)
                param.reg = self.body.regs[-1]
            else:
                self.scope.names[param.name] = Sym(param.name)
        self.raw: list[tuple[str, int, _Scope, Loc]] = []
        self.loc: Loc = ()
        self.places: dict[tuple[str, ...], Loc] = {}
        self.label = ""
        self.tables: dict[str, tuple[str, _Scope]] = {}

    def run(self, pos: int, end: int) -> None:
        """Parse the statements between two offsets into the function."""
        for kind, text, at in statements(self.parser.text, pos, end):
            try:
                self._statement(kind, text, at)
            except PtxSyntaxError as error:
                raise PtxSyntaxError(f"{self.function.name}, line {self.parser.line_of(at)}: {error}") from None
            except _MALFORMED as error:
                where = f"{self.function.name}, line {self.parser.line_of(at)}"
                raise PtxSyntaxError(f"{where}: cannot be read ({error}): {text[:60]!r}") from error
        for text, at, scope, loc in self.raw:
            try:
                self.body.instrs.append(self._instruction(text, at, scope))
                self.body.instrs[-1].loc = loc
            except PtxSyntaxError as error:
                raise PtxSyntaxError(f"{self.function.name}, line {self.parser.line_of(at)}: {error}") from None
            except _MALFORMED as error:
                where = f"{self.function.name}, line {self.parser.line_of(at)}"
                raise PtxSyntaxError(f"{where}: cannot be read ({error}): {text[:60]!r}") from error

    def _statement(self, kind: str, text: str, at: int) -> None:
        if kind == "open":
            self.scope = _Scope(self.scope)
        elif kind == "close":
            if self.scope.parent is None:
                raise PtxSyntaxError("unbalanced '}'")
            self.scope = self.scope.parent
        elif kind == "label":
            self.parser.unique += 1
            unique = f"{text}#{self.parser.unique}"
            self.scope.names[text] = Sym(unique)
            self.body.labels[unique] = len(self.raw)
            self.label = unique
        elif kind == "stmt":
            if text.startswith(".reg"):
                self._registers(text)
            elif text.startswith(".branchtargets"):
                self.tables[self.label] = (text.removeprefix(".branchtargets"), self.scope)
            elif text.startswith((".pragma", ".callprototype", ".calltargets")):
                return
            elif text.startswith("."):
                self._variable(text)
            else:
                self.raw.append((text, at, self.scope, self.loc))
        elif kind == "line" and (match := _LOC.match(text)):
            self._locate(match)

    def _locate(self, match: re.Match) -> None:
        """Keep the source line of what follows, and of the calls that were inlined around it.

        A call is named by its place alone; a ``.loc`` before has told what that is inlined at in turn.
        """
        own, caller = match.groups()[:3], match.groups()[3:]
        self.loc = ((int(own[0]), int(own[1])),)
        if caller[0]:
            self.loc += self.places.get(caller, ((int(caller[0]), int(caller[1])),))
        self.places[own] = self.loc

    def _registers(self, text: str) -> None:
        match = re.match(r"\.reg\s+(\.v[24]\s+)?\.(\w+)\s*(.*)$", text, re.S)
        if not match or match.group(1) or match.group(2) not in TYPE_BITS:
            raise PtxSyntaxError(f"unsupported register declaration {text!r}")
        for name in split_top(match.group(3)):
            family = _REG_FAMILY.match(name)
            names = [f"{family.group(1)}{i}" for i in range(int(family.group(2)))] if family else [name]
            self._declare(names, match.group(2))

    def _declare(self, names: list[str], kind: str) -> None:
        """Declare registers in the current scope."""
        regs = self.body.regs
        new = [Reg(name, kind, index) for index, name in enumerate(names, len(regs))]
        regs += new
        self.scope.names.update(zip(names, new, strict=True))

    def _variable(self, text: str) -> None:
        for var in self.parser._variables(text):
            source_name = var.name
            if source_name in self.body.variables or source_name in self.parser.module.variables:
                self.parser.unique += 1
                var.name = f"{source_name}#{self.parser.unique}"
            self.scope.names[source_name] = Sym(var.name)
            self.body.variables[var.name] = var

    def _instruction(self, text: str, at: int, scope: _Scope) -> Instr:
        match = _INSTRUCTION.match(text)
        if not match:
            raise PtxSyntaxError(f"cannot read instruction {text[:60]!r}")
        negated, name, opcode, operands = match.groups()
        guard = scope.find(name) if name else None
        if name and not isinstance(guard, Reg):
            raise PtxSyntaxError(f"unknown guard {name!r}")
        op, *mods = opcode.split(".")
        known = scope.operands
        args = [known.get(part) or self._operand(part, scope, text) for part in split_top(operands)]
        if op == "brx":
            args = [args[0], *self._targets(args[-1], text)]
        return Instr(op, mods, args, self.parser.line_of(at), " ".join(text.split()), guard, negated == "!")

    def _operand(self, part: str, scope: _Scope, text: str) -> Any:
        """Return an operand; equal texts are equal operands in a scope, once all of the scope is read."""
        declared = scope.find(part)
        if declared.__class__ is Reg:  # the most frequent kind of operand
            scope.operands[part] = declared
            return declared

        def resolve(name: str) -> Any:
            found = scope.find(name)
            if found is None and name.startswith("%"):
                raise PtxSyntaxError(f"unknown register {name!r} in {text[:60]!r}")
            return Sym(name) if found is None else found

        operand = scope.operands[part] = parse_operand(part, resolve)
        return operand

    def _targets(self, table: Any, text: str) -> list[Sym]:
        """Return the labels of a .branchtargets list."""
        if not isinstance(table, Sym) or table.name not in self.tables:
            raise PtxSyntaxError(f"no .branchtargets list for {text[:60]!r}")
        names, scope = self.tables[table.name]
        found = [scope.find(name) for name in split_top(names)]
        if not all(isinstance(label, Sym) for label in found):
            raise PtxSyntaxError(f"unknown label in .branchtargets {names.strip()!r}")
        return found


def parse(text: str) -> ModuleIR:
    """Parse a PTX module.

    Parameters
    ----------
    text : str
        PTX as NVRTC or nvcc emits it.

    Returns
    -------
    ModuleIR
        Functions with instructions in order and module-level variables.
    """
    return Parser(text).parse()


__all__ = ["Imm", "Not", "Parser", "parse"]
