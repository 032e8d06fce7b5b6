# ruff: noqa: E501 (lines of PTX are kept whole)
"""Planting bugs in any kernel: which there are, what catches them, which survive; coverage; the list of unknown forms."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import ptxsim
from ptxsim.__main__ import main
from simtest import nvrtc
from simtest.runners import bf16
from simtest.single import HEADER

KERNEL = """.visible .entry k(.param .u64 out)
{
.reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .pred %p<9>; .shared .align 16 .b8 s[256]; .shared .align 8 .b8 m[8];
mov.u32 %r0, %tid.x; mov.u32 %r1, s; mov.u32 %r5, m; mad.lo.u32 %r2, %r0, 4, %r1; ld.param.u64 %rd1, [out]; mad.wide.u32 %rd2, %r0, 4, %rd1;
setp.eq.u32 %p1, %r0, 0;
@%p1 mbarrier.init.shared::cta.b64 [%r5], 64;
st.shared.u32 [%r2], %r0;
bar.sync 0;
mbarrier.arrive.shared::cta.b64 _, [%r5];
W: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r5], 0;
@!%p2 bra W;
xor.b32 %r3, %r0, 32; mad.lo.u32 %r3, %r3, 4, %r1; ld.shared.u32 %r4, [%r3];
bar.sync 1;
fence.proxy.async.shared::cta;
setp.ne.u32 %p3, %r0, %r0;
@!%p3 bra E;
add.u32 %r4, %r4, 5;
E: st.global.u32 [%rd2], %r4;
ret;
}
"""


def test_bugs_of_a_small_kernel() -> None:
    module = ptxsim.Module(HEADER + KERNEL)
    assert [(each.line, each.change) for each in ptxsim.mutations(module, "k")] == [
        (9, "64 made 65"), (9, "64 made 63"), (11, "left out"), (12, "left out"), (13, "not waited for"), (16, "left out"), (17, "left out"),
    ]  # fmt: skip

    def test(changed: ptxsim.Module) -> None:
        out = np.zeros(64, "u4")
        changed.launch("k", 1, 64, [out], max_steps=10_000)
        assert out.tolist() == [i ^ 32 for i in range(64)]

    outcomes = list(ptxsim.mutate(module, "k", [test]))
    caught = {(each.mutation.line, each.mutation.change): each.caught for each in outcomes}
    assert caught[9, "64 made 65"] == "DeadlockError"
    assert caught[11, "left out"] == "RaceError"
    assert caught[12, "left out"] == "DeadlockError"
    # A spare arrival goes to the next phase, which nobody waits for. The barrier orders all that the mbarrier would.
    # Nothing comes after the second barrier and the fence.
    assert [each.mutation.line for each in outcomes if not each.caught] == [9, 13, 16, 17]
    assert str(outcomes[-1]).startswith("SURVIVES         line 17: left out: fence.proxy")
    test(module)


def test_steps_that_no_test_reaches() -> None:
    """Tests that return reports have bugs left out in what they do not execute."""
    module = ptxsim.Module(HEADER + KERNEL.replace("add.u32 %r4, %r4, 5;", "membar.gl;"))
    outcomes = list(ptxsim.mutate(module, "k", [lambda changed: changed.launch("k", 1, 64, [np.zeros(64, "u4")])]))
    assert [each.mutation.line for each in outcomes if not each.reached] == [20]
    assert str(outcomes[-1]) == "NOT REACHED      line 20: left out: membar.gl"
    silent = ptxsim.mutate(module, "k", [lambda changed: changed.launch("k", 1, 64, [np.zeros(64, "u4")]) and None])
    assert all(each.reached for each in silent)


def test_steps_of_a_kind() -> None:
    module = ptxsim.Module(HEADER + KERNEL)
    assert [ins.line for ins in ptxsim.steps(module, "k", "bar.sync")] == [11, 16]
    assert [ins.line for ins in ptxsim.steps(module, "k", "mbarrier")] == [12, 13]
    assert ptxsim.steps(module, "k", "bar.sy") == []
    with pytest.raises(ptxsim.RaceError):
        ptxsim.plant(module, "k", "bar.sync", [0]).launch("k", 1, 64, [np.zeros(64, "u4")])
    out = np.zeros(64, "u4")
    both = ptxsim.plant(module, "k", "bar.sync", [1]), ptxsim.plant(module, "k", "mbarrier.try_wait", [0])
    for changed in (*both, module):
        changed.launch("k", 1, 64, [out])
        assert out.tolist() == [i ^ 32 for i in range(64)]
    with pytest.raises(ValueError, match="but there are 2"):
        ptxsim.plant(module, "k", "bar.sync", [2])
    for call in (ptxsim.steps, lambda *names: ptxsim.plant(*names, [0])):
        with pytest.raises(ptxsim.SimError, match=r"no kernel 'kernels/k\.cuh'; the module has k"):
            call(module, "kernels/k.cuh", "bar.sync")


def test_wrong_kernels_are_not_mutated() -> None:
    module = ptxsim.Module(HEADER + KERNEL.replace("bar.sync 0;", ""))
    with pytest.raises(ptxsim.RaceError):
        list(ptxsim.mutate(module, "k", [lambda changed: changed.launch("k", 1, 64, [np.zeros(64, "u4")]) and None]))


#: The three unrolled waits for stages that are free at first, and the arrival after the last product.
SURVIVORS = Counter(
    {
        ("not waited for", "mbarrier.try_wait.parity.shared::cta.b64"): 3,
        ("left out", "mbarrier.arrive.shared::cta.b64"): 1,
    }
)


def test_every_bug_of_a_gemm() -> None:
    """Only steps that another step implies survive; each is listed here with the reason."""
    rng = np.random.default_rng(0)
    a, b = bf16(rng, 64, 320), bf16(rng, 64, 320)

    def test(module: ptxsim.Module, mode: str) -> None:
        c = np.zeros((64, 64), a.dtype)
        maps = [
            ptxsim.encode_tiled(
                "bfloat16", module.memory.map(x), [x.shape[1], 64], [2 * x.shape[1]], [64, 64], swizzle="128B"
            )
            for x in (a, b, c)
        ]
        module.launch("hopper_gemm", 1, 160, [*maps, 5], 7 * 8192 + 64, mode=mode, max_steps=20_000)
        np.testing.assert_allclose(c.astype("f4"), a.astype("f4") @ b.astype("f4").T, rtol=2**-6, atol=2**-6)

    module = ptxsim.Module(nvrtc.kernel_ptx("hopper_gemm.cu"))
    outcomes = list(
        ptxsim.mutate(module, "hopper_gemm", [functools.partial(test, mode=mode) for mode in ("early", "late")])
    )
    assert len(outcomes) > 15
    survivors = Counter(
        (each.mutation.change, each.mutation.text.split(" ")[0]) for each in outcomes if not each.caught
    )
    assert survivors == SURVIVORS


def test_coverage() -> None:
    report = ptxsim.Module(HEADER + KERNEL).launch("k", 1, 64, [np.zeros(64, "u4")])
    assert [place.text for place in report.missed] == ["add.u32 %r4, %r4, 5"]


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ptx = tmp_path / "k.ptx"
    ptx.write_text(HEADER + KERNEL)
    assert main(["mutate", str(ptx), "zeros:u4:64", "--block", "64"]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[-1] == "3 of 7 caught"
    assert "SURVIVES         line 17: left out: fence.proxy.async.shared::cta" in text
    assert main(["run", str(ptx), "zeros:u4:64", "--block", "64", "--coverage"]) == 0
    assert "never executed: 1 instructions\n  line 20: add.u32 %r4, %r4, 5" in capsys.readouterr().out


def test_check_lists_every_unknown_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ptx = tmp_path / "k.ptx"
    body = ".reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .pred %p<9>;\nfoo.b32 %r1;\nadd.u32.wrong %r1, %r2, %r3;\nfoo.b32 %r2;\nadd.u32 %r1, %r2;\nadd.u32 {%r1, %r2}, %r3, %r4;\nadd.u32 %r1, %r2, %r3;\nret;"
    good = ".visible .entry fine()\n{\nret;\n}\n"
    ptx.write_text(HEADER + f".visible .entry k()\n{{\n{body}\n}}\n" + good)
    assert main(["check", str(ptx)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "k: 8 instructions, 4 forms not modelled"
    assert lines[1] == "  2 x foo.b32, first in line 7: no such opcode in the simulator"
    assert [line.split(",")[0] for line in lines[2:5]] == ["  1 x add.u32.wrong", "  1 x add.u32", "  1 x add.u32"]
    assert lines[5] == "fine: 2 instructions, all modelled"
