# ruff: noqa: E501 (lines of PTX are kept whole)
"""Golden tables: many single instructions in one kernel, each applied to 64 lanes of edge values.

A line of a table is ``result tolerance | code``. The result is the type of ``%d``; the tolerance is in units of 2**-23,
relative (0: bit for bit, any NaN equal to any NaN). ``{a,b}`` stands for one line per alternative. The code may use the
inputs named in :data:`INPUTS` (``%i0`` to ``%i3`` and so on), ``%t0`` to ``%t9``, ``%w0`` to ``%w3`` (64 bits),
``%u0`` to ``%u3`` (16 bits) and the predicates ``%p0`` to ``%p5``; ``%p0`` is true in every third lane.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from simtest.golden.more import MORE

LANES = 64
RESULTS = {"b2": 16, "f2": 16, "bf": 16, "b4": 32, "f4": 32, "hh": 32, "bb": 32, "b8": 64, "f8": 64}
"""Result types: raw bits, f16, bf16, float32, pairs of f16 and bf16, float64; and the width of ``%d``."""

TABLES = {
    "integer": """
        b2 0 | {add,sub}.u16 %d, %s0, %s1;
        b8 0 | {add,sub}.s64 %d, %l0, %l1;
        b4 0 | sub.sat.s32 %d, %i0, %i1;
        b4 0 | {add.u16x2,add.s16x2} %d, %i0, %i1;
        b4 0 | add.cc.u32 %t0, %i0, %i1; addc.cc.u32 %t1, %i2, %i3; addc.u32 %t2, 0, 0; xor.b32 %d, %t1, %t0; add.u32 %d, %d, %t2;
        b4 0 | sub.cc.u32 %t0, %i0, %i1; subc.cc.u32 %t1, %i2, %i3; subc.u32 %t2, 0, 0; xor.b32 %d, %t1, %t0; add.u32 %d, %d, %t2;
        b8 0 | add.cc.u64 %w0, %l0, %l1; addc.u64 %d, %l2, %l3;
        b8 0 | sub.cc.u64 %w0, %l0, %l1; subc.u64 %d, %l2, %l3;
        b4 0 | mad.lo.cc.u32 %t0, %i0, %i1, %i2; madc.hi.u32 %d, %i0, %i1, %i3;
        b2 0 | mul.{lo,hi}.{u16,s16} %d, %s0, %s1;
        b4 0 | mul.wide.{u16,s16} %d, %s0, %s1;
        b8 0 | mul.{lo,hi}.{u64,s64} %d, %l0, %l1;
        b8 0 | mul.wide.{u32,s32} %d, %i0, %i1;
        b4 0 | mad.hi.{u32,s32,sat.s32} %d, %i0, %i1, %i2;
        b8 0 | mad.{lo,hi}.{u64,s64} %d, %l0, %l1, %l2;
        b8 0 | mad.wide.{u32,s32} %d, %i0, %i1, %l2;
        b4 0 | mul24.{lo,hi}.{u32,s32} %d, %i0, %i1;
        b4 0 | mad24.{lo,hi}.{u32,s32} %d, %i0, %i1, %i2;
        b4 0 | mad24.hi.sat.s32 %d, %i0, %i1, %i2;
        b2 0 | sad.{u16,s16} %d, %s0, %s1, %s2;
        b4 0 | sad.{u32,s32} %d, %i0, %i1, %i2;
        b2 0 | {div,rem}.{u16,s16} %d, %s0, %s1;
        b4 0 | {div,rem}.{u32,s32} %d, %i0, %i1;
        b8 0 | or.b64 %w0, %l1, 1; {div,rem}.{u64,s64} %d, %l0, %w0;
        b2 0 | {abs,neg}.s16 %d, %s0;
        b4 0 | {abs,neg}.s32 %d, %i0;
        b8 0 | {abs,neg}.s64 %d, %l0;
        b2 0 | {min,max}.{u16,s16} %d, %s0, %s1;
        b4 0 | {min,max}.{u32,s32,u16x2,s16x2,relu.s16x2,relu.s32} %d, %i0, %i1;
        b8 0 | {min,max}.{u64,s64} %d, %l0, %l1;
        b4 0 | {popc,clz}.b64 %d, %l0;
        b4 0 | bfind.{u32,shiftamt.u32,shiftamt.s32} %d, %i0;
        b4 0 | bfind.{u64,s64,shiftamt.u64,shiftamt.s64} %d, %l0;
        b8 0 | brev.b64 %d, %l0;
        b4 0 | fns.b32 %d, %i0, {0,7,31}, {0,1,-1,-3,9};
        b4 0 | and.b32 %t0, %i1, 31; fns.b32 %d, %i0, %t0, %i2;
        b4 0 | bfe.{u32,s32} %d, %i0, %i1, %i2;
        b8 0 | bfe.{u64,s64} %d, %l0, %i1, %i2;
        b4 0 | bfi.b32 %d, %i0, %i1, %i2, %i3;
        b8 0 | bfi.b64 %d, %l0, %l1, %i2, %i3;
        b4 0 | szext.{clamp,wrap}.{u32,s32} %d, %i0, %i1;
        b4 0 | bmsk.{clamp,wrap}.b32 %d, %i0, %i1;
        b4 0 | dp4a.{u32,s32}.{u32,s32} %d, %i0, %i1, %i2;
        b4 0 | dp2a.{lo,hi}.{u32,s32}.{u32,s32} %d, %i0, %i1, %i2;
    """,
    "logic": """
        b2 0 | {and,or,xor}.b16 %d, %s0, %s1;
        b8 0 | {and,or,xor}.b64 %d, %l0, %l1;
        b2 0 | {not,cnot}.b16 %d, %s0;
        b8 0 | {not,cnot}.b64 %d, %l0;
        b4 0 | {not,cnot}.b32 %d, %i0;
        b4 0 | lop3.b32 %d, %i0, %i1, %i2, {0x00,0x01,0x08,0x57,0x80,0x96,0xCA,0xE8,0xFE,0xFF};
        b4 0 | lop3.{and,or}.b32 %d|%p1, %i0, %i1, %i2, 0x80, %p0; @%p1 not.b32 %d, %d;
        b4 0 | lop3.or.b32 _|%p1, %i0, %i1, %i2, 0x80, !%p0; selp.b32 %d, 1, 2, %p1;
        b2 0 | shl.b16 %d, %s0, %i1;
        b2 0 | shr.{b16,u16,s16} %d, %s0, %i1;
        b8 0 | shl.b64 %d, %l0, %i1;
        b8 0 | shr.{b64,u64,s64} %d, %l0, %i1;
        b4 0 | shf.{l,r}.{clamp,wrap}.b32 %d, %i0, %i1, %i2;
        b4 0 | prmt.b32.{f4e,b4e,rc8,ecl,ecr,rc16} %d, %i0, %i1, %i2;
        b4 0 | and.b32 %t0, %i2, 0xFFFF; prmt.b32 %d, %i0, %i1, %t0;
        b4 0 | setp.{eq,ne,lt,le,gt,ge,lo,ls,hi,hs}.u32 %p1|%p2, %i0, %i1; selp.b32 %d, 1, 0, %p1; @%p2 add.u32 %d, %d, 2;
        b4 0 | setp.{lt,ge}.{and,or,xor}.s32 %p1|%p2, %i0, %i1, %p0; selp.b32 %d, 1, 0, %p1; @%p2 add.u32 %d, %d, 2;
        b4 0 | setp.{lt,gt}.{u16,s16} %p1, %s0, %s1; selp.b32 %d, 1, 0, %p1;
        b4 0 | setp.{le,ge}.{u64,s64} %p1, %l0, %l1; selp.b32 %d, 1, 0, %p1;
        b4 0 | setp.{eq,ne,lt,le,gt,ge,equ,neu,ltu,leu,gtu,geu,num,nan}.f32 %p1, %f0, %f1; selp.b32 %d, 1, 0, %p1;
        b4 0 | setp.{lt,equ,neu}.{and,or,xor}.ftz.f32 %p1|%p2, %f0, %f1, !%p0; selp.b32 %d, 1, 0, %p1; @%p2 add.u32 %d, %d, 2;
        b4 0 | setp.{eq,ne,leu,gtu,num,nan}.f64 %p1, %g0, %g1; selp.b32 %d, 1, 0, %p1;
        b4 0 | setp.{eq,ne,lt,geu,num,nan}.f16 %p1, %h0, %h1; selp.b32 %d, 1, 0, %p1;
        b4 0 | setp.{eq,ne,lt,geu,num,nan}.bf16 %p1, %e0, %e1; selp.b32 %d, 1, 0, %p1;
        b4 0 | setp.{eq,lt,neu}.ftz.f16x2 %p1|%p2, %x0, %x1; selp.b32 %d, 1, 0, %p1; @%p2 add.u32 %d, %d, 2;
        b4 0 | setp.{eq,lt,neu}.bf16x2 %p1|%p2, %y0, %y1; selp.b32 %d, 1, 0, %p1; @%p2 add.u32 %d, %d, 2;
        b4 0 | set.{eq,gt}.{u32,s32}.{u32,s32} %d, %i0, %i1;
        b4 0 | set.{ltu,num}.f32.f32 %d, %f0, %f1;
        b4 0 | set.{lt,ge}.and.u32.f32 %d, %f0, %f1, %p0;
        b4 0 | set.gt.u32.{f64} %d, %g0, %g1;
        b2 0 | set.{eq,ltu}.{f16,u16}.f16 %d, %h0, %h1;
        b2 0 | set.{eq,gtu}.{bf16,u16}.bf16 %d, %e0, %e1;
        b4 0 | set.{eq,gtu}.ftz.f16x2.f16x2 %d, %x0, %x1;
        b4 0 | set.{eq,gtu}.bf16x2.bf16x2 %d, %y0, %y1;
        b4 0 | slct.{b32,f32}.s32 %d, %i0, %i1, %i2;
        b4 0 | slct.{u32.f32,f32.f32,ftz.u32.f32} %d, %i0, %i1, %f2;
        b8 0 | slct.{u64,f64}.s32 %d, %l0, %l1, %i2;
        b4 0 | testp.{finite,infinite,number,notanumber,normal,subnormal}.f32 %p1, %f0; selp.b32 %d, 1, 0, %p1;
        b4 0 | testp.{finite,infinite,number,notanumber,normal,subnormal}.f64 %p1, %g0; selp.b32 %d, 1, 0, %p1;
        f4 0 | copysign.f32 %d, %f0, %f1;
        f8 0 | copysign.f64 %d, %g0, %g1;
        b4 0 | mov.b32 {%u0, %u1}, %i0; mov.b32 %d, {%u1, %u0};
        b4 0 | mov.b64 {%t0, %t1}, %l0; xor.b32 %d, %t0, %t1;
    """,
    "float": """
        f4 0 | {add,mul}.{rz,rp,rz.ftz,rm.sat}.f32 %d, %f0, %f3;
        f4 0 | {sub,mul}.{ftz,sat,rn.ftz.sat}.f32 %d, %f0, %f1;
        f4 0 | {sub,mul}.{rn,rm}.f32 %d, %f0, %f3;
        f4 0 | fma.{rm,rp,rn.ftz,rn.sat,rz.ftz.sat}.f32 %d, %f0, %f3, %f2;
        f4 0 | fma.{rn,rz}.f32 %d, %f3, %f3, %f0;
        f4 0 | div.{rz,rm,rp,rn.ftz}.f32 %d, %f0, %f3;
        f4 4 | div.{full,full.ftz,approx,approx.ftz}.f32 %d, %f0, %f3;
        f4 0 | {abs,neg}.ftz.f32 %d, %f0;
        f4 0 | {min,max}.{ftz,NaN,xorsign.abs,NaN.xorsign.abs,ftz.NaN.xorsign.abs}.f32 %d, %f0, %f1;
        f4 0 | {rcp,sqrt}.{rz,rm,rp,rn.ftz}.f32 %d, %f0;
        f4 2 | {rcp,sqrt}.approx.f32 %d, %f0;
        f4 2 | sqrt.approx.ftz.f32 %d, %f0;
        f4 4 | rsqrt.approx.ftz.f32 %d, %f0;
        f4 4 | ex2.approx.f32 %d, %f{0,3};
        f4 8 | lg2.approx.ftz.f32 %d, %f{0,3};
        f4 8192 | tanh.approx.f32 %d, %f{0,3};
        f8 0 | {add,sub,mul}.{rn,rz,rm,rp}.f64 %d, %g0, %g3;
        f8 0 | fma.{rn,rz,rm,rp}.f64 %d, %g0, %g3, %g2;
        f8 0 | div.{rn,rz,rm,rp}.f64 %d, %g0, %g3;
        f8 0 | {rcp,sqrt}.{rn,rz,rm,rp}.f64 %d, %g{0,3};
        f8 16 | rcp.approx.ftz.f64 %d, %g3;
        f8 16 | rsqrt.approx.{f64,ftz.f64} %d, %g3;
        f8 0 | {min,max}.f64 %d, %g0, %g1;
        f8 0 | {abs,neg}.f64 %d, %g0;
    """,
    "half": """
        f2 0 | {add,sub,mul}.{rn,rn.ftz,rn.sat}.f16 %d, %h0, %h1;
        hh 0 | {add,sub,mul}.{rn,rn.ftz,rn.sat}.f16x2 %d, %x0, %x1;
        bf 0 | {add,sub,mul}.rn.bf16 %d, %e0, %e1;
        bb 0 | {add,sub,mul}.rn.bf16x2 %d, %y0, %y1;
        f2 0 | fma.rn.{f16,ftz.f16,sat.f16,relu.f16,ftz.relu.f16} %d, %h0, %h1, %h2;
        hh 0 | fma.rn.{f16x2,ftz.f16x2,sat.f16x2,relu.f16x2} %d, %x0, %x1, %x2;
        bf 0 | fma.rn.{bf16,relu.bf16} %d, %e0, %e1, %e2;
        bb 0 | fma.rn.relu.bf16x2 %d, %y0, %y1, %y2;
        f2 0 | fma.rn.oob.{f16,relu.f16} %d, %h0, %h1, %h2;
        bb 0 | fma.rn.oob.bf16x2 %d, %y0, %y1, %y2;
        f2 0 | {abs,neg}.{f16,ftz.f16} %d, %h0;
        bf 0 | {abs,neg}.bf16 %d, %e0;
        f2 0 | {min,max}.{f16,ftz.f16,NaN.f16,xorsign.abs.f16,NaN.xorsign.abs.f16} %d, %h0, %h1;
        hh 0 | {min,max}.{f16x2,NaN.f16x2,xorsign.abs.f16x2} %d, %x0, %x1;
        bf 0 | {min,max}.{bf16,NaN.bf16,xorsign.abs.bf16} %d, %e0, %e1;
        bb 0 | {min,max}.{bf16x2,NaN.bf16x2} %d, %y0, %y1;
        f2 16384 | tanh.approx.f16 %d, %h0;
        hh 16384 | tanh.approx.f16x2 %d, %x0;
        bf 131072 | tanh.approx.bf16 %d, %e0;
        f2 16384 | ex2.approx.f16 %d, %h0;
        hh 16384 | ex2.approx.f16x2 %d, %x0;
        bf 131072 | ex2.approx.ftz.bf16 %d, %e0;
    """,
    "cvt to float": """
        f4 0 | cvt.{rn,rz,rm,rp}.f32.{u32,s32} %d, %i0;
        f4 0 | cvt.{rn,rz,rm,rp}.f32.{u64,s64} %d, %l0;
        f4 0 | cvt.rn.f32.{u8,s8,u16,s16} %d, %s0;
        f8 0 | cvt.rn.f64.{u32,s32} %d, %i0;
        f8 0 | cvt.{rn,rz,rm,rp}.f64.{u64,s64} %d, %l0;
        f2 0 | cvt.{rn,rz,rm,rp}.f16.{u32,s32} %d, %i0;
        f2 0 | cvt.rn.f16.{u16,s8} %d, %s0;
        f2 0 | cvt.{rn,rz,rm,rp}.f16.{u64,s64} %d, %l0;
        bf 0 | cvt.{rn,rz,rm,rp}.bf16.{u32,s32} %d, %i0;
        bf 0 | cvt.{rn,rz}.bf16.{u16,s16} %d, %s0;
        bf 0 | cvt.{rn,rz,rm,rp}.bf16.{u64,s64} %d, %l0;
        f4 0 | cvt.f32.f16 %d, %h0;
        f4 0 | cvt.f32.bf16 %d, %e0;
        f4 0 | cvt.{rn,rz,rm,rp,rn.ftz,rn.sat,rz.ftz.sat}.f32.f64 %d, %g{0,3};
        f4 0 | cvt.{rni,rzi,rmi,rpi,ftz,sat,rni.ftz.sat}.f32.f32 %d, %f0;
        f8 0 | cvt.{f64,ftz.f64}.f32 %d, %f0;
        f8 0 | cvt.f64.f16 %d, %h0;
        f8 0 | cvt.f64.bf16 %d, %e0;
        f8 0 | cvt.{rni,rzi,rmi,rpi,sat}.f64.f64 %d, %g0;
        f2 0 | cvt.{rn,rz,rm,rp,rn.ftz,rn.sat,rn.relu,rz.relu,rn.satfinite,rz.satfinite,rn.relu.satfinite}.f16.f32 %d, %f{0,3};
        bf 0 | cvt.{rn,rz,rn.relu,rz.relu,rn.satfinite,rz.satfinite,rn.relu.satfinite}.bf16.f32 %d, %f{0,3};
        bf 0 | cvt.{rm,rp}.bf16.f32 %d, %f{0,3};
        f2 0 | cvt.{rn,rz,rm,rp}.f16.f64 %d, %g{0,3};
        bf 0 | cvt.{rn,rz,rm,rp}.bf16.f64 %d, %g{0,3};
        f2 0 | cvt.{rni,rzi,rmi,rpi,sat}.f16.f16 %d, %h0;
        bf 0 | cvt.{rni,rzi,rmi,rpi}.bf16.bf16 %d, %e0;
        f2 0 | cvt.{rn,rz,rm,rp}.f16.bf16 %d, %e0;
        bf 0 | cvt.{rn,rz,rm,rp}.bf16.f16 %d, %h0;
        hh 0 | cvt.{rn,rz,rn.relu,rz.relu,rn.satfinite,rz.relu.satfinite}.f16x2.f32 %d, %f0, %f3;
        bb 0 | cvt.{rn,rz,rn.relu,rz.relu,rn.satfinite,rz.relu.satfinite}.bf16x2.f32 %d, %f0, %f3;
        f4 0 | cvt.{rna,rn,rz,rn.relu,rz.relu,rna.satfinite}.tf32.f32 %d, %f{0,3};
        b2 0 | cvt.rn.satfinite.relu.{e4m3x2,e5m2x2}.f32 %d, %f0, %f3;
        b2 0 | cvt.rn.satfinite.{e4m3x2,e5m2x2}.f32 %d, %f2, %f3;
        b2 0 | cvt.rn.satfinite.{e4m3x2,e5m2x2,relu.e4m3x2,relu.e5m2x2}.f16x2 %d, %x0;
        hh 0 | cvt.rn.f16x2.{e4m3x2,e5m2x2} %d, %s0;
        hh 0 | cvt.rn.relu.f16x2.{e4m3x2,e5m2x2} %d, %s1;
    """,
    "cvt to integer": """
        b4 0 | cvt.{rni,rzi,rmi,rpi}.{u32,s32}.f32 %d, %f{0,3};
        b4 0 | cvt.{rni,rmi}.ftz.{u32,s32}.f32 %d, %f0;
        b8 0 | cvt.{rni,rzi,rpi}.{u64,s64}.f32 %d, %f0;
        b2 0 | cvt.{rni,rzi}.{u16,s16,u8,s8}.f32 %d, %f0;
        b4 0 | cvt.{rni,rzi,rmi,rpi}.{u32,s32}.f64 %d, %g{0,3};
        b8 0 | cvt.{rni,rzi,rmi,rpi}.{u64,s64}.f64 %d, %g0;
        b2 0 | cvt.rzi.{u16,s16,u8,s8}.f64 %d, %g0;
        b4 0 | cvt.{rni,rzi,rmi,rpi}.{u32,s32}.f16 %d, %h0;
        b8 0 | cvt.rzi.{u64,s64}.f16 %d, %h0;
        b2 0 | cvt.rni.{u16,s16,u8,s8}.f16 %d, %h0;
        b4 0 | cvt.{rni,rzi,rmi,rpi}.{u32,s32}.bf16 %d, %e0;
        b8 0 | cvt.rzi.{u64,s64}.bf16 %d, %e0;
        b2 0 | cvt.rni.{u16,s16}.bf16 %d, %e0;
        b4 0 | cvt.{u32,s32}.{u8,s8,u16,s16} %d, %s0;
        b2 0 | cvt.{u8,s8,u16,s16,sat.u8,sat.s8,sat.u16,sat.s16}.{u32,s32} %d, %i0;
        b2 0 | cvt.{u8,s8,sat.u8,sat.s8}.{u16,s16} %d, %s0;
        b2 0 | cvt.{u16,s16}.{u8,s8} %d, %s0;
        b8 0 | cvt.{u64,s64}.{u32,s32} %d, %i0;
        b8 0 | cvt.{u64,s64}.{u8,s16} %d, %s0;
        b4 0 | cvt.{u32,s32,sat.u32,sat.s32}.{u64,s64} %d, %l0;
        b4 0 | cvt.sat.{u32.s32,s32.u32} %d, %i0;
        b8 0 | cvt.sat.{u64.s64,s64.u64} %d, %l0;
        b2 0 | cvt.sat.{u16,s8}.{u64,s64} %d, %l0;
        b4 0 | cvt.u8.u32 %u0, %i0; cvt.s32.s8 %d, %u0;
        b4 0 | cvt.pack.sat.{u16,s16}.s32 %d, %i0, %i1;
        b4 0 | cvt.pack.sat.{u8,s8,u4,s4,u2,s2}.s32.b32 %d, %i0, %i1, %i2;
    """,
    "memory": """
        b8 0 | ld.global.{b8,u8,s8} %u0, [%gp+3]; cvt.u64.u16 %d, %u0;
        b8 0 | ld.global.{b16,u16,s16} %u0, [%gp+6]; cvt.u64.u16 %d, %u0;
        b8 0 | ld.global.{u8,s8,u16,s16} %t0, [%gp+4]; cvt.u64.u32 %d, %t0;
        b8 0 | ld.global.{u8,s8,s16,u32,s32,b64,f64} %d, [%gp+8];
        b8 0 | ld.global.v2.{u8,b8} {%u0, %u1}, [%gp+2]; mov.b32 %t0, {%u0, %u1}; cvt.u64.u32 %d, %t0;
        b8 0 | ld.global.v4.{u8,s8,u16} {%u0, %u1, %u2, %u3}, [%gp+8]; mov.b64 %d, {%u0, %u1, %u2, %u3};
        b8 0 | ld.global.{v2.b32,nc.v2.f32,ca.v2.u32,L1::no_allocate.v2.s32} {%t0, %t1}, [%gp+8]; mov.b64 %d, {%t1, %t0};
        b8 0 | ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%t0, %t1, %t2, %t3}, [%gp+16]; add.u32 %t0, %t0, %t2; mov.b64 %d, {%t1, %t0};
        b8 0 | ld.global.v2.b64 {%w0, %w1}, [%gp]; xor.b64 %d, %w0, %w1;
        b8 0 | ld.global.b128 %q0, [%gp]; mov.b128 {%w0, %w1}, %q0; sub.s64 %d, %w0, %w1;
        b8 0 | ld.{relaxed.gpu.global,acquire.sys.global,volatile.global,relaxed.cta.global}.u64 %d, [%gp];
        b8 0 | ld.{u64,volatile.u64,acquire.gpu.u64} %d, [%gp+8];
        b8 0 | st.global.{u8,b8} [%gq+1], %i0; ld.global.u64 %d, [%gq];
        b8 0 | st.global.{u16,cg.u32,relaxed.gpu.u32,volatile.u32} [%gq+4], %i0; ld.global.u64 %d, [%gq];
        b8 0 | st.global.{u16,s32,b64} [%gq], %l0; ld.global.u64 %d, [%gq];
        b8 0 | st.global.v4.b8 [%gq+4], {%s0, %s1, %s2, %s3}; ld.global.u64 %d, [%gq];
        b8 0 | st.global.v4.b16 [%gq], {%s0, %s1, %s2, %s3}; ld.global.u64 %d, [%gq];
        b8 0 | st.global.v4.f32 [%gq+16], {%i0, %i1, %i2, %i3}; ld.global.u64 %d, [%gq+24];
        b8 0 | mov.b128 %q0, {%l0, %l1}; st.global.b128 [%gq], %q0; ld.global.u64 %d, [%gq+8];
        b8 0 | st.shared.v4.b32 [%sp], {%i0, %i1, %i2, %i3}; st.shared.u8 [%sp+9], 7; ld.shared.u64 %d, [%sp+8];
        b8 0 | mov.b128 %q0, {%l0, %l1}; st.shared.b128 [%sp], %q0; ld.shared.v2.u64 {%w0, %w1}, [%sp]; xor.b64 %d, %w0, %w1;
        b8 0 | st.shared.v2.b64 [%sp+16], {%l0, %l1}; ld.shared.v4.u16 {%u0, %u1, %u2, %u3}, [%sp+24]; mov.b64 %d, {%u3, %u2, %u1, %u0};
        b8 0 | cvt.u64.u32 %w0, %sp; cvta.shared.u64 %w0, %w0; st.u64 [%w0], %l2; ld.shared.u64 %d, [%sp];
        b8 0 | st.local.v2.b64 [%lp+16], {%l0, %l1}; ld.local.s16 %d, [%lp+18];
        b8 0 | cvta.local.u64 %w0, %lp; st.v4.u32 [%w0], {%i0, %i1, %i2, %i3}; ld.local.u64 %d, [%lp+8];
        b8 0 | isspacep.{global,shared,local} %p1, %gp; selp.b64 %d, 1, 2, %p1;
        b8 0 | cvta.local.u64 %w0, %lp; isspacep.{global,shared,local} %p1, %w0; selp.b64 %d, 1, 2, %p1;
    """,
    "atomics": """
        b8 0 | st.global.u32 [%gq], %i0; atom.global.{add.u32,min.u32,min.s32,max.u32,max.s32,and.b32,or.b32,xor.b32,exch.b32,inc.u32,dec.u32} %t0, [%gq], %i1; ld.global.u32 %t1, [%gq]; mov.b64 %d, {%t0, %t1};
        b8 0 | st.shared.u32 [%sp], %i0; atom.shared.{add.u32,min.s32,max.u32,max.s32,and.b32,xor.b32,exch.b32,inc.u32,dec.u32} %t0, [%sp], %i1; ld.shared.u32 %t1, [%sp]; mov.b64 %d, {%t0, %t1};
        b8 0 | st.global.u32 [%gq], %i0; atom.global.cas.b32 %t0, [%gq], %i3, %i1; ld.global.u32 %t1, [%gq]; mov.b64 %d, {%t0, %t1};
        b8 0 | st.global.u32 [%gq], %i0; atom.acq_rel.gpu.global.cas.b32 %t0, [%gq], %i0, %i1; ld.global.u32 %t1, [%gq]; mov.b64 %d, {%t0, %t1};
        b8 0 | st.global.u64 [%gq], %l0; atom.global.{add.u64,min.u64,min.s64,max.u64,max.s64,and.b64,or.b64,xor.b64,exch.b64} %w0, [%gq], %l1; ld.global.u64 %w1, [%gq]; mul.lo.s64 %w1, %w1, 3; xor.b64 %d, %w0, %w1;
        b8 0 | st.shared.u64 [%sp], %l0; atom.shared.cas.b64 %w0, [%sp], %l0, %l1; ld.shared.u64 %w1, [%sp]; mul.lo.s64 %w1, %w1, 3; xor.b64 %d, %w0, %w1;
        b2 0 | st.global.u16 [%gq], %s0; atom.global.cas.b16 %u0, [%gq], %s0, %s1; ld.global.u16 %u1, [%gq]; sub.u16 %d, %u0, %u1;
        b8 0 | mov.b128 %q0, {%l0, %l1}; st.global.b128 [%gq], %q0; mov.b128 %q1, {%l2, %l3}; atom.global.exch.b128 %q2, [%gq], %q1; mov.b128 {%w0, %w1}, %q2; ld.global.u64 %w2, [%gq+8]; xor.b64 %d, %w1, %w2;
        b8 0 | mov.b128 %q0, {%l0, %l1}; st.global.b128 [%gq], %q0; mov.b128 %q1, {%l2, %l3}; atom.global.cas.b128 %q2, [%gq], %q0, %q1; mov.b128 {%w0, %w1}, %q2; ld.global.u64 %w2, [%gq+8]; xor.b64 %d, %w1, %w2;
        f4 0 | st.global.f32 [%gq], %f0; atom.global.add.f32 %t0, [%gq], %f1; ld.global.f32 %d, [%gq];
        f4 0 | st.global.f32 [%gq], %f0; red.global.add.f32 [%gq], %f1; ld.global.f32 %d, [%gq];
        f4 0 | st.global.f32 [%gq], %f0; atom.global.add.f32 %t0, [%gq], 0f00000001; ld.global.f32 %d, [%gq];
        f4 0 | st.global.f32 [%gq], 0f00000001; red.global.add.f32 [%gq], 0f00000002; ld.global.f32 %d, [%gq];
        f4 0 | st.shared.f32 [%sp], %f0; atom.shared.add.f32 %t0, [%sp], %f1; ld.shared.f32 %d, [%sp];
        f4 0 | st.shared.f32 [%sp], 0f00000001; red.shared.add.f32 [%sp], 0f00000002; ld.shared.f32 %d, [%sp];
        f8 0 | st.global.f64 [%gq], %g0; atom.global.add.f64 %w0, [%gq], %g1; ld.global.f64 %d, [%gq];
        f2 0 | st.global.u16 [%gq], %h0; atom.global.add.noftz.f16 %u0, [%gq], %h1; ld.global.u16 %d, [%gq];
        bf 0 | st.global.u16 [%gq], %e0; atom.global.add.noftz.bf16 %u0, [%gq], %e1; ld.global.u16 %d, [%gq];
        hh 0 | st.global.u32 [%gq], %x0; red.global.add.noftz.f16x2 [%gq], %x1; ld.global.u32 %d, [%gq];
        bb 0 | st.global.u32 [%gq], %y0; red.global.add.noftz.bf16x2 [%gq], %y1; ld.global.u32 %d, [%gq];
        bb 0 | st.shared.u32 [%sp], %y0; atom.shared.add.noftz.bf16x2 %t0, [%sp], %y1; ld.shared.u32 %d, [%sp];
        f4 0 | st.global.v4.f32 [%gq], {%f0, %f1, %f2, %f3}; red.relaxed.gpu.global.v4.f32.add [%gq], {%f3, %f2, %f1, 0f00000001}; ld.global.f32 %d, [%gq+{0,4,8,12}];
        f4 0 | st.global.v2.f32 [%gq], {%f0, %f1}; atom.global.v2.f32.add {%t0, %t1}, [%gq], {%f3, %f2}; ld.global.f32 %t2, [%gq+4]; sub.f32 %d, %t1, %t2;
        bb 0 | st.global.v4.b32 [%gq], {%y0, %y1, %y2, %y3}; red.global.v4.bf16x2.{add,min,max}.noftz [%gq], {%y1, %y2, %y3, %y0}; ld.global.u32 %d, [%gq+8];
        hh 0 | st.global.v2.b32 [%gq], {%x0, %x1}; red.global.v2.f16x2.{add,min,max}.noftz [%gq], {%x1, %x2}; ld.global.u32 %d, [%gq+4];
        f2 0 | st.global.v4.b32 [%gq], {%x0, %x1, %x2, %x3}; atom.global.v8.f16.max.noftz {%u0, %u1, %u2, %u3, %u0, %u1, %u2, %u3}, [%gq], {%h0, %h1, %h2, %h3, %h3, %h2, %h1, %h0}; ld.global.u16 %d, [%gq+6];
        b4 0 | st.shared.u32 [%sp], 0; bar.sync 0; red.shared.add.u32 [s+64], %i0; atom.shared.max.s32 %t0, [s+96], %i0; bar.sync 0; ld.shared.u32 %t1, [s+64]; ld.shared.u32 %t2, [s+96]; xor.b32 %d, %t1, %t2;
    """,
    "half of outside": """
        f2 0 | mov.b16 %u0, 0x7FF7; fma.rn.oob.{f16,relu.f16} %d, %u0, %h1, %h2;
        f2 0 | mov.b16 %u0, {0x7FF7,0xFFF7,0x7FFE}; fma.rn.oob.f16 %d, %h0, %u0, %h2;
        f2 0 | mov.b16 %u0, 0x7FF7; fma.rn.oob.f16 %d, %h0, %h1, %u0;
        bf 0 | mov.b16 %u0, 0x7FF7; fma.rn.oob.{bf16,relu.bf16} %d, %u0, %e1, %e2;
        hh 0 | mov.b32 %t0, {0x7FF77FF7,0x3C007FF7}; fma.rn.oob.f16x2 %d, %x0, %t0, %x2;
        bb 0 | mov.b32 %t0, {0x7FF77FF7,0x7FF73F80}; fma.rn.oob.bf16x2 %d, %t0, %y1, %y2;
        f2 0 | mov.b16 %u0, 0x7FF7; add.rn.f16 %d, %u0, %h1;
    """,
    "warp": """
        b4 0 | shfl.sync.{up,down,bfly,idx}.b32 %d|%p1, %i0, {1,9,31}, {0x0000,0x001F,0x181F,0x1C03,0x100F}, -1; @%p1 not.b32 %d, %d;
        b4 0 | shfl.sync.idx.b32 %d|%p1, %i0, %i1, 31, 0xFFFFFFFF; @%p1 not.b32 %d, %d;
        b4 0 | vote.sync.{all,any,uni}.pred %p1, %p0, -1; selp.b32 %d, 1, 2, %p1;
        b4 0 | vote.sync.{all,any,uni}.pred %p1, !%p0, -1; selp.b32 %d, 1, 2, %p1;
        b4 0 | setp.ge.u32 %p2, %lane, 0; vote.sync.{all,uni}.pred %p1, %p2, -1; selp.b32 %d, 1, 2, %p1;
        b4 0 | vote.sync.ballot.b32 %d, %p0, -1;
        b4 0 | and.b32 %t0, %i0, 3; match.any.sync.b32 %d, %t0, -1;
        b4 0 | and.b64 %w0, %l0, 0x100000001; match.any.sync.b64 %d, %w0, -1;
        b4 0 | match.all.sync.b32 %d|%p1, %i0, -1; @%p1 not.b32 %d, %d;
        b4 0 | mov.b32 %t0, 77; match.all.sync.b32 %d|%p1, %t0, -1; @%p1 xor.b32 %d, %d, 0x5555;
        b4 0 | redux.sync.{add,min,max}.{u32,s32} %d, %i0, -1;
        b4 0 | redux.sync.{and,or}.b32 %d, %i0, -1;
        b4 0 | elect.sync %d|%p1, -1; @%p1 add.u32 %d, %d, 100;
        b4 0 | activemask.b32 %d;
        b4 0 | mov.b32 %d, 0; @%p0 activemask.b32 %d;
        b4 0 | mov.u32 %d, %{laneid,lanemask_eq,lanemask_le,lanemask_lt,lanemask_ge,lanemask_gt,tid.x,ntid.x,nwarpid,ctaid.y,nctaid.z};
        b4 0 | mov.u32 %d, %{cluster_ctarank,cluster_nctarank,clusterid.x,nclusterid.x,cluster_ctaid.x,cluster_nctaid.y};
        b4 0 | mov.u32 %d, %{dynamic_smem_size,total_smem_size,aggr_smem_size};
        b4 0 | mov.pred %p1, %is_explicit_cluster; selp.b32 %d, 1, 2, %p1;
        b4 0 | movmatrix.sync.aligned.m8n8.trans.b16 %d, %i0;
        b4 0 | bar.red.popc.u32 %d, 1, %p0;
        b4 0 | bar.red.popc.u32 %d, 1, 64, !%p0;
        b4 0 | bar.red.{and,or}.pred %p1, 1, 64, %p0; selp.b32 %d, 1, 2, %p1;
        b4 0 | barrier.red.{and,or}.aligned.pred %p1, 1, !%p0; selp.b32 %d, 1, 2, %p1;
        b4 0 | and.b32 %t0, %lane, 5; setp.eq.u32 %p1, %t0, 1; mov.b32 %d, 0; @%p1 vote.sync.ballot.b32 %d, %p0, 0x0A0A0A0A;
        b4 0 | and.b32 %t0, %lane, 5; setp.eq.u32 %p1, %t0, 1; mov.b32 %d, 0; @%p1 redux.sync.add.u32 %d, %i0, 0x0A0A0A0A;
        b4 0 | and.b32 %t0, %lane, 5; setp.eq.u32 %p1, %t0, 1; mov.b32 %d, 0; @%p1 shfl.sync.bfly.b32 %d, %i0, 2, 31, 0x0A0A0A0A;
    """,
    **MORE,
}  # fmt: skip


EXCEPTIONS = {
    "mad.hi.sat.s32 %d, %i0, %i1, %i2;": "the H200's result wraps where the ISA says that it saturates",
    "and.b32 %t0, %i1, 31; fns.b32 %d, %i0, %t0, %i2;": "0 instead of -1 for an offset of -2^31, whose size has no name",
}
"""Rows that are not compared, and why."""


@dataclass(frozen=True)
class Row:
    """One instruction (or a few): its code, its result's type and its tolerance."""

    code: str
    result: str
    tolerance: float


def alternatives(text: str) -> Iterator[str]:
    """Expand ``{a,b}`` (without blanks in it) into one text per alternative."""
    match = re.search(r"\{([^{} ]*)\}", text)
    if not match:
        yield text
        return
    for each in match.group(1).split(","):
        yield from alternatives(text[: match.start()] + each + text[match.end() :])


def rows(table: str) -> list[Row]:
    """Return the rows of a table's text."""
    result = []
    for line in filter(None, map(str.strip, table.splitlines())):
        head, code = line.split(" | ", 1)
        kind, tolerance = head.split()
        result += [Row(each, kind, float(tolerance)) for each in alternatives(code)]
    return result


_INTEGERS = [0, 1, 2, 3, 5, 7, 31, 32, 33, 63, 64, 100, 127, 128, 255, 256, 257, 0x1001, 0x7FFF, 0x8000, 0xFFFF, 0x10000,
             0x01010101, 0x12345678, 0x7FFFFFFE, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xDEADBEEF, 0xFFFF8000, 0xFFFFFF80,
             0xFFFFFFFF]  # fmt: skip
_FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, -2.5, 3.5, 0.1, 3.14159, 1e-3, -1e-3, 1e10, -1e10, 3e38, -3e38, 1e-38, 1e-40,
           -1e-40, 100.25, 254.5, 255.5, -128.5, 448.0, 464.0, 65504.0, 65520.0, 70000.0, 2147483520.0, np.inf, -np.inf,
           np.nan]  # fmt: skip


def inputs() -> dict[str, np.ndarray]:
    """Return the arrays of 64 edge and random values from which the inputs are rolled."""
    rng = np.random.default_rng(1)
    single = rng.standard_normal(32) * np.exp2(rng.integers(-20, 20, 32))
    halves = rng.standard_normal(32) * np.exp2(rng.integers(-20, 12, 32))
    floats = np.concatenate([_FLOATS, single]).astype("f4")
    with np.errstate(over="ignore"):
        narrow = np.concatenate([_FLOATS, halves]).astype("f2")
        narrow[6:9] = np.array([6e-8, -6e-8, 3e-5], "f2")
        narrow.view("u2")[9] = 0x7FFF
        brain = np.concatenate([_FLOATS, single]).astype("f4").astype(ml_dtypes.bfloat16)
        brain.view("u2")[9] = 0x7FFF
    double = np.concatenate([_FLOATS, rng.standard_normal(32) * np.exp2(rng.integers(-60, 60, 32))])
    double[20:24] = 1e300, -5e-324, 2.0**63, -(2.0**63) - 4096
    wide = np.array(_INTEGERS, "u8") * np.uint64(0x100000001) ^ np.uint64(0x8000000000000000)
    wide = np.concatenate([_INTEGERS, wide]).astype("u8")
    random = rng.integers(0, 1 << 32, 32, dtype="u8")
    return {
        "i": np.concatenate([_INTEGERS, random]).astype("u4"),
        "s": np.concatenate([_INTEGERS, random & np.uint64(0xFFFF)]).astype("u4").astype("u2"),
        "l": wide, "f": floats, "g": double, "h": narrow.view("u2"), "e": brain.view("u2"),
        "x": narrow.view("u2").astype("u4") | np.roll(narrow, 17).view("u2").astype("u4") << 16,
        "y": brain.view("u2").astype("u4") | np.roll(brain, 17).view("u2").astype("u4") << 16,
    }  # fmt: skip


def given(number: int, base: np.ndarray) -> np.ndarray:
    """Return an input's array: the base array rolled, number 1 as number 0 in every fifth lane."""
    result = np.roll(base, (0, 7, 14, 32)[number])
    if number == 1:
        result[::5] = base[::5]
    return result


def kernel(table: list[Row], arrays: dict[str, np.ndarray]) -> str:
    """Return PTX that runs every row; parameter ``in_<name>`` holds the four rolled inputs of a name, ``out`` the results."""
    lines = [".reg .b64 %a<4>; .reg .b32 %lane; mov.u32 %lane, %tid.x; .reg .b32 %t<10>; .reg .b64 %w<4>; .reg .b16 %u<4>;",
             ".reg .pred %p<6>; rem.u32 %t0, %lane, 3; setp.eq.u32 %p0, %t0, 0;"]  # fmt: skip
    if "%gp" in "".join(row.code for row in table) or "%gq" in "".join(row.code for row in table):
        lines.append(
            ".reg .b64 %gp, %gq, %lp; .reg .b32 %sp; .reg .b128 %q<3>; .shared .align 16 .b8 s[2048]; .local .align 16 .b8 l[32];"
            "ld.param.u64 %gp, [in_l]; mad.wide.u32 %gp, %lane, 16, %gp; ld.param.u64 %gq, [scratch]; mad.wide.u32 %gq, %lane, 32, %gq;"
            "mov.u32 %sp, s; mad.lo.u32 %sp, %lane, 32, %sp; mov.u64 %lp, l;"
        )
    used = set(re.findall(r"%([islfghexy])(\d)\b", " ".join(row.code for row in table)))
    for name, number in sorted(used):
        width = arrays[name].itemsize
        lines.append(
            f".reg .b{8 * width} %{name}{number}; ld.param.u64 %a0, [in_{name}]; mad.wide.u32 %a0, %lane, {width}, %a0;"
            f"ld.global.b{8 * width} %{name}{number}, [%a0+{LANES * width * int(number)}];"
        )
    lines.append("ld.param.u64 %a1, [out]; mad.wide.u32 %a1, %lane, 8, %a1;")
    for number, row in enumerate(table):
        bits = RESULTS[row.result]
        widen = "mov.b64 %a2, %d;" if bits == 64 else f"cvt.u64.u{bits} %a2, %d;"
        lines.append(f"{{ .reg .b{bits} %d; {row.code} {widen} st.global.u64 [%a1+{8 * LANES * number}], %a2; }}")
    params = ", ".join(f".param .u64 in_{name}" for name in arrays) + ", .param .u64 scratch, .param .u64 out"
    head = ".version 8.8\n.target sm_90a\n.address_size 64\n"
    return head + f".visible .entry k({params})\n{{\n" + "\n".join(lines) + "\nret;\n}\n"


def as_values(raw: np.ndarray, result: str) -> np.ndarray:
    """Read 64-bit results as numbers of their type, for comparing (packed types become two columns)."""
    bits = RESULTS[result]
    low = raw.astype(f"u{bits // 8}")
    if result in ("bf", "bb"):
        halves = low.view("u2")
        return (halves.astype("u4") << 16).view("f4").astype("f8")
    if result in ("f2", "hh"):
        return low.view("f2").astype("f8")
    return low.view(result) if result[0] == "f" else low


def differing(table: list[Row], got: np.ndarray, want: np.ndarray) -> list[str]:
    """Return a line per row whose results differ."""
    report = []
    for row, ours, theirs in zip(table, got, want, strict=True):
        if row.code in EXCEPTIONS:
            continue
        a, b = as_values(ours, row.result), as_values(theirs, row.result)
        same = a == b
        if a.dtype.kind == "f":
            same = np.where(same, np.signbit(a) == np.signbit(b), np.isnan(a) & np.isnan(b))
            smallest = {"f2": 2.0**-14, "hh": 2.0**-14, "f8": 2.0**-1022}.get(row.result, 2.0**-126)
            with np.errstate(invalid="ignore"):
                close = np.abs(a - b) <= row.tolerance * 2.0**-23 * np.maximum(np.abs(b), smallest)
            same |= close & (row.tolerance > 0)
        if not same.all():
            lane = int(np.flatnonzero(~same.reshape(len(ours), -1).all(1))[0])
            report.append(f"{row.code}  lane {lane}: {ours[lane]:#x} for {theirs[lane]:#x}")
    return report
