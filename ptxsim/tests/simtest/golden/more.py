# ruff: noqa: E501 (lines of PTX are kept whole)
"""More golden tables, in the language of rows.py: forms that the tables there leave out."""

from __future__ import annotations

MORE = {
    "more integer": """
        b2 0 | mad.{lo,hi}.{u16,s16} %d, %s0, %s1, %s2;
        b4 0 | mad.wide.{u16,s16} %d, %s0, %s1, %i2;
        b2 0 | {add,sub}.s16 %d, %s0, %s1;
        b8 0 | {add,sub}.u64 %d, %l0, %l1;
        b4 0 | sub.{u32,s32} %d, %i0, %i1;
        b4 0 | add.cc.s32 %t0, %i0, %i1; addc.cc.s32 %t1, %i2, %i3; addc.s32 %t2, 0, 0; xor.b32 %d, %t1, %t0; add.u32 %d, %d, %t2;
        b4 0 | sub.cc.s32 %t0, %i0, %i1; subc.cc.u32 %t1, %i2, %i3; subc.s32 %t2, 0, 0; xor.b32 %d, %t1, %t0; add.u32 %d, %d, %t2;
        b8 0 | add.cc.s64 %w0, %l0, %l1; addc.cc.u64 %w1, %l2, %l3; addc.s64 %w2, 0, 0; xor.b64 %d, %w1, %w2;
        b8 0 | sub.cc.s64 %w0, %l0, %l1; subc.cc.s64 %w1, %l2, %l3; subc.u64 %w2, 0, 0; xor.b64 %d, %w1, %w2;
        b4 0 | mad.lo.cc.{u32,s32} %t0, %i0, %i1, %i2; madc.lo.u32 %d, %i1, %i2, %i3;
        b4 0 | mad.hi.cc.{u32,s32} %t0, %i0, %i1, %i2; madc.hi.cc.s32 %t1, %i1, %i2, %i3; addc.u32 %d, %t1, 0;
        b8 0 | mad.lo.cc.u64 %w0, %l0, %l1, %l2; madc.hi.u64 %d, %l0, %l1, %l3;
        b8 0 | sad.{u64,s64} %d, %l0, %l1, %l2;
        b4 0 | mul.hi.u32 %d, %i0, %i1;
        b4 0 | mad.lo.s32 %d, %i0, %i1, %i2;
        b4 0 | shr.b32 %d, %i0, %i1;
    """,
    "more logic": """
        b4 0 | and.pred %p1, %p0, %p0; or.pred %p2, %p1, !%p0; xor.pred %p3, %p2, %p0; not.pred %p4, %p3; selp.b32 %d, 1, 2, %p4;
        b4 0 | set.{lo,ls,hi,hs}.u32.u32 %d, %i0, %i1;
        b2 0 | set.lt.bf16.bf16 %d, %e0, %e1;
        b4 0 | set.lt.bf16x2.bf16x2 %d, %y0, %y1;
        b4 0 | set.gt.u32.f16 %d, %h0, %h1;
        b4 0 | set.eq.s32.bf16 %d, %e0, %e1;
        b4 0 | setp.{eq,ne}.b16 %p1, %s0, %s1; selp.b32 %d, 1, 0, %p1;
        b4 0 | setp.{eq,ne}.b32 %p1, %i0, %i1; selp.b32 %d, 1, 0, %p1;
        b4 0 | setp.{eq,ne}.b64 %p1, %l0, %l1; selp.b32 %d, 1, 0, %p1;
        b4 0 | setp.{eq,neu,lt,gtu,num,nan}.ftz.f32 %p1, %f0, %f1; selp.b32 %d, 1, 0, %p1;
        b4 0 | setp.lt.and.f16 %p1, %h0, %h1, %p0; selp.b32 %d, 1, 0, %p1;
        b2 0 | selp.{b16,u16,s16} %d, %s0, %s1, %p0;
        b8 0 | selp.{b64,u64,s64,f64} %d, %l0, %l1, %p0;
        b2 0 | slct.{b16,u16}.s32 %d, %s0, %s1, %i2;
        b4 0 | set.{ne,lt,le,ge}.{u32,s32}.{u32,s32} %d, %i0, %i1;
        b4 0 | set.nan.f32.f32 %d, %f0, %f1;
        b4 0 | setp.{le,ge}.{u16,s16} %p1, %s0, %s1; selp.b32 %d, 1, 0, %p1;
        b4 0 | setp.{lt,gt}.{u64,s64} %p1, %l0, %l1; selp.b32 %d, 1, 0, %p1;
        b4 0 | setp.gt.{and,or,xor}.s32 %p1|%p2, %i0, %i1, !%p0; selp.b32 %d, 1, 0, %p1; @%p2 add.u32 %d, %d, 2;
        b4 0 | setp.{lt,le,gt,ge,equ,neu,ltu,geu}.f64 %p1, %g0, %g1; selp.b32 %d, 1, 0, %p1;
        b4 0 | setp.{neu,gtu}.f16 %p1, %h0, %h1; selp.b32 %d, 1, 0, %p1;
        b4 0 | setp.{neu,gtu}.bf16 %p1, %e0, %e1; selp.b32 %d, 1, 0, %p1;
        b4 0 | setp.{eq,neu,lt,gtu}.f16x2 %p1|%p2, %x0, %x1; selp.b32 %d, 1, 0, %p1; @%p2 add.u32 %d, %d, 2;
        b4 0 | setp.gtu.bf16x2 %p1|%p2, %y0, %y1; selp.b32 %d, 1, 0, %p1; @%p2 add.u32 %d, %d, 2;
        b4 0 | selp.{s32,f32} %d, %i0, %i1, %p0;
        b4 0 | slct.b32.f32 %d, %i0, %i1, %f2;
        b4 0 | slct.u32.s32 %d, %i0, %i1, %i2;
        b2 0 | mov.s16 %d, %s0;
        b4 0 | mov.s32 %d, %i0;
        b8 0 | mov.{s64,f64} %d, %l0;
    """,
    "more float": """
        f4 0 | mad.{rn,rz}.f32 %d, %f0, %f3, %f2;
        f4 0 | {add,sub}.f32 %d, %f0, %f1;
        f4 16 | and.b32 %t0, %f0, 0x807FFFFF; or.b32 %t0, %t0, 0x3F000000; {sin,cos}.approx.{f32,ftz.f32} %d, %t0;
        f2 0 | {add,sub,mul}.{f16,rn.ftz.sat.f16} %d, %h0, %h1;
        bf 0 | {add,sub,mul}.bf16 %d, %e0, %e1;
        hh 0 | {add,sub,mul}.f16x2 %d, %x0, %x1;
        bb 0 | {add,sub,mul}.bf16x2 %d, %y0, %y1;
        hh 0 | {abs,neg}.f16x2 %d, %x0;
        bb 0 | {abs,neg}.bf16x2 %d, %y0;
        f4 0 | add.{rn,ftz,rn.ftz.sat}.f32 %d, %f0, %f1;
        f4 0 | sub.rz.ftz.f32 %d, %f0, %f3;
        f4 0 | fma.{rn.ftz.sat,rz.ftz,rz.sat,rm.ftz,rm.sat,rm.ftz.sat,rp.ftz,rp.sat,rp.ftz.sat}.f32 %d, %f0, %f3, %f2;
        f4 0 | {abs,neg}.f32 %d, %f0;
        f4 0 | max.f32 %d, %f0, %f1;
        f8 0 | {add,sub,mul}.f64 %d, %g0, %g3;
        f2 0 | add.{ftz,sat}.f16 %d, %h0, %h1;
        hh 0 | add.{ftz,sat}.f16x2 %d, %x0, %x1;
        hh 0 | fma.rn.oob.relu.f16x2 %d, %x0, %x1, %x2;
        bf 0 | min.NaN.xorsign.abs.bf16 %d, %e0, %e1;
        hh 0 | max.ftz.NaN.xorsign.abs.f16x2 %d, %x0, %x1;
        bb 131072 | {tanh.approx,ex2.approx.ftz}.bf16x2 %d, %y0;
    """,
    "more conversions": """
        b4 0 | cvt.sat.u32.{s8,s16} %d, %s0;
        b8 0 | cvt.sat.u64.s32 %d, %i0;
        f8 0 | cvt.rn.f64.{u8,s8,u16,s16} %d, %s0;
        b2 0 | cvt.rni.sat.{u8,s8}.f32 %d, %f0;
        b2 0 | cvt.rzi.{u8,s8,u16,s16}.f16 %d, %h0;
        b2 0 | cvt.rzi.{u16,s16}.bf16 %d, %e0;
        b8 0 | cvt.{u64.s8,s64.s8,s64.u16} %d, %s0;
        b2 0 | cvt.{u16,s16,u8,s8}.{u64,s64} %d, %l0;
        b4 0 | cvt.u32.s32 %d, %i0;
        f2 0 | cvt.rn.f16.{u8,s16} %d, %s0;
        b4 0 | cvt.{rzi,rpi}.ftz.{u32,s32}.f32 %d, %f0;
        bf 0 | cvt.rz.relu.satfinite.bf16.f32 %d, %f{0,3};
    """,
    "more loads and stores": """
        b8 0 | ld.global.v4.{b32,f32} {%t0, %t1, %t2, %t3}, [%gp+16]; add.u32 %t0, %t0, %t2; mov.b64 %d, {%t1, %t0};
        b8 0 | ld.global.{ca,cg,cs,lu,cv}.u32 %t0, [%gp+4]; cvt.u64.u32 %d, %t0;
        b8 0 | ld.global.{nc,ca.nc,cg.nc,cs.nc}.u32 %t0, [%gp+4]; cvt.u64.u32 %d, %t0;
        b8 0 | ld.global.{L1::evict_normal,L1::evict_unchanged,L1::evict_first,L1::evict_last,L1::no_allocate}.u32 %t0, [%gp+4]; cvt.u64.u32 %d, %t0;
        b8 0 | createpolicy.fractional.{L2::evict_last.b64,L2::evict_first.b64,L2::evict_unchanged.b64,L2::evict_last.L2::evict_unchanged.b64,L2::evict_first.L2::evict_unchanged.b64} %w0; ld.global.L2::cache_hint.u32 %t0, [%gp+4], %w0; cvt.u64.u32 %d, %t0;
        b8 0 | createpolicy.fractional.L2::evict_last.b64 %w0, 0.5; ld.global.L1::no_allocate.L2::cache_hint.L2::128B.v4.u32 {%t0, %t1, %t2, %t3}, [%gp+16], %w0; add.u32 %t0, %t0, %t2; mov.b64 %d, {%t1, %t0};
        b8 0 | createpolicy.fractional.L2::evict_first.b64 %w0; ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%t0, %t1, %t2, %t3}, [%gp+16], %w0; add.u32 %t0, %t0, %t2; mov.b64 %d, {%t1, %t0};
        b8 0 | ld.{volatile.global,relaxed.cta.global,relaxed.gpu.global,relaxed.sys.global,acquire.cta.global,acquire.cluster.global,acquire.gpu.global,acquire.sys.global,mmio.relaxed.sys.global,weak.global}.u32 %t0, [%gp+4]; cvt.u64.u32 %d, %t0;
        b8 0 | ld.relaxed.gpu.global.L1::no_allocate.v4.b32 {%t0, %t1, %t2, %t3}, [%gp+16]; add.u32 %t0, %t0, %t2; mov.b64 %d, {%t1, %t0};
        b8 0 | st.shared.v4.b32 [%sp], {%i0, %i1, %i2, %i3}; ld.shared.v4.b32 {%t0, %t1, %t2, %t3}, [%sp]; xor.b32 %t0, %t0, %t2; mov.b64 %d, {%t3, %t0};
        b8 0 | st.shared.v2.b64 [%sp], {%l0, %l1}; ld.shared.v2.b64 {%w0, %w1}, [%sp]; sub.s64 %d, %w0, %w1;
        b8 0 | mov.b128 %q0, {%l0, %l1}; st.shared.b128 [%sp], %q0; ld.shared.b128 %q1, [%sp]; mov.b128 {%w0, %w1}, %q1; sub.s64 %d, %w0, %w1;
        b8 0 | st.shared.v4.b32 [%sp], {%i0, %i1, %i2, %i3}; ld.shared::cluster.v4.b32 {%t0, %t1, %t2, %t3}, [%sp]; xor.b32 %t0, %t0, %t2; mov.b64 %d, {%t3, %t0};
        b8 0 | st.local.u32 [%lp+4], %i0; st.local.u32 [%lp], %i1; st.local.v2.u32 [%lp+8], {%i2, %i3}; ld.local.v4.u32 {%t0, %t1, %t2, %t3}, [%lp]; xor.b32 %t0, %t0, %t2; mov.b64 %d, {%t1, %t0};
        b8 0 | {ldu.global.u32,ldu.global.b32} %t0, [%gp+4]; cvt.u64.u32 %d, %t0;
        b8 0 | ldu.global.v4.f32 {%t0, %t1, %t2, %t3}, [%gp+16]; xor.b32 %t0, %t0, %t2; mov.b64 %d, {%t1, %t0};
        b8 0 | st.global.v2.{b8,u16} [%gq+4], {%s0, %s1}; ld.global.u64 %d, [%gq];
        b8 0 | st.global.v2.{b64,f64} [%gq], {%l0, %l1}; ld.global.u64 %d, [%gq+8];
        b8 0 | st.global.{L1::evict_normal,L1::evict_first,L1::no_allocate,L1::evict_last,L1::evict_unchanged}.v4.b32 [%gq], {%i0, %i1, %i2, %i3}; ld.global.u64 %d, [%gq+8];
        b8 0 | createpolicy.fractional.L2::evict_last.b64 %w0; st.global.L1::no_allocate.L2::cache_hint.v4.b32 [%gq], {%i0, %i1, %i2, %i3}, %w0; ld.global.u64 %d, [%gq+8];
        b8 0 | createpolicy.fractional.L2::evict_first.b64 %w0; st.global.L2::cache_hint.u32 [%gq+4], %i0, %w0; ld.global.u64 %d, [%gq];
        b8 0 | st.{volatile.global,relaxed.gpu.global,relaxed.sys.global,release.cta.global,release.cluster.global,release.gpu.global,release.sys.global,mmio.relaxed.sys.global,weak.global}.u32 [%gq+4], %i0; ld.global.u64 %d, [%gq];
        b8 0 | st.{u32,volatile.u32,relaxed.gpu.u32} [%gq+4], %i1; ld.global.u64 %d, [%gq];
        b8 0 | st.global.{u32,s32,b32,f32,wb.u32,cg.u32,cs.u32,wt.u32} [%gq], %i2; ld.global.u64 %d, [%gq];
        b8 0 | prefetch.global.{L1,L2,L2::evict_last,L2::evict_normal} [%gp]; ld.global.u64 %d, [%gp];
        b8 0 | prefetch.{L1,L2} [%gp]; prefetchu.L1 [%gp]; prefetch.local.L1 [%lp]; ld.global.u64 %d, [%gp];
        b8 0 | createpolicy.range.global.L2::evict_last.L2::evict_first.b64 %w0, [%gp], 4096, 8192; ld.global.L2::cache_hint.u32 %t0, [%gp], %w0; cvt.u64.u32 %d, %t0;
        b8 0 | createpolicy.range.L2::evict_last.b64 %w0, [%gp], 4096, 8192; ld.global.L2::cache_hint.u32 %t0, [%gp], %w0; cvt.u64.u32 %d, %t0;
        b8 0 | fence.{sc,acq_rel,acquire,release}.{cta,cluster,gpu,sys}; st.global.u32 [%gq], %i3; membar.{cta,gl,sys}; ld.global.u64 %d, [%gq];
        b8 0 | st.global.u32 [%gq], %i3; membar.proxy.alias; fence.proxy.{alias,async,async.global,async.shared::cta,tensormap::generic.release.gpu,tensormap::generic.release.cta}; ld.global.u64 %d, [%gq];
        b8 0 | ld.global.s64 %d, [%gp+8];
        b8 0 | ld.global.v2.u16 {%u0, %u1}, [%gp+4]; mov.b32 %t0, {%u1, %u0}; cvt.u64.u32 %d, %t0;
        b8 0 | ld.global.v4.{b8,b16} {%u0, %u1, %u2, %u3}, [%gp+8]; mov.b64 %d, {%u0, %u1, %u2, %u3};
        b8 0 | ld.global.v2.{f32,u32} {%t0, %t1}, [%gp+8]; mov.b64 %d, {%t1, %t0};
        b8 0 | ld.global.v2.f64 {%w0, %w1}, [%gp]; xor.b64 %d, %w0, %w1;
        b8 0 | ld.global.nc.{L1::no_allocate,L1::evict_last,L1::no_allocate.L2::256B,L2::64B}.v4.u32 {%t0, %t1, %t2, %t3}, [%gp+16]; add.u32 %t0, %t0, %t2; mov.b64 %d, {%t1, %t0};
        b8 0 | ld.acquire.gpu.global.b128 %q0, [%gp]; mov.b128 {%w0, %w1}, %q0; sub.s64 %d, %w0, %w1;
        b8 0 | {ld.relaxed.sys,ld.volatile}.u32 %t0, [%gp+4]; cvt.u64.u32 %d, %t0;
        b8 0 | st.shared.u64 [%sp], %l0; {ld.shared::cta,ld.relaxed.cta.shared,ld.acquire.cta.shared,ld.acquire.cluster.shared::cluster,ld.relaxed.cluster.shared::cluster}.u32 %t0, [%sp+4]; cvt.u64.u32 %d, %t0;
        b8 0 | st.shared.u64 [%sp], %l0; {st.shared::cta,st.relaxed.cta.shared,st.release.cta.shared,st.release.cluster.shared::cluster,st.shared::cluster}.u32 [%sp], %i1; ld.shared.u64 %d, [%sp];
        b8 0 | st.global.u64 [%gq], %l1; st.global.{s8,b16,s16} [%gq+2], %s0; ld.global.u64 %d, [%gq];
        b8 0 | mov.b128 %q0, {%l0, %l1}; st.release.gpu.global.b128 [%gq], %q0; ld.global.u64 %d, [%gq+8];
        b8 0 | cvt.u64.u32 %w0, %sp; cvta.{shared::cta,shared::cluster}.u64 %w1, %w0; st.u64 [%w1], %l2; cvta.to.{shared,shared::cta,shared::cluster}.u64 %w2, %w1; sub.u64 %w2, %w2, %w0; ld.shared.u64 %d, [%sp]; add.u64 %d, %d, %w2;
        b8 0 | cvta.global.u64 %w0, %gq; cvta.to.global.u64 %w1, %w0; st.global.u64 [%w1], %l3; ld.u64 %d, [%w0];
        b8 0 | cvt.u64.u32 %w0, %sp; cvta.shared.u64 %w0, %w0; isspacep.{const,shared::cta,shared::cluster,param,local,global} %p1, %w0; selp.b64 %d, 1, 2, %p1;
        b8 0 | ld.param.v2.b32 {%t0, %t1}, [out]; mov.b64 %w0, {%t0, %t1}; ld.param::entry.b64 %w1, [out]; sub.u64 %w0, %w1, %w0; add.u64 %d, %w0, %l0;
        b8 0 | createpolicy.fractional.L2::evict_normal.b64 %w0; ld.global.L2::cache_hint.u64 %d, [%gp+8], %w0;
        b8 0 | createpolicy.cvt.L2.b64 %w0, 0x10000000; ld.global.L2::cache_hint.u64 %d, [%gp+8], %w0;
        b8 0 | griddepcontrol.launch_dependents; griddepcontrol.wait; ld.global.u64 %d, [%gp+8];
        b8 0 | pmevent 3; pmevent.mask 3; ld.global.u64 %d, [%gp+8];
        b8 0 | st.global.u32 [%gq], %i2; fence.proxy.{async.shared::cluster,tensormap::generic.release.cluster,tensormap::generic.release.sys}; ld.global.u64 %d, [%gq];
        b8 0 | st.global.u32 [%gq], %i2; ld.param.u64 %w0, [scratch]; fence.proxy.tensormap::generic.acquire.{cta,sys} [%w0], 128; ld.global.u64 %d, [%gq];
    """,
    "more atomics": """
        b8 0 | st.global.u64 [%gq], %l0; atom.global.cas.b64 %w0, [%gq], %l0, %l1; ld.global.u64 %w1, [%gq]; mul.lo.s64 %w1, %w1, 3; xor.b64 %d, %w0, %w1;
        hh 0 | st.global.u32 [%gq], %x0; atom.global.add.noftz.f16x2 %t0, [%gq], %x1; ld.global.u32 %d, [%gq];
        bb 0 | st.global.u32 [%gq], %y0; atom.global.add.noftz.bf16x2 %t0, [%gq], %y1; ld.global.u32 %d, [%gq];
        f4 0 | st.global.v4.f32 [%gq], {%f0, %f1, %f2, %f3}; atom.global.v4.f32.add {%t0, %t1, %t2, %t3}, [%gq], {%f3, %f2, %f1, 0f00000001}; ld.global.f32 %d, [%gq+{0,4,8,12}];
        f2 0 | st.global.v2.b16 [%gq], {%h0, %h1}; atom.global.v2.f16.add.noftz {%u0, %u1}, [%gq], {%h2, %h3}; ld.global.u16 %d, [%gq+2];
        bf 0 | st.global.v4.b32 [%gq], {%y0, %y1, %y2, %y3}; atom.global.v8.bf16.max.noftz {%u0, %u1, %u2, %u3, %u0, %u1, %u2, %u3}, [%gq], {%e0, %e1, %e2, %e3, %e3, %e2, %e1, %e0}; ld.global.u16 %d, [%gq+6];
        bb 0 | st.global.v4.b32 [%gq], {%y0, %y1, %y2, %y3}; atom.global.v4.bf16x2.add.noftz {%t0, %t1, %t2, %t3}, [%gq], {%y1, %y2, %y3, %y0}; ld.global.u32 %d, [%gq+8];
        b8 0 | st.global.u32 [%gq], %i0; atom.{relaxed.gpu.global,acquire.gpu.global,release.gpu.global,acq_rel.gpu.global,acq_rel.sys.global,relaxed.cta.global,acq_rel.cluster.global}.add.u32 %t0, [%gq], %i1; ld.global.u32 %t1, [%gq]; mov.b64 %d, {%t0, %t1};
        b8 0 | st.global.u32 [%gq], %i0; atom.{add.u32,acq_rel.gpu.add.u32} %t0, [%gq], %i1; ld.global.u32 %t1, [%gq]; mov.b64 %d, {%t0, %t1};
        b8 0 | st.shared.u32 [%sp], %i0; atom.shared.cas.b32 %t0, [%sp], %i3, %i1; ld.shared.u32 %t1, [%sp]; mov.b64 %d, {%t0, %t1};
        b8 0 | st.shared.u32 [%sp], %i0; atom.acquire.cta.shared::cta.cas.b32 %t0, [%sp], %i0, %i1; ld.shared.u32 %t1, [%sp]; mov.b64 %d, {%t0, %t1};
        b8 0 | mov.b128 %q0, {%l0, %l1}; st.shared.b128 [%sp], %q0; mov.b128 %q1, {%l2, %l3}; atom.shared.exch.b128 %q2, [%sp], %q1; mov.b128 {%w0, %w1}, %q2; ld.shared.u64 %w2, [%sp+8]; xor.b64 %d, %w1, %w2;
        b8 0 | mov.b128 %q0, {%l0, %l1}; st.shared.b128 [%sp], %q0; mov.b128 %q1, {%l2, %l3}; atom.shared.cas.b128 %q2, [%sp], %q0, %q1; mov.b128 {%w0, %w1}, %q2; ld.shared.u64 %w2, [%sp+8]; xor.b64 %d, %w1, %w2;
        b8 0 | st.shared.u64 [%sp], %l0; atom.shared.add.u64 %w0, [%sp], %l1; ld.shared.u64 %w1, [%sp]; mul.lo.s64 %w1, %w1, 3; xor.b64 %d, %w0, %w1;
        hh 0 | st.shared.u32 [%sp], %x0; atom.shared.add.noftz.f16x2 %t0, [%sp], %x1; ld.shared.u32 %d, [%sp];
        f4 0 | createpolicy.fractional.L2::evict_last.b64 %w0; st.global.f32 [%gq], %f0; atom.global.add.L2::cache_hint.f32 %t0, [%gq], %f1, %w0; ld.global.f32 %d, [%gq];
        b8 0 | st.global.u64 [%gq], %l0; red.global.{add.u64,min.s64,max.u64,and.b64,or.b64} [%gq], %l1; ld.global.u64 %d, [%gq];
        f8 0 | st.global.f64 [%gq], %g0; red.global.add.f64 [%gq], %g1; ld.global.f64 %d, [%gq];
        f2 0 | st.global.u16 [%gq], %h0; red.global.add.noftz.f16 [%gq], %h1; ld.global.u16 %d, [%gq];
        bf 0 | st.global.u16 [%gq], %e0; red.global.add.noftz.bf16 [%gq], %e1; ld.global.u16 %d, [%gq];
        b8 0 | st.global.u32 [%gq], %i0; red.{relaxed.gpu.global,release.gpu.global,release.sys.global,relaxed.cta.global,release.cluster.global}.add.u32 [%gq], %i1; ld.global.u64 %d, [%gq];
        b8 0 | st.global.u32 [%gq], %i0; red.add.u32 [%gq], %i1; ld.global.u64 %d, [%gq];
        f4 0 | st.global.v2.f32 [%gq], {%f0, %f1}; red.relaxed.gpu.global.v2.f32.add [%gq], {%f2, %f3}; ld.global.f32 %d, [%gq+{0,4}];
        bb 0 | st.global.v4.b32 [%gq], {%y0, %y1, %y2, %y3}; red.relaxed.gpu.global.v4.bf16x2.add.noftz [%gq], {%y1, %y2, %y3, %y0}; ld.global.u32 %d, [%gq+8];
        hh 0 | st.global.v2.b32 [%gq], {%x0, %x1}; red.relaxed.gpu.global.v2.f16x2.add.noftz [%gq], {%x1, %x2}; ld.global.u32 %d, [%gq+4];
        f2 0 | st.global.v4.b32 [%gq], {%x0, %x1, %x2, %x3}; red.relaxed.gpu.global.v8.f16.min.noftz [%gq], {%h0, %h1, %h2, %h3, %h3, %h2, %h1, %h0}; ld.global.u16 %d, [%gq+6];
        b8 0 | st.global.u32 [%gq], %i0; atom.global.add.s32 %t0, [%gq], %i1; ld.global.u32 %t1, [%gq]; mov.b64 %d, {%t0, %t1};
        b8 0 | st.shared.u32 [%sp], %i0; atom.{shared::cta,shared::cluster}.{add.u32,max.s32,exch.b32,inc.u32} %t0, [%sp], %i1; ld.shared.u32 %t1, [%sp]; mov.b64 %d, {%t0, %t1};
        f4 0 | st.shared.f32 [%sp], %f0; atom.{shared::cta,shared::cluster}.add.f32 %t0, [%sp], %f1; ld.shared.f32 %d, [%sp];
        b4 0 | st.global.u32 [%gq], %i0; red.global.{add.u32,add.s32,min.u32,max.s32,and.b32,or.b32,xor.b32,inc.u32,dec.u32} [%gq], %i1; ld.global.u32 %d, [%gq];
        b4 0 | st.shared.u32 [%sp], %i0; red.{shared::cta,shared::cluster,relaxed.cluster.shared::cluster,release.cluster.shared::cluster}.add.u32 [%sp], %i1; ld.shared.u32 %d, [%sp];
    """,
    "more barriers": """
        b8 0 | xor.b32 %t1, %lane, 32; ld.param.u64 %w0, [scratch]; mad.wide.u32 %w1, %t1, 8, %w0; mad.wide.u32 %w2, %lane, 8, %w0; st.global.u64 [%w2], %l0; {bar.cta.sync,barrier.sync} 1; ld.global.u64 %d, [%w1]; bar.sync 0;
        b8 0 | xor.b32 %t1, %lane, 32; ld.param.u64 %w0, [scratch]; mad.wide.u32 %w1, %t1, 8, %w0; mad.wide.u32 %w2, %lane, 8, %w0; st.global.u64 [%w2], %l1; {barrier.sync,barrier.sync.aligned,barrier.cta.sync.aligned} 2, 64; ld.global.u64 %d, [%w1]; bar.sync 0;
        b4 0 | {bar.cta.red,barrier.red,barrier.cta.red}.popc.u32 %d, 1, 64, %p0;
        b4 0 | barrier.red.popc.aligned.u32 %d, 1, 64, !%p0;
        b4 0 | {barrier.red,barrier.cta.red}.{and,or}.aligned.pred %p1, 1, 64, %p0; selp.b32 %d, 1, 2, %p1;
        b4 0 | setp.lt.u32 %p1, %lane, 32; mov.u32 %d, 5; @%p1 {bar.cta.arrive,barrier.arrive} 1, 64; @!%p1 bar.sync 1, 64; bar.sync 0;
        b4 0 | mov.b64 %w0, 7; match.all.sync.b64 %d|%p1, %w0, 0xffffffff; @%p1 xor.b32 %d, %d, 0x5555;
        b4 0 | nanosleep.u32 100; mov.u32 %t0, 20; nanosleep.u32 %t0; mov.u32 %d, %i0;
    """,
}  # fmt: skip
