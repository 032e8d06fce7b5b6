"""Emitters of wgmma instructions."""

from __future__ import annotations

import re
from typing import Any

from ..arithmetic.numeric import LaneSet, count_nonzero
from ..parsing.ir import Imm, Instr, Vec
from ..state.warp import Warp
from ..translation.codegen import Codegen
from ..translation.registry import Mods, op
from . import wgmma

_KINDS = ("bf16", "f16", "tf32", "e4m3", "e5m2", "s8", "u8")
_DEPTH = {"bf16": 16, "f16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32, "s8": 32, "u8": 32}
_FAMILIES = {
    ("f16",): ("f16", "f32"), ("bf16",): ("f32",), ("tf32",): ("f32",), ("e4m3", "e5m2"): ("f16", "f32"),
    ("s8", "u8"): ("s32",),
}  # fmt: skip
"""Operand types that go together, and the types D may have."""


def _dsts(ins: Instr) -> int:
    return 1 if "mma_async" in ins.mods else 0


@op("wgmma", "direct", dsts=_dsts, reads_dst=True, collective=True)
def _wgmma(cg: Codegen, ins: Instr, mods: Mods) -> None:
    kind = mods.choose("fence", "commit_group", "wait_group", "mma_async")
    mods.choose("sync")
    mods.choose("aligned")
    if kind == "fence":
        return direct(cg, lambda W, L: wgmma.fence(W, ins, L))
    if kind == "commit_group":
        return direct(cg, lambda W, L: wgmma.commit(W, ins, L))
    if kind == "wait_group":
        (count,) = mods.args(1)
        return direct(cg, lambda W, L: wgmma.wait(W, ins, L, count.value))
    return _mma(cg, ins, mods)


def direct(cg: Codegen, function: Any) -> None:
    """Emit a call ``function(W, L)`` that works on the register file and may park."""
    name = cg.bind(function)
    result = cg.name("z")
    cg.line(f"{result} = {name}(W, L)")
    cg.line(f"if {result}.__class__ is Park: return {result}")


def _mma(cg: Codegen, ins: Instr, mods: Mods) -> None:
    if "sp" in mods.left:
        mods.fail(
            "sparse products of wgmma are not modelled; simulate a build whose A is dense, with its zeros written out"
            " (a sparse mma.sync is modelled)"
        )
    shape = next((m for m in mods.left if re.fullmatch(r"m64n\d+k\d+", m)), None)
    if shape is None:
        mods.fail("needs a shape .m64nNkK")
    mods.flag(shape)
    n, depth = (int(v) for v in re.findall(r"[nk](\d+)", shape))
    saturate = mods.flag("satfinite")
    out = mods.choose("f32", "s32") if "f16" not in mods.left[:1] else mods.left.pop(0)
    kinds = []
    while mods.left and mods.left[0] in _KINDS:
        kinds.append(mods.left.pop(0))
    if len(kinds) != 2:
        mods.fail("needs two supported operand types")
    family = next((f for f in _FAMILIES if set(kinds) <= set(f)), None)
    if family is None or out not in _FAMILIES[family] or (saturate and out != "s32"):
        mods.fail(f".{out} of .{kinds[0]} and .{kinds[1]} is no form of wgmma")
    step = 16 if out == "s32" and n > 32 else 8
    if depth != _DEPTH[kinds[0]] or n % step or not 8 <= n <= 256:
        mods.fail(f"shape {shape} does not fit .{kinds[0]}")
    d, a, b, scale_d, *imms = ins.args
    form = wgmma.Form(ins, n, depth, (kinds[0], kinds[1]), out, list(d.items))
    form.saturate = saturate
    if len(form.d) != (n // 4 if out == "f16" else n // 2):
        mods.fail("wrong number of D registers")
    register_a = isinstance(a, Vec)
    if register_a:
        form.a_regs = list(a.items)
        if len(form.a_regs) != 4:
            mods.fail("A in registers takes four of them")
    _immediates(form, imms, kinds, register_a, mods)
    sources = [] if register_a else [(a, "b64")]
    sources.append((b, "b64"))
    names = []
    for operand, type_name in sources:
        cg.sources = []
        names += [cg.src(operand, type_name), cg.sources[0] if cg.sources else "None"]
    cg.sources = []
    names += [cg.src(scale_d, "pred"), cg.sources[0] if cg.sources else "None"]

    def run(W: Warp, L: LaneSet, *values: Any) -> None:
        for q in values[1::2]:
            if q is not None:
                W.poisoned(q, ins, "a matrix descriptor or scale-d", L)
        uniform = []
        for v in values[::2]:
            if count_nonzero(v != v[0]):
                W.sync_error(ins, "descriptor or scale-d differs between the lanes of a warp")
            uniform.append(v[0])
        desc_a = None if register_a else int(uniform[0])
        wgmma.issue(W, form, L, desc_a, int(uniform[-2]), bool(uniform[-1]))

    cg.line(f"{cg.bind(run)}(W, L, {', '.join(names)})")


def _immediates(form: wgmma.Form, imms: list, kinds: list[str], register_a: bool, mods: Mods) -> None:
    """Read imm-scale-a, imm-scale-b and the transpose flags."""
    values = [v.value for v in imms if isinstance(v, Imm)]
    if len(values) != len(imms):
        mods.fail("scales and transpose flags must be immediates")
    integer = kinds[0] in ("s8", "u8")
    half = kinds[0] in ("f16", "bf16")
    expected = 0 if integer else 2 + ((1 if register_a else 2) if half else 0)
    if len(values) != expected:
        mods.fail(f"takes {expected} immediates, has {len(values)}")
    if integer:
        return
    form.scale_a, form.scale_b = values[:2]
    if any(v not in (-1, 1) for v in values[:2]):
        mods.fail("scales must be 1 or -1")
    if half:
        form.b_mn = bool(values[-1])
        form.a_mn = bool(values[2]) if not register_a else False
