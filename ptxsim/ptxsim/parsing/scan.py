"""Splits PTX text into statements, and operand text into operand trees."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from typing import Any

from ..errors import PtxSyntaxError
from .ir import SINK, Addr, Imm, Neg, Not, Pair, SReg, Sym, Vec

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_NEXT = re.compile(
    r"\s*(?:(?P<open>\{)|(?P<close>\})|;"
    r"|(?P<line>\.(?:loc|file|version|target|address_size)\b[^\n;]*)"
    r"|(?P<label>[A-Za-z_$%][\w$]*)\s*:(?!:)"
    r'|(?P<stmt>[^\s;{}"][^;{}"]*);'
    r"|(?P<other>\S)|)"
)
"""Next piece of a body; ``other`` is a statement with braces or strings, or one without a semicolon."""
_INT = re.compile(r"[-+~]?(0[xX][0-9a-fA-F]+|0[bB][01]+|0[0-7]*|[1-9]\d*)U?$")
_FLOAT_BITS = re.compile(r"[-+]?0([fFdD])([0-9a-fA-F]{8,16})$")
_FLOAT_DEC = re.compile(r"[-+]?(\d+\.\d*([eE][-+]?\d+)?|\.\d+([eE][-+]?\d+)?|\d+[eE][-+]?\d+)$")
_IDENT = re.compile(r"[A-Za-z_$%][\w$.%]*$")

# A string is one mark, so that nothing inside it counts.
_STATEMENT_MARKS = re.compile(r'"[^"]*"|[{};]')
_BRACKETS = {pair[0]: re.compile(f'"[^"]*"|[{re.escape(pair)}]') for pair in ("{}", "()", "[]")}
_PIECE_MARKS = re.compile(r'"[^"]*"|[\[\](){},"]')
_NESTED = re.compile(r'[\[\](){}"]')

SPECIAL_PREFIXES = (
    "%tid",
    "%ntid",
    "%ctaid",
    "%nctaid",
    "%laneid",
    "%warpid",
    "%nwarpid",
    "%smid",
    "%nsmid",
    "%gridid",
    "%clusterid",
    "%nclusterid",
    "%cluster_cta",
    "%cluster_ncta",
    "%is_explicit_cluster",
    "%lanemask_",
    "%clock",
    "%globaltimer",
    "%dynamic_smem_size",
    "%total_smem_size",
    "%aggr_smem_size",
    "%reserved_smem",
    "%envreg",
    "%pm",
    "%current_graph_exec",
)


def strip_comments(text: str) -> str:
    """Replace comments by a blank, keeping the line numbers."""

    def blank(match: re.Match[str]) -> str:
        return "\n" * match.group().count("\n") or " "

    return _COMMENT.sub(blank, text)


def statements(text: str, pos: int, end: int) -> Iterator[tuple[str, str, int]]:
    """Yield ``(kind, text, position)`` between two offsets.

    Parameters
    ----------
    text : str
        Comment-free PTX.
    pos, end : int
        Half-open range of offsets.

    Yields
    ------
    tuple
        ``kind`` is ``open``, ``close``, ``label``, ``line`` (a directive without semicolon) or ``stmt``.
    """
    while match := _NEXT.match(text, pos, end):
        kind, pos = match.lastgroup, match.end()
        if kind is None:  # a semicolon, or the end
            if pos == match.start():
                return
        elif kind == "other":
            start = match.start("other")
            stop = _statement_end(text, start, end)
            yield "stmt", text[start:stop].strip(), start
            pos = stop + 1
        else:
            yield kind, match[kind], match.start(kind)


def _statement_end(text: str, pos: int, end: int) -> int:
    """Return the offset of the semicolon that ends the statement at ``pos``."""
    depth = 0
    for match in _STATEMENT_MARKS.finditer(text, pos, end):
        mark = match.group()
        if mark == "{":
            depth += 1
        elif mark == "}":
            depth -= 1
        elif mark == ";" and depth <= 0:
            return match.start()
    return end


def matching(text: str, pos: int) -> int:
    """Return the offset of the bracket that closes the one at ``pos``."""
    opening, depth = text[pos], 0
    for match in _BRACKETS[opening].finditer(text, pos):
        mark = match.group()
        if mark[0] != '"':
            depth += 1 if mark == opening else -1
            if not depth:
                return match.start()
    raise PtxSyntaxError(f"unbalanced {opening!r}")


def split_top(text: str) -> list[str]:
    """Split at the commas that are outside all brackets and strings."""
    if not _NESTED.search(text):
        parts = [part.strip() for part in text.split(",")]
        return parts if len(parts) > 1 or parts[0] else []
    parts, depth, start = [], 0, 0
    for match in _PIECE_MARKS.finditer(text):
        mark = match.group()
        if mark in "{[(":
            depth += 1
        elif mark in "}])":
            depth -= 1
        elif mark == "," and not depth:
            parts.append(text[start : match.start()].strip())
            start = match.end()
    tail = text[start:].strip()
    if tail or parts:
        parts.append(tail)
    return parts


def parse_number(text: str) -> Imm | None:
    """Return the literal a token denotes, or None when it is not a literal."""
    if match := _FLOAT_BITS.match(text):
        bits = int(match.group(2), 16)
        single = match.group(1) in "fF"
        if text[0] == "-":
            bits ^= 1 << (31 if single else 63)
        return Imm(bits, "f32" if single else "f64")
    if _INT.match(text):
        body = text.rstrip("U")
        sign, invert = body.startswith("-"), body.startswith("~")
        body = body.lstrip("-+~")
        if body[:2] in ("0x", "0X"):
            value = int(body, 16)
        elif body[:2] in ("0b", "0B"):
            value = int(body, 2)
        elif body.startswith("0") and len(body) > 1:
            value = int(body, 8)
        else:
            value = int(body)
        return Imm(-value if sign else ~value if invert else value)
    if _FLOAT_DEC.match(text):
        return Imm(struct.unpack("<Q", struct.pack("<d", float(text)))[0], "f64")
    return None


def parse_operand(text: str, resolve: Callable[[str], Any]) -> Any:
    """Parse one operand; ``resolve`` maps identifiers to registers, symbols or labels."""
    text = text.strip()
    if not text:
        raise PtxSyntaxError("empty operand")
    if text[0] == "%" and _IDENT.match(text):  # the most frequent kind
        return SReg(text) if text.startswith(SPECIAL_PREFIXES) else resolve(text)
    if text == "_":
        return SINK
    if text[0] == "{":
        if not text.endswith("}"):
            raise PtxSyntaxError(f"bad vector operand {text!r}")
        return Vec(tuple(parse_operand(part, resolve) for part in split_top(text[1:-1])))
    if text[0] == "(":
        return Vec(tuple(parse_operand(part, resolve) for part in split_top(text[1:-1])))
    if text[0] == "[":
        return _parse_address(text, resolve)
    if "|" in text:
        first, second = text.split("|", 1)
        return Pair(parse_operand(first, resolve), parse_operand(second, resolve))
    if text[0] == "!":
        return Not(parse_operand(text[1:], resolve))
    if (number := parse_number(text)) is not None:
        return number
    if text == "WARP_SZ":
        return Imm(32)
    if text[0] == "-":
        return Neg(parse_operand(text[1:], resolve))
    if "+" in text:
        base, offset = text.split("+", 1)
        target, number = parse_operand(base, resolve), parse_number(offset.strip())
        if isinstance(target, Sym) and number is not None:
            return Sym(target.name, target.offset + number.value)
    if _IDENT.match(text):
        if text.startswith(SPECIAL_PREFIXES):
            return SReg(text)
        return resolve(text)
    raise PtxSyntaxError(f"cannot read operand {text!r}")


def _parse_address(text: str, resolve: Callable[[str], Any]) -> Addr:
    """Parse ``[base+offset, more...]``."""
    if not text.endswith("]"):
        raise PtxSyntaxError(f"bad address operand {text!r}")
    head, *rest = split_top(text[1:-1])
    parts = tuple(parse_operand(part, resolve) for part in rest)
    match = re.match(r"(.*?)\s*([+-])\s*([-+]?\w+)$", head) if re.match(r"[A-Za-z_$%]", head) else None
    if match and (number := parse_number(match.group(3))) is not None:
        sign = -1 if match.group(2) == "-" else 1
        base = parse_operand(match.group(1), resolve)
        return Addr(base, sign * number.value, parts)
    return Addr(parse_operand(head, resolve), 0, parts)
